"""Errors keep their meaning on every way: class, status and back, and out of the core."""

import json

import grpc
import pytest

from kvist import _core, errors
from kvist.errors import FieldViolation, KvistError


@pytest.mark.parametrize("code", errors.CATALOGUE)
def test_an_error_survives_the_way_over_a_status(code: str) -> None:
    before = errors.error(
        code,
        "spec.replicas: must be positive",
        fields=[FieldViolation("spec.replicas", "must be positive")],
        metadata={"kind": "ModelService"},
        retry_after_seconds=1.5,
        not_started=True,
    )
    status = errors.to_status(before)
    after = errors.from_status(status)
    assert errors.CATALOGUE[code].grpc_number == status.code
    assert type(before) is type(after)
    assert vars(before) == vars(after)


def test_a_foreign_status_gets_the_nearest_code() -> None:
    status = errors.to_status(errors.error("INTERNAL", "gone"))
    del status.details[:]
    status.code = grpc.StatusCode.UNAVAILABLE.value[0]
    failure = errors.from_status(status)
    assert isinstance(failure, errors.UnavailableError)
    assert failure.code == "ENGINE_UNAVAILABLE"


def test_a_code_of_another_version_is_internal() -> None:
    failure = errors.error("MADE_LATER", "?")
    assert isinstance(failure, errors.InternalError)
    assert errors.CATALOGUE["INTERNAL"] == failure.entry


def test_several_wrong_fields_are_one_error() -> None:
    failure = errors.invalid([FieldViolation("a", "is missing"), FieldViolation("b[0]", "is negative")])
    assert failure.message == "a: is missing; b[0]: is negative"
    assert len(failure.fields) == 2


def test_a_failure_of_the_core_becomes_an_error_of_the_catalogue() -> None:
    details = {"fields": [{"field": "x", "description": "y"}], "retry_after_ms": 250, "not_started": True}
    with pytest.raises(KvistError) as caught, errors.core_errors():
        raise _core.CoreError("QUEUE_FULL", "full", json.dumps(details))
    assert isinstance(caught.value, errors.OverloadedError)
    assert caught.value.retry_after_seconds == 0.25
    assert caught.value.not_started
    assert caught.value.fields == (FieldViolation("x", "y"),)
