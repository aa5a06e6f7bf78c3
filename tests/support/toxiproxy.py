"""Links that are slow, narrow, black-holed or cut: a toxiproxy server, and its HTTP API.

Two things it cannot do are left to `tcp_proxy.py`: while it drops all bytes it still passes on that an end has hung up,
which a network that is cut does not; and it treats all connections to one server alike, whoever has opened them.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Self

import httpx2

from support.etcd_process import free_ports
from support.go_server import TOXIPROXY

START_TIME_LIMIT_SECONDS = 10
CALL_TIME_LIMIT_SECONDS = 10
STREAMS = ("upstream", "downstream")


class Toxiproxy:
    """A server for the length of a test, with as many links as are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._client = httpx2.AsyncClient()

    async def __aenter__(self) -> Self:
        port = free_ports(1)[0]
        binary = await asyncio.to_thread(TOXIPROXY.find, os.environ)
        with (self._folder / "toxiproxy.log").open("ab") as log:
            # Each connection that ends is a line otherwise.
            environment = os.environ | {"LOG_LEVEL": "error"}
            self._process = await asyncio.create_subprocess_exec(
                binary, "-host", "127.0.0.1", "-port", str(port), stdout=log, stderr=log, env=environment
            )
        self._client = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=CALL_TIME_LIMIT_SECONDS, trust_env=False
        )
        async with asyncio.timeout(START_TIME_LIMIT_SECONDS):
            while True:
                assert self._process.returncode is None, (self._folder / "toxiproxy.log").read_text()
                try:
                    (await self._client.get("/version")).raise_for_status()
                except httpx2.TransportError:
                    await asyncio.sleep(0.02)
                    continue
                return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def link(self, name: str, upstream_port: int) -> Link:
        """A new link to a server on loopback, which need not listen yet."""
        body = {"name": name, "listen": "127.0.0.1:0", "upstream": f"127.0.0.1:{upstream_port}", "enabled": True}
        made = await self.ask("POST", "/proxies", body)
        return Link(self, name, port=int(made["listen"].rpartition(":")[2]))

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """A call of the API; its answer."""
        answer = await self._client.request(method, path, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None


class Link:
    """Where clients connect instead of to the server behind it."""

    def __init__(self, server: Toxiproxy, name: str, *, port: int) -> None:
        self.port = port
        self._server = server
        self._path = f"/proxies/{name}"
        self._toxics: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def delay(self, *, milliseconds: int, jitter_milliseconds: int) -> None:
        """Whatever is said on either side arrives later."""
        await self._add("latency", latency=milliseconds, jitter=jitter_milliseconds)

    async def narrow(self, *, kilobytes_per_second: int) -> None:
        """No more than this goes through, of each connection and in each direction."""
        await self._add("bandwidth", rate=kilobytes_per_second)

    async def black_hole(self) -> None:
        """Connections stay open, are still made, and nothing comes through."""
        await self._add("timeout", timeout=0)

    async def cut(self) -> None:
        """Ends all connections, and refuses new ones."""
        await self._server.ask("POST", self._path, {"enabled": False})

    async def heal(self) -> None:
        """Lets everything through again. Connections that have lost bytes are closed."""
        while self._toxics:
            await self._server.ask("DELETE", f"{self._path}/toxics/{self._toxics.pop()}")
        await self._server.ask("POST", self._path, {"enabled": True})

    async def _add(self, kind: str, **attributes: int) -> None:
        for stream in STREAMS:
            name = f"{kind}-{stream}"
            body = {"name": name, "type": kind, "stream": stream, "attributes": attributes}
            await self._server.ask("POST", f"{self._path}/toxics", body)
            self._toxics.append(name)
