"""Real etcd members on free ports of loopback, alone or as a cluster that can be killed, frozen and cut into parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvist.etcd.api.rpc_pb2 import CompactionRequest, StatusRequest
from kvist.etcd.api.rpc_pb2_grpc import KVStub, MaintenanceStub
from kvist.grpc import open_channel
from support.go_server import ETCD
from support.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from support.toxiproxy import Link, Toxiproxy

START_TIME_LIMIT_SECONDS = 30
LOG_CHARACTERS = 4_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


class EtcdProcess:
    """A member that can be stopped and started again with what it knew."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "solo",
        ports: Sequence[int] = (),
        advertised_peer_port: int | None = None,
        initial_cluster: str = "",
        arguments: Sequence[str] = (),
        scheme: str = "http",
    ) -> None:
        self.name = name
        self.client_port, self.peer_port = ports or free_ports(2)
        self._folder = folder
        self._arguments = arguments
        self._scheme = scheme
        self._peer_url = f"http://127.0.0.1:{advertised_peer_port or self.peer_port}"
        self._initial_cluster = initial_cluster or f"{name}={self._peer_url}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")[-LOG_CHARACTERS:]

    def start(self) -> None:
        """Starts it; it may have to wait for others before it answers."""
        client_url = f"{self._scheme}://{self.address}"
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(ETCD.find(os.environ)),
                    *("--name", self.name, "--data-dir", str(self._folder / self.name)),
                    *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                    *("--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}"),
                    *("--initial-advertise-peer-urls", self._peer_url),
                    *("--initial-cluster", self._initial_cluster, "--initial-cluster-state", "new"),
                    # The disk of a test machine is no part of the tests.
                    *("--unsafe-no-fsync", "--log-level", "warn"),
                    *self._arguments,
                ],
                stdout=log,
                stderr=log,
            )

    def wait_until_listening(self) -> None:
        """Waits until it takes connections of clients, which it does as soon as it has a leader."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIME_LIMIT_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.client_port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
                continue
            return
        raise RuntimeError(self.log)

    async def until_listening(self) -> None:
        """Waits as `wait_until_listening` does, while the proxies work."""
        await asyncio.to_thread(self.wait_until_listening)

    def kill(self) -> None:
        """Ends it without a farewell; what it has written stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Stops it where it is, and returns when all its threads stand."""
        os.kill(self.process_id, signal.SIGSTOP)
        while psutil.Process(self.process_id).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets it go on as if no time had passed."""
        os.kill(self.process_id, signal.SIGCONT)


@contextlib.contextmanager
def etcd_process(folder: Path, *, arguments: Sequence[str] = (), scheme: str = "http") -> Iterator[EtcdProcess]:
    """Runs one member for the length of a test, or of several."""
    member = EtcdProcess(folder, arguments=arguments, scheme=scheme)
    member.start()
    try:
        member.wait_until_listening()
        yield member
    finally:
        member.kill()


class EtcdCluster:
    """Three members whose connections to each other, and their clients' to them, go through proxies."""

    def __init__(self, folder: Path) -> None:
        names = ("a", "b", "c")
        ports = free_ports(2 * len(names))
        pairs = {name: ports[2 * number : 2 * number + 2] for number, name in enumerate(names)}
        self._folder = folder
        self._ports = pairs
        self._cut: set[str] = set()
        self._peer_proxies = {
            name: TcpProxy(pair[1], swallows=lambda port, name=name: self._is_cut(name, port))
            for name, pair in pairs.items()
        }
        self._client_proxies = {name: TcpProxy(pair[0]) for name, pair in pairs.items()}
        self._owners: dict[int, str] = {}
        # To each member from the others, where a test has asked for such links.
        self.peer_links: dict[str, Link] = {}
        self.members: dict[str, EtcdProcess] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where clients connect, by name of the members."""
        return tuple(f"127.0.0.1:{self._client_proxies[name].port}" for name in sorted(self._client_proxies))

    @contextlib.asynccontextmanager
    async def running(self, *, toxiproxy: Toxiproxy | None = None) -> AsyncIterator[EtcdCluster]:
        """The cluster, for the length of a test. With a toxiproxy, links between members can also be slow."""
        async with contextlib.AsyncExitStack() as stack:
            if toxiproxy is not None:
                for name, proxy in self._peer_proxies.items():
                    link = self.peer_links[name] = await toxiproxy.link(f"etcd-peer-{name}", proxy.upstream_port)
                    proxy.upstream_port = link.port
            for proxy in (*self._peer_proxies.values(), *self._client_proxies.values()):
                await stack.enter_async_context(proxy)
            urls = {name: f"http://127.0.0.1:{proxy.port}" for name, proxy in self._peer_proxies.items()}
            for name, ports in self._ports.items():
                self.members[name] = EtcdProcess(
                    self._folder,
                    name=name,
                    ports=ports,
                    advertised_peer_port=self._peer_proxies[name].port,
                    initial_cluster=",".join(f"{other}={url}" for other, url in urls.items()),
                    # The members of a test share one busy machine.
                    arguments=("--heartbeat-interval", "50", "--election-timeout", "500"),
                )
            try:
                for member in self.members.values():
                    member.start()
                for member in self.members.values():
                    await member.until_listening()
                yield self
            finally:
                for member in self.members.values():
                    member.kill()

    def isolate(self, name: str) -> None:
        """Cuts one member off from the others and from all clients."""
        self._cut.add(name)
        self._client_proxies[name].is_cut = True

    def isolate_from_members(self, name: str) -> None:
        """Cuts one member off from the others; clients reach it."""
        self._cut.add(name)

    async def heal(self) -> None:
        """Ends all cuts."""
        self._cut.clear()
        for proxy in (*self._peer_proxies.values(), *self._client_proxies.values()):
            await proxy.heal()

    def _is_cut(self, target: str, source_port: int) -> bool:
        if not self._cut:
            return False
        return target in self._cut or self._owner(source_port) in self._cut

    def _owner(self, port: int) -> str:
        """The member that a connection comes from."""
        if port not in self._owners:
            for name, member in self.members.items():
                for connection in psutil.Process(member.process_id).net_connections("tcp4"):
                    self._owners[connection.laddr.port] = name
        return self._owners.get(port, "")

    async def compact(self, revision: int) -> None:
        """Cuts the history before a revision."""
        async with open_channel(self.endpoints[0], retries=False) as channel:
            await KVStub(channel).Compact(CompactionRequest(revision=revision, physical=True), timeout=5)

    async def leader(self) -> str:
        """Name of the member that leads, as the members say."""
        async with asyncio.timeout(START_TIME_LIMIT_SECONDS):
            while True:
                for name, member in self.members.items():
                    async with open_channel(member.address, retries=False) as channel:
                        try:
                            status = await MaintenanceStub(channel).Status(StatusRequest(), timeout=1)
                        except Exception:  # noqa: BLE001, S112  It is dead, frozen or cut off.
                            continue
                        if status.leader == status.header.member_id and name not in self._cut:
                            return name
                await asyncio.sleep(0.1)
