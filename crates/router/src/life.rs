//! The life of one request from the door on: its wait, placement, events, text, one retry, deadline, end.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, stream};
use kvist_errors::{Code, KvistError};
use kvist_link::{RequestEvent, RequestStream};
use kvist_proto::engine::v1::{AbortReason, EngineRequest, FinishReason, TokenIds, engine_request::Prompt};
use kvist_schedule::{MOST_REFUSALS, Report, TargetId};
use kvist_telemetry::names;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::field::Empty;
use xxhash_rust::xxh3::xxh3_64;

mod hand_on;

use crate::{
    answer::Answer,
    cluster::ModelView,
    core::RouterCore,
    door::{Entry, Place, Waiting},
    explain::{Ending, SeenDecision},
    generate::GenerateEvent,
    hand_over::{HandOver, expected_first_token, lease_id},
    health::{report_of, report_of_silence},
    parts::{Choice, Intent},
    record::{RequestRecord, record_failure},
    select::{Demand, Placement},
    stages::StageTimer,
};

/// Placements of a request: the first, and one more when its engine was lost before the first token.
const MOST_ATTEMPTS: u32 = 2;

/// By how much a worker's clock may be ahead when it ends a request at its deadline.
const DEADLINE_SLACK: Duration = Duration::from_millis(20);

fn late() -> KvistError {
    KvistError::new(Code::DeadlineExceeded, "the request took too long")
}

/// One request that was let in or waits for it. Dropping it ends the request at the worker, its reservation, and its place.
pub(crate) struct Life {
    core: Arc<RouterCore>,
    model: Arc<ModelView>,
    demand: Demand,
    /// The request without its prompt; filled in for each attempt.
    template: EngineRequest,
    answer: Answer,
    /// None once it has been let in.
    waiting: Option<Waiting>,
    placed: Option<Placed>,
    /// After `placed`, so that a request has been ended before what is kept for it is freed. None when it is not divided.
    hand_over: Option<HandOver>,
    /// After `placed`, so that a target has room before the place is given on.
    place: Option<Place>,
    tried: Vec<TargetId>,
    /// Times that a worker refused because more waited there than was known here.
    refusals: u32,
    has_tokens: bool,
    deadline: Pin<Box<Sleep>>,
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    stages: StageTimer,
    /// Last, so that the reservation is gone before the request is counted as ended.
    record: RequestRecord,
}

struct Placed {
    stream: RequestStream,
    placement: Placement,
    span: tracing::Span,
    has_asked_for_end: bool,
    target: TargetId,
    since: Instant,
    /// When the first token was expected, from `since` on.
    expected_first_token: Option<Duration>,
}

/// What wakes a life.
enum Woken {
    /// The wait is over.
    Door(Result<(), KvistError>),
    Event(Option<RequestEvent>),
    Deadline,
    Stage(KvistError),
    Stopped,
}

impl Life {
    pub(crate) fn new(
        core: Arc<RouterCore>,
        model: Arc<ModelView>,
        demand: Demand,
        template: EngineRequest,
        answer: Answer,
        deadline: tokio::time::Instant,
        record: RequestRecord,
    ) -> Self {
        let stopped = Box::pin(core.stopped.clone().cancelled_owned());
        let stages = StageTimer::new(core.stage_limits);
        Self {
            core,
            model,
            demand,
            template,
            answer,
            waiting: None,
            placed: None,
            hand_over: None,
            place: None,
            tried: Vec::new(),
            refusals: 0,
            has_tokens: false,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            stopped,
            stages,
            record,
        }
    }

    /// Goes in, or waits.
    ///
    /// # Errors
    /// There is no target; nothing runs.
    pub(crate) fn enter(&mut self, entry: Entry) -> Result<(), KvistError> {
        match entry {
            Entry::Admitted(place) => {
                self.place = Some(place);
                self.demand.queued_for = Some(Duration::ZERO);
                self.place()
            }
            Entry::Queued(waiting) => {
                self.waiting = Some(waiting);
                Ok(())
            }
        }
    }

    /// Chooses a target and sends the request there.
    ///
    /// # Errors
    /// There is no target; nothing runs.
    fn place(&mut self) -> Result<(), KvistError> {
        let attempt = self.record.attempts + 1;
        let view = self.core.view();
        // The newest state counts for a retry: the worker may just have been withdrawn.
        if let Some(model) = view.models.get(&*self.model.name) {
            self.model = Arc::clone(model);
        }
        let select_span = tracing::info_span!(
            parent: &self.record.span, names::SPAN_SELECT,
            otel.status_description = Empty,
            { names::ATTEMPT } = attempt, { names::CANDIDATES } = Empty, { names::MATCHED_BLOCKS } = Empty,
            { names::WORKER_UID } = Empty, { names::RANK } = Empty, { names::ERROR_TYPE } = Empty,
        );
        let choice = select_span.in_scope(|| {
            self.core.selector.select(&view, &self.model, &self.demand, &self.tried, attempt, Intent::Send)
        });
        for decision in choice.decisions() {
            self.core.metrics.decisions.decided(decision);
            self.core.explanations.add(decision);
        }
        let Choice { decision, placement: result, behind } = choice;
        if !decision.local_prefill_reason.is_empty() {
            self.core.metrics.count_hand_over(decision.local_prefill_reason);
        }
        if !select_span.is_disabled() {
            select_span.record(names::CANDIDATES, decision.candidates.len());
            match (&result, decision.chosen_candidate()) {
                (Ok(_), Some(chosen)) => {
                    select_span
                        .record(names::WORKER_UID, chosen.target.worker.as_str())
                        .record(names::RANK, chosen.target.rank.0)
                        .record(names::MATCHED_BLOCKS, chosen.matched_blocks());
                }
                (Ok(_), None) => {}
                (Err(error), _) => record_failure(&select_span, error.code),
            }
        }
        drop(select_span);
        if let Some(place) = &self.place {
            place.placed();
        }
        self.core.metrics.decision_seconds.observe(decision.duration.as_secs_f64());
        // A retry that finds nobody leaves the first attempt's story as it was.
        if result.is_ok() || attempt == 1 {
            self.record.decided(&decision);
        }
        let placement = result.inspect_err(|error| {
            let _ = decision.ending.set(Ending { outcome: error.code.name(), ..Ending::default() });
        })?;
        let lease_id = lease_id(&self.template.request_id, attempt);
        let metrics = &self.core.metrics;
        self.hand_over = behind.map(|behind| HandOver::begin(&placement, behind, lease_id, metrics)).transpose()?;
        self.record.expected_cached_tokens = placement.expected_cached_tokens;
        let most_waiting_tokens = placement.most_waiting_tokens.filter(|_| self.refusals < MOST_REFUSALS);
        self.tried.push(placement.node.target_id(placement.rank));
        self.stages.placed();
        self.send(placement, &decision, |request, hand_over| {
            request.most_waiting_tokens = most_waiting_tokens;
            if let Some(hand_over) = hand_over {
                hand_over.ask_to_keep(request);
            }
        })
    }

    /// Sends the request to a target.
    fn send(
        &mut self,
        placement: Placement,
        decision: &SeenDecision,
        adjust: impl FnOnce(&mut EngineRequest, Option<&HandOver>),
    ) -> Result<(), KvistError> {
        let attempt = self.record.attempts;
        let worker = placement.node.uid.as_str();
        let target = placement.node.target_id(placement.rank);
        let span = tracing::info_span!(
            parent: &self.record.span, names::SPAN_LINK, otel.kind = "client", otel.status_description = Empty,
            { names::WORKER_UID } = worker, { names::RANK } = placement.rank, { names::ATTEMPT } = attempt,
            { names::OUTCOME } = Empty, { names::ERROR_TYPE } = Empty,
        );
        let mut request = self.template.clone();
        request.prompt = Some(Prompt::Tokens(TokenIds { ids: self.demand.tokens.to_vec() }));
        request.rank = placement.rank;
        request.pool_revision.clone_from(&placement.node.target.pool_revision);
        request.expected_cached_tokens = placement.expected_cached_tokens;
        let time_left = self.deadline.deadline().saturating_duration_since(tokio::time::Instant::now());
        request.time_left = time_left.try_into().ok();
        let inbound = (!self.template.traceparent.is_empty()).then_some(self.template.traceparent.as_str());
        request.traceparent = kvist_telemetry::propagate(&span, inbound).unwrap_or_default();
        adjust(&mut request, self.hand_over.as_ref());
        let Some(connection) = &placement.node.connection else {
            return Err(KvistError::new(Code::Internal, "a target without a connection was chosen"));
        };
        let stream = connection.link.start(request);
        self.placed = Some(Placed {
            stream,
            placement,
            span,
            has_asked_for_end: false,
            target,
            since: Instant::now(),
            expected_first_token: expected_first_token(decision),
        });
        Ok(())
    }

    /// Notes that no target was found.
    pub(crate) fn refuse(&mut self, error: &KvistError) {
        self.record.failed(error.code);
    }

    /// The events of the request, each item being everything that was at hand.
    pub(crate) fn into_batches(self) -> impl Stream<Item = Vec<GenerateEvent>> + Send {
        // Boxed: the state moves through every item.
        stream::unfold(Box::new(self), |mut life| async move {
            let batch = life.next_batch().await?;
            Some((batch, life))
        })
    }

    async fn next_batch(&mut self) -> Option<Vec<GenerateEvent>> {
        let mut events = Vec::new();
        loop {
            let woken = if let Some(waiting) = &mut self.waiting {
                tokio::select! {
                    biased;
                    ended = waiting.end() => Woken::Door(ended),
                    () = &mut self.stopped => Woken::Stopped,
                }
            } else {
                let placed = self.placed.as_mut()?;
                tokio::select! {
                    biased;
                    event = placed.stream.next() => Woken::Event(event),
                    () = &mut self.deadline => Woken::Deadline,
                    error = self.stages.expired() => Woken::Stage(error),
                    () = &mut self.stopped => Woken::Stopped,
                }
            };
            match woken {
                Woken::Door(ended) => {
                    if let Err(error) = ended.and_then(|()| self.go_in()) {
                        self.fail(error, &mut events);
                    }
                }
                Woken::Event(event) => {
                    let mut next = event;
                    loop {
                        let lost =
                            || RequestEvent::Failed(KvistError::new(Code::EngineLost, "the engine's answer broke off"));
                        self.take(next.take().unwrap_or_else(lost), &mut events);
                        let Some(placed) = self.placed.as_mut() else { break };
                        next = placed.stream.try_next();
                        if next.is_none() {
                            break;
                        }
                    }
                }
                Woken::Deadline => {
                    if let Some(placed) = &self.placed {
                        placed.stream.abort(AbortReason::Deadline);
                        if !self.has_tokens {
                            let report = report_of_silence(placed.since.elapsed(), placed.expected_first_token);
                            self.model.state.health.report(&placed.target, report);
                        }
                    }
                    self.fail(late(), &mut events);
                }
                Woken::Stage(error) => {
                    if let Some(placed) = &self.placed {
                        placed.stream.abort(AbortReason::Deadline);
                    }
                    self.report(Report::TimedOut);
                    self.fail(error, &mut events);
                }
                Woken::Stopped => {
                    self.fail(KvistError::new(Code::Draining, "the router is being stopped"), &mut events);
                }
            }
            if !events.is_empty() {
                return Some(events);
            }
        }
    }

    /// The wait is over. What was true of caches and targets before it may not be so now, so the choice is made here.
    fn go_in(&mut self) -> Result<(), KvistError> {
        let Some(waiting) = self.waiting.take() else { return Ok(()) };
        let (place, queued_for) = waiting.into_place();
        self.place = Some(place);
        self.demand.queued_for = Some(queued_for);
        self.core.check_quarantine(&self.demand.tokens)?;
        self.place()
    }

    fn take(&mut self, event: RequestEvent, events: &mut Vec<GenerateEvent>) {
        let is_prefill = self.hand_over.as_ref().is_some_and(HandOver::is_prefill);
        match event {
            RequestEvent::Delta(delta) if is_prefill => {
                // The token that no prompt is computed without; the decode worker draws it again.
                if let Some(placed) = &self.placed
                    && !delta.token_ids.is_empty()
                {
                    if let Some(reservation) = &placed.placement.reservation {
                        reservation.prefilled();
                    }
                    self.model.state.health.has_begun_to_answer(&placed.target);
                }
            }
            RequestEvent::Finished(finished) if is_prefill => {
                if let Err(error) = self.hand_on(finished) {
                    self.fail(error, events);
                }
            }
            RequestEvent::Delta(delta) => {
                if !delta.token_ids.is_empty() {
                    self.stages.saw_tokens();
                }
                if !self.has_tokens && !delta.token_ids.is_empty() {
                    self.has_tokens = true;
                    self.record.first_token();
                    if let Some(hand_over) = &mut self.hand_over {
                        hand_over.answered();
                    }
                    if let Some(placed) = &self.placed {
                        if let Some(reservation) = &placed.placement.reservation {
                            reservation.prefilled();
                        }
                        self.model.state.health.has_begun_to_answer(&placed.target);
                    }
                    self.core.quarantine.answered(|| fingerprint(&self.demand.tokens));
                }
                let may_end = self.answer.push(delta, events);
                if may_end
                    && let Some(placed) = &mut self.placed
                    && !placed.has_asked_for_end
                {
                    placed.has_asked_for_end = true;
                    placed.stream.abort(AbortReason::StopString);
                }
            }
            RequestEvent::Finished(finished) => {
                self.record.receipt = finished.receipt;
                self.answer.finish(finished, events);
                let is_late = self.deadline.deadline() <= tokio::time::Instant::now() + DEADLINE_SLACK;
                if let Some(GenerateEvent::Failed(error)) = events.last_mut()
                    && error.code == Code::Cancelled
                    && is_late
                {
                    // The worker keeps the same deadline and was a moment faster.
                    *error = late();
                }
                if let (Some(GenerateEvent::Finished(end)), Some(hand_over)) = (events.last_mut(), &mut self.hand_over)
                {
                    hand_over.answered();
                    // What the one engine sent to the other is not what a client means by cached.
                    end.usage.cached_tokens = hand_over.cached_tokens().unwrap_or(end.usage.cached_tokens);
                }
                let report = match events.last() {
                    Some(GenerateEvent::Failed(error)) => report_of(error),
                    _ => Report::Success,
                };
                self.report(report);
                match events.last() {
                    Some(GenerateEvent::Finished(end)) => {
                        self.record.usage = end.usage;
                        let by_length = end.choices.iter().all(|choice| choice.reason == FinishReason::Length);
                        self.record.finished(if by_length { "length" } else { "stop" });
                    }
                    Some(GenerateEvent::Failed(error)) => {
                        self.note_usage();
                        self.record.failed(error.code);
                    }
                    _ => {}
                }
                self.end_placement(None);
                self.place = None;
            }
            RequestEvent::Failed(error) if error.code == Code::BusierThanExpected && self.refusals < MOST_REFUSALS => {
                if let Err(error) = self.place_anew(&error) {
                    self.fail(error, events);
                }
            }
            RequestEvent::Failed(error) => {
                self.report(report_of(&error));
                if self.may_retry(&error) {
                    if error.code == Code::EngineLost {
                        self.blame();
                    }
                    self.record.end_attempt(error.code.name());
                    self.end_placement(Some(&error));
                    match self.retry() {
                        Ok(()) => return,
                        Err(_) => return self.fail(error, events),
                    }
                }
                if error.code == Code::EngineLost && !self.has_tokens {
                    self.blame();
                }
                self.fail(error, events);
            }
        }
    }

    fn report(&self, report: Report) {
        if let Some(placed) = &self.placed {
            self.model.state.health.report(&placed.target, report);
        }
    }

    /// Decides again after a refusal, which has brought the newest load. It is no fault, so the target may be chosen again.
    fn place_anew(&mut self, refusal: &KvistError) -> Result<(), KvistError> {
        self.report(report_of(refusal));
        if let Some(placed) = &self.placed {
            self.core.selector.take_back(&self.core.view(), &self.demand, &placed.placement);
        }
        if let Some(hand_over) = &mut self.hand_over {
            hand_over.refused();
        }
        self.tried.pop();
        self.refusals += 1;
        self.core.metrics.refusals.inc();
        self.record.end_attempt(refusal.code.name());
        self.end_placement(Some(refusal));
        self.place()
    }

    fn may_retry(&self, error: &KvistError) -> bool {
        // What is wrong with the request is wrong everywhere.
        let is_fault_of_caller = (400..500).contains(&error.code.http_status()) && !error.code.is_retryable();
        let can_move = (error.not_started && !is_fault_of_caller)
            || matches!(error.code, Code::EngineLost | Code::EngineUnavailable | Code::Draining | Code::NotReady);
        can_move
            && !self.has_tokens
            && self.record.attempts - self.refusals < MOST_ATTEMPTS
            && !self.core.stopped.is_cancelled()
    }

    /// Places the request once more. What has killed engines is not carried to the next one.
    fn retry(&mut self) -> Result<(), KvistError> {
        self.core.check_quarantine(&self.demand.tokens)?;
        self.place()?;
        self.core.metrics.retries.inc();
        Ok(())
    }

    /// The engine was lost while this prompt was in it and had no answer.
    fn blame(&self) {
        if let Some(target) = self.tried.last()
            && let Some(incarnation) = self.record.decision.as_ref().and_then(|decision| decision.chosen_incarnation)
        {
            let now = Instant::now();
            self.core.quarantine.engine_lost(fingerprint(&self.demand.tokens), target.worker.clone(), incarnation, now);
        }
    }

    fn fail(&mut self, error: KvistError, events: &mut Vec<GenerateEvent>) {
        self.note_usage();
        self.record.failed(error.code);
        self.end_placement(Some(&error));
        (self.waiting, self.place) = (None, None);
        events.push(GenerateEvent::Failed(error));
    }

    /// What is known of a request that did not end well.
    fn note_usage(&mut self) {
        self.record.usage.prompt_tokens = u32::try_from(self.demand.tokens.len()).unwrap_or(u32::MAX);
        self.record.usage.completion_tokens = self.answer.generated_tokens();
        self.record.usage.cached_tokens = self.answer.cached_tokens().unwrap_or(0);
    }

    /// Ends the request at its worker if it still runs there, and the reservation at once.
    fn end_placement(&mut self, error: Option<&KvistError>) {
        let placed = self.placed.take();
        if let (Some(hand_over), Some(_)) = (&mut self.hand_over, error) {
            hand_over.failed();
        }
        let Some(placed) = placed else {
            self.hand_over = None;
            return;
        };
        match error {
            Some(error) => record_failure(&placed.span, error.code),
            None => {
                placed.span.record(names::OUTCOME, self.record.outcome());
            }
        }
        // The request has ended there before what is kept for it is freed.
        drop(placed);
        self.hand_over = None;
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let Some(placed) = &mut self.placed else { return };
        // Whoever closes a connection that takes nothing more drops what had ended for that very reason.
        while let Some(event) = placed.stream.try_next() {
            if let RequestEvent::Failed(error) = event
                && error.code == Code::SlowClient
            {
                self.record.failed(error.code);
            }
        }
        placed.span.record(names::OUTCOME, self.record.outcome());
        // Nothing was learned, and a probe that nobody waits for is over.
        self.report(Report::ClientError);
        self.note_usage();
    }
}

/// Names a prompt without holding it.
pub(crate) fn fingerprint(tokens: &[u32]) -> u64 {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64(&bytes)
}
