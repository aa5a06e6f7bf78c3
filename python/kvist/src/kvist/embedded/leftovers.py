"""Processes of a cluster whose supervisor was killed: they would hold its ports and its memory."""

from __future__ import annotations

import psutil

from kvist.embedded.layout import Layout

END_TIME_LIMIT_SECONDS = 5.0
_PROGRAMS = ("kvist_", "nats-server")


def end_leftovers(layout: Layout) -> int:
    """Ends every process of Kvist whose command line names a file of this cluster, and returns how many there were."""
    folder = f"{layout.root}/"
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(folder in word for word in words) and any(program in word for word in words for program in _PROGRAMS):
            found.append(process)
            _signal(process, is_kill=False)
    _, alive = psutil.wait_procs(found, timeout=END_TIME_LIMIT_SECONDS)
    for process in alive:
        _signal(process, is_kill=True)
    psutil.wait_procs(alive, timeout=END_TIME_LIMIT_SECONDS)
    return len(found)


def _signal(process: psutil.Process, *, is_kill: bool) -> None:
    try:
        if is_kill:
            process.kill()
        else:
            process.terminate()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
