"""A real NATS server on a free port of loopback."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

START_TIME_LIMIT_SECONDS = 10


class NatsProcess:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path, *, configuration: str = "") -> None:
        self._folder = folder
        self._configuration = configuration
        self._process: asyncio.subprocess.Process | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def process_id(self) -> int:
        """Process id of the last start."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Starts it and waits until it answers."""
        binary = Path(sys.executable).with_name("nats-server")
        log = self._folder / "nats.log"
        arguments = ["-a", "127.0.0.1", "-p", str(self.port), "-l", str(log)]
        if self._configuration:
            file = self._folder / "nats.conf"
            file.write_text(self._configuration)
            arguments += ["-c", str(file)]
        self._process = await asyncio.create_subprocess_exec(binary, *arguments)
        async with asyncio.timeout(START_TIME_LIMIT_SECONDS):
            while True:
                if self._process.returncode is not None:
                    raise RuntimeError(log.read_text())
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                return

    async def stop(self) -> None:
        """Ends it."""
        if self._process is not None and self._process.returncode is None:
            # A frozen process dies of this as well.
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


@contextlib.asynccontextmanager
async def nats_process(folder: Path, *, configuration: str = "") -> AsyncIterator[NatsProcess]:
    """Runs a server for the length of a test."""
    server = NatsProcess(folder, configuration=configuration)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
