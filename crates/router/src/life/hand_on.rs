//! From the prefill worker to the decode worker.

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{FinishReason, Finished};
use kvist_schedule::Report;
use kvist_telemetry::names;

use super::{DEADLINE_SLACK, Life, late};

impl Life {
    /// The prefill worker has done its part: the decode worker goes on.
    pub(super) fn hand_on(&mut self, mut finished: Finished) -> Result<(), KvistError> {
        if !matches!(finished.reason(), FinishReason::Length | FinishReason::Stop) {
            let is_late = self.deadline.deadline() <= tokio::time::Instant::now() + DEADLINE_SLACK;
            let ended = || KvistError::new(Code::Cancelled, "the request was ended at the engine");
            return Err(if is_late { late() } else { ended() });
        }
        self.report(Report::Success);
        let next = self.hand_over.as_mut().and_then(|hand_over| hand_over.prefilled(&mut finished));
        let Some((decision, mut placement, kept)) = next else {
            return Err(KvistError::new(Code::Internal, "a prompt was computed for nobody"));
        };
        self.record.handed_over(finished.receipt, &decision);
        if let Some(placed) = self.placed.take() {
            placed.span.record(names::OUTCOME, "handed_over");
        }
        self.core.selector.sent(&self.core.view(), &self.demand, &mut placement);
        // The one that has computed the prompt is not to blame for what comes now.
        self.tried.pop();
        self.tried.push(placement.node.target_id(placement.rank));
        let prompt_tokens = u32::try_from(self.demand.tokens.len()).unwrap_or(u32::MAX);
        self.send(placement, &decision, |request, _| {
            // What is on its way need not be computed.
            request.expected_cached_tokens = kept.as_ref().map(|_| prompt_tokens).or(request.expected_cached_tokens);
            request.kv_transfer = kept;
        })
    }
}
