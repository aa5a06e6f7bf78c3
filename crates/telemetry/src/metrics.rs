//! The process's metrics.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::{
    encoding::text::encode,
    registry::{Metric, Registry},
};

/// A registry that parts of a process share. Clones are the same registry.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a metric under its full name of [`crate::names`] and returns a handle to it.
    ///
    /// OpenMetrics appends `_total` to counters itself, so the suffix is taken off here; names stay what a dashboard
    /// shows. A name may be registered once.
    pub fn register<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        let name = name.strip_suffix("_total").unwrap_or(name);
        // The encoder ends the help text with a full stop of its own.
        self.registry.lock().register(name, help.trim_end_matches('.'), metric.clone());
        metric
    }

    /// All metrics as OpenMetrics text.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail; what a metric itself refuses to write is left out.
        let _ = encode(&mut text, &self.registry.lock());
        text
    }
}

/// Upper bounds for histograms of durations, from 100 µs to 100 s, three a decade.
pub fn latency_buckets_seconds() -> impl Iterator<Item = f64> {
    [
        0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0,
        100.0,
    ]
    .into_iter()
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::{counter::Counter, histogram::Histogram};

    use super::*;
    use crate::names;

    #[test]
    fn metrics_appear_under_the_names_of_the_module() {
        let metrics = Metrics::new();
        let requests: Counter = metrics.register(names::ROUTER_REQUESTS, "Requests.", Counter::default());
        let seconds = metrics.register(
            names::ROUTER_DECISION_SECONDS,
            "Time of one decision.",
            Histogram::new(latency_buckets_seconds()),
        );
        requests.inc_by(3);
        seconds.observe(0.0003);
        let text = metrics.encode();
        assert!(text.contains("kvist_router_requests_total 3\n"), "{text}");
        assert!(text.contains("kvist_router_decision_seconds_bucket{le=\"0.0005\"} 1\n"), "{text}");
        assert!(text.contains("# HELP kvist_router_requests Requests.\n"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
