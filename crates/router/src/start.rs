//! The start of a request, and the router behind its trait.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use kvist_errors::{Code, KvistError};
use kvist_proto::{engine::v1::EngineRequest, router::v1::ModelSummary};
use kvist_telemetry::names;

use crate::{
    answer::{Answer, AnswerSettings},
    core::RouterCore,
    door::Ticket,
    generate::{EmbedInput, EmbedOutput, EventStream, Generate, GenerateInput, Prompt, RequestContext, Tokens},
    life::Life,
    needs::Needs,
    parsing::{OfferedTools, tool_family},
    record::RequestRecord,
    select::{Demand, to_u32},
};

/// Between two looks of a request that came before the first target.
const STARTING_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl RouterCore {
    /// In the first seconds of a process, waits for the first target of a model. Whoever restarts a router that is the
    /// only one sees a pause and no refusal.
    pub(crate) async fn wait_while_starting(&self, model: &str, deadline: Instant) {
        let until = self.starting_until.min(deadline);
        while Instant::now() < until && !self.is_draining() {
            let view = self.view();
            let may_come = match view.models.get(model) {
                Some(model) => !model.can_answer(),
                None => !self.has_state.load(Ordering::Acquire),
            };
            if !may_come {
                return;
            }
            tokio::time::sleep(STARTING_POLL_INTERVAL).await;
        }
    }

    async fn start(
        self: &Arc<Self>,
        context: RequestContext,
        mut input: GenerateInput,
        record: &mut Option<RequestRecord>,
    ) -> Result<EventStream, KvistError> {
        if self.is_draining() {
            return Err(KvistError::new(Code::Draining, "the router is being stopped").before_start());
        }
        let began = Instant::now();
        let deadline = context.deadline.unwrap_or_else(|| began + self.default_deadline());
        self.wait_while_starting(&input.model, deadline).await;
        let view = self.view();
        let model = self.model(&view, &input.model)?;
        if let Some(record) = record.as_mut() {
            record.model = Arc::clone(&model.name);
        }
        if input.sampling.prompt_logprobs.is_some() {
            let field = "sampling.prompt_logprobs";
            return Err(KvistError::field(Code::UnsupportedField, field, "this version does not return them"));
        }
        let tools = OfferedTools::take(&mut input, tool_family(&model.model, model.text().as_deref()))?;
        let needs = Needs::of(&input).for_tools(&tools);
        let tokenize_span = tracing::info_span!(parent: &context.span, names::SPAN_TOKENIZE);
        let cache_salt = join_salts(&context.caller_salt, &input.cache_salt);
        let encoding = self.tokenize_with(&model, input.prompt, &cache_salt);
        let expired = || KvistError::new(Code::DeadlineExceeded, "the deadline passed before the request was placed");
        let (tokens, text) =
            tokio::time::timeout_at(deadline.into(), encoding).await.map_err(|_| expired().before_start())??;
        drop(tokenize_span);
        self.metrics.tokenize_seconds.observe(began.elapsed().as_secs_f64());
        let prompt_tokens = to_u32(tokens.len());
        if let Some(record) = record.as_mut() {
            record.usage.prompt_tokens = prompt_tokens;
        }
        check_context(model.context_tokens(), prompt_tokens, input.stop.max_tokens)?;
        self.check_quarantine(&tokens)?;
        let request_id: Arc<str> =
            record.as_ref().map_or_else(|| self.request_id("").into(), |record| Arc::clone(&record.request_id));
        let demand = Demand {
            request_id: Arc::clone(&request_id),
            tokens: Arc::new(tokens),
            adapter: input.adapter.clone(),
            cache_salt,
            further_tokens: 0,
            max_tokens: input.stop.max_tokens,
            text: text.clone(),
            needs,
            session: session_of(&context.session_id),
            queued_for: None,
        };
        let plan = tools.plan(&model.model, text.as_deref(), &demand.tokens, &request_id)?;
        let parse_failures = (!plan.parsing.is_nothing()).then(|| self.metrics.parse_failures_of(&model.name));
        let answer = Answer::new(
            text,
            AnswerSettings {
                choices: input.sampling.choices.unwrap_or(1),
                stop_strings: input.stop_strings,
                include_stop_string: input.include_stop_string,
                return_token_ids: input.return_token_ids,
                prompt_tokens,
                plan: Some(plan),
                parse_failures,
            },
        );
        let template = EngineRequest {
            request_id: request_id.to_string(),
            sampling: Some(input.sampling),
            stop: Some(input.stop),
            structured_output: input.structured_output,
            adapter: input.adapter,
            cache_salt: demand.cache_salt.clone(),
            priority: input.priority,
            traceparent: context.traceparent,
            tracestate: context.tracestate,
            engine_extras: input.engine_extras,
            ..EngineRequest::default()
        };
        let Some(record) = record.take() else {
            return Err(KvistError::new(Code::Internal, "a request without a record"));
        };
        let core = Arc::clone(self);
        let ticket =
            Ticket { class: &context.class, priority: input.priority, deadline, tokens: demand.expected_tokens() };
        let entry = model.state.door.enter(ticket);
        let mut life = Life::new(core, model, demand, template, answer, deadline.into(), record);
        if let Err(error) = entry.and_then(|entry| life.enter(entry)) {
            life.refuse(&error);
            return Err(error);
        }
        Ok(EventStream::new(request_id, prompt_tokens, life.into_batches()))
    }
}

/// The session of an id; none for an empty one.
pub(crate) fn session_of(id: &str) -> Option<Arc<str>> {
    (!id.is_empty()).then(|| id.into())
}

/// Caches of an API key with a salt are its own; the client may split them further.
#[must_use]
pub fn join_salts(of_caller: &str, of_request: &str) -> String {
    match (of_caller, of_request) {
        ("", salt) | (salt, "") => salt.to_owned(),
        // The length keeps "a" + "bc" and "ab" + "c" apart.
        (caller, request) => format!("{}:{caller}:{request}", caller.len()),
    }
}

pub(crate) fn check_context(
    context_tokens: u32,
    prompt_tokens: u32,
    max_tokens: Option<u32>,
) -> Result<(), KvistError> {
    let completion = max_tokens.unwrap_or(1);
    let wanted = u64::from(prompt_tokens) + u64::from(completion);
    if context_tokens == 0 || wanted <= u64::from(context_tokens) {
        return Ok(());
    }
    let message = format!(
        "the model's context is {context_tokens} tokens; the prompt has {prompt_tokens} and {completion} more were \
         asked for"
    );
    Err(KvistError::new(Code::ContextLengthExceeded, message)
        .with_metadata("context_tokens", context_tokens.to_string())
        .with_metadata("prompt_tokens", prompt_tokens.to_string()))
}

/// The router behind its trait. A type of its own, because a request's life needs the router by `Arc`.
#[derive(Clone, Debug)]
pub struct Router(pub Arc<RouterCore>);

impl Router {
    /// The record of a request that has come in, under a new id.
    fn record(&self, context: &RequestContext) -> RequestRecord {
        let request_id: Arc<str> = self.0.request_id(&context.request_id).into();
        let (caller, span) = (Arc::clone(&context.caller), context.span.clone());
        let mut record = RequestRecord::new(Arc::clone(&self.0), request_id, caller, context.door, span);
        record.trace_id = kvist_telemetry::span_traceparent(&context.span)
            .or_else(|| kvist_telemetry::parse_traceparent(&context.traceparent))
            .map(|place| place.trace_id_hex());
        record
    }
}

impl Generate for Router {
    fn generate(
        &self,
        context: RequestContext,
        input: GenerateInput,
    ) -> BoxFuture<'_, Result<EventStream, KvistError>> {
        Box::pin(async move {
            let record = self.record(&context);
            let request_id = Arc::clone(&record.request_id);
            record.asked(&input);
            let mut record = Some(record);
            let result = self.0.start(context, input, &mut record).await;
            // The id travels with the error, so that the client can ask about it.
            result.map_err(|error| {
                if let Some(record) = &mut record {
                    record.failed(error.code);
                }
                error.with_metadata("request_id", &*request_id)
            })
        })
    }

    fn embed(&self, context: RequestContext, input: EmbedInput) -> BoxFuture<'_, Result<EmbedOutput, KvistError>> {
        Box::pin(async move {
            let mut record = self.record(&context);
            record.asked_to_embed(&input);
            match self.0.embed(&context, input, &mut record).await {
                Ok(output) => {
                    record.finished("embedded");
                    Ok(output)
                }
                Err(error) => {
                    record.failed(error.code);
                    Err(error.with_metadata("request_id", &*record.request_id))
                }
            }
        })
    }

    fn detokenize<'a>(&'a self, model: &'a str, token_ids: &'a [u32]) -> BoxFuture<'a, Result<String, KvistError>> {
        Box::pin(async move {
            let view = self.0.view();
            let model = self.0.model(&view, model)?;
            let text = model.text().ok_or_else(|| {
                KvistError::new(Code::NoReadyTarget, "no worker of this model has brought its tokenizer yet")
            })?;
            Ok(text.decode(token_ids, false))
        })
    }

    fn tokenize<'a>(&'a self, model: &'a str, prompt: Prompt) -> BoxFuture<'a, Result<Tokens, KvistError>> {
        Box::pin(async move {
            let view = self.0.view();
            let model = self.0.model(&view, model)?;
            let ids = self.0.tokenize(&model, prompt).await?;
            Ok(Tokens { ids, context_tokens: model.context_tokens() })
        })
    }

    fn models(&self) -> BoxFuture<'_, Result<Vec<ModelSummary>, KvistError>> {
        Box::pin(async move {
            let view = self.0.view();
            let models = view.models_by_name();
            let present = models.iter().filter(|model| !model.model.deleting);
            Ok(present
                .map(|model| ModelSummary {
                    name: model.name.to_string(),
                    ready_targets: model.ready_targets(),
                    context_tokens: model.context_tokens(),
                    created_at: model.model.created_at,
                    kv_awareness: self.0.awareness.condition(&model.name).map(|condition| condition.to_wire()),
                })
                .collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_of_different_keys_never_meet() {
        assert_eq!("", join_salts("", ""));
        assert_eq!("a", join_salts("a", ""));
        assert_eq!("b", join_salts("", "b"));
        assert_ne!(join_salts("a", "b:c"), join_salts("a:b", "c"));
    }

    #[test]
    fn a_prompt_must_leave_room_for_what_is_asked() {
        assert!(check_context(10, 9, None).is_ok() && check_context(10, 4, Some(6)).is_ok());
        assert!(check_context(0, 9999, Some(9)).is_ok());
        for (prompt, completion) in [(10, None), (4, Some(7)), (u32::MAX, Some(u32::MAX))] {
            let error = check_context(10, prompt, completion).unwrap_err();
            assert_eq!(Code::ContextLengthExceeded, error.code);
        }
    }
}
