//! The choice of one target.

use kvist_blocks::{Rank, WorkerUid};

/// Name of the rule, as `Explain` states it: the least of uncached prompt tokens plus tokens already promised.
pub const POLICY_LEAST_TOKENS: &str = "least_uncached_and_promised_tokens";

/// What the router chooses: a worker and a rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetId {
    /// Worker slot.
    pub worker: WorkerUid,
    /// Rank of its engine.
    pub rank: Rank,
}

/// A target as it is at the moment of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub target: TargetId,
    /// Prompt tokens that the target would have to compute. Where nothing is known of its cache this is the whole
    /// prompt for all that share this state, so that it never excludes.
    pub uncached_tokens: u64,
    /// Tokens promised to the target and not yet finished, by all routers.
    pub promised_tokens: u64,
    /// Requests that run or wait there; breaks ties.
    pub active_requests: u64,
    /// Why it cannot serve; none when it can.
    pub excluded: Option<&'static str>,
}

/// A candidate with its cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scored {
    /// The candidate.
    pub candidate: Candidate,
    /// In tokens; smaller is better. None when it is excluded.
    pub cost_tokens: Option<u64>,
}

/// What was considered, and what was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// In the order of the candidates.
    pub scored: Vec<Scored>,
    /// Position of the chosen one; none when all are excluded.
    pub chosen: Option<usize>,
}

/// Chooses the candidate of least cost. Ties go to the one with fewer requests, and then by `random`, so that routers
/// that see the same do not all choose the first.
#[must_use]
pub fn decide(candidates: Vec<Candidate>, random: u64) -> Decision {
    let scored: Vec<Scored> = candidates
        .into_iter()
        .map(|candidate| {
            let cost = candidate.uncached_tokens.saturating_add(candidate.promised_tokens);
            Scored { cost_tokens: candidate.excluded.is_none().then_some(cost), candidate }
        })
        .collect();
    let key = |scored: &Scored| scored.cost_tokens.map(|cost| (cost, scored.candidate.active_requests));
    let best = scored.iter().filter_map(key).min();
    let tied: Vec<usize> =
        (0..scored.len()).filter(|position| best.is_some() && key(&scored[*position]) == best).collect();
    let chosen = if tied.is_empty() { None } else { tied.get((random % tied.len() as u64) as usize).copied() };
    Decision { scored, chosen }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(name: usize, uncached_tokens: u64, promised_tokens: u64, excluded: bool) -> Candidate {
        Candidate {
            target: TargetId { worker: format!("w{name}").as_str().into(), rank: Rank(0) },
            uncached_tokens,
            promised_tokens,
            active_requests: 0,
            excluded: excluded.then_some("draining"),
        }
    }

    #[test]
    fn a_cached_prompt_is_worth_a_queue_and_no_more() {
        let choose = |promised| decide(vec![candidate(0, 10, promised, false), candidate(1, 1000, 0, false)], 0).chosen;
        assert_eq!((Some(0), Some(1)), (choose(900), choose(1100)));
    }

    proptest! {
        #[test]
        fn nothing_that_can_serve_costs_less_than_the_chosen(
            list in prop::collection::vec((0u64..50, 0u64..50, any::<bool>()), 0..20), random in any::<u64>(),
        ) {
            let candidates: Vec<Candidate> = list.iter().enumerate()
                .map(|(name, (uncached, promised, excluded))| candidate(name, *uncached, *promised, *excluded)).collect();
            let least = list.iter().filter(|entry| !entry.2).map(|entry| entry.0 + entry.1).min();
            let decision = decide(candidates, random);
            prop_assert_eq!(least, decision.chosen.and_then(|chosen| decision.scored[chosen].cost_tokens));
        }
    }
}
