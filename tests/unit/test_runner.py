"""A service process: flags, the ready file, signals and exit codes."""

import asyncio
import json
import signal
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys
    from kvist.runner import run
    from kvist.settings import Settings, TelemetrySettings

    class Demo(Settings):
        mode: str = "serve"
        telemetry: TelemetrySettings = TelemetrySettings(log_format="json")

    async def main(process):
        process.announce(admin_address="127.0.0.1:1")
        if process.settings.mode == "fail":
            raise RuntimeError("broken")
        await process.stopping.wait()
        if process.settings.mode == "hang":
            await __import__("asyncio").Event().wait()

    sys.exit(run("demo", Demo, main))
    """
)


async def start(tmp_path: Path, *flags: str) -> tuple[asyncio.subprocess.Process, Path]:
    program = tmp_path / "demo.py"
    program.write_text(PROGRAM)
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, "--ready-file", ready, *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    return process, ready


async def wait_for(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_sigterm_ends_it_with_zero(tmp_path: Path) -> None:
    process, ready = await start(tmp_path)
    await wait_for(ready)
    assert json.loads(ready.read_text()) == {
        "event": "listening",
        "admin_address": "127.0.0.1:1",
        "process_id": process.pid,
    }
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), 20)
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["event"] for line in lines] == ["listening", "stopping", "stopped"]
    assert {"service", "timestamp", "level", "logger"} <= set(lines[0])
    assert lines[0]["timestamp"].endswith("Z")
    assert process.returncode == 0


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    process, ready = await start(tmp_path, "--set", "mode=hang")
    await wait_for(ready)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while b"stopping" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


async def test_a_failure_is_logged_and_counts(tmp_path: Path) -> None:
    process, _ = await start(tmp_path, "--set", "mode=fail")
    _, log = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert "RuntimeError: broken" in json.loads(log.splitlines()[-1])["exception"]


@pytest.mark.parametrize(("flags", "code", "says"), [
    (("--set", "mod=x"), 2, "did you mean 'mode'"),
    (("--check-config",), 0, ""),
    (("--show-config", "--set", "mode=x"), 0, "mode: x  # flag mode"),
])  # fmt: skip
async def test_settings_are_checked_before_anything_runs(
    tmp_path: Path, flags: tuple[str, ...], code: int, says: str
) -> None:
    process, ready = await start(tmp_path, *flags)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == code
    assert says in (out + err).decode()
    assert not ready.exists()
