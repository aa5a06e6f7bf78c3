//! The router's metrics.

use std::sync::atomic::AtomicU64;

use kvist_events::FeedStats;
use kvist_telemetry::{Metrics, latency_buckets_seconds, names};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};

use crate::decision_metrics::DecisionMetrics;

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

/// Label of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ModelLabel {
    pub(crate) model: String,
}

/// Labels of a request that was not let in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RefusalLabels {
    pub(crate) model: String,
    pub(crate) reason: &'static str,
}

/// Label of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabel {
    pub(crate) outcome: &'static str,
}

/// Label of the candidates of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StageLabel {
    pub(crate) stage: &'static str,
}

/// Label of tokens in caches.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub(crate) kind: &'static str,
}

/// Whether there was more or less than was predicted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct DirectionLabel {
    pub(crate) direction: &'static str,
}

/// Times by model.
pub(crate) type ModelHistogram = Family<ModelLabel, Histogram, fn() -> Histogram>;

fn latencies() -> Histogram {
    Histogram::new(latency_buckets_seconds())
}

fn by_model() -> ModelHistogram {
    Family::new_with_constructor(latencies)
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabel {
    reason: &'static str,
}

/// All of them.
#[derive(Clone, Debug)]
pub(crate) struct RouterMetrics {
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) active: Gauge,
    pub(crate) retries: Counter,
    pub(crate) parse_failures: Family<ModelLabel, Counter>,
    pub(crate) refusals: Counter,
    hand_overs: Family<OutcomeLabel, Counter>,
    pub(crate) hand_over_seconds: Histogram,
    pub(crate) decision_seconds: Histogram,
    pub(crate) tokenize_seconds: Histogram,
    pub(crate) first_token_seconds: ModelHistogram,
    pub(crate) time_per_token_seconds: ModelHistogram,
    pub(crate) engine_queue_seconds: ModelHistogram,
    pub(crate) request_seconds: ModelHistogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) predicted_cached_tokens: Counter,
    pub(crate) delivered_cached_tokens: Counter,
    pub(crate) decisions: DecisionMetrics,
    pub(crate) queued_requests: Family<ModelLabel, Gauge>,
    pub(crate) queue_seconds: Histogram,
    pub(crate) admission_refusals: Family<RefusalLabels, Counter>,
    pub(crate) breakers: Family<StateLabel, Gauge>,
    pub(crate) breaker_openings: Family<ModelLabel, Counter>,
    pub(crate) refused_policies: Gauge,
    ignored_states: Family<ReasonLabel, Counter>,
    pub(crate) held_state: Gauge,
    pub(crate) reservations: Gauge,
    pub(crate) promised_tokens: Gauge,
    pub(crate) targets: Family<TargetLabel, Gauge>,
    pub(crate) links_connected: Gauge,
    pub(crate) index_sources: Family<StateLabel, Gauge>,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) index_recent_bytes: Gauge,
    pub(crate) index_byte_budget: Gauge,
    pub(crate) index_divergence_blocks: Gauge,
    pub(crate) kv_awareness: Family<ModelLabel, Gauge<f64, AtomicU64>>,
    pub(crate) kv_exact_sources_share: Family<ModelLabel, Gauge<f64, AtomicU64>>,
    pub(crate) kv_delivered_hits_share: Family<ModelLabel, Gauge<f64, AtomicU64>>,
    pub(crate) kv_aware: Family<ModelLabel, Gauge>,
}

impl RouterMetrics {
    /// A divided request is at its end, or one was not divided for a reason.
    pub(crate) fn count_hand_over(&self, outcome: &'static str) {
        self.hand_overs.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts what parsers of a model's answers could not read.
    pub(crate) fn parse_failures_of(&self, model: &str) -> Counter {
        self.parse_failures.get_or_create(&ModelLabel { model: model.to_owned() }).clone()
    }

    /// Counts a cluster state that was not taken up.
    pub(crate) fn state_ignored(&self, reason: &'static str) {
        self.ignored_states.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            requests: metrics.register(names::ROUTER_REQUESTS, "Requests by how they ended.", Family::default()),
            active: metrics.register(names::ROUTER_ACTIVE_REQUESTS, "Requests that run or wait.", Gauge::default()),
            retries: metrics.register(names::ROUTER_RETRIES, "Requests placed a second time.", Counter::default()),
            parse_failures: metrics.register(
                names::ROUTER_PARSE_FAILURES,
                "What looked like a tool call and was passed on as text.",
                Family::default(),
            ),
            hand_overs: metrics.register(
                names::ROUTER_HAND_OVERS,
                "Requests of models with prefill workers, by how they were divided.",
                Family::default(),
            ),
            hand_over_seconds: metrics.register(
                names::ROUTER_HAND_OVER_SECONDS,
                "From the end of a prefill to the first token of the decode worker.",
                Histogram::new(latency_buckets_seconds()),
            ),
            refusals: metrics.register(
                names::ROUTER_REFUSALS,
                "Placements that a worker refused because more waited there than was known here.",
                Counter::default(),
            ),
            decision_seconds: metrics.register(
                names::ROUTER_DECISION_SECONDS,
                "Time of one decision, hashing included.",
                latencies(),
            ),
            tokenize_seconds: metrics.register(
                names::ROUTER_TOKENIZE_SECONDS,
                "Time of rendering and tokenizing.",
                latencies(),
            ),
            first_token_seconds: metrics.register(
                names::ROUTER_TIME_TO_FIRST_TOKEN_SECONDS,
                "From arrival to the first token.",
                by_model(),
            ),
            time_per_token_seconds: metrics.register(
                names::ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS,
                "From the first token to the end, for each further token: one value for each request.",
                by_model(),
            ),
            engine_queue_seconds: metrics.register(
                names::ROUTER_ENGINE_QUEUE_SECONDS,
                "Time in the engine's queue, as its receipt says.",
                by_model(),
            ),
            request_seconds: metrics.register(
                names::ROUTER_REQUEST_SECONDS,
                "From arrival to the end of the answer.",
                by_model(),
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
            decisions: DecisionMetrics::new(metrics),
            queued_requests: metrics.register(
                names::ROUTER_QUEUED_REQUESTS,
                "Requests that wait at the door.",
                Family::default(),
            ),
            queue_seconds: metrics.register(
                names::ROUTER_QUEUE_SECONDS,
                "Time that requests waited at the door.",
                latencies(),
            ),
            admission_refusals: metrics.register(
                names::ROUTER_ADMISSION_REFUSALS,
                "Requests that were not let in.",
                Family::default(),
            ),
            breakers: metrics.register(
                names::ROUTER_BREAKERS,
                "Targets by the state of their breaker.",
                Family::default(),
            ),
            breaker_openings: metrics.register(
                names::ROUTER_BREAKER_OPENINGS,
                "Breakers that opened.",
                Family::default(),
            ),
            refused_policies: metrics.register(
                names::ROUTER_REFUSED_POLICIES,
                "Models whose resource says what this router does not understand.",
                Gauge::default(),
            ),
            ignored_states: metrics.register(
                names::CLUSTER_STATES_IGNORED,
                "Cluster states that were not taken up.",
                Family::default(),
            ),
            held_state: metrics.register(
                names::ROUTER_CLUSTER_STATE_HELD,
                "Whether a cluster state that names no worker is held back, since workers answer that it does not know.",
                Gauge::default(),
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
            index_recent_bytes: metrics.register(
                names::INDEX_RECENT_BYTES,
                "Bytes of what is kept of the router's own recent decisions.",
                Gauge::default(),
            ),
            index_byte_budget: metrics.register(names::INDEX_BYTE_BUDGET, "Most bytes.", Gauge::default()),
            index_divergence_blocks: metrics.register(
                names::INDEX_DIVERGENCE_BLOCKS,
                "Blocks by which sources differ from their ledgers or from their own account, at least, until mended.",
                Gauge::default(),
            ),
            kv_awareness: metrics.register(
                names::KV_AWARENESS,
                "Share of exact sources times share of delivered hits.",
                Family::default(),
            ),
            kv_exact_sources_share: metrics.register(
                names::KV_EXACT_SOURCES_SHARE,
                "Exact sources over all of the workers that take requests.",
                Family::default(),
            ),
            kv_delivered_hits_share: metrics.register(
                names::KV_DELIVERED_HITS_SHARE,
                "Delivered over predicted hits of the last five minutes.",
                Family::default(),
            ),
            kv_aware: metrics.register(
                names::KV_AWARE,
                "0 once one of both has been too low for 15 s.",
                Family::default(),
            ),
        }
    }
}

/// Numbers of the subscription to the bus; only a router with a bus has them.
#[derive(Clone, Debug)]
pub(crate) struct FeedMetrics {
    bus_connected: Gauge,
    silent_sources: Gauge,
    event_lag_seconds: Gauge<f64, AtomicU64>,
    event_lag_batches: Gauge,
    messages: Counter,
    batches: Counter,
    gaps: Counter,
    catch_ups: Counter,
    failed_catch_ups: Counter,
    snapshots: Counter,
    bootstrapped_sources: Counter,
    digest_matches: Counter,
    digest_mismatches: Counter,
    closed_incarnations: Counter,
    skipped_batches: Family<ReasonLabel, Counter>,
    refused_statements: Family<ReasonLabel, Counter>,
}

impl FeedMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let counter = |name, help| metrics.register(name, help, Counter::default());
        let by_reason = |name, help| metrics.register(name, help, Family::default());
        Self {
            bus_connected: metrics.register(names::BUS_CONNECTED, "Whether NATS is connected.", Gauge::default()),
            silent_sources: metrics.register(
                names::INDEX_SILENT_SOURCES,
                "Sources that have fallen silent.",
                Gauge::default(),
            ),
            event_lag_batches: metrics.register(
                names::INDEX_EVENT_LAG_BATCHES,
                "Batches by which all sources together are known to be ahead of the index.",
                Gauge::default(),
            ),
            event_lag_seconds: metrics.register(
                names::INDEX_EVENT_LAG_SECONDS,
                "From the record of the last batch in its ledger to its place in the index.",
                Gauge::default(),
            ),
            messages: counter(names::INDEX_MESSAGES, "Messages of the bus."),
            batches: counter(names::INDEX_BATCHES, "Batches applied."),
            gaps: counter(names::INDEX_GAPS, "Gaps seen in sequences."),
            catch_ups: counter(names::INDEX_CATCH_UPS, "Questions to workers about what is missing."),
            failed_catch_ups: counter(names::INDEX_FAILED_CATCH_UPS, "Questions to workers that had no answer."),
            snapshots: counter(names::INDEX_SNAPSHOTS, "Snapshots applied."),
            bootstrapped_sources: counter(
                names::INDEX_BOOTSTRAPPED_SOURCES,
                "Sources whose first snapshot came from a KV master.",
            ),
            digest_matches: counter(names::INDEX_DIGEST_MATCHES, "Digests that matched."),
            digest_mismatches: counter(names::INDEX_DIGEST_MISMATCHES, "Digests that did not match."),
            closed_incarnations: counter(names::INDEX_CLOSED_INCARNATIONS, "Incarnations that were closed."),
            skipped_batches: by_reason(names::INDEX_SKIPPED_BATCHES, "Batches that were not applied."),
            refused_statements: by_reason(names::INDEX_REFUSED_STATEMENTS, "Statements that could not be used."),
        }
    }

    /// Takes the feed's own numbers over.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "gauges for people")]
    pub(crate) fn take(&self, stats: &FeedStats) {
        // A feed that was started anew counts from 0; the counter then waits until it is passed.
        let raise = |counter: &Counter, total: u64| {
            counter.inc_by(total.saturating_sub(counter.get()));
        };
        let (counters, refusals) = (&stats.counters, &stats.counters.refusals);
        self.bus_connected.set(stats.bus_connected.into());
        self.silent_sources.set(stats.silent_sources as i64);
        self.event_lag_batches.set(counters.lag_batches as i64);
        self.event_lag_seconds.set(counters.last_lag_micros as f64 / 1e6);
        raise(&self.messages, stats.messages);
        raise(&self.batches, counters.applied_batches);
        raise(&self.gaps, counters.gaps);
        raise(&self.catch_ups, counters.catch_ups);
        raise(&self.failed_catch_ups, counters.failed_catch_ups);
        raise(&self.snapshots, counters.snapshots);
        raise(&self.bootstrapped_sources, stats.bootstrapped_sources);
        raise(&self.digest_matches, counters.equal_digests);
        raise(&self.digest_mismatches, counters.mismatches);
        raise(&self.closed_incarnations, counters.tombstones);
        for (family, reason, total) in [
            (&self.skipped_batches, "duplicate", counters.duplicate_batches),
            (&self.skipped_batches, "old_incarnation", counters.refused_batches),
            (&self.skipped_batches, "no_room", counters.dropped_batches),
            (&self.refused_statements, "garbage", refusals.garbage),
            (&self.refused_statements, "oversized", refusals.oversized),
            (&self.refused_statements, "wrong_subject", refusals.wrong_subject),
            (&self.refused_statements, "unknown_worker", refusals.unknown_workers),
            (&self.refused_statements, "malformed", refusals.malformed),
            (&self.refused_statements, "broken_history", refusals.broken_histories),
            (&self.refused_statements, "overrun", stats.overrun_messages),
        ] {
            raise(&family.get_or_create(&ReasonLabel { reason }), total);
        }
    }
}
