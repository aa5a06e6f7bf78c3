"""Every metric, span and attribute name that Python code of Kvist emits.

The Rust side has its own table (`crates/telemetry/src/names.rs`); a test compares what both emit.
"""

from __future__ import annotations

from typing import Final

# Processes.
BUILD_INFO: Final = "kvist_build_info"
READY: Final = "kvist_ready"

# gRPC servers and clients written in Python.
GRPC_SERVER_CALLS: Final = "kvist_grpc_server_calls_total"
GRPC_SERVER_CALL_DURATION: Final = "kvist_grpc_server_call_duration_seconds"
GRPC_SERVER_ACTIVE_CALLS: Final = "kvist_grpc_server_active_calls"

# State store.
STORE_OPERATIONS: Final = "kvist_store_operations_total"
STORE_OPERATION_DURATION: Final = "kvist_store_operation_duration_seconds"
STORE_LEASES_EXPIRED: Final = "kvist_store_leases_expired_total"

# Elections.
LEADER: Final = "kvist_leader"
LEADER_CHANGES: Final = "kvist_leader_changes_total"

# Bus.
BUS_CONNECTED: Final = "kvist_bus_connected"
BUS_PUBLISHED: Final = "kvist_bus_published_messages_total"
BUS_DROPPED: Final = "kvist_bus_dropped_messages_total"
BUS_RECONNECTS: Final = "kvist_bus_reconnects_total"

# Attributes of spans: the stable names of the RPC conventions, and ours below `kvist.`.
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"

# Fields of log lines.
TRACE_ID: Final = "trace_id"
SPAN_ID: Final = "span_id"
CANONICAL_EVENT: Final = "request_finished"
