//! One request from its prompt to its end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use kvist_link::{LinkEvent, RequestStream};
use kvist_proto::{
    engine::v1::{AbortReason, EngineRequest, FinishReason, Finished, TokenDelta, TokenIds, engine_request::Prompt},
    router::v1::{ChoiceFinish, GenerateFinished, GenerateRequest, TextDelta, Usage},
};
use kvist_text::{Detokenizer, ModelText, StopStrings};

use crate::core::{Chosen, DecisionInput, Reserved, RouterCore};

/// How long after the deadline the engine may take to confirm the end.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// What a client is told.
#[derive(Clone, Debug, PartialEq)]
pub enum TextEvent {
    /// New text.
    Delta(TextDelta),
    /// The end, with the engine's own reason.
    Finished(Box<GenerateFinished>),
    /// The request failed; nothing follows.
    Failed(KvistError),
}

/// A running request. Dropping it aborts it at the worker and frees its reservation.
#[derive(Debug)]
pub struct Generation {
    core: Arc<RouterCore>,
    request_id: String,
    model: String,
    request: GenerateRequest,
    ids: Vec<u32>,
    text: Arc<ModelText>,
    traceparent: String,
    deadline: Instant,
    /// Where it runs.
    worker_uid: String,
    tried: Vec<String>,
    attempt: u32,
    stream: RequestStream,
    reserved: Option<Reserved>,
    started: Instant,
    first_token: Option<Duration>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    matched_stop: Option<usize>,
    ended: bool,
}

impl RouterCore {
    /// Tokenizes, chooses, reserves and starts a request.
    ///
    /// # Errors
    /// The request is wrong, or nothing can take it.
    pub async fn generate(
        self: &Arc<Self>,
        mut request: GenerateRequest,
        time_left: Option<Duration>,
        traceparent: String,
    ) -> Result<Generation, KvistError> {
        let started = Instant::now();
        if request.sampling.as_ref().and_then(|sampling| sampling.choices).unwrap_or(1) > 1 {
            return Err(KvistError::field(Code::UnsupportedField, "n", "this version returns one choice"));
        }
        let model = request.model.clone();
        let cluster = self.cluster.load_full();
        let entry = Arc::clone(cluster.model(&model)?);
        let tokenized = self.tokenize(&entry, request.prompt.take()).await?;
        let request_id = self.new_request_id(&request.request_id);
        let deadline = started + time_left.unwrap_or(self.settings.default_deadline);
        let stops = StopStrings::new(request.stop_strings.clone(), request.include_stop_string);
        let mut tried = Vec::new();
        let mut attempt = 1;
        loop {
            let parts = Parts {
                core: self,
                request: &request,
                request_id: &request_id,
                ids: &tokenized.ids,
                traceparent: &traceparent,
                deadline,
            };
            match parts.start(&model, attempt, &tried).await {
                Ok((worker_uid, stream, reserved)) => {
                    return Ok(Generation {
                        worker_uid,
                        core: Arc::clone(self),
                        request_id,
                        model,
                        detokenizer: tokenized.text.detokenizer(true),
                        ids: tokenized.ids,
                        text: tokenized.text,
                        request,
                        traceparent,
                        deadline,
                        tried,
                        attempt,
                        stream,
                        reserved,
                        started,
                        first_token: None,
                        stops,
                        matched_stop: None,
                        ended: false,
                    });
                }
                Err((_, Some(uid))) if attempt == 1 => {
                    tried.push(uid);
                    attempt += 1;
                }
                Err((error, _)) => {
                    self.records.complete(&request_id, error.code.name(), None, None);
                    return Err(error);
                }
            }
        }
    }
}

/// What a start needs, at the first attempt and at the second.
struct Parts<'a> {
    core: &'a Arc<RouterCore>,
    request: &'a GenerateRequest,
    request_id: &'a str,
    ids: &'a [u32],
    traceparent: &'a str,
    deadline: Instant,
}

impl Parts<'_> {
    /// Chooses and starts. An error names the worker when another one could be tried.
    async fn start(
        &self,
        model: &str,
        attempt: u32,
        tried: &[String],
    ) -> Result<(String, RequestStream, Option<Reserved>), (KvistError, Option<String>)> {
        let cluster = self.core.cluster.load_full();
        let entry = Arc::clone(cluster.model(model).map_err(|error| (error, None))?);
        let input = DecisionInput {
            request_id: self.request_id,
            ids: self.ids,
            adapter: &self.request.adapter,
            cache_salt: &self.request.cache_salt,
            attempt,
            reserve: true,
        };
        let Chosen { worker, reserved, expected_cached_tokens, record } =
            self.core.choose(&cluster, &entry, input, tried).map_err(|refused| {
                let (error, record) = *refused;
                self.core.records.add(record);
                (error, None)
            })?;
        self.core.records.add(record);
        self.check_context(&worker.link.state()).map_err(|error| (error, None))?;
        let time_left = self.deadline.saturating_duration_since(Instant::now());
        let engine_request = EngineRequest {
            request_id: if attempt == 1 {
                self.request_id.to_owned()
            } else {
                format!("{}-{attempt}", self.request_id)
            },
            prompt: Some(Prompt::Tokens(TokenIds { ids: self.ids.to_vec() })),
            sampling: self.request.sampling.clone(),
            stop: self.request.stop.clone(),
            structured_output: self.request.structured_output.clone(),
            adapter: self.request.adapter.clone(),
            cache_salt: self.request.cache_salt.clone(),
            priority: self.request.priority,
            time_left: time_left.try_into().ok(),
            traceparent: self.traceparent.to_owned(),
            expected_cached_tokens: Some(expected_cached_tokens),
            engine_extras: self.request.engine_extras.clone(),
            pool_revision: worker.entry.target.as_ref().map(|target| target.pool_revision.clone()).unwrap_or_default(),
            ..EngineRequest::default()
        };
        match worker.link.start(engine_request).await {
            Ok(stream) => Ok((worker.uid().to_owned(), stream, reserved)),
            Err(error) => Err((error, Some(worker.uid().to_owned()))),
        }
    }

    /// Refuses what cannot fit before it costs anything.
    fn check_context(&self, state: &kvist_link::LinkState) -> Result<(), KvistError> {
        let kvist_link::LinkState::Connected(description) = state else { return Ok(()) };
        let context = description.limits.as_ref().map_or(0, |limits| limits.context_tokens) as usize;
        let wanted = self.request.stop.as_ref().and_then(|stop| stop.max_tokens).unwrap_or(1) as usize;
        let prompt = self.ids.len();
        if context > 0 && prompt + wanted > context {
            let why = format!("the prompt has {prompt} tokens and {wanted} are asked for; the context holds {context}");
            return Err(KvistError::field(Code::ContextLengthExceeded, "prompt", why));
        }
        Ok(())
    }
}

impl Generation {
    /// The router's id of the request.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Name of the model as the client said it.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The model's text, for the texts of log-probabilities.
    #[must_use]
    pub fn text(&self) -> &ModelText {
        &self.text
    }

    /// Everything at hand, as soon as there is something; none after the end.
    pub async fn next_events(&mut self) -> Option<Vec<TextEvent>> {
        let mut events = Vec::new();
        while !self.ended && events.is_empty() {
            let wait = tokio::time::timeout_at((self.deadline + DEADLINE_GRACE).into(), self.stream.next()).await;
            let mut next = match wait {
                Ok(event) => event,
                Err(_) => Some(LinkEvent::Failed(KvistError::new(Code::DeadlineExceeded, "the deadline passed"))),
            };
            while let Some(event) = next.take() {
                match event {
                    LinkEvent::Delta(delta) => self.take_delta(delta, &mut events),
                    LinkEvent::Finished(finished) => self.finish(&finished, &mut events),
                    LinkEvent::Failed(error) => {
                        if !self.retry(&error).await {
                            self.fail(error, &mut events);
                        }
                    }
                }
                if !self.ended {
                    next = self.stream.try_next();
                }
            }
        }
        (!events.is_empty()).then_some(events)
    }

    fn take_delta(&mut self, delta: TokenDelta, events: &mut Vec<TextEvent>) {
        if self.first_token.is_none() {
            self.first_token = Some(self.started.elapsed());
            if let Some(reserved) = &self.reserved {
                reserved.prompt_done(0);
            }
        }
        if self.matched_stop.is_some() {
            return;
        }
        let mut text = String::new();
        for id in &delta.token_ids {
            self.detokenizer.push(*id, &mut text);
        }
        if !self.stops.is_empty() {
            let outcome = self.stops.feed(&text);
            text = outcome.text;
            if outcome.matched.is_some() {
                self.matched_stop = outcome.matched;
                self.stream.abort(AbortReason::StopString);
            }
        }
        let token_ids = if self.request.return_token_ids { delta.token_ids } else { Vec::new() };
        if !text.is_empty() || !delta.logprobs.is_empty() || !token_ids.is_empty() {
            // Tokens of one write go out as one piece of text.
            if let Some(TextEvent::Delta(last)) = events.last_mut() {
                last.text.push_str(&text);
                last.token_ids.extend(token_ids);
                last.logprobs.extend(delta.logprobs);
            } else {
                events.push(TextEvent::Delta(TextDelta {
                    index: delta.index,
                    text,
                    token_ids,
                    logprobs: delta.logprobs,
                }));
            }
        }
    }

    fn finish(&mut self, finished: &Finished, events: &mut Vec<TextEvent>) {
        let reason = if self.matched_stop.is_some() { FinishReason::Stop } else { finished.reason() };
        match reason {
            FinishReason::Stop | FinishReason::Length => {}
            FinishReason::Aborted => {
                let error = if Instant::now() >= self.deadline {
                    KvistError::new(Code::DeadlineExceeded, "the deadline passed")
                } else {
                    KvistError::new(Code::Cancelled, "the request was aborted at the engine")
                };
                return self.fail(error, events);
            }
            FinishReason::Unspecified => {
                return self.fail(KvistError::new(Code::EngineFailed, "the engine gave no reason for the end"), events);
            }
        }
        if self.matched_stop.is_none() {
            let mut rest = String::new();
            self.detokenizer.finish(&mut rest);
            let mut text = self.stops.feed(&rest).text;
            text.push_str(&self.stops.finish());
            if !text.is_empty() {
                events.push(TextEvent::Delta(TextDelta { text, ..TextDelta::default() }));
            }
        }
        let receipt = finished.receipt.unwrap_or_default();
        let outcome = if reason == FinishReason::Stop { "stop" } else { "length" };
        self.end(outcome, Some(&receipt));
        let usage = Usage {
            prompt_tokens: u32::try_from(self.ids.len()).unwrap_or(u32::MAX),
            completion_tokens: receipt.completion_tokens,
            cached_tokens: receipt.cached_tokens,
        };
        events.push(TextEvent::Finished(Box::new(GenerateFinished {
            choices: vec![ChoiceFinish {
                index: 0,
                reason: reason.into(),
                stop_string: self.matched_stop.map(|stop| self.stops.get(stop).to_owned()).unwrap_or_default(),
                stop_token_id: finished.stop_token_id,
            }],
            usage: Some(usage),
            receipt: Some(receipt),
        })));
    }

    /// Starts again elsewhere when nothing was told to the client yet; once.
    async fn retry(&mut self, error: &KvistError) -> bool {
        let may = error.not_started || error.code == Code::EngineLost;
        if !may || self.first_token.is_some() || self.attempt > 1 || Instant::now() >= self.deadline {
            return false;
        }
        self.tried.push(self.worker_uid.clone());
        self.core.records.complete(&self.request_id, error.code.name(), None, None);
        self.reserved = None;
        self.attempt += 1;
        let parts = Parts {
            core: &self.core,
            request: &self.request,
            request_id: &self.request_id,
            ids: &self.ids,
            traceparent: &self.traceparent,
            deadline: self.deadline,
        };
        let Ok((worker_uid, stream, reserved)) = parts.start(&self.model, self.attempt, &self.tried).await else {
            return false;
        };
        (self.worker_uid, self.stream, self.reserved) = (worker_uid, stream, reserved);
        true
    }

    fn fail(&mut self, error: KvistError, events: &mut Vec<TextEvent>) {
        self.end(error.code.name(), None);
        events.push(TextEvent::Failed(error));
    }

    fn end(&mut self, outcome: &str, receipt: Option<&kvist_proto::events::v1::Receipt>) {
        self.ended = true;
        self.reserved = None;
        self.core.records.complete(&self.request_id, outcome, receipt, self.first_token);
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Code::Cancelled.name(), None);
        }
    }
}
