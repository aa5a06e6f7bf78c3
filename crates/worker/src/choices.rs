//! Several choices from an engine that makes one of each request: one request of the engine for each choice, all of
//! them one request to whoever asked.

use std::sync::{Arc, Weak};

use kvist_errors::KvistError;
use kvist_proto::{
    engine::v1::{AbortReason, EngineRequest, FinishReason, Finished, TokenDelta, TokenLogprobs},
    events::v1::Receipt,
};
use parking_lot::Mutex;

use crate::{sink::Running, worker::Worker};

/// The choices of one request, on their way to their common end.
#[derive(Debug)]
pub(crate) struct Choices {
    running: Arc<Running>,
    worker: Weak<Worker>,
    /// By which the engine knows each choice.
    ids: Vec<Arc<str>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Of each choice, once it has ended.
    ends: Vec<Option<Finished>>,
    prompt_logprobs: Vec<TokenLogprobs>,
    has_sent: bool,
}

impl Choices {
    /// The requests of the engine, in order of their choices.
    pub(crate) fn split(
        running: &Arc<Running>,
        worker: Weak<Worker>,
        request: &EngineRequest,
        choices: u32,
    ) -> (Arc<Self>, Vec<EngineRequest>) {
        let ids: Vec<Arc<str>> = (0..choices).map(|index| format!("{}#{index}", request.request_id).into()).collect();
        let parts = (0_i64..).zip(&ids).map(|(index, id)| {
            let mut part = request.clone();
            part.request_id = id.to_string();
            if let Some(sampling) = &mut part.sampling {
                sampling.choices = None;
                // The same seed would draw the same choice again.
                sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(index));
                if index > 0 {
                    sampling.prompt_logprobs = None;
                }
            }
            part
        });
        let parts = parts.collect();
        let state = State { ends: vec![None; ids.len()], prompt_logprobs: Vec::new(), has_sent: false };
        (Arc::new(Self { running: Arc::clone(running), worker, ids, state: Mutex::new(state) }), parts)
    }

    pub(crate) fn ids(&self) -> &[Arc<str>] {
        &self.ids
    }

    pub(crate) fn id(&self, index: u32) -> &str {
        self.ids.get(index as usize).map_or("", |id| id)
    }

    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    pub(crate) fn delta(&self, index: u32, mut delta: TokenDelta) {
        delta.index = index;
        // One prompt, one number: what the others found is mostly what the first one left.
        delta.cached_tokens = delta.cached_tokens.filter(|_| index == 0);
        self.state.lock().has_sent = true;
        self.running.delta(delta);
    }

    /// One choice has ended; with the last one the request has.
    pub(crate) fn finished(&self, index: u32, finished: Finished, prompt_logprobs: Vec<TokenLogprobs>) {
        let (end, logprobs) = {
            let mut state = self.state.lock();
            if !prompt_logprobs.is_empty() {
                state.prompt_logprobs = prompt_logprobs;
            }
            match state.ends.get_mut(index as usize) {
                Some(end @ None) => *end = Some(finished),
                _ => return,
            }
            if state.ends.iter().any(Option::is_none) {
                return;
            }
            let ends = state.ends.iter_mut().filter_map(Option::take).collect();
            (merge(ends), std::mem::take(&mut state.prompt_logprobs))
        };
        self.running.finished(end, logprobs);
    }

    /// One choice has failed, and with it the request: a client that waits for all of them must not wait for ever.
    pub(crate) fn failed(&self, index: u32, error: &KvistError) {
        if self.state.lock().ends.get(index as usize).is_none_or(Option::is_some) {
            return;
        }
        let mut error = error.clone();
        error.not_started &= !self.state.lock().has_sent;
        if self.running.fail(&error)
            && let Some(worker) = self.worker.upgrade()
        {
            worker.abort_at_engine_soon(self.ids.clone(), AbortReason::Cancelled);
        }
    }
}

/// The end of a request from those of its choices: the first one's, with the tokens and the time of all.
fn merge(ends: Vec<Finished>) -> Finished {
    let mut ends = ends.into_iter();
    let mut merged = ends.next().unwrap_or_default();
    for end in ends {
        merged.choice_reasons.push(FinishReason::try_from(end.reason).unwrap_or_default().into());
        if let (Some(all), Some(one)) = (&mut merged.receipt, end.receipt) {
            all.completion_tokens = all.completion_tokens.saturating_add(one.completion_tokens);
            all.decode_duration = longer(all, &one);
        }
    }
    merged
}

fn longer(left: &Receipt, right: &Receipt) -> Option<prost_types::Duration> {
    let key = |receipt: &Receipt| receipt.decode_duration.map(|time| (time.seconds, time.nanos));
    if key(left) >= key(right) { left.decode_duration } else { right.decode_duration }
}
