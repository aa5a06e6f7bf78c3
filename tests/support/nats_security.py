"""Keys, tokens and certificates for servers that do not let everybody in, made by OpenSSL."""

import base64
import binascii
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATOR, ACCOUNT, USER, SEED = 14, 0, 20, 18
ANY = {"subs": -1, "data": -1, "payload": -1}


def openssl(*arguments: object, given: bytes = b"") -> bytes:
    """Runs the command."""
    return subprocess.run(
        ["openssl", *map(str, arguments)], input=given, capture_output=True, check=True, timeout=30
    ).stdout


@dataclass(frozen=True)
class Identity:
    """A key pair in NATS's form."""

    key_file: Path
    public: str
    seed: str

    @classmethod
    def make(cls, folder: Path, kind: int) -> "Identity":
        """Makes one of a kind."""
        path = folder / f"identity-{kind}.pem"
        openssl("genpkey", "-algorithm", "ed25519", "-out", path)
        # The last bytes of both forms are the key itself.
        secret = openssl("pkey", "-in", path, "-outform", "DER")[-32:]
        public = openssl("pkey", "-in", path, "-pubout", "-outform", "DER")[-32:]
        # A seed begins with two fields of five bits, one for each letter.
        prefix = bytes([(SEED << 3) | ((kind << 3) >> 5), ((kind << 3) & 31) << 3])
        return cls(path, _encode(bytes([kind << 3]) + public), _encode(prefix + secret))

    def token(self, folder: Path, subject: "Identity", **claims: Any) -> str:
        """A token about somebody, signed by this one."""
        body = {"jti": "test", "iat": 1, "iss": self.public, "sub": subject.public, "name": "test", "nats": claims}
        signed = ".".join(_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        message = folder / "message"
        message.write_text(signed)
        signature = openssl("pkeyutl", "-sign", "-rawin", "-inkey", self.key_file, "-in", message)
        return f"{signed}.{_base64(signature)}"


@dataclass(frozen=True)
class Door:
    """How a server lets clients in.

    Attributes:
        configuration: What the server is told.
        login: What goes before the host in the URL.
        credentials_file: Credentials that open it; none when none are asked for.
        ca_file: Authorities that signed its certificate; none without TLS.
    """

    configuration: str
    login: str = ""
    credentials_file: Path | None = None
    ca_file: Path | None = None


def password_door() -> Door:
    """User and password, in the URL."""
    return Door(configuration='authorization: {user: "kvist", password: "s3cret"}\n', login="kvist:s3cret@")


def credentials_door(folder: Path) -> Door:
    """A user's token and key."""
    operator, account, user = (Identity.make(folder, kind) for kind in (OPERATOR, ACCOUNT, USER))
    limits = {**ANY, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    operator_token = operator.token(folder, operator, type="operator", version=2)
    account_token = operator.token(folder, account, type="account", version=2, limits=limits)
    user_token = account.token(folder, user, type="user", version=2, pub={}, sub={}, **ANY)
    file = folder / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return Door(
        configuration=(
            f"operator: {operator_token}\nresolver: MEMORY\nresolver_preload: {{{account.public}: {account_token}}}\n"
        ),
        credentials_file=file,
    )


@dataclass(frozen=True)
class Certificate:
    """A certificate of 127.0.0.1, and the authority that signed it, which nobody else knows."""

    file: Path
    key_file: Path
    ca_file: Path


def make_certificate(folder: Path) -> Certificate:
    """Makes one."""
    ca, ca_key, key, request, certificate, extensions = (
        folder / name for name in ("ca.pem", "ca.key", "server.key", "server.csr", "server.pem", "extensions")
    )
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", 2, "-subj", "/CN=test authority")
    openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=nats")
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial"),
        *("-out", certificate, "-days", 2, "-extfile", extensions),
    )
    return Certificate(file=certificate, key_file=key, ca_file=ca)


def tls_door(folder: Path) -> Door:
    """A certificate signed by an authority that nobody else knows."""
    made = make_certificate(folder)
    return Door(configuration=f'tls: {{cert_file: "{made.file}", key_file: "{made.key_file}"}}\n', ca_file=made.ca_file)


def _encode(data: bytes) -> str:
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
