"""Settings of a worker: where it may listen."""

import json

import pytest
from pydantic import ValidationError

from kvist_worker.settings import WorkerSettings


def test_plain_text_off_loopback_must_be_wanted() -> None:
    with pytest.raises(ValidationError, match="not loopback: give a TLS certificate, or say `insecure: true`"):
        WorkerSettings(grpc_listen="10.0.0.7:0")
    with pytest.raises(ValidationError, match="host:port"):
        WorkerSettings(grpc_listen="10.0.0.7")
    settings = WorkerSettings(grpc_listen="10.0.0.7:0", insecure=True)
    # The word is for people and not for the core.
    core = json.loads(settings.core_json())
    assert (core["grpc_listen"], "insecure" in core) == ("10.0.0.7:0", False)
