//! The loop that steps the simulated engine.

use std::{sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_link::WakeBatch;
use kvist_proto::{
    engine::v1::{FinishReason, Finished, KvTransferParameters},
    events::v1::{LoadReport, Receipt},
};
use kvist_twin::{Finish, Step};

use super::{Job, Shared, SimWorkerSettings, State, hand_over, tokenizer::END_OF_TEXT};
use crate::{EngineHost, HandOverSettings};

/// The clock of tokio's timers ticks in milliseconds: what is nearer than this is not slept for.
const LEAST_SLEEP: Duration = Duration::from_millis(1);
/// How far virtual time may fall behind before the lost time is given up.
const MOST_LAG: Duration = Duration::from_millis(50);

/// Steps until the engine is closed. What a step yields is told when its time has passed; steps follow each other in
/// virtual time, so that a late wake-up does not make the engine slower than it is meant to be.
pub(super) async fn run(
    shared: Arc<Shared>,
    host: EngineHost,
    settings: SimWorkerSettings,
    hand_over: HandOverSettings,
) {
    let mut virtual_now = Duration::ZERO;
    loop {
        let now = shared.started.elapsed();
        if now > virtual_now + MOST_LAG {
            virtual_now = now;
        }
        let step = {
            let mut state = shared.state.lock();
            if state.is_closed {
                return;
            }
            if state.engine.is_idle() { None } else { Some(state.engine.step(virtual_now)) }
        };
        let Some(step) = step else {
            shared.has_work.notified().await;
            // An idle engine has no time to catch up.
            virtual_now = shared.started.elapsed();
            continue;
        };
        let (at_begin, at_end) = step.events.split_at(step.events_at_begin.min(step.events.len()));
        host.cache_changed(0, at_begin);
        place(&mut shared.state.lock(), &host, &step);
        virtual_now += step.duration.unwrap_or_default();
        if virtual_now > shared.started.elapsed() + LEAST_SLEEP {
            tokio::time::sleep_until(shared.started + virtual_now).await;
        } else if step.duration.is_some() {
            // Others must run, such as those that read what this writes.
            tokio::task::yield_now().await;
        } else if step.finished.is_empty() && step.events.is_empty() {
            // Something waits that does not fit: it waits for an abort, or for ever.
            shared.has_work.notified().await;
        }
        host.cache_changed(0, at_end);
        tell(&shared, &host, &step, (&settings, &hand_over));
    }
}

/// Notes what the ledger claims for the requests that were placed, at the moment they were.
fn place(state: &mut State, host: &EngineHost, step: &Step) {
    for (id, cached_tokens) in &step.placed {
        if let Some(job) = state.jobs.get_mut(id) {
            job.cached_tokens = Some(*cached_tokens);
            job.claimed_blocks = u32::try_from(host.claimed_blocks(0, &job.usable)).unwrap_or(u32::MAX);
        }
    }
}

/// Tells the requests what the step brought.
fn tell(shared: &Arc<Shared>, host: &EngineHost, step: &Step, settings: (&SimWorkerSettings, &HandOverSettings)) {
    let state = &mut *shared.state.lock();
    let (settings, hand_over) = settings;
    // All tokens of a step leave together.
    let _one_wake_up = WakeBatch::begin();
    for (id, token) in &step.tokens {
        let Some(job) = state.jobs.get_mut(id) else { continue };
        job.generated_tokens += 1;
        if job.generated_tokens > job.min_tokens && job.stop_token_ids.contains(token) {
            job.stopped_by = Some(*token);
            state.engine.abort(*id);
        } else {
            job.sink.tokens(vec![*token], Vec::new(), job.cached_tokens.take());
        }
    }
    for finished in &step.finished {
        let Some(mut job) = state.remove(finished.id) else { continue };
        let is_whole = matches!(finished.finish, Finish::Length | Finish::Stop);
        let kept = job
            .lease
            .take()
            .filter(|_| is_whole)
            .and_then(|lease| hand_over::give(shared, state, finished.id, lease, &job.usable, hand_over));
        end(state, &job, finished, kept, settings.block_size_tokens);
    }
    state.load = load(state, settings);
    host.report_load(state.load);
}

fn end(
    state: &State,
    job: &Job,
    finished: &kvist_twin::Finished,
    kv_transfer: Option<KvTransferParameters>,
    block_size_tokens: u32,
) {
    let (reason, stop_token_id) = match (finished.finish, job.stopped_by) {
        (Finish::TooLarge, _) => {
            let error =
                KvistError::new(Code::ContextLengthExceeded, "the request needs more cache than the engine has");
            state.note_end(job, error.code.name());
            return job.sink.failed(&error.before_start());
        }
        // The stop token may be the last that the budget allows.
        (_, Some(token)) => (FinishReason::Stop, Some(token)),
        (Finish::Stop, None) => (FinishReason::Stop, Some(END_OF_TEXT)),
        (Finish::Length, None) if job.ends_by_itself => (FinishReason::Stop, Some(END_OF_TEXT)),
        (Finish::Length, None) => (FinishReason::Length, None),
        (Finish::Aborted, None) => (FinishReason::Aborted, None),
    };
    state.note_end(
        job,
        match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Aborted => "aborted",
            FinishReason::Unspecified => "unspecified",
        },
    );
    let duration = |duration: Duration| prost_types::Duration::try_from(duration).ok();
    job.sink.finished(Finished {
        reason: reason.into(),
        stop_token_id,
        receipt: Some(Receipt {
            prompt_tokens: finished.prompt_tokens,
            cached_tokens: finished.cached_tokens,
            completion_tokens: finished.completion_tokens,
            queue_duration: duration(finished.queue),
            prefill_duration: duration(finished.prefill),
            decode_duration: duration(finished.decode),
            claimed_blocks: Some(job.claimed_blocks),
            block_size_tokens,
            external_tokens: finished.external_tokens,
        }),
        kv_transfer,
        ..Finished::default()
    });
}

fn load(state: &State, settings: &SimWorkerSettings) -> LoadReport {
    let counters = state.engine.counters();
    let arriving = state.jobs.values().filter(|job| job.arrival.is_some()).count();
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let further = counters.running.saturating_sub(1) as f64;
    let decode_step_ms = settings.decode_step_ms + settings.decode_step_per_request_ms * further;
    LoadReport {
        running_requests: number(counters.running),
        waiting_requests: number(counters.waiting + arriving),
        outstanding_prefill_tokens: counters.outstanding_prefill_tokens,
        active_tokens: counters.active_tokens,
        used_blocks: counters.used_blocks as u64,
        total_blocks: counters.total_blocks as u64,
        prefill_tokens_per_second: (settings.prefill_tokens_per_second > 0.0)
            .then_some(settings.prefill_tokens_per_second),
        decode_step_duration: Duration::try_from_secs_f64(decode_step_ms / 1000.0)
            .ok()
            .and_then(|duration| duration.try_into().ok()),
        finished_requests_total: counters.finished_requests,
        engine_steps_total: counters.steps,
        generated_tokens_total: counters.generated_tokens,
        pinned_blocks: counters.pinned_blocks as u64,
        expired_leases_total: state.leases.expired,
        external_tokens_total: counters.external_tokens,
        failed_transfers_total: state.failed_transfers,
        ..LoadReport::default()
    }
}
