"""Generates the Python stubs from `proto/` into the base package, or checks that they are current.

The import path equals the proto path: `proto/kvist/router/v1/router.proto` becomes `kvist.router.v1.router_pb2`.
With `--check` nothing is written; the exit code is 1 when a file differs.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
# Vendored protos whose paths are ours all the same.
THIRD_PARTY = PROTO / "third_party" / "etcd"
TARGET = ROOT / "python" / "kvist" / "src"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Writes all stubs below `target`."""
    # The plugins lie beside this interpreter, whether its environment is activated or not.
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    includes = resources.files("grpc_tools") / "_proto"
    files = sorted(
        str(path.relative_to(root)) for root in (PROTO, THIRD_PARTY) for path in root.glob("kvist/**/*.proto")
    )
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{THIRD_PARTY}",
            f"-I{includes}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *files,
        ]
    )
    if code:
        raise SystemExit(code)


def stubs(folder: Path) -> set[Path]:
    """All generated files below a folder, relative to it."""
    return {path.relative_to(folder) for pattern in GENERATED for path in folder.glob(f"kvist/**/{pattern}")}


def main() -> int:
    """Generates or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        different = sorted(
            path
            for path in stubs(fresh) | stubs(TARGET)
            if not (fresh / path).is_file()
            or not (TARGET / path).is_file()
            or not filecmp.cmp(fresh / path, TARGET / path, shallow=False)
        )
    for path in different:
        print(f"{path}: not current; run `./task gen`")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
