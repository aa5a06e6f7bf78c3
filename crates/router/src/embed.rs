//! Embeddings: the inputs of a request go to engines in groups, each placed like one prompt.

use std::{sync::Arc, time::Instant};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{EmbedRequest, Embedding, TokenIds};
use kvist_schedule::{Report, TargetId};
use kvist_telemetry::names;
use kvist_text::ModelText;

use crate::{
    cluster::ModelView,
    core::RouterCore,
    door::{Entry, Place, Ticket},
    explain::{Ending, SeenDecision},
    generate::{EmbedInput, EmbedOutput, RequestContext, Usage},
    health::report_of,
    life::fingerprint,
    needs::Needs,
    parts::{Choice, Intent},
    record::RequestRecord,
    select::{Demand, Placement, to_u32},
    start::{check_context, session_of},
};

/// Most inputs of one request, as at OpenAI.
pub(crate) const MOST_INPUTS: usize = 2048;
/// Inputs and tokens of one call to an engine, at most, unless one input alone has more. Small enough that a large
/// request spreads over the engines, and that a lost engine costs little.
const MOST_INPUTS_OF_GROUP: usize = 32;
const MOST_TOKENS_OF_GROUP: usize = 16_384;
/// Groups of one request that are computed at once.
const GROUPS_AT_ONCE: usize = 8;
/// Placements of a group: the first, and one more when its engine was lost.
const MOST_ATTEMPTS: u32 = 2;
/// Short inputs that are tokenized before others get a turn.
const INPUTS_OF_TURN: usize = 16;

/// What all groups of a request share.
struct Asked<'a> {
    core: &'a RouterCore,
    model: &'a str,
    text: Option<Arc<ModelText>>,
    request_id: Arc<str>,
    context: &'a RequestContext,
    deadline: Instant,
    place: Place,
}

/// What came of a group.
struct Answered {
    embeddings: Vec<Embedding>,
    decision: Arc<SeenDecision>,
    attempts: u32,
}

impl RouterCore {
    pub(crate) async fn embed(
        &self,
        context: &RequestContext,
        input: EmbedInput,
        record: &mut RequestRecord,
    ) -> Result<EmbedOutput, KvistError> {
        if self.is_draining() {
            return Err(KvistError::new(Code::Draining, "the router is being stopped").before_start());
        }
        let deadline = context.deadline.unwrap_or_else(|| Instant::now() + self.default_deadline());
        let late = || KvistError::new(Code::DeadlineExceeded, "the request took too long");
        tokio::select! {
            embedded = tokio::time::timeout_at(deadline.into(), self.embed_all(context, input, deadline, record)) => {
                embedded.map_err(|_| late())?
            }
            () = self.stopped.cancelled() => Err(KvistError::new(Code::Draining, "the router is being stopped")),
        }
    }

    async fn embed_all(
        &self,
        context: &RequestContext,
        input: EmbedInput,
        deadline: Instant,
        record: &mut RequestRecord,
    ) -> Result<EmbedOutput, KvistError> {
        check_number(input.inputs.len())?;
        self.wait_while_starting(&input.model, deadline).await;
        let view = self.view();
        let model = self.model(&view, &input.model)?;
        record.model = Arc::clone(&model.name);
        let began = Instant::now();
        let (inputs, text) = self.tokenize_inputs(&model, input).await?;
        self.metrics.tokenize_seconds.observe(began.elapsed().as_secs_f64());
        let tokens: usize = inputs.iter().map(Vec::len).sum();
        record.usage.prompt_tokens = to_u32(tokens);
        let ticket = Ticket { class: &context.class, priority: 0, deadline, tokens: tokens as u64 };
        let place = match model.state.door.enter(ticket)? {
            Entry::Admitted(place) => place,
            Entry::Queued(mut waiting) => {
                waiting.end().await?;
                waiting.into_place().0
            }
        };
        let asked = Asked {
            core: self,
            model: &model.name,
            text,
            request_id: Arc::clone(&record.request_id),
            context,
            deadline,
            place,
        };
        let mut embeddings = Vec::with_capacity(inputs.len());
        let calls = stream::iter(groups(inputs)).map(|group| asked.embed_group(group)).buffered(GROUPS_AT_ONCE);
        tokio::pin!(calls);
        while let Some(answered) = calls.try_next().await? {
            if record.decision.is_none() {
                record.decided(&answered.decision);
            }
            record.attempts = record.attempts.max(answered.attempts);
            embeddings.extend(answered.embeddings);
        }
        let prompt_tokens = embeddings.iter().fold(0_u32, |sum, embedding| sum.saturating_add(embedding.prompt_tokens));
        record.usage = Usage { prompt_tokens, ..Usage::default() };
        Ok(EmbedOutput { request_id: Arc::clone(&record.request_id), embeddings })
    }

    async fn tokenize_inputs(
        &self,
        model: &ModelView,
        input: EmbedInput,
    ) -> Result<(Vec<Vec<u32>>, Option<Arc<ModelText>>), KvistError> {
        let mut all = Vec::with_capacity(input.inputs.len());
        let mut text = None;
        for (position, prompt) in input.inputs.into_iter().enumerate() {
            let (tokens, by) =
                self.tokenize_with(model, prompt, "").await.map_err(|error| of_input(error, position))?;
            check_context(model.context_tokens(), to_u32(tokens.len()), Some(0))?;
            all.push(tokens);
            // All inputs are tokenized alike also where the model is being moved to another tokenizer.
            text = text.or(by);
            if position % INPUTS_OF_TURN == INPUTS_OF_TURN - 1 {
                tokio::task::yield_now().await;
            }
        }
        Ok((all, text))
    }
}

impl Asked<'_> {
    async fn embed_group(&self, inputs: Vec<Vec<u32>>) -> Result<Answered, KvistError> {
        let all_tokens = inputs.concat();
        let first = inputs.first().cloned().unwrap_or_default();
        let demand = Demand {
            request_id: Arc::clone(&self.request_id),
            further_tokens: (all_tokens.len() - first.len()) as u64,
            tokens: Arc::new(first),
            adapter: String::new(),
            cache_salt: self.context.caller_salt.to_string(),
            max_tokens: Some(0),
            text: self.text.clone(),
            needs: Needs::of_embeddings(),
            session: session_of(&self.context.session_id),
            queued_for: None,
        };
        let mut tried: Vec<TargetId> = Vec::new();
        let mut last_error = None;
        for attempt in 1..=MOST_ATTEMPTS {
            self.core.check_quarantine(&all_tokens)?;
            let view = self.core.view();
            let model = self.core.model(&view, self.model)?;
            let Choice { decision, placement, .. } =
                self.core.selector.select(&view, &model, &demand, &tried, attempt, Intent::Whole);
            self.place.placed();
            self.core.metrics.decision_seconds.observe(decision.duration.as_secs_f64());
            self.core.metrics.decisions.decided(&decision);
            self.core.explanations.add(&decision);
            let end_as = |outcome| {
                let _ = decision.ending.set(Ending { outcome, ..Ending::default() });
            };
            let placement = match placement {
                Ok(placement) => placement,
                // A retry that finds nobody ends as the first attempt did.
                Err(error) => {
                    end_as(error.code.name());
                    return Err(last_error.unwrap_or(error));
                }
            };
            let target = placement.node.target_id(placement.rank);
            let answer = self.call(&placement, attempt, &inputs).await;
            drop(placement);
            match answer {
                Ok(embeddings) => {
                    model.state.health.report(&target, Report::Success);
                    end_as("embedded");
                    return Ok(Answered { embeddings, decision, attempts: attempt });
                }
                Err(error) => {
                    model.state.health.report(&target, report_of(&error));
                    end_as(error.code.name());
                    if error.code == Code::EngineLost
                        && let Some(incarnation) = decision.chosen_incarnation
                    {
                        let worker = target.worker.clone();
                        let now = Instant::now();
                        self.core.quarantine.engine_lost(fingerprint(&all_tokens), worker, incarnation, now);
                    }
                    if !may_move(&error) {
                        return Err(error);
                    }
                    self.core.metrics.retries.inc();
                    tried.push(target);
                    last_error = Some(error);
                }
            }
        }
        Err(last_error.unwrap_or_else(|| KvistError::new(Code::Internal, "a group of inputs was not placed")))
    }

    async fn call(
        &self,
        placement: &Placement,
        attempt: u32,
        inputs: &[Vec<u32>],
    ) -> Result<Vec<Embedding>, KvistError> {
        let Some(connection) = &placement.node.connection else {
            return Err(KvistError::new(Code::Internal, "a target without a connection was chosen"));
        };
        let span = tracing::info_span!(
            parent: &self.context.span, names::SPAN_LINK, otel.kind = "client",
            { names::WORKER_UID } = placement.node.uid.as_str(), { names::RANK } = placement.rank,
            { names::ATTEMPT } = attempt,
        );
        let request = EmbedRequest {
            request_id: self.request_id.to_string(),
            inputs: inputs.iter().map(|ids| TokenIds { ids: ids.clone() }).collect(),
            rank: placement.rank,
        };
        let answer = connection.link.embed(request, self.deadline.saturating_duration_since(Instant::now())).await;
        drop(span);
        answer
    }
}

fn check_number(inputs: usize) -> Result<(), KvistError> {
    let wrong = |why: String| Err(KvistError::field(Code::InvalidArgument, "inputs", why));
    match inputs {
        0 => wrong("must have at least one input".to_owned()),
        1..=MOST_INPUTS => Ok(()),
        _ => wrong(format!("may have at most {MOST_INPUTS} inputs")),
    }
}

/// Names the input that an error is about.
fn of_input(mut error: KvistError, position: usize) -> KvistError {
    for violation in &mut error.fields {
        if let Some(rest) = violation.field.strip_prefix("prompt") {
            let name = format!("inputs[{position}]{rest}");
            if let Some(why) = error.message.strip_prefix(&violation.field) {
                error.message = format!("{name}{why}");
            }
            violation.field = name;
        }
    }
    error
}

/// Nothing is kept of a call that failed, so whatever was not the caller's fault may be asked of another engine.
fn may_move(error: &KvistError) -> bool {
    matches!(error.code, Code::EngineLost | Code::EngineUnavailable | Code::Draining | Code::NotReady)
        || (error.not_started && error.code.is_retryable())
}

/// Inputs in order, in groups of a bounded size.
fn groups(inputs: Vec<Vec<u32>>) -> Vec<Vec<Vec<u32>>> {
    let mut groups: Vec<Vec<Vec<u32>>> = Vec::new();
    let mut tokens_of_last = 0;
    for input in inputs {
        tokens_of_last += input.len();
        match groups.last_mut() {
            Some(last) if last.len() < MOST_INPUTS_OF_GROUP && tokens_of_last <= MOST_TOKENS_OF_GROUP => {
                last.push(input);
            }
            _ => {
                tokens_of_last = input.len();
                groups.push(vec![input]);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_error_names_the_input() {
        let error = KvistError::field(Code::InvalidArgument, "prompt[3]", "is no token of the model");
        let error = of_input(error, 7);
        assert_eq!("inputs[7][3]", error.fields[0].field);
        assert!(error.message.starts_with("inputs[7][3]"), "{}", error.message);
    }

    proptest! {
        #[test]
        fn groups_keep_order_and_bounds(lengths in proptest::collection::vec(1_usize..40_000, 1..100)) {
            let inputs: Vec<Vec<u32>> = lengths.iter().map(|length| vec![to_u32(*length); *length]).collect();
            let groups = groups(inputs.clone());
            for group in &groups {
                let tokens: usize = group.iter().map(Vec::len).sum();
                prop_assert!(!group.is_empty() && group.len() <= MOST_INPUTS_OF_GROUP);
                prop_assert!(tokens <= MOST_TOKENS_OF_GROUP || group.len() == 1);
            }
            prop_assert_eq!(inputs, groups.concat());
        }
    }
}
