"""`google.protobuf.Struct` to plain values and back.

A Struct knows no integers; YAML and JSON do, and so do engines. A number without a fraction is therefore an integer.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2

# Integers above it do not survive a double.
_LARGEST_EXACT = 2**53


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Plain values of a Struct."""
    plain: dict[str, Any] = _integral(json_format.MessageToDict(struct))
    return plain


def to_struct(value: Mapping[str, Any]) -> struct_pb2.Struct:
    """A Struct of plain values."""
    struct = struct_pb2.Struct()
    struct.update(value)
    return struct


def _integral(value: Any) -> Any:
    match value:
        case dict():
            return {key: _integral(inner) for key, inner in value.items()}
        case list():
            return [_integral(inner) for inner in value]
        case float() if value.is_integer() and abs(value) <= _LARGEST_EXACT:
            return int(value)
        case _:
            return value
