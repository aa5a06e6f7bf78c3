"""What routers are told of a model's policy."""

import pytest
from google.protobuf import json_format

from kvist.controller.v1.controller_pb2 import Model
from kvist_controller.cluster_state import build_cluster_state
from kvist_controller.records import ServiceRecord


def told(**policy: object) -> Model:
    spec = {"model": "m", "engine": {"name": "sim"}, **policy}
    service = ServiceRecord(name="m", uid="u", generation=1, created_at_unix_nanos=1, spec=spec)
    state = build_cluster_state(
        cluster="c",
        hash_seed=1,
        services=[service],
        slots=[],
        nodes={},
        contracts={},
        dead_incarnations={},
        silent_workers=(),
    )
    (model,) = state.models
    return model


def test_a_model_that_says_nothing_leaves_it_to_the_routers() -> None:
    model = told()
    assert not model.HasField("routing")
    assert not model.HasField("admission")


@pytest.mark.parametrize(
    "admission", ["allow_all", {"concurrency": {"maxConcurrentRequests": 3, "queueTimeout": "1s"}}]
)
def test_a_policy_goes_to_the_routers_as_it_was_written(admission: object) -> None:
    routing = {"scorers": [{"algorithm": "session", "parameters": {"loadBound": 2.5}}]}
    model = told(routing=routing, admission=admission)
    assert json_format.MessageToDict(model.routing) == routing
    assert json_format.MessageToDict(model.admission) == admission
