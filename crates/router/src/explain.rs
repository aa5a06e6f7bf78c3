//! Why requests went where they went: the last decisions, and a stream of the new ones.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use kvist_blocks::{Incarnation, Tier};
use kvist_index::SourceState;
use kvist_proto::events::v1::{self as wire, DecisionRecord, Receipt, TierMatch};
use kvist_schedule::{CostTerms, Outcome, Round, TargetId};
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// Decisions that wait for a slow watcher.
const WATCH_BUFFER: usize = 1024;

/// Candidates that are kept, all decisions together: some 130 MB. With more than 64 targets a router remembers fewer
/// decisions than it may.
const MOST_CANDIDATES: usize = 640_000;

/// What the index said of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) incarnation: Incarnation,
    pub(crate) state: SourceState,
    pub(crate) applied_sequence: Option<u64>,
    pub(crate) tier_blocks: [u32; 4],
    /// Leading blocks held in any tier.
    pub(crate) matched_blocks: u32,
}

/// One candidate as it was seen.
#[derive(Clone, Debug)]
pub(crate) struct SeenCandidate {
    pub(crate) target: TargetId,
    /// None when the index knew no such source.
    pub(crate) claim: Option<Claim>,
    /// Blocks that the router's own recent decisions have sent there; not part of the claim.
    pub(crate) recent_blocks: u32,
    pub(crate) uncached_tokens: u64,
    pub(crate) promised_tokens: u64,
    /// Less is better; seconds where the scorer is `cost`. None when it was left out.
    pub(crate) cost: Option<f64>,
    /// The parts of the cost, where the scorer is `cost`.
    pub(crate) terms: Option<CostTerms>,
    pub(crate) excluded: Option<&'static str>,
}

/// How a decided request went on.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    pub(crate) receipt: Option<Receipt>,
    pub(crate) outcome: &'static str,
    pub(crate) time_to_first_token: Option<Duration>,
}

/// One decision, kept small; it becomes a record when somebody asks.
#[derive(Debug)]
pub(crate) struct SeenDecision {
    pub(crate) request_id: Arc<str>,
    pub(crate) model: Arc<str>,
    pub(crate) decided_at: SystemTime,
    pub(crate) prompt_tokens: u32,
    pub(crate) prompt_blocks: u32,
    pub(crate) block_size_tokens: u32,
    pub(crate) candidates: Vec<SeenCandidate>,
    /// Scorers and picker that chose.
    pub(crate) policy: Arc<str>,
    pub(crate) outcome: Outcome,
    /// Candidates that take requests at all.
    pub(crate) available: u32,
    /// Of these, the ones that the filters left.
    pub(crate) selectable: u32,
    /// Prompt tokens in the best cache of those that take requests, recent decisions included.
    pub(crate) available_hit_tokens: u32,
    /// How long the request had waited at the door; none for a dry run.
    pub(crate) queued_for: Option<Duration>,
    pub(crate) chosen: Option<usize>,
    pub(crate) chosen_incarnation: Option<Incarnation>,
    pub(crate) attempt: u32,
    /// What the target is wanted for.
    pub(crate) round: Round,
    /// Why the request was not divided although the model has prefill targets; empty otherwise.
    pub(crate) local_prefill_reason: &'static str,
    pub(crate) duration: Duration,
    pub(crate) ending: OnceLock<Ending>,
}

impl SeenDecision {
    pub(crate) fn chosen_candidate(&self) -> Option<&SeenCandidate> {
        self.chosen.and_then(|position| self.candidates.get(position))
    }

    /// Prompt tokens that the chosen target was expected to have in its cache, recent decisions included.
    pub(crate) fn predicted_cached_tokens(&self) -> Option<u32> {
        let uncached = u32::try_from(self.chosen_candidate()?.uncached_tokens).unwrap_or(u32::MAX);
        Some(self.prompt_tokens.saturating_sub(uncached))
    }

    /// Seconds that the first token was expected to take from the decision on; none with a scorer that has no such terms.
    pub(crate) fn predicted_first_token_seconds(&self) -> Option<f64> {
        let terms = self.chosen_candidate()?.terms?;
        Some(terms.queue + terms.prefill + terms.transfer)
    }

    pub(crate) fn to_record(&self) -> DecisionRecord {
        let ending = self.ending.get();
        DecisionRecord {
            request_id: self.request_id.to_string(),
            model: self.model.to_string(),
            decided_at: Some(self.decided_at.into()),
            prompt_tokens: self.prompt_tokens,
            prompt_blocks: self.prompt_blocks,
            block_size_tokens: self.block_size_tokens,
            candidates: self.candidates.iter().map(SeenCandidate::to_wire).collect(),
            chosen_candidate: self.chosen.and_then(|position| u32::try_from(position).ok()),
            policy: self.policy.to_string(),
            attempt: self.attempt,
            decision_duration: to_wire_duration(self.duration),
            receipt: ending.and_then(|ending| ending.receipt),
            outcome: ending.map_or("", |ending| ending.outcome).to_owned(),
            time_to_first_token: ending.and_then(|ending| ending.time_to_first_token).and_then(to_wire_duration),
            predicted_time_to_first_token: self
                .predicted_first_token_seconds()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .and_then(to_wire_duration),
            predicted_cached_tokens: self.predicted_cached_tokens(),
            queue_duration: self.queued_for.and_then(to_wire_duration),
            round: match self.round {
                Round::Aggregate => "",
                Round::Encoder => "encoder",
                Round::Prefill => "prefill",
                Round::Decode => "decode",
            }
            .to_owned(),
            local_prefill_reason: self.local_prefill_reason.to_owned(),
        }
    }
}

pub(crate) fn to_wire_duration(duration: Duration) -> Option<prost_types::Duration> {
    duration.try_into().ok()
}

impl SeenCandidate {
    /// Blocks of the prompt that its best tier holds.
    pub(crate) fn matched_blocks(&self) -> u32 {
        self.claim.as_ref().and_then(|claim| claim.tier_blocks.iter().copied().max()).unwrap_or(0)
    }

    fn to_wire(&self) -> wire::Candidate {
        let claim = self.claim.as_ref();
        let matches = claim.map(|claim| {
            let tiers = Tier::ALL.into_iter().zip(claim.tier_blocks);
            let held = tiers.filter(|(_, blocks)| *blocks > 0);
            held.map(|(tier, blocks)| TierMatch { tier: tier.to_number(), blocks }).collect()
        });
        wire::Candidate {
            worker_uid: self.target.worker.to_string(),
            rank: self.target.rank.0,
            incarnation: claim.map_or(0, |claim| claim.incarnation.0),
            source_state: claim.map_or(wire::SourceState::Unspecified, |claim| state_to_wire(claim.state)).into(),
            applied_sequence: claim.and_then(|claim| claim.applied_sequence),
            matches: matches.unwrap_or_default(),
            uncached_tokens: u32::try_from(self.uncached_tokens).unwrap_or(u32::MAX),
            promised_tokens: self.promised_tokens,
            cost: self.cost.unwrap_or(0.0),
            filtered_reason: self.excluded.unwrap_or_default().to_owned(),
            recent_blocks: self.recent_blocks,
            cost_terms: self.terms.map(|terms| wire::CostTerms {
                queue_seconds: terms.queue,
                prefill_seconds: terms.prefill,
                transfer_seconds: terms.transfer,
                displacement_seconds: terms.displacement,
                decode_seconds: terms.decode,
                pressure_seconds: terms.pressure,
                assumed_cached_tokens: u32::try_from(terms.assumed_cached_tokens).unwrap_or(u32::MAX),
            }),
        }
    }
}

pub(crate) fn state_to_wire(state: SourceState) -> wire::SourceState {
    match state {
        SourceState::Exact => wire::SourceState::Exact,
        SourceState::CatchingUp => wire::SourceState::CatchingUp,
        SourceState::Partial => wire::SourceState::Partial,
        SourceState::Truncated => wire::SourceState::Truncated,
        SourceState::Stale => wire::SourceState::Stale,
    }
}

#[derive(Debug, Default)]
struct Ring {
    by_request: HashMap<Arc<str>, Vec<Arc<SeenDecision>>>,
    order: VecDeque<Arc<str>>,
    candidates: usize,
}

impl Ring {
    fn forget_oldest(&mut self) {
        let forgotten = self.order.pop_front().and_then(|oldest| self.by_request.remove(&oldest));
        self.candidates -= forgotten.iter().flatten().map(|decision| decision.candidates.len()).sum::<usize>();
    }
}

/// The last decisions by request.
#[derive(Debug)]
pub(crate) struct Explanations {
    ring: Mutex<Ring>,
    capacity: usize,
    most_candidates: usize,
    watchers: broadcast::Sender<Arc<SeenDecision>>,
}

impl Explanations {
    pub(crate) fn new(capacity: usize) -> Self {
        let watchers = broadcast::Sender::new(WATCH_BUFFER);
        Self { ring: Mutex::default(), capacity: capacity.max(1), most_candidates: MOST_CANDIDATES, watchers }
    }

    pub(crate) fn add(&self, decision: &Arc<SeenDecision>) {
        {
            let mut ring = self.ring.lock();
            let ring = &mut *ring;
            match ring.by_request.get_mut(&decision.request_id) {
                Some(decisions) => decisions.push(Arc::clone(decision)),
                None => {
                    ring.by_request.insert(Arc::clone(&decision.request_id), vec![Arc::clone(decision)]);
                    ring.order.push_back(Arc::clone(&decision.request_id));
                }
            }
            ring.candidates += decision.candidates.len();
            // The newest request is kept whatever it takes.
            let is_full = |ring: &Ring| ring.order.len() > self.capacity || ring.candidates > self.most_candidates;
            while is_full(ring) && ring.order.len() > 1 {
                ring.forget_oldest();
            }
        }
        if self.watchers.receiver_count() > 0 {
            let _ = self.watchers.send(Arc::clone(decision));
        }
    }

    /// The decisions of a request, in order of attempts.
    pub(crate) fn of(&self, request_id: &str) -> Option<Vec<DecisionRecord>> {
        let decisions = self.ring.lock().by_request.get(request_id).cloned()?;
        Some(decisions.iter().map(|decision| decision.to_record()).collect())
    }

    pub(crate) fn watch(&self) -> broadcast::Receiver<Arc<SeenDecision>> {
        self.watchers.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(request_id: &str, attempt: u32) -> Arc<SeenDecision> {
        Arc::new(SeenDecision {
            request_id: request_id.into(),
            model: "m".into(),
            decided_at: SystemTime::UNIX_EPOCH,
            prompt_tokens: 1,
            prompt_blocks: 0,
            block_size_tokens: 16,
            candidates: Vec::new(),
            policy: "cost, max".into(),
            outcome: Outcome::NoMatchingTarget,
            available: 0,
            selectable: 0,
            available_hit_tokens: 0,
            queued_for: None,
            chosen: None,
            chosen_incarnation: None,
            attempt,
            round: Round::Aggregate,
            local_prefill_reason: "",
            duration: Duration::ZERO,
            ending: OnceLock::new(),
        })
    }

    #[test]
    fn decisions_among_many_targets_are_fewer() {
        let mut explanations = Explanations::new(100);
        explanations.most_candidates = 10;
        let candidate = SeenCandidate {
            target: TargetId { worker: "w".into(), rank: kvist_blocks::Rank(0) },
            claim: None,
            recent_blocks: 0,
            uncached_tokens: 0,
            promised_tokens: 0,
            cost: None,
            terms: None,
            excluded: None,
        };
        let among = |request: &str, candidates: usize| {
            let decision = Arc::into_inner(decision(request, 1)).unwrap();
            Arc::new(SeenDecision { candidates: vec![candidate.clone(); candidates], ..decision })
        };
        let kept = |explanations: &Explanations| ["a", "b", "c", "d"].map(|request| explanations.of(request).is_some());
        for request in ["a", "b", "c"] {
            explanations.add(&among(request, 4));
        }
        assert_eq!([false, true, true, false], kept(&explanations));
        explanations.add(&among("d", 11));
        assert_eq!([false, false, false, true], kept(&explanations));
        explanations.add(&among("a", 1));
        assert_eq!([true, false, false, false], kept(&explanations));
    }

    #[test]
    fn the_oldest_request_is_forgotten_with_all_its_attempts() {
        let explanations = Explanations::new(2);
        for (request, attempt) in [("a", 1), ("a", 2), ("b", 1), ("c", 1)] {
            explanations.add(&decision(request, attempt));
        }
        assert_eq!(None, explanations.of("a"));
        assert_eq!(1, explanations.of("b").unwrap().len());
        explanations.add(&decision("c", 2));
        let attempts: Vec<u32> = explanations.of("c").unwrap().iter().map(|record| record.attempt).collect();
        assert_eq!(vec![1, 2], attempts);
    }
}
