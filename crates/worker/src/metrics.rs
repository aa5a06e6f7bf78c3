//! Numbers of a worker.

use kvist_proto::events::v1::LoadReport;
use kvist_telemetry::{Metrics, names};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

use crate::EngineHost;

type Labels = Vec<(&'static str, String)>;

/// Handles of all metrics of a worker.
#[derive(Debug)]
pub(crate) struct WorkerMetrics {
    registry: Metrics,
    requests: Family<Labels, Counter>,
    pub(crate) soundness_violations: Counter,
    pub(crate) ledger_batches: Counter,
    ledger_blocks: Gauge,
    running: Gauge,
    waiting: Gauge,
    outstanding: Gauge,
    used_blocks: Gauge,
    total_blocks: Gauge,
    generated_tokens: Counter,
    certificate_expiry: Family<Labels, Gauge>,
    pinned_blocks: Gauge,
    expired_leases: Counter,
    external_tokens: Counter,
    failed_transfers: Counter,
    preemptions: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_draft_tokens: Counter,
}

impl WorkerMetrics {
    pub(crate) fn new() -> Self {
        let registry = Metrics::new();
        let gauge = |name, help| registry.register(name, help, Gauge::default());
        let counter = |name, help| registry.register(name, help, Counter::default());
        Self {
            requests: registry.register(names::WORKER_REQUESTS, "Requests by outcome", Family::default()),
            soundness_violations: counter(
                names::LEDGER_SOUNDNESS_VIOLATIONS,
                "Receipts with fewer cached tokens than the ledger had claimed",
            ),
            ledger_batches: counter(names::LEDGER_BATCHES, "Batches of all ledgers"),
            generated_tokens: counter(names::WORKER_GENERATED_TOKENS, "Tokens generated"),
            certificate_expiry: registry.register(
                names::TLS_CERTIFICATE_EXPIRY,
                "When the certificate of a listener ends, in Unix seconds",
                Family::default(),
            ),
            preemptions: counter(names::WORKER_PREEMPTIONS, "Requests that had to give up their slot"),
            drafts: counter(names::WORKER_DRAFTS, "Drafts of speculative decoding"),
            draft_tokens: counter(names::WORKER_DRAFT_TOKENS, "Tokens that drafts proposed"),
            accepted_draft_tokens: counter(names::WORKER_ACCEPTED_DRAFT_TOKENS, "Tokens of drafts that were right"),
            ledger_blocks: gauge(names::LEDGER_BLOCKS, "Blocks held, as the ledgers count them"),
            running: gauge(names::WORKER_RUNNING_REQUESTS, "Requests that have a slot"),
            waiting: gauge(names::WORKER_WAITING_REQUESTS, "Requests that wait for a slot"),
            outstanding: gauge(names::WORKER_OUTSTANDING_PREFILL_TOKENS, "Prompt tokens accepted and not yet computed"),
            used_blocks: gauge(names::WORKER_USED_BLOCKS, "KV blocks in use by running requests"),
            total_blocks: gauge(names::WORKER_TOTAL_BLOCKS, "KV blocks there are"),
            pinned_blocks: gauge(names::WORKER_PINNED_BLOCKS, "KV blocks of ended requests kept for a decode engine"),
            expired_leases: counter(names::WORKER_EXPIRED_LEASES, "Leases on such blocks that nobody came for"),
            external_tokens: counter(names::WORKER_EXTERNAL_TOKENS, "Prompt tokens whose KV another engine sent"),
            failed_transfers: counter(names::WORKER_FAILED_TRANSFERS, "KV that did not arrive from another engine"),
            registry,
        }
    }

    pub(crate) fn registry(&self) -> &Metrics {
        &self.registry
    }

    pub(crate) fn request_ended(&self, outcome: &'static str) {
        self.requests.get_or_create(&vec![(names::LABEL_OUTCOME, outcome.to_owned())]).inc();
    }

    /// Notes when the certificate of the gRPC server ends.
    pub(crate) fn certificate_expires(&self, at_unix_seconds: i64) {
        self.certificate_expiry.get_or_create(&vec![("listener", "grpc".to_owned())]).set(at_unix_seconds);
    }

    /// Takes the engine's own numbers over. Called now and then, not for each step.
    pub(crate) fn sample(&self, host: &EngineHost) {
        let loads = host.loads();
        let total = |value: fn(&LoadReport) -> u64| loads.iter().map(value).sum::<u64>();
        let sum = |value| i64::try_from(total(value)).unwrap_or(i64::MAX);
        self.running.set(sum(|load| load.running_requests.into()));
        self.waiting.set(sum(|load| load.waiting_requests.into()));
        self.outstanding.set(sum(|load| load.outstanding_prefill_tokens));
        self.used_blocks.set(sum(|load| load.used_blocks));
        self.total_blocks.set(sum(|load| load.total_blocks));
        self.ledger_blocks.set(i64::try_from(host.block_count()).unwrap_or(i64::MAX));
        self.pinned_blocks.set(sum(|load| load.pinned_blocks));
        // Engines count from their start, as this does.
        let raise = |counter: &Counter, value| counter.inc_by(total(value).saturating_sub(counter.get()));
        raise(&self.generated_tokens, |load| load.generated_tokens_total);
        raise(&self.preemptions, |load| load.preemptions_total);
        raise(&self.drafts, |load| load.drafts_total);
        raise(&self.draft_tokens, |load| load.draft_tokens_total);
        raise(&self.accepted_draft_tokens, |load| load.accepted_draft_tokens_total);
        raise(&self.expired_leases, |load| load.expired_leases_total);
        raise(&self.external_tokens, |load| load.external_tokens_total);
        raise(&self.failed_transfers, |load| load.failed_transfers_total);
    }
}
