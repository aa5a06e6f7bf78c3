//! The cost of a target, in seconds.

use kvist_blocks::Tier;

use crate::{Candidate, Request, Round};

pub(crate) const RECOMPUTE_WEIGHT: f64 = 3.0;
pub(crate) const DECODE_WEIGHT: f64 = 0.1;
pub(crate) const PRESSURE_SECONDS: f64 = 0.05;

/// What `cost` counts how much; see its parameters in the catalogue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostParameters {
    /// What a second of prefill counts.
    pub recompute_weight: f64,
    /// What a second of slower decoding counts.
    pub decode_weight: f64,
    /// Scale of the KV barrier, seconds.
    pub pressure_seconds: f64,
}

impl Default for CostParameters {
    fn default() -> Self {
        Self { recompute_weight: RECOMPUTE_WEIGHT, decode_weight: DECODE_WEIGHT, pressure_seconds: PRESSURE_SECONDS }
    }
}

/// The parts of a cost, all in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostTerms {
    /// Until everything that was sent there before is computed.
    pub queue: f64,
    /// To compute the uncached tokens.
    pub prefill: f64,
    /// To bring cached blocks from lower tiers to the device.
    pub transfer: f64,
    /// What computing them takes from others: those who come behind, and those whose blocks are evicted.
    pub displacement: f64,
    /// By how much this request and the running ones slow each other's decoding.
    pub decode: f64,
    /// Barrier of a KV pool that fills up; infinite when the request does not fit.
    pub pressure: f64,
    /// Prompt tokens that are taken to be cached: what is known, or what is usual where nothing is known.
    pub assumed_cached_tokens: u64,
}

impl CostTerms {
    /// All parts together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.without_pressure() + self.pressure
    }

    /// All parts but the barrier; orders targets that are all full.
    #[must_use]
    pub fn without_pressure(&self) -> f64 {
        self.queue + self.prefill + self.transfer + self.displacement + self.decode
    }
}

/// What is assumed of targets that say nothing: as good as the others on average, neither a miss nor idle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Neutral {
    cached_tokens: u64,
    queue_seconds: f64,
    active_requests: u64,
}

impl Neutral {
    pub(crate) fn of<'a>(candidates: impl Iterator<Item = &'a Candidate> + Clone) -> Self {
        let known = candidates.clone().filter_map(|candidate| candidate.cached).filter(|cached| cached.is_complete);
        let (cached, count) = known.fold((0, 0u64), |(sum, count), cached| (sum + cached.matched_tokens, count + 1));
        let reporting = candidates.filter(|candidate| candidate.outstanding_tokens.is_some());
        let (queue, active, reports) = reporting.fold((0.0, 0, 0u64), |(queue, active, reports), candidate| {
            (queue + queue_seconds(candidate, 0), active + candidate.active_requests(), reports + 1)
        });
        Self {
            cached_tokens: cached.checked_div(count).unwrap_or(0),
            queue_seconds: if reports > 0 { queue / reports as f64 } else { 0.0 },
            active_requests: active.checked_div(reports).unwrap_or(0),
        }
    }
}

/// Seconds that what was sent there before needs. Prompts that wait are computed one after the other, so the context of
/// their tokens is half a prompt on average.
fn queue_seconds(candidate: &Candidate, at_least_tokens: u64) -> f64 {
    let tokens = candidate.outstanding_tokens.unwrap_or(0).max(at_least_tokens);
    let prompts = candidate.active_requests().max(1);
    candidate.rates.prefill_seconds(tokens / prompts, 0) * prompts as f64
}

impl CostParameters {
    /// What it costs to serve a request by a target.
    pub(crate) fn terms(&self, request: &Request, candidate: &Candidate, neutral: &Neutral) -> CostTerms {
        let rates = &candidate.rates;
        let known = candidate.cached.unwrap_or_default();
        let assumed =
            if known.is_complete { known.matched_tokens } else { known.matched_tokens.max(neutral.cached_tokens) };
        let assumed = assumed.min(request.prompt_tokens);
        let uncached = request.prompt_tokens - assumed;
        // A decode target of a divided request is sent the KV; a prefill target generates nothing.
        let prefill = if request.round == Round::Decode { 0.0 } else { rates.prefill_seconds(uncached, assumed) };
        let (queue, active) = match candidate.outstanding_tokens {
            Some(_) => (queue_seconds(candidate, 0), candidate.active_requests()),
            None => (
                queue_seconds(candidate, candidate.promise.prefill_tokens).max(neutral.queue_seconds),
                candidate.active_requests().max(neutral.active_requests),
            ),
        };
        let generated = if request.round == Round::Prefill { 0 } else { request.expected_output_tokens };
        let together = generated as f64 * rates.step_seconds_per_request * active as f64;
        CostTerms {
            queue,
            prefill,
            transfer: transfer_seconds(candidate),
            displacement: (self.recompute_weight - 1.0) * prefill,
            decode: self.decode_weight * together,
            pressure: self.pressure(request, candidate),
            assumed_cached_tokens: assumed,
        }
    }

    /// s·k/(1 − k). Without a report of the pool there is no barrier.
    fn pressure(&self, request: &Request, candidate: &Candidate) -> f64 {
        let Some(load) = candidate.load else { return 0.0 };
        let (Some(usage), Some(blocks)) = (load.kv_usage, load.kv_blocks) else { return 0.0 };
        if blocks == 0 || candidate.block_size_tokens == 0 || self.pressure_seconds == 0.0 {
            return 0.0;
        }
        // Cached blocks that nobody uses are no part of the usage, and become a part of it when they are hit.
        let needed = (request.prompt_tokens + request.expected_output_tokens).div_ceil(candidate.block_size_tokens);
        let share = usage + needed as f64 / blocks as f64;
        if share >= 1.0 { f64::INFINITY } else { self.pressure_seconds * share / (1.0 - share) }
    }
}

/// Blocks behind those on the device are brought from the fastest tier that holds them, or computed where that is sooner.
fn transfer_seconds(candidate: &Candidate) -> f64 {
    let Some(cached) = candidate.cached else { return 0.0 };
    let mut reached = cached.tier_tokens[Tier::Device.position()];
    let mut seconds = 0.0;
    let mut bring = |upto: u64, tier: Tier| {
        if upto > reached {
            let tokens = upto - reached;
            let transfer = tokens as f64 * candidate.rates.transfer_seconds_per_token[tier.position()];
            seconds += transfer.min(candidate.rates.prefill_seconds(tokens, reached));
            reached = upto;
        }
    };
    let mut slowest = Tier::Host;
    for tier in [Tier::Host, Tier::Disk, Tier::External] {
        let held = cached.tier_tokens[tier.position()];
        if held > 0 {
            slowest = tier;
        }
        bring(held, tier);
    }
    // What no tier holds from the beginning lies in several; the slowest of them is the safe guess.
    bring(cached.matched_tokens, slowest);
    seconds
}
