//! Where the events of one request go.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kvist_errors::{Code, KvistError};
use kvist_link::{EventSender, RequestEvent, RequestOutput};
use kvist_proto::engine::v1::{AbortReason, FinishReason, Finished, TokenDelta, TokenLogprobs};
use kvist_telemetry::names;
use parking_lot::Mutex;
use tracing::Span;

use crate::{choices::Choices, deadlines::DeadlineKey, promise::Promise, worker::Worker};

/// Who listens to a request.
#[derive(Debug)]
pub(crate) enum Output {
    /// A router.
    Link(RequestOutput),
    /// A caller of `Generate`.
    Call(EventSender),
}

/// The span of a traced request, until its end.
#[derive(Debug)]
struct Traced {
    span: Span,
    accepted_at: SystemTime,
}

/// One running request, as the worker knows it.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) request_id: Arc<str>,
    worker: Weak<Worker>,
    /// None once the terminal event was sent.
    output: Mutex<Option<Output>>,
    abort_reason: AtomicI32,
    deadline: Mutex<Option<DeadlineKey>>,
    traced: Mutex<Option<Traced>>,
    /// Until the engine's first word, by when it has placed the request.
    promise: Mutex<Option<Promise>>,
    /// What the ledger promised all the while until then.
    kept_promise_tokens: AtomicU64,
    has_begun: AtomicBool,
    /// By which the engine knows the choices, where it makes one of each request.
    parts: OnceLock<Vec<Arc<str>>>,
}

impl Running {
    pub(crate) fn new(request_id: Arc<str>, worker: Weak<Worker>, output: Output, span: Span) -> Self {
        let traced = (!span.is_disabled()).then(|| Traced { span, accepted_at: SystemTime::now() });
        Self {
            request_id,
            worker,
            output: Mutex::new(Some(output)),
            abort_reason: AtomicI32::new(0),
            deadline: Mutex::new(None),
            traced: Mutex::new(traced),
            promise: Mutex::new(None),
            kept_promise_tokens: AtomicU64::new(0),
            has_begun: AtomicBool::new(false),
            parts: OnceLock::new(),
        }
    }

    pub(crate) fn set_deadline(&self, key: DeadlineKey) {
        *self.deadline.lock() = Some(key);
    }

    /// Remembers the first reason.
    pub(crate) fn note_abort(&self, reason: AbortReason) {
        let _ = self.abort_reason.compare_exchange(0, i32::from(reason).max(1), Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.abort_reason.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn set_promise(&self, promise: Option<Promise>) {
        *self.promise.lock() = promise;
    }

    /// The engine speaks: it has placed the request.
    fn begin(&self) {
        if self.has_begun.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(tokens) = self.promise.lock().take().and_then(|promise| promise.undisturbed_tokens()) {
            self.kept_promise_tokens.store(tokens, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_parts(&self, parts: Vec<Arc<str>>) {
        let _ = self.parts.set(parts);
    }

    /// What the engine knows the request by.
    pub(crate) fn engine_ids(&self) -> &[Arc<str>] {
        self.parts.get().map_or(std::slice::from_ref(&self.request_id), Vec::as_slice)
    }

    pub(crate) fn delta(&self, delta: TokenDelta) {
        self.begin();
        let overflow = match &*self.output.lock() {
            Some(Output::Link(output)) => {
                output.delta(delta);
                false
            }
            Some(Output::Call(sender)) => sender.send(RequestEvent::Delta(delta)).is_err(),
            None => false,
        };
        // The caller has been told; the engine is to stop.
        if overflow && let Some(worker) = self.worker.upgrade() {
            worker.abort_soon(&self.request_id, AbortReason::SlowClient);
        }
    }

    pub(crate) fn finished(&self, mut finished: Finished, prompt_logprobs: Vec<TokenLogprobs>) {
        self.begin();
        let Some(output) = self.end() else { return };
        // A stop string that the router found is a regular end, however the engine was made to end.
        let is_stop_string = self.abort_reason.load(Ordering::Relaxed) == i32::from(AbortReason::StopString);
        if is_stop_string && finished.reason() == FinishReason::Aborted {
            finished.set_reason(FinishReason::Stop);
        }
        if let Some(worker) = self.worker.upgrade() {
            worker.account(&mut finished, self.kept_promise_tokens.load(Ordering::Relaxed));
            if !prompt_logprobs.is_empty() {
                finished.large_result = worker.link.put_result(&self.request_id, prompt_logprobs).is_ok();
            }
            worker.metrics.request_ended(match finished.reason() {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Aborted => "aborted",
                FinishReason::Unspecified => "unspecified",
            });
        }
        // Closed before the end is told, so that it ends within the span of whoever waits.
        if let Some(traced) = self.traced.lock().take() {
            traced.finished(&finished);
        }
        match output {
            Output::Link(output) => output.finished(finished),
            Output::Call(sender) => {
                let _ = sender.send(RequestEvent::Finished(finished));
            }
        }
    }

    /// False when it has ended before.
    pub(crate) fn fail(&self, error: &KvistError) -> bool {
        let Some(output) = self.end() else { return false };
        if let Some(worker) = self.worker.upgrade() {
            worker.metrics.request_ended(error.code.name());
        }
        if let Some(traced) = self.traced.lock().take() {
            traced.failed(error.code);
        }
        match output {
            Output::Link(output) => output.failed(error),
            Output::Call(sender) => {
                let _ = sender.send(RequestEvent::Failed(error.clone()));
            }
        }
        true
    }

    /// Takes the output out, and the request out of the worker's books. None when it has ended before.
    fn end(&self) -> Option<Output> {
        let output = self.output.lock().take()?;
        if let Some(worker) = self.worker.upgrade() {
            worker.forget(self);
            if let Some(key) = self.deadline.lock().take() {
                worker.deadlines.remove(key);
            }
        }
        Some(output)
    }
}

impl Traced {
    /// Tells of the phases as the engine accounts for them: the receipt is the only clock that every engine has, and
    /// what this process sees of its first token is late by a hand-over between threads.
    fn finished(self, finished: &Finished) {
        self.span.record(
            names::FINISH_REASONS,
            match finished.reason() {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Aborted => "aborted",
                FinishReason::Unspecified => "error",
            },
        );
        let Some(receipt) = &finished.receipt else { return };
        self.span.record(names::PROMPT_TOKENS, receipt.prompt_tokens);
        self.span.record(names::COMPLETION_TOKENS, receipt.completion_tokens);
        self.span.record(names::CACHED_TOKENS, receipt.cached_tokens);
        let now = SystemTime::now();
        let mut begin = self.accepted_at;
        for (name, duration) in [
            (names::SPAN_QUEUE, receipt.queue_duration),
            (names::SPAN_PREFILL, receipt.prefill_duration),
            (names::SPAN_DECODE, receipt.decode_duration),
        ] {
            let Some(duration) = duration.and_then(|duration| Duration::try_from(duration).ok()) else { continue };
            // An engine's clock may run ahead of this one: no phase ends after the request.
            let end = begin.checked_add(duration).map_or(now, |end| end.min(now)).max(begin);
            tracing::info_span!(
                parent: &self.span,
                "kvist.phase",
                otel.name = name,
                otel.start_unix_nanos = unix_nanos(begin),
                otel.end_unix_nanos = unix_nanos(end),
            );
            begin = end;
        }
    }

    fn failed(self, code: Code) {
        self.span.record(names::ERROR_TYPE, code.name());
        if code.is_fault_of_server() {
            kvist_telemetry::set_status_error(&self.span, code.name());
        }
    }
}

fn unix_nanos(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

/// Where an engine puts the events of one request. Exactly one terminal event gets through, the first; dropping it before
/// fails the request with `ENGINE_FAILED`. Nothing blocks.
#[derive(Debug)]
pub struct RequestSink(Listener);

/// Whose events they are.
#[derive(Debug)]
enum Listener {
    Request(Arc<Running>),
    /// One choice of several that end together.
    Choice(Arc<Choices>, u32),
}

impl RequestSink {
    pub(crate) fn new(running: Arc<Running>) -> Self {
        Self(Listener::Request(running))
    }

    pub(crate) fn of_choice(choices: Arc<Choices>, index: u32) -> Self {
        Self(Listener::Choice(choices, index))
    }

    /// Id of the request.
    #[must_use]
    pub fn request_id(&self) -> &str {
        match &self.0 {
            Listener::Request(running) => &running.request_id,
            Listener::Choice(choices, index) => choices.id(*index),
        }
    }

    /// New tokens of the first choice. `logprobs` has one entry for each token, or none. `cached_tokens` goes with the first
    /// tokens of a request.
    pub fn tokens(&self, token_ids: Vec<u32>, logprobs: Vec<TokenLogprobs>, cached_tokens: Option<u32>) {
        self.delta(TokenDelta { index: 0, token_ids, logprobs, cached_tokens });
    }

    /// New tokens.
    pub fn delta(&self, delta: TokenDelta) {
        match &self.0 {
            Listener::Request(running) => running.delta(delta),
            Listener::Choice(choices, index) => choices.delta(*index, delta),
        }
    }

    /// The engine ended the request.
    pub fn finished(&self, finished: Finished) {
        self.finished_with_prompt_logprobs(finished, Vec::new());
    }

    /// The engine ended the request, and has log-probabilities of its prompt.
    pub fn finished_with_prompt_logprobs(&self, finished: Finished, prompt_logprobs: Vec<TokenLogprobs>) {
        match &self.0 {
            Listener::Request(running) => running.finished(finished, prompt_logprobs),
            Listener::Choice(choices, index) => choices.finished(*index, finished, prompt_logprobs),
        }
    }

    /// The request failed.
    pub fn failed(&self, error: &KvistError) {
        match &self.0 {
            Listener::Request(running) => {
                running.fail(error);
            }
            Listener::Choice(choices, index) => choices.failed(*index, error),
        }
    }

    /// Whether somebody has asked for its end.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        match &self.0 {
            Listener::Request(running) => running.is_aborted(),
            Listener::Choice(choices, _) => choices.running().is_aborted(),
        }
    }
}

impl Drop for RequestSink {
    fn drop(&mut self) {
        self.failed(&KvistError::new(Code::EngineFailed, "the engine gave the request up"));
    }
}
