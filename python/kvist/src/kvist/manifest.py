"""Manifests as people write them: YAML documents become resources, and what is wrong is named by its path."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from google.protobuf import json_format

from kvist.controller.v1.controller_pb2 import Resource
from kvist.errors import FieldViolation, InvalidRequestError, invalid

_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
_WRITTEN_METADATA = ("annotations", "labels", "name", "resourceVersion")
# What `kvist get -o yaml` shows beside; only the controller writes it.
_READ_METADATA = ("createdAt", "deletedAt", "generation", "uid")
_INVALID = "INVALID_MANIFEST"


def read_manifests(text: str) -> list[Resource]:
    """The resources of a YAML text with one or more documents.

    Raises:
        InvalidRequestError: INVALID_MANIFEST, when it is no YAML or a document is no resource.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as failure:
        raise InvalidRequestError(f"this is not YAML: {failure}", code=_INVALID) from failure
    if not documents:
        raise InvalidRequestError("there is no document in this file", code=_INVALID)
    return [to_resource(document) for document in documents]


def to_resource(document: object) -> Resource:
    """The resource of one document; its specification is checked by the controller.

    Raises:
        InvalidRequestError: INVALID_MANIFEST, with every wrong field.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequestError("a manifest must be a mapping with apiVersion, kind, metadata, spec", code=_INVALID)
    violations = list(_unknown("", document, _TOP))
    metadata = document.get("metadata") or {}
    if isinstance(metadata, Mapping):
        violations += _unknown("metadata.", metadata, _WRITTEN_METADATA + _READ_METADATA)
    else:
        violations.append(FieldViolation("metadata", "must be a mapping"))
    for field in ("apiVersion", "kind"):
        if not isinstance(document.get(field), str):
            violations.append(FieldViolation(field, "is required"))
    if not isinstance(document.get("spec", {}), Mapping):
        violations.append(FieldViolation("spec", "must be a mapping"))
    if violations:
        raise invalid(violations, code=_INVALID)
    plain: dict[str, Any] = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {key: value for key, value in metadata.items() if key in _WRITTEN_METADATA},
        "spec": document.get("spec", {}),
    }
    try:
        return json_format.ParseDict(plain, Resource())
    except json_format.ParseError as failure:
        raise InvalidRequestError(f"this is no resource: {failure}", code=_INVALID) from failure


def to_document(resource: Resource) -> dict[str, Any]:
    """A resource as people write it, with what the controller adds."""
    document: dict[str, Any] = json_format.MessageToDict(resource)
    if "generation" in document.get("metadata", {}):
        # The protocol's JSON writes 64-bit numbers as text.
        document["metadata"]["generation"] = int(document["metadata"]["generation"])
    return {key: _whole(document[key]) for key in _TOP if key in document}


def _whole(value: Any) -> Any:
    """A value as it was written: the protocol's structures know no whole numbers."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unknown(prefix: str, section: Mapping[Any, Any], known: tuple[str, ...]) -> Iterator[FieldViolation]:
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            suggestion = f", did you mean {close[0]!r}?" if close else ""
            yield FieldViolation(f"{prefix}{key}", f"unknown field{suggestion}; known: {', '.join(known)}")
