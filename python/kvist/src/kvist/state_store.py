"""The state store that settings name."""

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.grpc.client import TlsFiles
from kvist.settings import StoreSettings
from kvist.store import StateStore
from kvist.store.sqlite import SqliteStore


def open_store(settings: StoreSettings) -> StateStore:
    """The store; it is opened as `async with`."""
    if settings.kind == "sqlite":
        return SqliteStore(settings.path)
    etcd = settings.etcd
    files = TlsFiles(etcd.tls_ca_file, etcd.tls_certificate_file, etcd.tls_key_file)
    return EtcdStore(
        EtcdOptions(
            endpoints=etcd.endpoints,
            tls=None if files == TlsFiles() else files,
            username=etcd.username,
            password_file=etcd.password_file,
            time_limit_seconds=etcd.time_limit_seconds,
        ),
        namespace=etcd.namespace,
    )
