//! What becomes of a decision: what is to be seen of it, and where the request goes.

use std::{
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use kvist_blocks::usable_blocks;
use kvist_errors::{Code, KvistError};
use kvist_schedule::{Candidate, Decision, Outcome, Round, most_waiting_tokens};

use crate::{
    explain::SeenDecision,
    parts::{About, Field},
    select::{Placement, Reservation, Selector, to_u32},
};

impl Selector {
    /// What is to be seen of a decision, and where the request goes.
    pub(crate) fn conclude(
        &self,
        about: &About<'_>,
        field: Field<'_>,
        decision: Decision,
        reservation: Option<Reservation>,
        local_prefill_reason: &'static str,
    ) -> (Arc<SeenDecision>, Result<Placement, KvistError>) {
        let About { demand, request, lookups, now, reserve, .. } = about;
        let Field { candidates, mut seen, nodes, .. } = field;
        let prompt_tokens = demand.tokens.len();
        for ((seen, candidate), verdict) in seen.iter_mut().zip(&candidates).zip(&decision.verdicts) {
            seen.uncached_tokens = candidate.uncached_tokens(request);
            seen.promised_tokens = candidate.outstanding_tokens.unwrap_or(candidate.promise.prefill_tokens);
            seen.cost = verdict.score.map(|score| -score.preference);
            seen.terms = verdict.terms;
            seen.excluded = verdict.filtered;
        }
        let available = || candidates.iter().filter(|candidate| candidate.unavailable.is_none());
        let best_hit = available().map(Candidate::matched_tokens).max().unwrap_or(0).min(prompt_tokens as u64);
        let chosen_node = decision.chosen.and_then(|chosen| nodes.get(chosen));
        let block_size = chosen_node.or(nodes.first()).map_or(0, |(node, _)| node.block_size());
        let record = Arc::new(SeenDecision {
            request_id: Arc::clone(&demand.request_id),
            model: Arc::clone(&about.model.name),
            decided_at: SystemTime::now(),
            prompt_tokens: to_u32(prompt_tokens),
            prompt_blocks: to_u32(usable_blocks(prompt_tokens, block_size)),
            block_size_tokens: to_u32(block_size),
            candidates: seen,
            policy: Arc::clone(&about.policy),
            outcome: decision.outcome,
            available: to_u32(available().count()),
            selectable: to_u32(decision.selectable),
            available_hit_tokens: u32::try_from(best_hit).unwrap_or(u32::MAX),
            queued_for: demand.queued_for,
            chosen: decision.chosen,
            chosen_incarnation: chosen_node.map(|(node, _)| node.incarnation),
            attempt: about.attempt,
            round: request.round,
            local_prefill_reason,
            duration: about.started.elapsed(),
            ending: OnceLock::new(),
        });
        let result = match chosen_node {
            Some((node, rank)) => {
                // The decode target gets the prompt once it is computed.
                if *reserve && request.round != Round::Decode {
                    self.note(*now, node, *rank, lookups);
                }
                // What the index claims; what recent decisions make likely is no claim.
                let claim = record.chosen_candidate().and_then(|seen| seen.claim.as_ref());
                let cached = claim.filter(|claim| claim.state.is_exact()).map(|claim| {
                    let blocks = claim.matched_blocks.min(record.prompt_blocks);
                    blocks.saturating_mul(record.block_size_tokens)
                });
                Ok(Placement {
                    node: Arc::clone(node),
                    rank: *rank,
                    reservation,
                    expected_cached_tokens: cached,
                    most_waiting_tokens: most_waiting_tokens(&decision, &candidates),
                    noted_at: *now,
                })
            }
            None if decision.outcome == Outcome::Saturated => {
                Err(KvistError::new(Code::Overloaded, "all workers of this model are saturated").before_start())
            }
            None => Err(why_none(&record, about.missing)),
        };
        (record, result)
    }
}

/// Why nobody was chosen, as the client should hear it.
fn why_none(decision: &SeenDecision, missing: Option<(&'static str, &'static str)>) -> KvistError {
    let all = |reasons: &[&str]| {
        !decision.candidates.is_empty()
            && decision.candidates.iter().all(|seen| seen.excluded.is_some_and(|reason| reasons.contains(&reason)))
    };
    let any = |reason| decision.candidates.iter().any(|seen| seen.excluded == Some(reason));
    let gone = ["draining", "connection_lost", "description_differs", "tokenizer_loading", "role", "already_tried"];
    if decision.candidates.iter().any(|seen| seen.excluded == Some("no_matching_decode")) {
        let message = "a prefill worker takes requests, and no decode worker that could take over from it";
        return KvistError::new(Code::NoReadyTarget, message).before_start();
    }
    let hard = |reason: &'static str| any(reason) && all(&[&gone[..], &[reason]].concat());
    if let Some((field, why)) = missing
        && hard("lacks_capability")
    {
        return KvistError::field(Code::UnsupportedField, field, why);
    }
    if hard("context_too_short") {
        return KvistError::new(
            Code::ContextLengthExceeded,
            format!("the prompt has {} tokens, which do not fit the model's context", decision.prompt_tokens),
        );
    }
    KvistError::new(Code::NoReadyTarget, "no worker of this model takes requests at the moment").before_start()
}
