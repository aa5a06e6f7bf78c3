"""Installs an engine into an environment of its own.

All packages are pinned, so nothing is resolved here, and the same command gives the same environment everywhere. What
is there already is kept: a second call takes seconds, and one that was broken off goes on.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import kvist
from kvist.engines.environment import EngineEnvironment, EngineRecord

VARIANTS = ("cpu", "cuda")
# Links the sources of a checkout into an environment, as an editable installation would.
_LINK_FILE = "kvist-checkout.pth"
# A package index may be slow; one that says nothing for so long is not there.
_STEP_SECONDS = 3_600
_CHECK_SECONDS = 900
Say = Callable[[str], None]


class InstallError(Exception):
    """The engine could not be installed.

    Attributes:
        hint: What to do about it.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def pinned_packages(engine: str, variant: str) -> str:
    """The pinned packages of an engine, one a line."""
    return (importlib.resources.files("kvist.engines") / f"{engine}-{variant}.txt").read_text()


def install(engine: str, variant: str, *, say: Say) -> EngineEnvironment:
    """Installs an engine, or sees that it is installed.

    Raises:
        InstallError: A step failed; what was done so far is kept for the next call.
    """
    environment = EngineEnvironment.of(engine)
    packages = pinned_packages(engine, variant)
    checkout = checkout_folder()
    wanted = EngineRecord(
        engine=engine,
        variant=variant,
        packages_sha256=hashlib.sha256(packages.encode()).hexdigest(),
        kvist=kvist.__version__ if checkout is None else str(checkout),
    )
    present = environment.read()
    if present == wanted:
        say(f"{engine} ({variant}) is installed in {environment.folder}")
        return environment
    if present is not None and present.variant != variant:
        # Packages of the other variant would stay behind.
        shutil.rmtree(environment.folder)
    environment.forget()
    say(f"1/4 environment: {environment.folder}")
    _make(environment)
    say(f"2/4 packages: {len(packages.splitlines())}, some gigabytes the first time")
    requirements = environment.folder / f"{engine}-{variant}.txt"
    requirements.write_text(packages)
    _install(environment, ["--no-deps", "--requirement", str(requirements)])
    say(f"3/4 Kvist: {wanted.kvist}")
    _install_kvist(environment, checkout)
    say(f"4/4 check: import {engine}; the first time takes a minute")
    _run([str(environment.python), "-c", f"import {engine}, kvist_worker"], time_limit_seconds=_CHECK_SECONDS)
    environment.write(wanted)
    say(f"{engine} ({variant}) is installed in {environment.folder}")
    return environment


def checkout_folder() -> Path | None:
    """The checkout that this `kvist` runs from; none for an installed package."""
    root = Path(kvist.__file__).resolve().parents[4]
    return root if (root / "services" / "worker" / "pyproject.toml").is_file() else None


def _make(environment: EngineEnvironment) -> None:
    if environment.python.exists():
        return
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        # With pip only where uv is not there to do its work.
        venv.create(environment.folder, with_pip=_uv() is None, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        raise InstallError(
            f"cannot make an environment in {environment.folder}: {failure}",
            hint="on Debian and Ubuntu: apt-get install python3-venv; KVIST_ENGINES names another folder",
        ) from failure


def _install_kvist(environment: EngineEnvironment, checkout: Path | None) -> None:
    if checkout is None:
        version = kvist.__version__
        _install(environment, ["--no-deps", f"kvist=={version}", f"kvist-worker=={version}"])
        return
    # The core is built for every Python from 3.11 on, so that of the checkout serves here too.
    sources = (checkout / "python" / "kvist" / "src", checkout / "services" / "worker" / "src")
    [site] = (environment.folder / "lib").glob("python3.*/site-packages")
    (site / _LINK_FILE).write_text("".join(f"{source}\n" for source in sources))


def _install(environment: EngineEnvironment, arguments: Sequence[str]) -> None:
    uv = _uv()
    if uv is None:
        command = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    else:
        # Compiled once: without it each of the engine's processes compiles vLLM anew.
        command = [uv, "pip", "install", "--python", str(environment.python), "--compile-bytecode", *arguments]
    _run(command, time_limit_seconds=_STEP_SECONDS)


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def _run(command: Sequence[str], *, time_limit_seconds: float) -> None:
    """Runs a step, whose own progress goes to where this process writes."""
    # The environment of the caller's interpreter must not leak into the other one.
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    try:
        subprocess.run(command, check=True, timeout=time_limit_seconds, env=inherited)
    except subprocess.CalledProcessError as failure:
        raise InstallError(
            f"`{' '.join(command[:4])} …` ended with {failure.returncode}", hint="its own message is above; try again"
        ) from failure
    except subprocess.TimeoutExpired as failure:
        raise InstallError(
            f"`{' '.join(command[:4])} …` did not end in {time_limit_seconds:.0f} s",
            hint="look whether the package index answers, and try again: what is there is kept",
        ) from failure
