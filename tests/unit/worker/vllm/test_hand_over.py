"""What vLLM's connectors are told."""

from typing import Any

import pytest

from kvist.errors import KvistError
from kvist_worker.engines.vllm.hand_over import set_environment, with_connector, worker_extension
from kvist_worker.settings import HandOverSettings


def test_the_connector_is_configured_by_the_hand_over() -> None:
    shared = HandOverSettings(connector="ExampleConnector", shared_folder="/kv")
    assert with_connector({"model": "m"}, shared, is_prefill=True) == {
        "model": "m",
        "kv-transfer-config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": "/kv"},
        },
    }
    pulled = HandOverSettings(connector="NixlConnector", protocol="tcp", lease_ms=12_000, on_failure="fail")
    config = with_connector({}, pulled, is_prefill=False)["kv-transfer-config"]
    assert config["kv_role"] == "kv_consumer"
    assert (config["kv_load_failure_policy"], config["kv_connector_extra_config"]) == (
        "fail",
        {"kv_lease_duration": 12},
    )
    assert with_connector({"model": "m"}, None, is_prefill=False) == {"model": "m"}


@pytest.mark.parametrize(
    ("arguments", "connector", "field"),
    [
        ({"kv-transfer-config": {"kv_connector": "X"}}, "NixlConnector", "engine_arguments.kv-transfer-config"),
        ({"enable_lora": True}, "ExampleConnector", "engine_arguments.enable-lora"),
        ({}, "MooncakeConnector", "hand_over.connector"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], connector: str, field: str) -> None:
    with pytest.raises(KvistError) as refused:
        with_connector(arguments, HandOverSettings(connector=connector, shared_folder="/kv"), is_prefill=True)
    assert [violation.field for violation in refused.value.fields] == [field]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"protocol": "tcp"}, {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}),
        ({"protocol": "rdma", "rdma_device": "mlx5_0"}, {"UCX_TLS": "rc,ud,self,sm", "UCX_NET_DEVICES": "mlx5_0:1"}),
        ({"protocol": "rdma"}, {"UCX_TLS": "rc,ud,self,sm"}),
    ],
)
def test_only_what_was_written_may_carry_kv(settings: dict[str, Any], expected: dict[str, str]) -> None:
    environment: dict[str, str] = {}
    set_environment(environment, HandOverSettings(connector="NixlConnector", **settings), port=5600)
    always = {
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }
    assert environment == expected | always
    nothing: dict[str, str] = {}
    set_environment(nothing, HandOverSettings(connector="ExampleConnector", shared_folder="/kv"), port=1)
    assert nothing == {}


def test_only_nixl_over_tcp_is_told_to_pause() -> None:
    over_tcp = worker_extension(HandOverSettings(connector="NixlConnector", protocol="tcp"))
    assert over_tcp == "kvist_worker.engines.vllm.nixl_pause.PausesBetweenLooks"
    assert worker_extension(HandOverSettings(connector="NixlConnector", protocol="rdma")) == ""
    assert worker_extension(HandOverSettings(connector="ExampleConnector", shared_folder="/kv")) == ""
    assert worker_extension(None) == ""
