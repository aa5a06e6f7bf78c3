"""Configuration of NATS with one user for each role, each with the subjects of its role and no others.

The server gets an operator, an account and nothing secret; each user is a credentials file that its processes name in
`bus.credentials_file`. The seeds of operator and account stay in the folder, so that users can be made anew later.
Needs the extra `kvist[certs]`.

Formats: NATS's NKeys (https://docs.nats.io, "NKeys") and its JSON web tokens, version 2.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvist.bus import subject
from kvist.certificates import write_secret
from kvist.errors import error

# First byte of a public key of each kind; its letter in base 32.
_KINDS: Mapping[str, int] = MappingProxyType({"operator": 14 << 3, "account": 0, "user": 20 << 3})
_SEED = 18 << 3
_UNLIMITED = -1
_NOTHING = ">"


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a user may do.

    Attributes:
        publish: Subjects that it may speak on.
        subscribe: Subjects that it may hear.
    """

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    def claims(self) -> dict[str, Any]:
        """As the user's token states it. An empty list would allow everything, so nothing is said by denying all."""
        return {"pub": _allowed(self.publish), "sub": _allowed(self.subscribe)}


def permissions(cluster: str) -> Mapping[str, Permissions]:
    """What each role says and hears: `crates/events/src/subject.rs` and `kvist.bus` make these subjects.

    Controllers and workers use no NATS, and so have no user.

    Raises:
        ValueError: The cluster's name cannot be part of a subject.
    """
    told = tuple(f"{subject(cluster, kind)}.>" for kind in ("kv", "tombstone"))
    return {
        "agent": Permissions(publish=told),
        # Samples of its decisions are the only thing that a router says.
        "router": Permissions(publish=(subject(cluster, "decision"),), subscribe=told),
        "kvmaster": Permissions(subscribe=told),
    }


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair of NATS."""

    kind: str
    key: Ed25519PrivateKey

    @classmethod
    def new(cls, kind: str) -> Self:
        """A new one."""
        return cls(kind, Ed25519PrivateKey.generate())

    @classmethod
    def kept(cls, kind: str, file: Path) -> Self:
        """The one of a seed file, which is made when it is missing.

        Raises:
            KvistError: The file holds no seed of this kind.
        """
        if not file.exists():
            made = cls.new(kind)
            write_secret(file, f"{made.seed}\n".encode())
            return made
        wrong = error("PRECONDITION_FAILED", f"{file.name} holds no seed of an {kind}")
        try:
            text = file.read_text().strip()
            raw = base64.b32decode(text + "=" * (-len(text) % 8))
            read = cls(kind, Ed25519PrivateKey.from_private_bytes(raw[2:-2]))
        except (OSError, ValueError) as failure:
            raise wrong from failure
        if read.seed != text:
            raise wrong
        return read

    @property
    def public(self) -> str:
        """The public key in NATS's form."""
        raw = self.key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return _encode(bytes([_KINDS[self.kind]]) + raw)

    @property
    def seed(self) -> str:
        """The secret in NATS's form."""
        raw = self.key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        kind = _KINDS[self.kind]
        # Two fields of five bits: that it is a seed, and of what.
        return _encode(bytes([_SEED | kind >> 5, (kind & 31) << 3]) + raw)

    def token(self, about: Identity, *, name: str, **claims: Any) -> str:
        """A token about somebody, signed by this one."""
        body = {
            "jti": secrets.token_hex(16),
            "iat": int(time.time()),
            "iss": self.public,
            "sub": about.public,
            "name": name,
            "nats": {"type": about.kind, "version": 2, **claims},
        }
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_base64(json.dumps(part, separators=(",", ":")).encode()) for part in (header, body))
        return f"{signed}.{_base64(self.key.sign(signed.encode()))}"


class NatsFolder:
    """A folder with the configuration of NATS and a credentials file for each role.

    ```
    <folder>/
      nats.conf                  what the server includes; holds nothing secret
      <role>.creds               what the processes of a role show
      operator.seed, account.seed
    ```
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def configuration_file(self) -> Path:
        """What the server is started with, or includes."""
        return self.path / "nats.conf"

    def credentials_file(self, role: str) -> Path:
        """What `bus.credentials_file` of a role's processes names."""
        return self.path / f"{role}.creds"

    def write(self, *, cluster: str, tls: tuple[Path, Path] | None = None, renew: bool = False) -> list[str]:
        """Writes the configuration and the credentials that are missing, and returns the names of the files.

        Args:
            cluster: Name of the cluster, which is part of its subjects.
            tls: Certificate and key of the server; plain text when absent.
            renew: Make the users anew, with new keys; the old ones stay valid until the account is changed.

        Raises:
            KvistError: A seed file cannot be used.
            ValueError: The cluster's name cannot be part of a subject.
        """
        wanted = permissions(cluster)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        operator = Identity.kept("operator", self.path / "operator.seed")
        account = Identity.kept("account", self.path / "account.seed")
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), _UNLIMITED)
        operator_token = operator.token(operator, name=f"kvist-{cluster}")
        account_token = operator.token(account, name=f"kvist-{cluster}", limits={**limits, "wildcards": True})
        lines = [
            f"# NATS for the Kvist cluster {cluster}: one user for each role. Made by `kvist nats config`.",
            f"operator: {operator_token}",
            "resolver: MEMORY",
            f"resolver_preload: {{{account.public}: {account_token}}}",
        ]
        if tls is not None:
            certificate, key = (json.dumps(str(path.absolute())) for path in tls)
            lines.append(f"tls: {{cert_file: {certificate}, key_file: {key}}}")
        write_secret(self.configuration_file, ("\n".join(lines) + "\n").encode(), mode=0o644)
        written = [self.configuration_file.name]
        for role, allowed in wanted.items():
            file = self.credentials_file(role)
            if file.exists() and not renew:
                continue
            user = Identity.new("user")
            token = account.token(
                user, name=role, **allowed.claims(), subs=_UNLIMITED, data=_UNLIMITED, payload=_UNLIMITED
            )
            write_secret(file, _credentials(token, user.seed).encode())
            written.append(file.name)
        return written


def _credentials(token: str, seed: str) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _allowed(subjects: tuple[str, ...]) -> dict[str, list[str]]:
    return {"allow": list(subjects)} if subjects else {"deny": [_NOTHING]}


def _encode(data: bytes) -> str:
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
