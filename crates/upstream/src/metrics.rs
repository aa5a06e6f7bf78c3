//! What is counted of upstreams.

use kvist_telemetry::{Metrics, names};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    pub(crate) upstream: String,
    pub(crate) outcome: String,
}

#[derive(Clone, Debug)]
pub(crate) struct UpstreamMetrics {
    pub(crate) requests: Family<OutcomeLabels, Counter>,
    pub(crate) active: Gauge,
}

impl UpstreamMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            requests: metrics.register(
                names::UPSTREAM_REQUESTS,
                "Requests to servers outside the mesh by how they ended.",
                Family::default(),
            ),
            active: metrics.register(
                names::UPSTREAM_ACTIVE_REQUESTS,
                "Requests that run at servers outside the mesh.",
                Gauge::default(),
            ),
        }
    }

    /// Counts a request from now to the drop of what is returned.
    pub(crate) fn begin(&self, upstream: &str) -> Counted {
        self.active.inc();
        Counted { metrics: self.clone(), upstream: upstream.to_owned(), outcome: "cancelled" }
    }
}

/// A request that runs.
#[derive(Debug)]
pub(crate) struct Counted {
    metrics: UpstreamMetrics,
    upstream: String,
    outcome: &'static str,
}

impl Counted {
    /// How it ended; without a word the client went away.
    pub(crate) fn ended(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.metrics.active.dec();
        let labels = OutcomeLabels { upstream: std::mem::take(&mut self.upstream), outcome: self.outcome.to_owned() };
        self.metrics.requests.get_or_create(&labels).inc();
    }
}
