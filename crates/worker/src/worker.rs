//! What all calls share: the engine, its description, and the requests that run.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use kvist_errors::{Code, KvistError};
use kvist_link::{LinkServer, LinkServerSettings, RequestAcceptor, RequestOutput};
use kvist_proto::{
    engine::v1::{AbortReason, EngineRequest, Finished, WorkerDescription, engine_request::Prompt},
    events::v1::LoadReport,
};
use kvist_telemetry::{Rarely, names};
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use tracing::{Span, field::Empty};

use crate::{
    Engine, EngineHost, RequestSink, TokenizerFile, WorkerSettings,
    choices::Choices,
    deadlines::Deadlines,
    metrics::WorkerMetrics,
    promise::Promise,
    sink::{Output, Running},
};

/// Between two lines about claims that were false.
const VIOLATION_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A worker, whether its engine is up or not.
pub(crate) struct Worker {
    pub(crate) settings: WorkerSettings,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) link: Arc<LinkServer>,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) deadlines: Deadlines,
    violation_log: Rarely,
    up: OnceLock<Up>,
    running: Mutex<HashMap<Arc<str>, Arc<Running>>>,
    running_count: watch::Sender<usize>,
    is_draining: AtomicBool,
    has_failed: watch::Sender<bool>,
    fence: AtomicU64,
    direct_number: AtomicU64,
    /// Held from the look at the load to the engine's report of what it has accepted: of two requests at once, the
    /// second is held against the first.
    entrance: Mutex<()>,
    /// For what is said on threads of the engine.
    runtime: tokio::runtime::Handle,
    myself: Weak<Self>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Worker").field("uid", &self.settings.worker_uid).finish_non_exhaustive()
    }
}

/// What is known once the engine is up.
pub(crate) struct Up {
    pub(crate) description: WorkerDescription,
    pub(crate) tokenizer: Option<TokenizerFile>,
    pub(crate) host: EngineHost,
    /// A request can use whatever blocks its rank holds.
    pub(crate) claims_hold_for_all: bool,
    /// The engine makes several choices of one request by itself.
    pub(crate) makes_choices: bool,
}

impl Worker {
    /// Called inside a runtime.
    pub(crate) fn new(settings: WorkerSettings, engine: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new_cyclic(|myself| Self {
            settings,
            engine,
            link: Arc::new(LinkServer::new(LinkServerSettings::default())),
            metrics: WorkerMetrics::new(),
            deadlines: Deadlines::default(),
            violation_log: Rarely::every(VIOLATION_LOG_INTERVAL),
            up: OnceLock::new(),
            running: Mutex::default(),
            running_count: watch::Sender::new(0),
            is_draining: AtomicBool::new(false),
            has_failed: watch::Sender::new(false),
            fence: AtomicU64::new(0),
            direct_number: AtomicU64::new(0),
            entrance: Mutex::new(()),
            runtime: tokio::runtime::Handle::current(),
            myself: myself.clone(),
        })
    }

    pub(crate) fn set_up(&self, up: Up) {
        let _ = self.up.set(up);
    }

    /// # Errors
    /// `NOT_READY` while the engine is loading.
    pub(crate) fn up(&self) -> Result<&Up, KvistError> {
        self.up.get().ok_or_else(|| KvistError::new(Code::NotReady, "the engine is loading").before_start())
    }

    pub(crate) fn describe(&self) -> Result<WorkerDescription, KvistError> {
        let description = self.up()?.description.clone();
        Ok(WorkerDescription { draining: !self.takes_requests(), ..description })
    }

    pub(crate) fn takes_requests(&self) -> bool {
        !self.is_draining.load(Ordering::Relaxed) && !*self.has_failed.borrow()
    }

    /// Checks a request and hands it to the engine. Whatever happens, `output` hears the end.
    pub(crate) fn submit(&self, mut request: EngineRequest, output: Output) {
        let _entrance = request.most_waiting_tokens.map(|_| self.entrance.lock());
        if let Err(error) = self.link.resolve_prompt(&mut request).and_then(|()| self.check(&request)) {
            return self.refuse(output, &error);
        }
        let request_id: Arc<str> = request.request_id.as_str().into();
        let span = self.span(&request);
        let running = {
            let mut all = self.running.lock();
            match all.entry(Arc::clone(&request_id)) {
                Entry::Vacant(entry) => {
                    let running = Running::new(Arc::clone(&request_id), self.myself.clone(), output, span);
                    Arc::clone(entry.insert(Arc::new(running)))
                }
                Entry::Occupied(_) => {
                    drop(all);
                    let error = KvistError::new(Code::DuplicateRequest, "a request of this id is running");
                    return self.refuse(output, &error.before_start());
                }
            }
        };
        self.count_running(1);
        if let Some(time_left) = &request.time_left {
            // A negative time is one that is over.
            let time_left = Duration::try_from(*time_left).unwrap_or_default();
            if let Some(at) = Instant::now().checked_add(time_left) {
                running.set_deadline(self.deadlines.add(at, request_id));
            }
        }
        if let Ok(up) = self.up()
            && up.claims_hold_for_all
        {
            running.set_promise(Promise::of(&up.host, &request));
        }
        self.hand_over(request, &running);
        // Whoever failed what was running then may not have seen this one.
        if *self.has_failed.borrow() {
            running.fail(&KvistError::new(Code::EngineFailed, "the engine has failed"));
        }
    }

    /// Gives a request to the engine, in as many parts as it needs.
    fn hand_over(&self, request: EngineRequest, running: &Arc<Running>) {
        let choices = request.sampling.as_ref().and_then(|sampling| sampling.choices).unwrap_or(1);
        if choices <= 1 || self.up().is_ok_and(|up| up.makes_choices) {
            return self.engine.submit(request, RequestSink::new(Arc::clone(running)));
        }
        let (choices, parts) = Choices::split(running, self.myself.clone(), &request, choices);
        running.set_parts(choices.ids().to_vec());
        for (index, part) in (0..).zip(parts) {
            self.engine.submit(part, RequestSink::of_choice(Arc::clone(&choices), index));
        }
    }

    /// A number for a request that came without an id.
    pub(crate) fn next_direct_number(&self) -> u64 {
        self.direct_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Ends a request; true when it was running.
    pub(crate) fn abort_request(&self, request_id: &str, reason: AbortReason) -> bool {
        let Some(running) = self.running.lock().get(request_id).cloned() else { return false };
        running.note_abort(reason);
        running.engine_ids().iter().for_each(|id| self.engine.abort(id, reason));
        true
    }

    /// The same from inside a call of the engine, which may hold its own locks.
    pub(crate) fn abort_soon(&self, request_id: &Arc<str>, reason: AbortReason) {
        let Some(running) = self.running.lock().get(request_id).cloned() else { return };
        running.note_abort(reason);
        self.abort_at_engine_soon(running.engine_ids().to_vec(), reason);
    }

    /// Tells the engine alone, from inside one of its calls, to end what it knows by these ids.
    pub(crate) fn abort_at_engine_soon(&self, ids: Vec<Arc<str>>, reason: AbortReason) {
        let Some(worker) = self.myself.upgrade() else { return };
        // A thread of the engine's own is no thread of the runtime.
        self.runtime.spawn(async move { ids.iter().for_each(|id| worker.engine.abort(id, reason)) });
    }

    pub(crate) fn forget(&self, running: &Running) {
        let mut all = self.running.lock();
        if all.get(&running.request_id).is_some_and(|other| std::ptr::eq(&**other, running)) {
            all.remove(&running.request_id);
            drop(all);
            self.count_running(-1);
        }
    }

    /// What runs has become more or less.
    pub(crate) fn count_running(&self, change: isize) {
        self.running_count.send_modify(|count| *count = count.saturating_add_signed(change));
    }

    /// Completes a receipt and holds it against the ledger: against what the engine says was claimed when it placed the
    /// request, and against what was promised when it came and held until then.
    pub(crate) fn account(&self, finished: &mut Finished, promised_tokens: u64) {
        let (Some(receipt), Ok(up)) = (&mut finished.receipt, self.up()) else { return };
        if receipt.block_size_tokens == 0 {
            receipt.block_size_tokens = up.description.block_size_tokens;
        }
        let claimed = u64::from(receipt.claimed_blocks.unwrap_or(0)) * u64::from(receipt.block_size_tokens);
        // A request that ended before its prompt was looked up has no cached tokens to show.
        let claimed_tokens = claimed.max(promised_tokens);
        if u64::from(receipt.cached_tokens) < claimed_tokens && receipt.completion_tokens > 0 {
            self.metrics.soundness_violations.inc();
            if let Some(times) = self.violation_log.due() {
                tracing::error!(claimed_tokens, cached_tokens = receipt.cached_tokens, times, "ledger_claim_was_false");
            }
        }
    }

    pub(crate) fn engine_failed(&self, reason: &str) {
        tracing::error!(reason, "engine_failed");
        self.has_failed.send_replace(true);
        self.link.announce_draining();
        let running: Vec<_> = self.running.lock().values().cloned().collect();
        for running in running {
            running.fail(&KvistError::new(Code::EngineFailed, "the engine has failed"));
        }
    }

    pub(crate) fn watch_failure(&self) -> watch::Receiver<bool> {
        self.has_failed.subscribe()
    }

    pub(crate) fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::SeqCst);
        self.link.announce_draining();
    }

    pub(crate) fn watch_running(&self) -> watch::Receiver<usize> {
        self.running_count.subscribe()
    }

    pub(crate) fn running_ids(&self) -> Vec<Arc<str>> {
        self.running.lock().keys().cloned().collect()
    }

    /// # Errors
    /// `STALE_FENCE` when a higher fence was seen; 0 is people, who are not fenced.
    pub(crate) fn check_fence(&self, fence: u64) -> Result<(), KvistError> {
        if fence != 0 && self.fence.fetch_max(fence, Ordering::Relaxed) > fence {
            return Err(KvistError::new(Code::StaleFence, "a newer leader has spoken to this worker"));
        }
        Ok(())
    }

    fn refuse(&self, output: Output, error: &KvistError) {
        self.metrics.request_ended(error.code.name());
        match output {
            Output::Link(output) => output.failed(error),
            Output::Call(sender) => {
                let _ = sender.send(kvist_link::RequestEvent::Failed(error.clone()));
            }
        }
    }

    /// # Errors
    /// Why nothing new is taken.
    pub(crate) fn check_takes_requests(&self) -> Result<(), KvistError> {
        if *self.has_failed.borrow() {
            return Err(KvistError::new(Code::EngineUnavailable, "the engine has failed"));
        }
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(KvistError::new(Code::Draining, "the worker takes nothing new"));
        }
        Ok(())
    }

    fn check(&self, request: &EngineRequest) -> Result<(), KvistError> {
        let up = self.up()?;
        let refused = |error: KvistError| Err(error.before_start());
        self.check_takes_requests().or_else(refused)?;
        if up.description.capabilities.is_some_and(|can| can.embeddings) {
            let message = "this engine was started for embeddings and generates nothing";
            return refused(KvistError::new(Code::NotImplemented, message));
        }
        let own = &up.description.pool_revision;
        if !own.is_empty() && !request.pool_revision.is_empty() && *own != request.pool_revision {
            return refused(KvistError::new(Code::PoolRevisionMismatch, "the worker belongs to another pool revision"));
        }
        let invalid = |field, description| refused(KvistError::field(Code::InvalidArgument, field, description));
        if request.request_id.is_empty() {
            return invalid("request_id", "must not be empty");
        }
        if request.rank >= up.description.ranks.max(1) {
            return invalid("rank", "the engine has no such rank");
        }
        let prompt_tokens = match &request.prompt {
            Some(Prompt::Tokens(tokens)) => tokens.ids.len(),
            _ => 0,
        };
        if prompt_tokens == 0 {
            return invalid("tokens", "the prompt must have at least one token");
        }
        let context = up.description.limits.as_ref().map_or(0, |limits| limits.context_tokens);
        if context > 0 && prompt_tokens >= context as usize {
            let message = format!("the prompt has {prompt_tokens} tokens and the context {context}");
            return refused(KvistError::new(Code::ContextLengthExceeded, message));
        }
        if let Some(most) = request.most_waiting_tokens
            && up.host.outstanding_prefill_tokens(request.rank) > most
        {
            return refused(KvistError::new(Code::BusierThanExpected, "more waits here than the router knew of"));
        }
        Ok(())
    }

    fn span(&self, request: &EngineRequest) -> Span {
        if request.traceparent.is_empty() {
            return Span::none();
        }
        let description = self.up().ok().map(|up| &up.description);
        tracing::info_span!(
            parent: None,
            names::SPAN_ENGINE,
            traceparent = request.traceparent.as_str(),
            otel.kind = "server",
            otel.status_description = Empty,
            { names::PROVIDER } = description.map(|description| description.engine.as_str()),
            { names::MODEL } = description.map(|description| description.model.as_str()),
            { names::REQUEST_ID } = request.request_id.as_str(),
            { names::WORKER_UID } = self.settings.worker_uid.as_str(),
            { names::RANK } = request.rank,
            { names::FINISH_REASONS } = Empty,
            { names::PROMPT_TOKENS } = Empty,
            { names::COMPLETION_TOKENS } = Empty,
            { names::CACHED_TOKENS } = Empty,
            { names::ERROR_TYPE } = Empty,
        )
    }
}

/// Why what never ends by itself ends.
pub(crate) fn stopped() -> KvistError {
    KvistError::new(Code::Draining, "the worker is being stopped")
}

/// The worker as the link sees it.
pub(crate) struct Acceptor(pub(crate) Arc<Worker>);

impl RequestAcceptor for Acceptor {
    fn description(&self) -> Result<WorkerDescription, KvistError> {
        self.0.describe()
    }

    fn loads(&self) -> Vec<LoadReport> {
        self.0.up().map(|up| up.host.loads()).unwrap_or_default()
    }

    fn accept(&self, request: EngineRequest, output: RequestOutput) {
        self.0.submit(request, Output::Link(output));
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        self.0.abort_request(request_id, reason);
    }

    fn release(&self, lease_id: &str) {
        self.0.engine.release_lease(lease_id);
    }
}
