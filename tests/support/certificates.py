"""Certificates for tests: an authority with all roles, and what is wrong with others."""

import datetime as dt
from pathlib import Path

import pytest

from kvist import certificates
from kvist.certificates import CertificateFolder
from kvist.grpc import TlsFiles


def authority(path: Path) -> CertificateFolder:
    """A folder with an authority and a certificate for each role."""
    folder = CertificateFolder(path)
    folder.init()
    return folder


def expired(path: Path) -> CertificateFolder:
    """The same authority's certificates, all of which have ended: the authority is that of `path`, made before."""
    folder = CertificateFolder(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "_BACKDATED", dt.timedelta(days=30))
        folder.init(days=-1, renew=True)
    return folder


def files_of(folder: CertificateFolder, role: str, *, ca: CertificateFolder | None = None) -> TlsFiles:
    """A client of a role."""
    return TlsFiles(
        ca_file=(ca or folder).certificate_file("ca"),
        certificate_file=folder.certificate_file(role),
        key_file=folder.key_file(role),
    )
