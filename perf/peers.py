"""The routers that Kvist is measured beside: pinned, in an environment of their own, started as their docs say."""

import asyncio
import socket
import subprocess
import urllib.error
import urllib.request
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.machine_facts import ROOT
from perf.placement import Placement
from perf.processes import Process, ProcessFailedError

ENVIRONMENT = ROOT / "target" / "bench-peers" / "venv"
PINNED = ("smg==1.13.0", "vllm-router==0.1.17")
INSTALL_TIME_LIMIT_SECONDS = 900
READY_TIME_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.1
PROBE_TIME_LIMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A router of somebody else.

    Attributes:
        name: Name of the package and of its command.
        arguments: Arguments in which `{host}`, `{port}`, `{metrics_port}` stand for addresses; the engines follow.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def version(self) -> str:
        """The pinned version."""
        return next(pin.partition("==")[2] for pin in PINNED if pin.startswith(f"{self.name}=="))


# Both choose by the prompt's beginning, as Kvist does; everything else is as they come, logs included.
_COMMON = ("--host", "{host}", "--port", "{port}", "--policy", "cache_aware", "--prometheus-port", "{metrics_port}")
PEERS = (
    Peer("smg", ("launch", *_COMMON, "--worker-urls")),
    Peer("vllm-router", (*_COMMON, "--worker-urls")),
)


def install_peers() -> None:
    """Brings the environment to the pinned versions.

    Raises:
        ProcessFailedError: A package index cannot be reached or has not got them.
    """
    stamp = ENVIRONMENT / "stamp"
    wanted = "\n".join(PINNED)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*command, *PINNED], check=True, timeout=INSTALL_TIME_LIMIT_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ProcessFailedError(f"pip could not install {', '.join(PINNED)}: {error}") from None
    stamp.write_text(wanted)


async def started_peer(
    peer: Peer, engines: Sequence[str], *, model: str, folder: Path, cores: Placement
) -> tuple[Process, str]:
    """Starts a router before engines (`host:port`) and returns it and its address, once a request would be answered.

    Raises:
        ProcessFailedError: It ended, or was not ready in time.
    """
    host, port, metrics_port = "127.0.0.1", _free_port(), _free_port()
    filled = [part.format(host=host, port=port, metrics_port=metrics_port) for part in peer.arguments]
    command = [str(ENVIRONMENT / "bin" / peer.name), *filled, *(f"http://{engine}" for engine in engines)]
    process = Process(peer.name, command, folder=folder, cores=cores.router, is_announced=False)
    await process.start()
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(READY_TIME_LIMIT_SECONDS):
            while not await asyncio.to_thread(_answers, address, model):
                process.check()
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        await process.stop()
        raise ProcessFailedError(f"{peer.name} was not ready in time\n{process.log_tail()}") from None
    except BaseException:
        await process.stop()
        raise
    return process, address


def _answers(address: str, model: str) -> bool:
    body = (
        f'{{"model":"{model}","messages":[{{"role":"user","content":"to"}}],"max_tokens":1,"stream":true}}'
    ).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIME_LIMIT_SECONDS) as response:  # noqa: S310
            content: bytes = response.read()
            return content.endswith(b"data: [DONE]\n\n")
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    """A port that was free a moment ago; routers of others cannot be told to choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def peer_facts() -> dict[str, Any]:
    """What ran, for the result."""
    return {peer.name: {"version": peer.version, "arguments": " ".join(peer.arguments)} for peer in PEERS}
