//! How much may wait at a target before another one is better.
//!
//! Routers that decide within the lag of load reports do not see each other's requests. No rule that draws or hashes can
//! make up for that: what two of them send to one target in the same instant, neither could know. The target itself
//! knows, so a decision says what it rests on, and the target refuses at once when that is no longer true. The refusal
//! brings the newest load, and the router decides again.

use crate::{Candidate, Decision, config::EPSILON_MOST_SECONDS};

/// Refusals of one request after which the next target takes it whatever waits there. Each tells the router of one target
/// what all routers have sent there, so that as many are enough for as many targets.
pub const MOST_REFUSALS: u32 = 16;

/// Prompt tokens that may wait at the chosen target, the request's own left aside, so that it still costs no more than
/// the runner-up, or as good as no more. None where the queue is not known, where nobody else could serve, and where
/// something else than `cost` chose.
#[must_use]
pub fn most_waiting_tokens(decision: &Decision, candidates: &[Candidate]) -> Option<u64> {
    let chosen = decision.chosen?;
    let candidate = candidates.get(chosen)?;
    let cost = decision.verdicts.get(chosen)?.terms?.total();
    let others = decision.verdicts.iter().enumerate().filter(|(position, _)| *position != chosen);
    let runner_up = others.filter_map(|(_, verdict)| Some(verdict.terms?.total())).min_by(f64::total_cmp)?;
    // Where both are full, neither is better: the difference is no number, and counts as none.
    let slack_seconds = (runner_up - cost).max(0.0) + EPSILON_MOST_SECONDS;
    let slack_tokens = slack_seconds / candidate.rates.prefill_seconds(1, 0);
    Some(candidate.outstanding_tokens?.saturating_add(slack_tokens as u64))
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;

    use super::*;
    use crate::{Cached, Draws, Memory, Pipeline, PipelineConfig, Request, Step, TargetId};

    /// 10,000 prompt tokens a second, of which 8,000 are asked for.
    fn candidate(name: &str, cached_tokens: u64, outstanding_tokens: u64) -> Candidate {
        let tier_tokens = [cached_tokens, 0, 0, 0];
        let cached = Cached { tier_tokens, matched_tokens: cached_tokens, is_complete: true };
        Candidate {
            cached: Some(cached),
            outstanding_tokens: Some(outstanding_tokens),
            ..Candidate::new(TargetId { worker: name.into(), rank: Rank(0) })
        }
    }

    fn limit(pipeline: &Pipeline, candidates: &[Candidate]) -> (Option<usize>, Option<u64>) {
        let request = Request { prompt_tokens: 8000, expected_output_tokens: 128, ..Request::default() };
        let decision = pipeline.decide(&request, candidates, &Memory::default(), &mut Draws::new(1));
        (decision.chosen, most_waiting_tokens(&decision, candidates))
    }

    #[test]
    fn what_a_cache_saves_may_wait_before_it() {
        // A costs 0.9 + 3 · 0.2 = 1.5 s and B 3 · 0.8 = 2.4 s: 0.9 s more may wait, and 0.1 s that count as equal.
        let both = [candidate("a", 6000, 9000), candidate("b", 0, 0)];
        assert_eq!((Some(0), Some(9000 + 9000 + 1000)), limit(&Pipeline::standard(), &both));
        // With nothing between them, only what counts as equal.
        let both = [candidate("a", 0, 500), candidate("b", 0, 500)];
        assert_eq!(Some(1500), limit(&Pipeline::standard(), &both).1);
    }

    #[test]
    fn there_is_no_limit_without_a_choice_a_report_or_a_cost() {
        let standard = Pipeline::standard();
        assert_eq!((Some(0), None), limit(&standard, &[candidate("a", 0, 500)]));
        let silent = Candidate { outstanding_tokens: None, ..candidate("a", 7000, 0) };
        assert_eq!((Some(0), None), limit(&standard, &[silent, candidate("b", 0, 0)]));
        let least_loaded = Pipeline::new(PipelineConfig::best_by(Step::new("least_loaded"))).unwrap();
        assert_eq!(None, limit(&least_loaded, &[candidate("a", 0, 500), candidate("b", 0, 500)]).1);
        let nobody = [Candidate { unavailable: Some("draining"), ..candidate("a", 0, 0) }];
        assert_eq!((None, None), limit(&standard, &nobody));
    }

    #[test]
    fn targets_that_are_all_full_may_be_waited_for_no_longer() {
        let full = |name| Candidate {
            load: Some(crate::Load { kv_usage: Some(1.0), kv_blocks: Some(100), ..crate::Load::default() }),
            ..candidate(name, 0, 500)
        };
        assert_eq!(Some(1500), limit(&Pipeline::standard(), &[full("a"), full("b")]).1);
    }
}
