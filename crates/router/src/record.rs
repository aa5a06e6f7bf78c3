//! What is said of a request once it has ended, however it ended.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_errors::Code;
use kvist_proto::events::v1::Receipt;
use kvist_telemetry::{RequestLine, names};

use crate::{
    core::RouterCore,
    explain::{Ending, SeenDecision},
    generate::{EmbedInput, GenerateInput, Prompt, Usage},
    metrics::{ModelLabel, RequestLabels},
};

/// The outcome of a request whose client went away.
pub(crate) const CANCELLED: &str = "cancelled";

/// Counts a request from its arrival to its end. Dropped without an end, it says that the client went away.
#[derive(Debug)]
pub(crate) struct RequestRecord {
    core: Arc<RouterCore>,
    pub(crate) request_id: Arc<str>,
    pub(crate) caller: Arc<str>,
    pub(crate) door: &'static str,
    /// The door's span, which gets what is known of the request at its end.
    pub(crate) span: tracing::Span,
    pub(crate) trace_id: Option<String>,
    /// As the cluster state names it; for an unknown one a word that keeps metrics small.
    pub(crate) model: Arc<str>,
    pub(crate) decision: Option<Arc<SeenDecision>>,
    pub(crate) attempts: u32,
    pub(crate) usage: Usage,
    pub(crate) receipt: Option<Receipt>,
    pub(crate) expected_cached_tokens: Option<u32>,
    arrived: Instant,
    first_token: Option<Instant>,
    decided: Option<Instant>,
    /// The prompt was computed by another worker than the one that answers.
    is_handed_over: bool,
    outcome: &'static str,
    error_code: Option<Code>,
}

/// Says on a door's span why its request failed. The router does so itself for every request that it gave an id.
pub fn record_failure(span: &tracing::Span, code: Code) {
    span.record(names::ERROR_TYPE, code.name());
    span.record(names::RPC_RESPONSE_STATUS_CODE, code.grpc_name());
    if code.is_fault_of_server() {
        kvist_telemetry::set_status_error(span, code.name());
    }
}

impl RequestRecord {
    pub(crate) fn new(
        core: Arc<RouterCore>,
        request_id: Arc<str>,
        caller: Arc<str>,
        door: &'static str,
        span: tracing::Span,
    ) -> Self {
        core.request_began();
        Self {
            core,
            request_id,
            caller,
            door,
            span,
            trace_id: None,
            model: "unknown".into(),
            decision: None,
            attempts: 0,
            usage: Usage::default(),
            receipt: None,
            expected_cached_tokens: None,
            arrived: Instant::now(),
            first_token: None,
            decided: None,
            is_handed_over: false,
            outcome: CANCELLED,
            error_code: None,
        }
    }

    /// Says on the span what is asked for.
    pub(crate) fn asked(&self, input: &GenerateInput) {
        let operation = match &input.prompt {
            Prompt::Chat(_) => "chat",
            Prompt::Text(_) | Prompt::Tokens(_) => "text_completion",
        };
        self.span
            .record(names::REQUEST_ID, &*self.request_id)
            .record(names::OPERATION, operation)
            .record(names::MODEL, input.model.as_str())
            .record(names::MAX_TOKENS, input.stop.max_tokens)
            .record(names::TEMPERATURE, input.sampling.temperature)
            .record(names::TOP_P, input.sampling.top_p);
    }

    /// The same for embeddings.
    pub(crate) fn asked_to_embed(&self, input: &EmbedInput) {
        self.span
            .record(names::REQUEST_ID, &*self.request_id)
            .record(names::OPERATION, "embeddings")
            .record(names::MODEL, input.model.as_str());
    }

    /// A target was chosen.
    pub(crate) fn decided(&mut self, decision: &Arc<SeenDecision>) {
        self.end_attempt(self.outcome);
        self.attempts += 1;
        self.is_handed_over = false;
        self.decided = Some(Instant::now());
        self.decision = Some(Arc::clone(decision));
    }

    /// The prompt has been computed elsewhere, and what the engine found there is told; another worker answers.
    pub(crate) fn handed_over(&mut self, receipt: Option<Receipt>, answering: &Arc<SeenDecision>) {
        if let Some(prefill) = self.decision.take() {
            let _ = prefill.ending.set(Ending { receipt, outcome: "handed_over", time_to_first_token: None });
            if let Some(receipt) = &receipt {
                self.note_delivered(&prefill, receipt);
            }
        }
        self.is_handed_over = true;
        self.expected_cached_tokens = None;
        self.decided = Some(Instant::now());
        self.decision = Some(Arc::clone(answering));
    }

    /// Holds what an engine found in its cache against what was expected.
    fn note_delivered(&self, decision: &SeenDecision, receipt: &Receipt) {
        let metrics = &self.core.metrics;
        if let Some(expected) = self.expected_cached_tokens {
            metrics.predicted_cached_tokens.inc_by(u64::from(expected));
            metrics.delivered_cached_tokens.inc_by(u64::from(receipt.cached_tokens));
            let now = self.core.started.elapsed();
            self.core.awareness.note_receipt(now, &self.model, expected, receipt.cached_tokens);
        }
        metrics.decisions.delivered(decision, receipt.cached_tokens);
    }

    /// The first token has arrived.
    pub(crate) fn first_token(&mut self) {
        if self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            let seconds = (now - self.arrived).as_secs_f64();
            self.core.metrics.first_token_seconds.get_or_create(&self.model_label()).observe(seconds);
            self.span.record(names::TIME_TO_FIRST_CHUNK, seconds);
            if let (Some(decision), Some(decided)) = (&self.decision, self.decided) {
                self.core.metrics.decisions.answered(decision, (now - decided).as_secs_f64());
            }
        }
    }

    fn model_label(&self) -> ModelLabel {
        ModelLabel { model: self.model.to_string() }
    }

    /// It ended well.
    pub(crate) fn finished(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }

    /// How it stands.
    pub(crate) fn outcome(&self) -> &'static str {
        self.outcome
    }

    /// It failed.
    pub(crate) fn failed(&mut self, code: Code) {
        self.error_code = Some(code);
        self.outcome = if code == Code::Cancelled { CANCELLED } else { code.name() };
    }

    /// Closes the explanation of the present attempt.
    pub(crate) fn end_attempt(&self, outcome: &'static str) {
        if let Some(decision) = &self.decision {
            let time_to_first_token = self.first_token.zip(self.decided).map(|(first, decided)| first - decided);
            let _ = decision.ending.set(Ending { receipt: self.receipt, outcome, time_to_first_token });
        }
    }
}

fn milliseconds(duration: Duration) -> f64 {
    // Whole microseconds: more digits say nothing.
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

impl RequestRecord {
    fn record_end(&self) {
        self.span
            .record(names::PROMPT_TOKENS, self.usage.prompt_tokens)
            .record(names::COMPLETION_TOKENS, self.usage.completion_tokens)
            .record(names::CACHED_TOKENS, self.usage.cached_tokens)
            .record(names::OUTCOME, self.outcome);
        match self.error_code {
            Some(code) => record_failure(&self.span, code),
            None if self.outcome == CANCELLED => {
                self.span.record(names::RPC_RESPONSE_STATUS_CODE, Code::Cancelled.grpc_name());
            }
            None => {
                self.span.record(names::RPC_RESPONSE_STATUS_CODE, "OK").record(names::FINISH_REASONS, self.outcome);
            }
        }
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.end_attempt(self.outcome);
        self.record_end();
        let duration = self.arrived.elapsed();
        let metrics = &self.core.metrics;
        let model = self.model_label();
        metrics.request_seconds.get_or_create(&model).observe(duration.as_secs_f64());
        if let Some(first) = self.first_token
            && let Some(further) = self.usage.completion_tokens.checked_sub(1).filter(|further| *further > 0)
            && self.error_code.is_none()
        {
            let seconds = first.elapsed().as_secs_f64() / f64::from(further);
            metrics.time_per_token_seconds.get_or_create(&model).observe(seconds);
        }
        let queue = self.receipt.and_then(|receipt| receipt.queue_duration);
        if let Some(queue) = queue.and_then(|queue| Duration::try_from(queue).ok()) {
            metrics.engine_queue_seconds.get_or_create(&model).observe(queue.as_secs_f64());
        }
        metrics
            .requests
            .get_or_create(&RequestLabels {
                model: model.model,
                outcome: self.outcome.to_owned(),
                surface: self.door.to_owned(),
            })
            .inc();
        metrics.prompt_tokens.inc_by(u64::from(self.usage.prompt_tokens));
        metrics.completion_tokens.inc_by(u64::from(self.usage.completion_tokens));
        // What a decode engine was sent was in no cache.
        if let (Some(receipt), Some(decision), false) = (&self.receipt, &self.decision, self.is_handed_over) {
            self.note_delivered(decision, receipt);
        }
        let chosen = self.decision.as_ref().and_then(|decision| decision.chosen_candidate());
        let matched = chosen.filter(|seen| seen.claim.is_some()).map(|seen| u64::from(seen.matched_blocks()));
        RequestLine {
            request_id: self.request_id.to_string(),
            trace_id: self.trace_id.take(),
            surface: self.door.to_owned(),
            tenant: (!self.caller.is_empty()).then(|| self.caller.to_string()),
            model: self.model.to_string(),
            worker: chosen.map(|seen| seen.target.worker.to_string()),
            rank: chosen.map(|seen| seen.target.rank.0),
            policy: chosen.and(self.decision.as_ref()).map(|decision| decision.policy.to_string()),
            attempts: self.attempts,
            prompt_blocks: self.decision.as_ref().map(|decision| u64::from(decision.prompt_blocks)),
            matched_blocks: matched,
            prompt_tokens: (self.usage.prompt_tokens > 0).then_some(u64::from(self.usage.prompt_tokens)),
            cached_tokens: self.receipt.map(|receipt| u64::from(receipt.cached_tokens)),
            completion_tokens: (self.usage.prompt_tokens > 0).then_some(u64::from(self.usage.completion_tokens)),
            queue_ms: queue.and_then(|queue| Duration::try_from(queue).ok()).map(milliseconds),
            time_to_first_token_ms: self.first_token.map(|first| milliseconds(first - self.arrived)),
            duration_ms: milliseconds(duration),
            outcome: match self.error_code {
                Some(_) if self.outcome != CANCELLED => "error".to_owned(),
                _ => self.outcome.to_owned(),
            },
            error_code: self.error_code.map(|code| code.name().to_owned()),
        }
        .emit();
        self.core.request_ended();
    }
}
