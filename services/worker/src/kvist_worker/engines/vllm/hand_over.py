"""How vLLM is told to hand KV over: its connector's configuration and environment. Pure."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from kvist.errors import invalid_field
from kvist_worker.settings import HandOverSettings

NIXL = "NixlConnector"
EXAMPLE = "ExampleConnector"
# UCX takes the first that works, so what must not be used must not be named.
_UCX_TRANSPORTS = {"tcp": "tcp,self,sm", "rdma": "rc,ud,self,sm"}
# Where decode engines ask a prefill engine for its layout: one port, and one more for each rank.
SIDE_CHANNEL_HOST = "127.0.0.1"


def connector_config(settings: HandOverSettings, *, is_prefill: bool) -> dict[str, Any]:
    """`--kv-transfer-config` of a worker.

    Raises:
        KvistError: `INVALID_ARGUMENT` for a connector that Kvist does not know how to hand over with.
    """
    if settings.connector == EXAMPLE:
        extra: dict[str, Any] = {"shared_storage_path": settings.shared_folder}
    elif settings.connector == NIXL:
        extra = {"kv_lease_duration": max(1, round(settings.lease_ms / 1000))}
    else:
        raise invalid_field("hand_over.connector", f"must be {NIXL} or {EXAMPLE} with vLLM")
    return {
        "kv_connector": settings.connector,
        "kv_role": "kv_producer" if is_prefill else "kv_consumer",
        "kv_load_failure_policy": settings.on_failure,
        "kv_connector_extra_config": extra,
    }


def with_connector(
    arguments: Mapping[str, Any], settings: HandOverSettings | None, *, is_prefill: bool
) -> dict[str, Any]:
    """The engine's arguments with the connector's.

    Raises:
        KvistError: `INVALID_ARGUMENT` when both are said, or do not go together.
    """
    if settings is None:
        return dict(arguments)
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    if given.get("kv_transfer_config") is not None:
        raise invalid_field("engine_arguments.kv-transfer-config", "is refused: Kvist makes it of kvTransfer")
    if settings.connector == EXAMPLE and given.get("enable_lora"):
        # Its files are named by token ids alone.
        raise invalid_field("engine_arguments.enable-lora", f"is refused with {EXAMPLE}, whose files know no adapters")
    return {**arguments, "kv-transfer-config": connector_config(settings, is_prefill=is_prefill)}


def worker_extension(settings: HandOverSettings | None) -> str:
    """The class that vLLM has to mix into its workers; empty for none."""
    is_nixl_over_tcp = settings is not None and settings.connector == NIXL and settings.protocol == "tcp"
    return "kvist_worker.engines.vllm.nixl_pause.PausesBetweenLooks" if is_nixl_over_tcp else ""


def set_environment(environment: MutableMapping[str, str], settings: HandOverSettings, *, port: int) -> None:
    """Says to UCX what may carry KV, and to NIXL where it listens."""
    if settings.connector != NIXL or settings.protocol is None:
        return
    environment["UCX_TLS"] = _UCX_TRANSPORTS[settings.protocol]
    if settings.protocol == "rdma":
        if settings.rdma_device:
            environment["UCX_NET_DEVICES"] = f"{settings.rdma_device}:1"
    else:
        environment.setdefault("UCX_NET_DEVICES", "lo")
    # As vLLM sets it before it loads NIXL, which may be loaded before.
    environment.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    environment.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", SIDE_CHANNEL_HOST)
    environment.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
