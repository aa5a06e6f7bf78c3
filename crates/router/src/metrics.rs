//! The router's metrics.

use std::sync::atomic::AtomicU64;

use kvist_telemetry::{Metrics, latency_buckets_seconds, names};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};

/// Labels of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    pub(crate) model: String,
    pub(crate) outcome: String,
    pub(crate) surface: String,
}

/// Label of an index source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabel {
    pub(crate) state: String,
}

/// Label of a target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct TargetLabel {
    pub(crate) state: String,
}

/// All of them.
#[derive(Clone, Debug)]
pub(crate) struct RouterMetrics {
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) active: Gauge,
    pub(crate) retries: Counter,
    pub(crate) decision_seconds: Histogram,
    pub(crate) tokenize_seconds: Histogram,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) request_seconds: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) predicted_cached_tokens: Counter,
    pub(crate) delivered_cached_tokens: Counter,
    pub(crate) reservations: Gauge,
    pub(crate) promised_tokens: Gauge,
    pub(crate) targets: Family<TargetLabel, Gauge>,
    pub(crate) links_connected: Gauge,
    pub(crate) index_sources: Family<StateLabel, Gauge>,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) index_byte_budget: Gauge,
    pub(crate) kv_awareness: Gauge<f64, AtomicU64>,
}

impl RouterMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let histogram = || Histogram::new(latency_buckets_seconds());
        Self {
            requests: metrics.register(names::ROUTER_REQUESTS, "Requests by how they ended.", Family::default()),
            active: metrics.register(names::ROUTER_ACTIVE_REQUESTS, "Requests that run or wait.", Gauge::default()),
            retries: metrics.register(names::ROUTER_RETRIES, "Requests placed a second time.", Counter::default()),
            decision_seconds: metrics.register(
                names::ROUTER_DECISION_SECONDS,
                "Time of one decision, hashing included.",
                histogram(),
            ),
            tokenize_seconds: metrics.register(
                names::ROUTER_TOKENIZE_SECONDS,
                "Time of rendering and tokenizing.",
                histogram(),
            ),
            first_token_seconds: metrics.register(
                names::ROUTER_TIME_TO_FIRST_TOKEN_SECONDS,
                "From arrival to the first token.",
                histogram(),
            ),
            request_seconds: metrics.register(
                names::ROUTER_REQUEST_SECONDS,
                "From arrival to the end of the answer.",
                histogram(),
            ),
            prompt_tokens: metrics.register(names::ROUTER_PROMPT_TOKENS, "Prompt tokens.", Counter::default()),
            completion_tokens: metrics.register(
                names::ROUTER_COMPLETION_TOKENS,
                "Generated tokens.",
                Counter::default(),
            ),
            predicted_cached_tokens: metrics.register(
                names::ROUTER_PREDICTED_CACHED_TOKENS,
                "Prompt tokens expected in a cache.",
                Counter::default(),
            ),
            delivered_cached_tokens: metrics.register(
                names::ROUTER_DELIVERED_CACHED_TOKENS,
                "Prompt tokens found in a cache.",
                Counter::default(),
            ),
            reservations: metrics.register(names::ROUTER_RESERVATIONS, "Reservations held.", Gauge::default()),
            promised_tokens: metrics.register(
                names::ROUTER_PROMISED_TOKENS,
                "Tokens promised and not yet finished.",
                Gauge::default(),
            ),
            targets: metrics.register(names::ROUTER_TARGETS, "Targets by why they take nothing.", Family::default()),
            links_connected: metrics.register(names::LINK_CONNECTED, "Links that stand.", Gauge::default()),
            index_sources: metrics.register(names::INDEX_SOURCES, "Sources by state.", Family::default()),
            index_blocks: metrics.register(names::INDEX_BLOCKS, "Distinct blocks.", Gauge::default()),
            index_bytes: metrics.register(names::INDEX_BYTES, "Bytes of the index.", Gauge::default()),
            index_byte_budget: metrics.register(names::INDEX_BYTE_BUDGET, "Most bytes.", Gauge::default()),
            kv_awareness: metrics.register(
                names::KV_AWARENESS,
                "Share of exact sources times delivered over predicted hits.",
                Gauge::default(),
            ),
        }
    }
}
