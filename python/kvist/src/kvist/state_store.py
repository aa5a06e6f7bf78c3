"""The state store that settings name."""

import asyncio
from collections.abc import Awaitable, Callable

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.settings import StoreSettings
from kvist.store import StateStore, StoreError
from kvist.store.sqlite import SqliteStore
from kvist.telemetry import logger
from kvist.tls_files import TlsFiles

RETRY_SECONDS = 0.5

_log = logger(__name__)


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


async def serve_with_store(settings: StoreSettings, serve: Callable[[StateStore], Awaitable[None]]) -> None:
    """Opens the store and serves with it, for ever.

    Waits while it cannot be opened: a process that ends would only be started again.
    """
    while True:
        store = open_store(settings)
        try:
            await store.__aenter__()
        except StoreError as failure:
            _log.warning("store_not_open", reason=str(failure))
            await asyncio.sleep(RETRY_SECONDS)
            continue
        try:
            await serve(store)
        finally:
            await store.__aexit__(None, None, None)
