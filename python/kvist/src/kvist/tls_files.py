"""The TLS files of a client, for Python and for the core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvist.settings import DoorSettings


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a client.

    Attributes:
        ca_file: Authorities that sign the servers' certificates; the system's when absent.
        certificate_file: The client's own certificate, for mutual TLS.
        key_file: Key of that certificate.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, ca_file: Path | None, own: DoorSettings) -> Self | None:
        """Files of a process that shows its server's certificate when it calls; none for plain text."""
        if ca_file is None:
            return None
        return cls(ca_file=ca_file, certificate_file=own.tls_certificate_file, key_file=own.tls_key_file)

    def core_tls(self, role_uri: str = "") -> dict[str, object]:
        """What a client in the core is told."""
        files: dict[str, Path | None] = {
            "tls_ca_file": self.ca_file,
            "tls_certificate_file": self.certificate_file,
            "tls_key_file": self.key_file,
        }
        return {"tls_role_uri": role_uri, **{name: str(path) for name, path in files.items() if path is not None}}

    def credentials(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, key and certificate, as they are on disk now."""
        return _read(self.ca_file), _read(self.key_file), _read(self.certificate_file)


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path else None
