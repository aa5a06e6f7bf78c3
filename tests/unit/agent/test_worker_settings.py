"""What an agent tells a worker of its hand-over, and what the worker makes of it."""

from typing import Any

import pytest

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.engine.v1.engine_pb2 import ROLE_DECODE
from kvist_agent.settings import WorkerSettings as Network
from kvist_agent.slot import worker_settings
from kvist_controller.pools import KvTransferSpec
from kvist_worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (
            {"connector": "NixlConnector", "rdmaDevice": "mlx5_0", "onFailure": "fail", "lease": "5s"},
            {"protocol": "rdma", "rdma_device": "mlx5_0", "on_failure": "fail", "lease_ms": 5_000, "shared_folder": ""},
        ),
        (
            {"connector": "ExampleConnector", "sharedFolder": "/kv"},
            {
                "protocol": None,
                "rdma_device": "",
                "on_failure": "recompute",
                "lease_ms": 30_000,
                "shared_folder": "/kv",
            },
        ),
    ],
)
def test_a_hand_over_arrives_as_the_resource_says_it(transfer: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = WorkerSpec(
        worker_uid="w-1",
        model="m",
        engine="vllm",
        role=ROLE_DECODE,
        hand_over=KvTransferSpec.model_validate(transfer).to_wire(),
    )
    told = WorkerSettings.model_validate(worker_settings(spec, incarnation_floor=0, network=Network()))
    assert told.hand_over is not None
    assert told.hand_over.model_dump() == {"connector": transfer["connector"], **expected}
    spec.ClearField("hand_over")
    alone = WorkerSettings.model_validate(worker_settings(spec, incarnation_floor=0, network=Network()))
    assert alone.hand_over is None
