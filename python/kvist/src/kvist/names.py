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

# TLS of every listener.
TLS_CERTIFICATE_EXPIRY: Final = "kvist_tls_certificate_expiry_timestamp_seconds"

# Cluster states of a KV master; a router's has the same name.
CLUSTER_STATES_IGNORED: Final = "kvist_cluster_states_ignored_total"

# State store.
STORE_DIFFERENCES: Final = "kvist_store_differences_total"
STORE_UP: Final = "kvist_store_up"
STORE_OPERATIONS: Final = "kvist_store_operations_total"
STORE_OPERATION_DURATION: Final = "kvist_store_operation_duration_seconds"
STORE_LEASES_EXPIRED: Final = "kvist_store_leases_expired_total"

# Controllers.
CONTROLLER_STRANGE_WORKERS: Final = "kvist_controller_strange_workers"

# Elections.
LEADER: Final = "kvist_leader"
LEADER_CHANGES: Final = "kvist_leader_changes_total"

# Bus.
BUS_CONNECTED: Final = "kvist_bus_connected"
BUS_PUBLISHED: Final = "kvist_bus_published_messages_total"
BUS_DROPPED: Final = "kvist_bus_dropped_messages_total"
BUS_RECONNECTS: Final = "kvist_bus_reconnects_total"

# Relay of an agent.
RELAY_BUS_CONNECTED: Final = "kvist_relay_bus_connected"
RELAY_CONNECTED: Final = "kvist_relay_connected"
RELAY_MESSAGES: Final = "kvist_relay_messages_total"
RELAY_BATCHES: Final = "kvist_relay_batches_total"
RELAY_BYTES: Final = "kvist_relay_bytes_total"
RELAY_DROPPED_BATCHES: Final = "kvist_relay_dropped_batches_total"
RELAY_SKIPPED_SNAPSHOTS: Final = "kvist_relay_skipped_snapshots_total"
RELAY_BROKEN_STREAMS: Final = "kvist_relay_broken_streams_total"

# Engines that an agent has attached.
ATTACHED_CONNECTED: Final = "kvist_attached_connected"
ATTACHED_IN_TOUCH: Final = "kvist_attached_in_touch"
ATTACHED_COMPLETE: Final = "kvist_attached_complete"
ATTACHED_BLOCKS: Final = "kvist_attached_blocks"
ATTACHED_HINTS: Final = "kvist_attached_hints"
ATTACHED_BATCHES: Final = "kvist_attached_batches_total"
ATTACHED_DUPLICATE_BATCHES: Final = "kvist_attached_duplicate_batches_total"
ATTACHED_EVENTS: Final = "kvist_attached_events_total"
ATTACHED_REFUSED: Final = "kvist_attached_refused_total"
ATTACHED_GAPS: Final = "kvist_attached_gaps_total"
ATTACHED_LOSSES: Final = "kvist_attached_losses_total"
ATTACHED_RESTARTS: Final = "kvist_attached_restarts_total"
ATTACHED_QUESTIONS: Final = "kvist_attached_questions_total"
ATTACHED_FAILED_QUESTIONS: Final = "kvist_attached_failed_questions_total"
ATTACHED_HASH_CHECKS: Final = "kvist_attached_hash_checks_total"
ATTACHED_LEFT_OUT_BLOCKS: Final = "kvist_attached_left_out_blocks_total"

# Index of a KV master; a router's has the same names.
INDEX_SOURCES: Final = "kvist_index_sources"
INDEX_BLOCKS: Final = "kvist_index_blocks"
INDEX_DIVERGENCE_BLOCKS: Final = "kvist_index_divergence_blocks"
INDEX_BYTES: Final = "kvist_index_bytes"
INDEX_RECENT_BYTES: Final = "kvist_index_recent_bytes"
INDEX_BYTE_BUDGET: Final = "kvist_index_byte_budget"
INDEX_MESSAGES: Final = "kvist_index_messages_total"
INDEX_BATCHES: Final = "kvist_index_batches_total"
INDEX_SKIPPED_BATCHES: Final = "kvist_index_skipped_batches_total"
INDEX_REFUSED_STATEMENTS: Final = "kvist_index_refused_statements_total"
INDEX_GAPS: Final = "kvist_index_gaps_total"
INDEX_CATCH_UPS: Final = "kvist_index_catch_ups_total"
INDEX_FAILED_CATCH_UPS: Final = "kvist_index_failed_catch_ups_total"
INDEX_SNAPSHOTS: Final = "kvist_index_snapshots_total"
INDEX_DIGEST_MATCHES: Final = "kvist_index_digest_matches_total"
INDEX_DIGEST_MISMATCHES: Final = "kvist_index_digest_mismatches_total"
INDEX_CLOSED_INCARNATIONS: Final = "kvist_index_closed_incarnations_total"
INDEX_SILENT_SOURCES: Final = "kvist_index_silent_sources"
INDEX_EVENT_LAG_SECONDS: Final = "kvist_index_event_lag_seconds"
INDEX_EVENT_LAG_BATCHES: Final = "kvist_index_event_lag_batches"

# Labels.
LABEL_REASON: Final = "reason"
LABEL_STATE: Final = "state"
LABEL_WORKER: Final = "worker"
LABEL_RANK: Final = "rank"
LABEL_OUTCOME: Final = "outcome"
LABEL_SOCKET: Final = "socket"

# Attributes of spans: the stable names of the RPC conventions, and ours below `kvist.`.
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"

# Fields of log lines.
TRACE_ID: Final = "trace_id"
SPAN_ID: Final = "span_id"
CANONICAL_EVENT: Final = "request_finished"
