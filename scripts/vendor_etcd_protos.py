"""Writes etcd's protos into `proto/third_party/etcd/`, from the source folder of `go.etcd.io/etcd/api/v3`.

    go mod download -json go.etcd.io/etcd/api/v3@v3.7.3   # its `Dir` is the folder
    python scripts/vendor_etcd_protos.py FOLDER

Names on the wire stay as they are. Paths become ours, because a process has one table of proto files by path. Options
of grpc-gateway, OpenAPI and etcd's own version marks are left out, and with them the files that define them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "proto" / "third_party" / "etcd" / "kvist" / "etcd" / "api"
SOURCES = {"rpc": "etcdserverpb/rpc.proto", "kv": "mvccpb/kv.proto", "auth": "authpb/auth.proto"}
UNWANTED_IMPORT = re.compile(
    r'^(// for grpc-gateway|import "(google/api|protoc-gen-openapiv2|etcd/api/versionpb)/.*)\n', re.MULTILINE
)
OWN_IMPORT = re.compile(r'import "etcd/api/(?:mvccpb|authpb)/(\w+)\.proto"')
FIELD_OPTION = re.compile(r"\s*\[\(versionpb\.[^\]]*\]")
LINE_OPTION = re.compile(r"^\s*option \(versionpb\.[^;]*;\n", re.MULTILINE)
BLOCK_OPTION = re.compile(r"^\s*option \((?:google\.api|grpc\.gateway)")


def without_block_options(text: str) -> str:
    """Drops options whose value is a message, however many lines it has."""
    kept: list[str] = []
    depth = 0
    is_inside = False
    for line in text.splitlines():
        if not is_inside and BLOCK_OPTION.match(line):
            is_inside = True
        if not is_inside:
            kept.append(line)
            continue
        depth += line.count("{") - line.count("}")
        if depth == 0 and "}" in line:
            is_inside = False
    return "\n".join(kept) + "\n"


def convert(text: str) -> str:
    """One file as we keep it."""
    text = UNWANTED_IMPORT.sub("", text)
    text = OWN_IMPORT.sub(r'import "kvist/etcd/api/\1.proto"', text)
    text = LINE_OPTION.sub("", FIELD_OPTION.sub("", text))
    return re.sub(r"\n{3,}", "\n\n", without_block_options(text))


def main() -> int:
    """Converts all files and returns the exit code."""
    if len(sys.argv) != 2:  # noqa: PLR2004  The folder.
        print(__doc__)
        return 2
    source = Path(sys.argv[1])
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, path in SOURCES.items():
        (TARGET / f"{name}.proto").write_text(convert((source / path).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
