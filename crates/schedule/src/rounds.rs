//! Which choices a request needs: one target for all of it, or one for each part.

use crate::{Candidate, Decision, Draws, Memory, Outcome, Pipeline, Request, Round};

/// When a request is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundSettings {
    /// Uncached prompt tokens from which on a prefill target is worth the transfer of its KV; below, the decode target
    /// computes them itself.
    pub prefill_from_uncached_tokens: u64,
}

impl Default for RoundSettings {
    fn default() -> Self {
        Self { prefill_from_uncached_tokens: 512 }
    }
}

/// The choices to make, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundPlan {
    /// Whether images or sound are encoded first, by an encoder target.
    pub encoder: bool,
    /// Whether prompt and answer go to different targets.
    pub is_split: bool,
    /// The role of the only target when they do not: aggregate where there is one, else decode.
    pub whole: Round,
}

/// Plans the choices, given the roles of which there are targets. None when no role can serve.
///
/// `uncached_tokens` is what the best decode target would have to compute.
#[must_use]
pub fn plan_rounds(
    roles: &[Round],
    has_media: bool,
    uncached_tokens: u64,
    settings: RoundSettings,
) -> Option<RoundPlan> {
    let has = |role| roles.contains(&role);
    let whole = if has(Round::Aggregate) {
        Round::Aggregate
    } else if has(Round::Decode) {
        Round::Decode
    } else {
        return None;
    };
    let is_long = uncached_tokens >= settings.prefill_from_uncached_tokens;
    Some(RoundPlan {
        encoder: has_media && has(Round::Encoder),
        is_split: whole == Round::Decode && has(Round::Prefill) && is_long,
        whole,
    })
}

/// A prefill target and the decode target behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct PairDecision {
    /// By the candidates for the prompt.
    pub prefill: Decision,
    /// By the candidates for the answer, of which those of another group are left out; none when no prefill target was
    /// chosen.
    pub decode: Option<Decision>,
    /// What became of both.
    pub outcome: Outcome,
}

/// Chooses a prefill target, then a decode target that takes its KV. A prefill target without such a decode target is no
/// choice.
#[must_use]
pub fn decide_pair(
    pipeline: &Pipeline,
    request: &Request,
    prefill: &[Candidate],
    decode: &[Candidate],
    memory: &Memory,
    draws: &mut Draws,
) -> PairDecision {
    let behind = |group| {
        let partners =
            decode.iter().filter(|one| one.group == group && one.unavailable.is_none() && one.unsuitable.is_none());
        partners.map(Candidate::active_requests).min()
    };
    let prefill: Vec<Candidate> = prefill
        .iter()
        .cloned()
        .map(|mut one| {
            match behind(one.group) {
                Some(load) => one.load_behind = load,
                None => one.unavailable = one.unavailable.or(Some("no_matching_decode")),
            }
            one
        })
        .collect();
    let of_prompt = Request { round: Round::Prefill, ..request.clone() };
    let first = pipeline.decide(&of_prompt, &prefill, memory, draws);
    let Some(chosen) = first.chosen.and_then(|chosen| prefill.get(chosen)) else {
        let lacks_partner = |verdict: &crate::Verdict| verdict.filtered == Some("no_matching_decode");
        let outcome = if first.verdicts.iter().any(lacks_partner) { Outcome::NoMatchingDecode } else { first.outcome };
        return PairDecision { prefill: first, decode: None, outcome };
    };
    let decode: Vec<Candidate> = decode
        .iter()
        .cloned()
        .map(|mut one| {
            if one.group != chosen.group {
                one.unavailable = one.unavailable.or(Some("other_group"));
            }
            one
        })
        .collect();
    let of_answer = Request { round: Round::Decode, ..request.clone() };
    let second = pipeline.decide(&of_answer, &decode, memory, draws);
    let outcome = match second.outcome {
        Outcome::NoMatchingTarget => Outcome::NoMatchingDecode,
        outcome => outcome,
    };
    PairDecision { prefill: first, decode: Some(second), outcome }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;

    use super::*;
    use crate::{PipelineConfig, TargetId, TargetPromise};

    fn candidate(name: &str, group: u64, active: u64) -> Candidate {
        let target = TargetId { worker: name.into(), rank: Rank(0) };
        let promise = TargetPromise { count: active, ..TargetPromise::default() };
        Candidate { group, promise, ..Candidate::new(target) }
    }

    #[test]
    fn a_request_is_split_only_when_its_uncached_part_is_long() {
        let plan = |roles: &[Round], media, uncached| plan_rounds(roles, media, uncached, RoundSettings::default());
        let split = [Round::Encoder, Round::Prefill, Round::Decode];
        assert_eq!(Some(RoundPlan { encoder: false, is_split: true, whole: Round::Decode }), plan(&split, false, 512));
        assert_eq!(Some(RoundPlan { encoder: true, is_split: false, whole: Round::Decode }), plan(&split, true, 511));
        let whole = Some(RoundPlan { encoder: false, is_split: false, whole: Round::Aggregate });
        assert_eq!(whole, plan(&[Round::Aggregate, Round::Prefill], true, 9999));
        assert_eq!(None, plan(&[Round::Prefill, Round::Encoder], false, 9999));
    }

    #[test]
    fn a_pair_is_of_one_group_and_the_load_behind_a_prefill_target_counts() {
        let pipeline = Pipeline::new(PipelineConfig::best_by(crate::Step::new("kv_least_loaded"))).unwrap();
        let decide = |prefill: &[Candidate], decode: &[Candidate]| {
            let request = Request { prompt_tokens: 1000, ..Request::default() };
            decide_pair(&pipeline, &request, prefill, decode, &Memory::default(), &mut Draws::new(1))
        };
        // Load of the pairs: 2 + min(9, 8) = 10 and 4 + 5 = 9.
        let decode = [candidate("d1", 1, 9), candidate("d2", 1, 8), candidate("d3", 2, 5)];
        let decision = decide(&[candidate("p1", 1, 2), candidate("p2", 2, 4)], &decode);
        assert_eq!(Some(1), decision.prefill.chosen);
        assert_eq!(Some(2), decision.decode.as_ref().unwrap().chosen);
        let reasons: Vec<_> = decision.decode.unwrap().verdicts.iter().map(|verdict| verdict.filtered).collect();
        assert_eq!(vec![Some("other_group"), Some("other_group"), None], reasons);
        assert_eq!(Outcome::Selected, decision.outcome);
        // Without a partner the better prefill target is no choice.
        assert_eq!(Some(0), decide(&[candidate("p1", 1, 2), candidate("p2", 2, 4)], &decode[..2]).prefill.chosen);
        assert_eq!(Outcome::NoMatchingDecode, decide(&[candidate("p2", 2, 4)], &decode[..2]).outcome);
    }
}
