"""A certificate authority for development: one folder with an authority and a certificate for each role.

```
<folder>/
  ca.crt, ca.key           the authority
  <role>.crt, <role>.key   one certificate for each role, of all hosts that were named
  nats.crt, nats.key       one for the NATS server, without a role
```

Keys are readable by their owner alone. A mesh that people depend on has certificates from somebody who can revoke and
renew them, such as cert-manager or SPIRE; docs/guides/certificates.md says what they must contain. Needs the extra
`kvist[certs]`.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvist.errors import error

SERVERS = ("router", "worker", "agent", "controller", "kvmaster")
# Those who only call.
CALLERS = ("client", "operator")
ROLES = (*SERVERS, *CALLERS)
# Servers beside Kvist's own; their certificates state no role.
OTHERS = ("nats",)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3_650
# Clocks of machines differ.
_BACKDATED = dt.timedelta(hours=1)
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")
_AUTHORITY = "ca"


@dataclass(frozen=True, slots=True)
class Seen:
    """A certificate of the folder, as it is.

    Attributes:
        name: Name of its file without the ending.
        uris: Its URIs; one states the role.
        hosts: Host names and addresses.
        not_after: When it ends.
        is_signed: Whether the folder's authority has signed it.
    """

    name: str
    uris: tuple[str, ...]
    hosts: tuple[str, ...]
    not_after: dt.datetime
    is_signed: bool

    def is_valid(self, now: dt.datetime) -> bool:
        """Whether it is of use now."""
        return self.is_signed and now < self.not_after


class CertificateFolder:
    """A folder with an authority and certificates."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def certificate_file(self, name: str) -> Path:
        """PEM of a certificate; that of the authority is called `ca`."""
        return self.path / f"{name}.crt"

    def key_file(self, name: str) -> Path:
        """PEM of its key."""
        return self.path / f"{name}.key"

    def init(
        self, *, hosts: Sequence[str] = (), trust_domain: str = "kvist.local", days: int = 365, renew: bool = False
    ) -> list[str]:
        """Makes what is missing, and returns the names of what was made. An authority is never replaced.

        Args:
            hosts: Names and addresses besides those of loopback that servers are reached by.
            trust_domain: Trust domain of the URIs that state roles.
            days: How long the certificates hold.
            renew: Make the certificates of all roles anew, of the same authority.

        Raises:
            KvistError: The trust domain is none, or half of an authority is there.
        """
        if not _TRUST_DOMAIN.fullmatch(trust_domain):
            raise error("INVALID_ARGUMENT", f"{trust_domain!r} is no trust domain: a-z, 0-9, '.', '-' and '_' only")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = []
        if self.certificate_file(_AUTHORITY).exists() or self.key_file(_AUTHORITY).exists():
            certificate, key = self._authority()
        else:
            certificate, key = self._make_authority(trust_domain)
            made.append(_AUTHORITY)
        for name in (*ROLES, *OTHERS):
            is_there = self.certificate_file(name).exists() and self.key_file(name).exists()
            if is_there and not renew:
                continue
            uri = f"spiffe://{trust_domain}/kvist/{name}" if name in ROLES else None
            self._make(name, hosts=hosts, uri=uri, days=days, issuer=(certificate, key))
            made.append(name)
        return made

    def seen(self) -> Iterator[Seen]:
        """Yields what certificates there are.

        Raises:
            KvistError: There is no authority, or a file is no certificate.
        """
        authority = self._read_certificate(_AUTHORITY)
        for file in sorted(self.path.glob("*.crt")):
            certificate = self._read_certificate(file.stem)
            names = _names(certificate)
            yield Seen(
                file.stem,
                uris=tuple(names.get_values_for_type(x509.UniformResourceIdentifier)) if names else (),
                hosts=(
                    *(names.get_values_for_type(x509.DNSName) if names else ()),
                    *(str(address) for address in (names.get_values_for_type(x509.IPAddress) if names else ())),
                ),
                not_after=certificate.not_valid_after_utc,
                is_signed=_is_signed(certificate, authority),
            )

    def _authority(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        certificate = self._read_certificate(_AUTHORITY)
        try:
            key = serialization.load_pem_private_key(self.key_file(_AUTHORITY).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as failure:
            raise _refused("ca.crt is there and its ca.key is not usable, so nothing can be signed") from failure
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise _refused("ca.key is not the key of ca.crt")
        return certificate, key

    def _make_authority(self, trust_domain: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"Kvist development authority of {trust_domain}"[:64])]
        )
        certificate = (
            _builder(name, key, issuer=name, issuer_key=key, days=AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        self._write(_AUTHORITY, certificate, key)
        return certificate, key

    def _make(
        self,
        name: str,
        *,
        hosts: Sequence[str],
        uri: str | None,
        days: int,
        issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    ) -> None:
        authority, authority_key = issuer
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvist-{name}")])
        names: list[x509.GeneralName] = [] if uri is None else [x509.UniformResourceIdentifier(uri)]
        purposes = [] if name in OTHERS else [ExtendedKeyUsageOID.CLIENT_AUTH]
        if name not in CALLERS:
            names += [_host(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        certificate = (
            _builder(subject, key, issuer=authority.subject, issuer_key=authority_key, days=days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        self._write(name, certificate, key)

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # The key first: whoever finds the certificate finds its key too.
        write_secret(self.key_file(name), secret)
        write_secret(self.certificate_file(name), certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)

    def _read_certificate(self, name: str) -> x509.Certificate:
        file = self.certificate_file(name)
        try:
            return x509.load_pem_x509_certificate(file.read_bytes())
        except OSError as failure:
            raise error("NOT_FOUND", f"{file.name} cannot be read: {failure.strerror}") from failure
        except ValueError as failure:
            raise _refused(f"{file.name} is no certificate as PEM") from failure


def write_secret(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Writes a file that nobody else may read, at no moment; readers see the old or the new one, whole."""
    # Made for its owner alone.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as failure:
        raise error("INVALID_ARGUMENT", f"{host!r} is no host name and no address") from failure


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _is_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _refused(message: str) -> Exception:
    return error("PRECONDITION_FAILED", message)
