"""Links that are made ill are ill as their names say, and well again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.toxiproxy import Link, Toxiproxy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LIMIT_SECONDS = 30
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    """To a server that says what it hears."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while heard := await reader.read(65_536):
                writer.write(heard)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with asyncio.timeout(LIMIT_SECONDS), Toxiproxy(tmp_path) as toxiproxy:
        yield await toxiproxy.link("echo", server.sockets[0].getsockname()[1])
    server.close()


async def connect(link: Link) -> Connection:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def ask(connection: Connection, size: int = 1) -> float:
    """Seconds until as many bytes have come back."""
    started = time.monotonic()
    connection[1].write(bytes(size))
    await connection[0].readexactly(size)
    return time.monotonic() - started


async def test_what_is_delayed_comes_later_in_both_directions(link: Link) -> None:
    connection = await connect(link)
    await link.delay(milliseconds=200, jitter_milliseconds=50)
    assert await ask(connection) >= 2 * 0.15
    await link.heal()
    await ask(connection)


async def test_a_narrow_link_takes_its_time_for_what_is_large(link: Link) -> None:
    connection = await connect(link)
    await link.narrow(kilobytes_per_second=20)
    # Both ways.
    assert await ask(connection, 10_000) >= 0.5
    await link.heal()
    await ask(connection, 10_000)


async def test_what_goes_into_a_black_hole_is_lost_and_ends_with_it(link: Link) -> None:
    old = await connect(link)
    await ask(old)
    await link.black_hole()
    new = await connect(link)
    for connection in (old, new):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await ask(connection)
    await link.heal()
    for connection in (old, new):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ask(connection)
    await ask(await connect(link))


async def test_a_link_that_is_cut_ends_connections_and_refuses_new_ones(link: Link) -> None:
    old = await connect(link)
    await ask(old)
    await link.cut()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ask(old)
    with pytest.raises(ConnectionRefusedError):
        await connect(link)
    await link.heal()
    await ask(await connect(link))
