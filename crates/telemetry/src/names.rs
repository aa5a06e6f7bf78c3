//! All names of metrics, spans and attributes of the Rust side.
//!
//! A metric's name is what a dashboard shows: unit and, for counters, `_total` included. Names are never built from
//! parts, so that a search for one finds its every use.

macro_rules! names {
    ($list:ident: $($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $text;)*
        /// All names of the group, in the order of the module.
        pub const $list: &[&str] = &[$($name),*];
    };
}

names! { METRICS:
    /// Requests by model, outcome and HTTP or gRPC surface.
    ROUTER_REQUESTS = "kvist_router_requests_total";
    /// Requests that run or wait.
    ROUTER_ACTIVE_REQUESTS = "kvist_router_active_requests";
    /// Requests that were placed a second time after their first target was lost.
    ROUTER_RETRIES = "kvist_router_retries_total";
    /// What looked like a tool call or a head of a message and could not be read, by model: it was passed on as text.
    ROUTER_PARSE_FAILURES = "kvist_router_parse_failures_total";
    /// Placements that a worker refused because more waited there than the router knew of.
    ROUTER_REFUSALS = "kvist_router_refusals_total";
    /// Requests that were divided between a prefill and a decode worker, by how that ended.
    ROUTER_HAND_OVERS = "kvist_router_hand_overs_total";
    /// From the end of a prefill to the first token of the decode worker.
    ROUTER_HAND_OVER_SECONDS = "kvist_router_hand_over_seconds";
    /// Time of one routing decision, hashing included.
    ROUTER_DECISION_SECONDS = "kvist_router_decision_seconds";
    /// Time of rendering and tokenizing a prompt.
    ROUTER_TOKENIZE_SECONDS = "kvist_router_tokenize_seconds";
    /// From arrival to the first token.
    ROUTER_TIME_TO_FIRST_TOKEN_SECONDS = "kvist_router_time_to_first_token_seconds";
    /// From the first token to the end of the answer, for each further token.
    ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS = "kvist_router_time_per_output_token_seconds";
    /// Time in the engine's queue.
    ROUTER_ENGINE_QUEUE_SECONDS = "kvist_router_engine_queue_seconds";
    /// From arrival to the end of the answer.
    ROUTER_REQUEST_SECONDS = "kvist_router_request_seconds";
    /// Routers of other processes that serve, behind an edge without a router.
    EDGE_REMOTE_ROUTERS = "kvist_edge_remote_routers";
    /// Requests that run at routers of other processes.
    EDGE_ACTIVE_REQUESTS = "kvist_edge_active_requests";
    /// Requests to servers outside the mesh by upstream and outcome.
    UPSTREAM_REQUESTS = "kvist_upstream_requests_total";
    /// Requests that run at servers outside the mesh.
    UPSTREAM_ACTIVE_REQUESTS = "kvist_upstream_active_requests";
    /// Prompt tokens of all requests.
    ROUTER_PROMPT_TOKENS = "kvist_router_prompt_tokens_total";
    /// Generated tokens of all requests.
    ROUTER_COMPLETION_TOKENS = "kvist_router_completion_tokens_total";
    /// Prompt tokens that decisions expected to find in a cache.
    ROUTER_PREDICTED_CACHED_TOKENS = "kvist_router_predicted_cached_tokens_total";
    /// Prompt tokens that engines found in their cache.
    ROUTER_DELIVERED_CACHED_TOKENS = "kvist_router_delivered_cached_tokens_total";
    /// Reservations held.
    ROUTER_RESERVATIONS = "kvist_router_reservations";
    /// Tokens promised to targets and not yet finished.
    ROUTER_PROMISED_TOKENS = "kvist_router_promised_tokens";
    /// Targets by whether they take requests.
    ROUTER_TARGETS = "kvist_router_targets";
    /// Decisions by what became of them.
    ROUTER_SELECTIONS = "kvist_router_selections_total";
    /// Candidates of decisions by how far they came.
    ROUTER_CANDIDATES = "kvist_router_candidates_total";
    /// Prompt tokens in caches: the most that a target had, those of the chosen one, those that its engine found.
    ROUTER_HIT_TOKENS = "kvist_router_hit_tokens_total";
    /// By how many prompt tokens a decision was wrong about the cache of its target.
    ROUTER_CACHED_ERROR_TOKENS = "kvist_router_cached_error_tokens";
    /// By how much a decision was wrong about the time to the first token.
    ROUTER_FIRST_TOKEN_ERROR_SECONDS = "kvist_router_first_token_error_seconds";
    /// Requests that wait at the door of their model.
    ROUTER_QUEUED_REQUESTS = "kvist_router_queued_requests";
    /// Time that requests waited at the door until they were let in or turned away.
    ROUTER_QUEUE_SECONDS = "kvist_router_queue_seconds";
    /// Requests that were not let in, by why.
    ROUTER_ADMISSION_REFUSALS = "kvist_router_admission_refusals_total";
    /// Targets by the state of their breaker.
    ROUTER_BREAKERS = "kvist_router_breakers";
    /// Breakers that opened.
    ROUTER_BREAKER_OPENINGS = "kvist_router_breaker_openings_total";
    /// Models whose resource says something that this router does not understand.
    ROUTER_REFUSED_POLICIES = "kvist_router_refused_policies";
    /// Links to workers that were lost.
    LINK_LOSSES = "kvist_link_losses_total";
    /// Links to workers that stand.
    LINK_CONNECTED = "kvist_link_connected";
    /// Sources of the index by state.
    INDEX_SOURCES = "kvist_index_sources";
    /// Blocks that somebody holds in the index.
    INDEX_BLOCKS = "kvist_index_blocks";
    /// Bytes of the index.
    INDEX_BYTES = "kvist_index_bytes";
    /// Bytes of the small index of a router's own recent decisions.
    INDEX_RECENT_BYTES = "kvist_index_recent_bytes";
    /// Most bytes of the index.
    INDEX_BYTE_BUDGET = "kvist_index_byte_budget";
    /// Blocks by which index and ledgers differ at the same position.
    INDEX_DIVERGENCE_BLOCKS = "kvist_index_divergence_blocks";
    /// Messages of the bus to the index.
    INDEX_MESSAGES = "kvist_index_messages_total";
    /// Batches applied to the index.
    INDEX_BATCHES = "kvist_index_batches_total";
    /// Batches that were not applied, by reason.
    INDEX_SKIPPED_BATCHES = "kvist_index_skipped_batches_total";
    /// Statements that could not be used, by reason.
    INDEX_REFUSED_STATEMENTS = "kvist_index_refused_statements_total";
    /// Gaps seen by the index.
    INDEX_GAPS = "kvist_index_gaps_total";
    /// Questions to workers about what is missing.
    INDEX_CATCH_UPS = "kvist_index_catch_ups_total";
    /// Questions to workers that had no answer.
    INDEX_FAILED_CATCH_UPS = "kvist_index_failed_catch_ups_total";
    /// Snapshots taken into the index.
    INDEX_SNAPSHOTS = "kvist_index_snapshots_total";
    /// Sources whose first snapshot came from a KV master.
    INDEX_BOOTSTRAPPED_SOURCES = "kvist_index_bootstrapped_sources_total";
    /// Digests that matched.
    INDEX_DIGEST_MATCHES = "kvist_index_digest_matches_total";
    /// Digests that did not match.
    INDEX_DIGEST_MISMATCHES = "kvist_index_digest_mismatches_total";
    /// Incarnations that were closed.
    INDEX_CLOSED_INCARNATIONS = "kvist_index_closed_incarnations_total";
    /// Sources that have fallen silent.
    INDEX_SILENT_SOURCES = "kvist_index_silent_sources";
    /// From the record of the last batch in its ledger to its place in the index.
    INDEX_EVENT_LAG_SECONDS = "kvist_index_event_lag_seconds";
    /// Batches by which sources are known to be ahead of the index.
    INDEX_EVENT_LAG_BATCHES = "kvist_index_event_lag_batches";
    /// Share of EXACT sources times delivered over predicted hits, by model.
    KV_AWARENESS = "kvist_kv_awareness";
    /// EXACT sources over all of the workers of a model that take requests.
    KV_EXACT_SOURCES_SHARE = "kvist_kv_exact_sources_share";
    /// Delivered over predicted hits of the last five minutes, by model.
    KV_DELIVERED_HITS_SHARE = "kvist_kv_delivered_hits_share";
    /// 0 once one of both has been too low for 15 s.
    KV_AWARE = "kvist_kv_aware";
    /// Cluster states that were not taken up, by reason.
    CLUSTER_STATES_IGNORED = "kvist_cluster_states_ignored_total";
    /// Whether a cluster state that names no worker is held back, since workers answer that it does not know.
    ROUTER_CLUSTER_STATE_HELD = "kvist_router_cluster_state_held";
    /// When the certificate of a listener ends, in Unix seconds.
    TLS_CERTIFICATE_EXPIRY = "kvist_tls_certificate_expiry_timestamp_seconds";
    /// Whether the bus is connected.
    BUS_CONNECTED = "kvist_bus_connected";
    /// Requests of a worker by outcome.
    WORKER_REQUESTS = "kvist_worker_requests_total";
    /// Requests that have a slot.
    WORKER_RUNNING_REQUESTS = "kvist_worker_running_requests";
    /// Requests that wait for a slot.
    WORKER_WAITING_REQUESTS = "kvist_worker_waiting_requests";
    /// Prompt tokens accepted and not yet computed.
    WORKER_OUTSTANDING_PREFILL_TOKENS = "kvist_worker_outstanding_prefill_tokens";
    /// KV blocks in use.
    WORKER_USED_BLOCKS = "kvist_worker_used_blocks";
    /// KV blocks there are.
    WORKER_TOTAL_BLOCKS = "kvist_worker_total_blocks";
    /// Tokens generated.
    WORKER_GENERATED_TOKENS = "kvist_worker_generated_tokens_total";
    /// KV blocks of ended requests that are kept for a decode engine.
    WORKER_PINNED_BLOCKS = "kvist_worker_pinned_blocks";
    /// Leases on such blocks that ended because nobody came.
    WORKER_EXPIRED_LEASES = "kvist_worker_expired_leases_total";
    /// Prompt tokens whose KV another engine sent.
    WORKER_EXTERNAL_TOKENS = "kvist_worker_external_tokens_total";
    /// KV that did not arrive from another engine.
    WORKER_FAILED_TRANSFERS = "kvist_worker_failed_transfers_total";
    /// Requests that had to give up their slot.
    WORKER_PREEMPTIONS = "kvist_worker_preemptions_total";
    /// Drafts of speculative decoding.
    WORKER_DRAFTS = "kvist_worker_drafts_total";
    /// Tokens that drafts proposed.
    WORKER_DRAFT_TOKENS = "kvist_worker_draft_tokens_total";
    /// Tokens of drafts that were right.
    WORKER_ACCEPTED_DRAFT_TOKENS = "kvist_worker_accepted_draft_tokens_total";
    /// Blocks held, as the ledger counts them.
    LEDGER_BLOCKS = "kvist_ledger_blocks";
    /// Batches of the ledger.
    LEDGER_BATCHES = "kvist_ledger_batches_total";
    /// Receipts with fewer cached tokens than the ledger had claimed.
    LEDGER_SOUNDNESS_VIOLATIONS = "kvist_ledger_soundness_violations_total";
    /// Log lines that were dropped because the writer fell behind.
    LOG_DROPPED_LINES = "kvist_log_dropped_lines_total";
}

names! { SPANS:
    /// A request at the HTTP edge.
    SPAN_EDGE = "kvist.edge";
    /// A request at the gRPC door, named as the conventions name calls.
    SPAN_GENERATE = "kvist.router.v1.RouterService/Generate";
    /// A request for embeddings at the router's gRPC door.
    SPAN_EMBED = "kvist.router.v1.RouterService/Embed";
    /// Rendering and tokenizing.
    SPAN_TOKENIZE = "kvist.tokenize";
    /// The routing decision.
    SPAN_SELECT = "kvist.select";
    /// One placement, as the router sees it: from sending it over the link to its end.
    SPAN_LINK = "kvist.link";
    /// The engine's work, as its worker sees it.
    SPAN_ENGINE = "kvist.engine";
    /// Waiting in the engine.
    SPAN_QUEUE = "kvist.queue";
    /// From the start of the prefill to the first token.
    SPAN_PREFILL = "kvist.prefill";
    /// From the first to the last token.
    SPAN_DECODE = "kvist.decode";
}

names! { ATTRIBUTES:
    /// The request's id.
    REQUEST_ID = "kvist.request_id";
    /// UID of the worker.
    WORKER_UID = "kvist.worker_uid";
    /// Rank of the engine.
    RANK = "kvist.rank";
    /// Blocks that the decision matched.
    MATCHED_BLOCKS = "kvist.matched_blocks";
    /// Targets that a decision looked at.
    CANDIDATES = "kvist.candidates";
    /// How the request ended.
    OUTCOME = "kvist.outcome";
    /// 1 for the first placement, 2 for the retry.
    ATTEMPT = "kvist.attempt";
    /// What was asked for: `chat` or `text_completion`.
    OPERATION = "gen_ai.operation.name";
    /// Who answers: the mesh, or below it the engine.
    PROVIDER = "gen_ai.provider.name";
    /// Model as the client named it.
    MODEL = "gen_ai.request.model";
    /// Most tokens that the client wants.
    MAX_TOKENS = "gen_ai.request.max_tokens";
    /// Temperature that the client wants.
    TEMPERATURE = "gen_ai.request.temperature";
    /// Nucleus that the client wants.
    TOP_P = "gen_ai.request.top_p";
    /// Why generation ended.
    FINISH_REASONS = "gen_ai.response.finish_reasons";
    /// Seconds from arrival to the first token.
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk";
    /// Tokens of the prompt, cached ones included.
    PROMPT_TOKENS = "gen_ai.usage.input_tokens";
    /// Tokens generated.
    COMPLETION_TOKENS = "gen_ai.usage.output_tokens";
    /// Prompt tokens found in the cache.
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens";
    /// Code of the error catalogue.
    ERROR_TYPE = "error.type";
    /// Method of an HTTP request.
    HTTP_METHOD = "http.request.method";
    /// Path pattern that an HTTP request matched.
    HTTP_ROUTE = "http.route";
    /// Status of an HTTP answer.
    HTTP_STATUS = "http.response.status_code";
    /// `http`: what encrypts is in front of the edge.
    URL_SCHEME = "url.scheme";
    /// Path of an HTTP request.
    URL_PATH = "url.path";
    /// `grpc`.
    RPC_SYSTEM_NAME = "rpc.system.name";
    /// Service and method of a call.
    RPC_METHOD = "rpc.method";
    /// Name of the status of a call.
    RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code";
}

names! { LABELS:
    /// Model as the client named it.
    LABEL_MODEL = "model";
    /// How something ended.
    LABEL_OUTCOME = "outcome";
    /// Why something was not done.
    LABEL_REASON = "reason";
    /// State of a source.
    LABEL_STATE = "state";
    /// UID of a worker.
    LABEL_WORKER = "worker";
    /// Rank of an engine.
    LABEL_RANK = "rank";
    /// Surface a request came in by: `http` or `grpc`.
    LABEL_SURFACE = "surface";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_metrics_are_well_formed() {
        for list in [METRICS, SPANS, ATTRIBUTES, LABELS] {
            assert_eq!(list.len(), list.iter().collect::<HashSet<_>>().len());
        }
        for name in METRICS {
            assert!(name.starts_with("kvist_"), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        }
    }
}
