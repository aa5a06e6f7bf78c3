//! Whether a router knows what the engines of a model hold (promise P10).
//!
//! A mesh that has lost this knowledge serves on, only slower, and nobody notices. So it is a condition of its own, for
//! each model, made of the two things that can go wrong: sources of which the index does not know everything, and hits
//! that were predicted and not found. It alarms, in metrics, a log line, the health service and `ListModels`; it never
//! takes a router out of service, since a router without knowledge still serves better than none.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, SystemTime},
};

use kvist_proto::router::v1 as wire;
use parking_lot::Mutex;

/// The window in which receipts count is this long and moves in so many parts.
const WINDOW: Duration = Duration::from_secs(300);
const PARTS: u64 = 10;

/// Predicted tokens in the window below which the share that was delivered says nothing.
const LEAST_PREDICTED_TOKENS: u64 = 4_096;

/// Smallest share of sources that are EXACT.
const LEAST_EXACT_SHARE: f64 = 0.5;

/// Smallest share of predicted hits that engines deliver. A little is lost to blocks that go between a decision and its
/// request's start.
const LEAST_DELIVERED_SHARE: f64 = 0.8;

/// How long something has to be too low: a restart or a gap that heals is no alarm.
const PATIENCE: Duration = Duration::from_secs(15);

/// What is too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// Of fewer than half of the model's sources the index knows everything.
    ExactSources,
    /// Engines find less in their caches than was predicted.
    DeliveredHits,
}

impl Lost {
    /// The stable word for it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::ExactSources => "few_exact_sources",
            Self::DeliveredHits => "few_hits_delivered",
        }
    }
}

/// How the sources of a model are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceCount {
    /// Sources that should be known.
    pub(crate) all: u32,
    /// Of these, those that are EXACT.
    pub(crate) exact: u32,
}

impl SourceCount {
    pub(crate) fn exact_share(self) -> f64 {
        if self.all == 0 { 1.0 } else { f64::from(self.exact) / f64::from(self.all) }
    }
}

/// What is known of one model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Condition {
    /// What is too low, since longer than a router has patience; none while all is well.
    pub(crate) lost: Option<Lost>,
    /// Since when this is so.
    pub(crate) since: SystemTime,
    pub(crate) sources: SourceCount,
    /// Prompt tokens that claims promised in a cache, by receipts of the last five minutes.
    pub(crate) predicted_tokens: u64,
    /// Of these, those that engines found.
    pub(crate) delivered_tokens: u64,
}

impl Condition {
    pub(crate) fn delivered_share(&self) -> f64 {
        share(self.delivered_tokens, self.predicted_tokens)
    }

    pub(crate) fn to_wire(&self) -> wire::KvAwareness {
        wire::KvAwareness {
            aware: self.lost.is_none(),
            reason: self.lost.map(Lost::word).unwrap_or_default().to_owned(),
            since: Some(self.since.into()),
            sources: self.sources.all,
            exact_sources: self.sources.exact,
            predicted_cached_tokens: self.predicted_tokens,
            delivered_cached_tokens: self.delivered_tokens,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

#[derive(Clone, Copy, Debug, Default)]
struct Part {
    number: u64,
    predicted_tokens: u64,
    delivered_tokens: u64,
}

#[derive(Debug)]
struct OfModel {
    parts: [Part; PARTS as usize],
    /// What is too low at the moment, and since when.
    suspected: Option<(Lost, Duration)>,
    condition: Condition,
}

impl OfModel {
    fn new(wall: SystemTime) -> Self {
        let sources = SourceCount::default();
        let condition = Condition { lost: None, since: wall, sources, predicted_tokens: 0, delivered_tokens: 0 };
        Self { parts: Default::default(), suspected: None, condition }
    }

    fn judge(&mut self, now: Duration, wall: SystemTime, sources: SourceCount) {
        let oldest = part_number(now).saturating_sub(PARTS - 1);
        let parts = self.parts.iter().filter(|part| part.number >= oldest);
        let (predicted, delivered) = parts.fold((0, 0), |(predicted, delivered), part| {
            (predicted + part.predicted_tokens, delivered + part.delivered_tokens)
        });
        let condition = &mut self.condition;
        (condition.sources, condition.predicted_tokens, condition.delivered_tokens) = (sources, predicted, delivered);
        let found = if sources.exact_share() < LEAST_EXACT_SHARE {
            Some(Lost::ExactSources)
        } else if predicted >= LEAST_PREDICTED_TOKENS && share(delivered, predicted) < LEAST_DELIVERED_SHARE {
            Some(Lost::DeliveredHits)
        } else {
            None
        };
        // Patience is for the state, not for its cause, which may change meanwhile.
        self.suspected = found.map(|lost| (lost, self.suspected.map_or(now, |(_, since)| since)));
        let lost = self.suspected.filter(|(_, since)| now.saturating_sub(*since) >= PATIENCE).map(|(lost, _)| lost);
        if lost.is_some() != self.condition.lost.is_some() {
            self.condition.since = wall;
        }
        self.condition.lost = lost;
    }
}

fn part_number(now: Duration) -> u64 {
    // From 1, so that a part that was never used is older than any.
    now.as_secs() / (WINDOW.as_secs() / PARTS) + PARTS
}

/// The condition of every model. Times are durations since any fixed moment.
#[derive(Debug, Default)]
pub(crate) struct Awareness {
    models: Mutex<HashMap<Arc<str>, OfModel>>,
}

impl Awareness {
    /// Takes in what a request's claim promised and what the engine found, in tokens. More than was promised does not
    /// make up for another request that got less.
    pub(crate) fn note_receipt(&self, now: Duration, model: &str, predicted_tokens: u32, delivered_tokens: u32) {
        let mut models = self.models.lock();
        let Some(of_model) = models.get_mut(model) else { return };
        let number = part_number(now);
        let part = &mut of_model.parts[(number % PARTS) as usize];
        if part.number != number {
            *part = Part { number, ..Part::default() };
        }
        part.predicted_tokens += u64::from(predicted_tokens);
        part.delivered_tokens += u64::from(delivered_tokens.min(predicted_tokens));
    }

    /// Judges all models there are, and says how they stand and which have changed to the better or worse.
    pub(crate) fn judge(
        &self,
        now: Duration,
        wall: SystemTime,
        counts: &BTreeMap<Arc<str>, SourceCount>,
    ) -> Vec<(Arc<str>, Condition, bool)> {
        let mut models = self.models.lock();
        models.retain(|model, _| counts.contains_key(model));
        let judge = |(model, sources): (&Arc<str>, &SourceCount)| {
            let of_model = models.entry(Arc::clone(model)).or_insert_with(|| OfModel::new(wall));
            let was_aware = of_model.condition.lost.is_none();
            of_model.judge(now, wall, *sources);
            let has_changed = was_aware != of_model.condition.lost.is_none();
            (Arc::clone(model), of_model.condition.clone(), has_changed)
        };
        counts.iter().map(judge).collect()
    }

    /// How a model stood when it was last judged.
    pub(crate) fn condition(&self, model: &str) -> Option<Condition> {
        self.models.lock().get(model).map(|of_model| of_model.condition.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = "m";

    fn judge(awareness: &Awareness, second: u64, exact: u32, all: u32) -> Condition {
        let counts = BTreeMap::from([(Arc::from(MODEL), SourceCount { all, exact })]);
        let now = Duration::from_secs(second);
        let judged = awareness.judge(now, SystemTime::UNIX_EPOCH + now, &counts);
        judged.into_iter().map(|(_, condition, _)| condition).next().unwrap()
    }

    fn receipt(awareness: &Awareness, second: u64, predicted: u32, delivered: u32) {
        awareness.note_receipt(Duration::from_secs(second), MODEL, predicted, delivered);
    }

    #[test]
    fn few_exact_sources_alarm_when_it_lasts_and_no_longer_than_it_lasts() {
        let awareness = Awareness::default();
        assert_eq!(None, judge(&awareness, 0, 4, 8).lost);
        assert_eq!(None, judge(&awareness, 1, 3, 8).lost);
        assert_eq!(None, judge(&awareness, 15, 3, 8).lost);
        let lost = judge(&awareness, 16, 3, 8);
        assert_eq!(Some(Lost::ExactSources), lost.lost);
        assert_eq!(SystemTime::UNIX_EPOCH + Duration::from_secs(16), lost.since);
        assert_eq!(lost.since, judge(&awareness, 17, 3, 8).since);
        assert_eq!(None, judge(&awareness, 18, 4, 8).lost);
        // The next time begins anew.
        assert_eq!(None, judge(&awareness, 19, 0, 8).lost);
        assert_eq!(None, judge(&awareness, 33, 0, 8).lost);
        assert_eq!(Some(Lost::ExactSources), judge(&awareness, 34, 0, 8).lost);
    }

    #[test]
    fn a_model_without_sources_has_nothing_to_be_unaware_of() {
        assert_eq!(None, judge(&Awareness::default(), 0, 0, 0).lost);
        let awareness = Awareness::default();
        judge(&awareness, 0, 0, 0);
        assert_eq!(None, judge(&awareness, 100, 0, 0).lost);
    }

    #[test]
    fn hits_that_are_not_delivered_alarm_and_are_forgotten_after_the_window() {
        let awareness = Awareness::default();
        judge(&awareness, 0, 1, 1);
        receipt(&awareness, 1, 4_000, 0);
        // Too few to say anything.
        judge(&awareness, 2, 1, 1);
        assert_eq!(None, judge(&awareness, 20, 1, 1).lost);
        receipt(&awareness, 21, 4_000, 4_000);
        judge(&awareness, 22, 1, 1);
        let lost = judge(&awareness, 37, 1, 1);
        assert_eq!(
            (Some(Lost::DeliveredHits), 8_000, 4_000),
            (lost.lost, lost.predicted_tokens, lost.delivered_tokens)
        );
        assert!((lost.delivered_share() - 0.5).abs() < 1e-9);
        assert_eq!(None, judge(&awareness, 330, 1, 1).lost);
    }

    #[test]
    fn a_gift_does_not_hide_a_loss() {
        let awareness = Awareness::default();
        judge(&awareness, 0, 1, 1);
        receipt(&awareness, 0, 5_000, 0);
        receipt(&awareness, 0, 100, 90_000);
        judge(&awareness, 1, 1, 1);
        assert_eq!(Some(Lost::DeliveredHits), judge(&awareness, 16, 1, 1).lost);
    }

    #[test]
    fn a_part_that_comes_round_again_starts_empty() {
        let awareness = Awareness::default();
        judge(&awareness, 0, 1, 1);
        receipt(&awareness, 0, 5_000, 0);
        receipt(&awareness, 300, 10, 10);
        let condition = judge(&awareness, 300, 1, 1);
        assert_eq!((10, 10), (condition.predicted_tokens, condition.delivered_tokens));
    }

    #[test]
    fn models_that_are_gone_are_forgotten() {
        let awareness = Awareness::default();
        judge(&awareness, 0, 1, 1);
        assert!(awareness.condition(MODEL).is_some());
        awareness.judge(Duration::ZERO, SystemTime::UNIX_EPOCH, &BTreeMap::new());
        assert!(awareness.condition(MODEL).is_none());
        receipt(&awareness, 0, 1, 1);
        assert!(awareness.condition(MODEL).is_none());
    }
}
