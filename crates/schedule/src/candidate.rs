//! What a decision knows: the request, and each target that could serve it.

use std::sync::Arc;

use kvist_blocks::{Rank, WorkerUid};

use crate::{Rates, TargetPromise};

/// What the router chooses: a worker and a rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetId {
    /// Worker slot.
    pub worker: WorkerUid,
    /// Rank of its engine.
    pub rank: Rank,
}

/// Which part of a request a target is wanted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Round {
    /// All of it.
    #[default]
    Aggregate,
    /// Images and sound, before the prompt.
    Encoder,
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
}

/// What of a request counts for the choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that the answer is expected to have.
    pub expected_output_tokens: u64,
    /// Names a conversation, for `session`; none when the client names none.
    pub session: Option<Arc<str>>,
    /// What the target is wanted for.
    pub round: Round,
}

/// What is known of a prompt in a target's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// Leading prompt tokens held in each tier alone, by [`kvist_blocks::Tier::position`].
    pub tier_tokens: [u64; 4],
    /// Leading prompt tokens held in any tier.
    pub matched_tokens: u64,
    /// Whether nothing else is held; otherwise it is a lower bound.
    pub is_complete: bool,
}

/// What an engine says of itself, recent enough to be believed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Share of the KV pool that running requests hold, 0 to 1; none when the engine does not say.
    pub kv_usage: Option<f64>,
    /// Blocks of the KV pool; none when unknown.
    pub kv_blocks: Option<u64>,
}

/// A target as it is at the moment of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Which.
    pub target: TargetId,
    /// Why it takes no requests at all, such as `draining`; none when it does. No filter lets such a target pass.
    pub unavailable: Option<&'static str>,
    /// Why it cannot serve this request, such as `context_too_short`; what the filter `capability` looks at.
    pub unsuitable: Option<&'static str>,
    /// Whether its breaker lets nothing pass; what the filter `breaker` looks at.
    pub is_broken: bool,
    /// What its cache holds of the prompt; none when nothing is known, which is not the same as nothing.
    pub cached: Option<Cached>,
    /// Tokens a block of its cache; 0 when it has none.
    pub block_size_tokens: u64,
    /// Its own report; none without a recent one, which is not the same as idle.
    pub load: Option<Load>,
    /// Requests and tokens that this router has in flight there.
    pub promise: TargetPromise,
    /// Prompt tokens that all routers have sent there and that are not computed yet; none when only this router's part
    /// is known. See [`crate::Reservations::state`].
    pub outstanding_tokens: Option<u64>,
    /// How fast it works.
    pub rates: Rates,
    /// Requests that it runs at once; none when unknown.
    pub most_running: Option<u64>,
    /// Whether it belongs to somebody else, who takes care of its saturation.
    pub is_foreign: bool,
    /// Prefill and decode targets of equal groups can hand KV to each other.
    pub group: u64,
    /// The least load of the decode targets behind a prefill target; 0 in other rounds.
    pub load_behind: u64,
}

impl Candidate {
    /// A target of which nothing is known but its name.
    #[must_use]
    pub fn new(target: TargetId) -> Self {
        Self {
            target,
            unavailable: None,
            unsuitable: None,
            is_broken: false,
            cached: None,
            block_size_tokens: 16,
            load: None,
            promise: TargetPromise::default(),
            outstanding_tokens: None,
            rates: Rates::default(),
            most_running: None,
            is_foreign: false,
            group: 0,
            load_behind: 0,
        }
    }

    /// Requests there, as far as is known: what the engine reports, and at least what this router has sent.
    #[must_use]
    pub fn active_requests(&self) -> u64 {
        self.load.map_or(0, |load| load.running + load.waiting).max(self.promise.count)
    }

    /// Leading prompt tokens that are known to be held.
    #[must_use]
    pub fn matched_tokens(&self) -> u64 {
        self.cached.map_or(0, |cached| cached.matched_tokens)
    }

    /// Prompt tokens that are not known to be held.
    #[must_use]
    pub fn uncached_tokens(&self, request: &Request) -> u64 {
        request.prompt_tokens.saturating_sub(self.matched_tokens())
    }
}
