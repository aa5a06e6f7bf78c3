//! What decisions were like, and how right they were.

use kvist_schedule::Outcome;
use kvist_telemetry::{Metrics, latency_buckets_seconds, names};
use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    histogram::{Histogram, exponential_buckets},
};

use crate::{
    explain::SeenDecision,
    metrics::{DirectionLabel, KindLabel, OutcomeLabel, StageLabel},
};

/// Numbers of decisions that were carried out; those of a dry run are not counted.
#[derive(Clone, Debug)]
pub(crate) struct DecisionMetrics {
    selections: [Counter; 4],
    candidates_available: Counter,
    candidates_filtered: Counter,
    candidates_selectable: Counter,
    available_hit_tokens: Counter,
    chosen_hit_tokens: Counter,
    delivered_hit_tokens: Counter,
    more_cached: Histogram,
    fewer_cached: Histogram,
    later: Histogram,
    earlier: Histogram,
}

const OUTCOMES: [Outcome; 4] =
    [Outcome::Selected, Outcome::NoMatchingTarget, Outcome::NoMatchingDecode, Outcome::Saturated];

impl DecisionMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let selections: Family<OutcomeLabel, Counter> =
            metrics.register(names::ROUTER_SELECTIONS, "Decisions by what became of them.", Family::default());
        let candidates: Family<StageLabel, Counter> =
            metrics.register(names::ROUTER_CANDIDATES, "Candidates by how far they came.", Family::default());
        let hits: Family<KindLabel, Counter> =
            metrics.register(names::ROUTER_HIT_TOKENS, "Prompt tokens in caches.", Family::default());
        let cached: Family<DirectionLabel, Histogram> = metrics.register(
            names::ROUTER_CACHED_ERROR_TOKENS,
            "By how many tokens a decision was wrong about a cache.",
            Family::new_with_constructor(|| {
                Histogram::new(std::iter::once(0.5).chain(exponential_buckets(16.0, 4.0, 8)))
            }),
        );
        let first_token: Family<DirectionLabel, Histogram> = metrics.register(
            names::ROUTER_FIRST_TOKEN_ERROR_SECONDS,
            "By how much a decision was wrong about the first token.",
            Family::new_with_constructor(|| Histogram::new(latency_buckets_seconds())),
        );
        let stage = |stage| candidates.get_or_create(&StageLabel { stage }).clone();
        let kind = |kind| hits.get_or_create(&KindLabel { kind }).clone();
        let cached = |direction| cached.get_or_create(&DirectionLabel { direction }).clone();
        let first_token = |direction| first_token.get_or_create(&DirectionLabel { direction }).clone();
        Self {
            selections: OUTCOMES
                .map(|outcome| selections.get_or_create(&OutcomeLabel { outcome: outcome.name() }).clone()),
            candidates_available: stage("available"),
            candidates_filtered: stage("filtered"),
            candidates_selectable: stage("selectable"),
            available_hit_tokens: kind("available"),
            chosen_hit_tokens: kind("chosen"),
            delivered_hit_tokens: kind("delivered"),
            more_cached: cached("more"),
            fewer_cached: cached("fewer"),
            later: first_token("later"),
            earlier: first_token("earlier"),
        }
    }

    /// A decision was made.
    pub(crate) fn decided(&self, decision: &SeenDecision) {
        let [selected, no_target, no_decode, saturated] = &self.selections;
        match decision.outcome {
            Outcome::Selected => selected,
            Outcome::NoMatchingTarget => no_target,
            Outcome::NoMatchingDecode => no_decode,
            Outcome::Saturated => saturated,
        }
        .inc();
        self.candidates_available.inc_by(u64::from(decision.available));
        self.candidates_filtered.inc_by(u64::from(decision.available.saturating_sub(decision.selectable)));
        self.candidates_selectable.inc_by(u64::from(decision.selectable));
        self.available_hit_tokens.inc_by(u64::from(decision.available_hit_tokens));
        self.chosen_hit_tokens.inc_by(u64::from(decision.predicted_cached_tokens().unwrap_or(0)));
    }

    /// The engine has said how it was.
    pub(crate) fn delivered(&self, decision: &SeenDecision, cached_tokens: u32) {
        self.delivered_hit_tokens.inc_by(u64::from(cached_tokens));
        let Some(predicted) = decision.predicted_cached_tokens() else { return };
        let error = f64::from(cached_tokens.abs_diff(predicted));
        if cached_tokens < predicted { &self.fewer_cached } else { &self.more_cached }.observe(error);
    }

    /// The first token has arrived, so many seconds after the decision.
    pub(crate) fn answered(&self, decision: &SeenDecision, seconds: f64) {
        let Some(predicted) = decision.predicted_first_token_seconds() else { return };
        let error = seconds - predicted;
        if error < 0.0 { &self.earlier } else { &self.later }.observe(error.abs());
    }
}
