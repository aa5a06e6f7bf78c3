//! Several prompts of one request: each is a request of its own to the router, and their choices are one answer.

use std::{pin::Pin, sync::Arc};

use futures::{StreamExt as _, future::try_join_all, stream::SelectAll};
use kvist_errors::KvistError;
use kvist_router::{EventStream, Generate, GenerateEnd, GenerateEvent, GenerateInput, Prompt, RequestContext, Usage};

use crate::answer::broke_off;

/// Everything that was at hand of one prompt, and which one it is.
type Batch = (u32, Vec<GenerateEvent>);
type Batches = Pin<Box<dyn futures::Stream<Item = Batch> + Send>>;

/// Starts a request for the first prompt and one for each further one, all else being the same. The choices of prompt `p`
/// are those from `p * choices` on; the first failure ends all.
///
/// # Errors
/// One of them cannot be started; then none runs.
pub(crate) async fn generate_each(
    generate: &dyn Generate,
    context: RequestContext,
    input: GenerateInput,
    further: Vec<Prompt>,
) -> Result<EventStream, KvistError> {
    let choices = input.sampling.choices.unwrap_or(1);
    let inputs = further.into_iter().map(|prompt| GenerateInput { prompt, ..input.clone() });
    let inputs: Vec<GenerateInput> = std::iter::once(input.clone()).chain(inputs).collect();
    let started = inputs.into_iter().zip(0u32..).map(|(input, number)| {
        let stream = generate.generate(context.part(number), input);
        async move { stream.await.map_err(|error| of_prompt(error, number)) }
    });
    let streams = try_join_all(started).await?;
    let request_id = streams.first().map(|stream| Arc::clone(&stream.request_id)).unwrap_or_default();
    let prompt_tokens = streams.iter().fold(0, |sum: u32, stream| sum.saturating_add(stream.prompt_tokens));
    let merged = Merged::new(streams, choices);
    let batches = futures::stream::unfold(Some(merged), |merged| async move {
        let mut merged = merged?;
        let batch = merged.next().await;
        let is_last = batch.last().is_some_and(GenerateEvent::is_terminal);
        // What still runs ends with the answer.
        Some((batch, (!is_last).then_some(merged)))
    });
    Ok(EventStream::new(request_id, prompt_tokens, batches))
}

/// The answers of all prompts as they grow.
struct Merged {
    batches: SelectAll<Batches>,
    choices: u32,
    ends: Vec<Option<GenerateEnd>>,
}

impl Merged {
    fn new(streams: Vec<EventStream>, choices: u32) -> Self {
        let ends = vec![None; streams.len()];
        let numbered = streams.into_iter().zip(0u32..).map(|(stream, number)| {
            let batches: Batches = Box::pin(stream.map(move |batch| (number, batch)));
            batches
        });
        Self { batches: numbered.collect(), choices, ends }
    }

    /// The next events, with the numbers that their choices have in the answer.
    async fn next(&mut self) -> Vec<GenerateEvent> {
        let Some((number, mut batch)) = self.batches.next().await else {
            return vec![GenerateEvent::Failed(broke_off())];
        };
        let first = number * self.choices;
        for event in &mut batch {
            match event {
                GenerateEvent::Delta(delta) => delta.index += first,
                GenerateEvent::Reasoning(delta) => delta.index += first,
                GenerateEvent::Call(delta) => delta.index += first,
                GenerateEvent::Finished(end) => end.choices.iter_mut().for_each(|choice| choice.index += first),
                GenerateEvent::Failed(_) => {}
            }
        }
        if let Some(GenerateEvent::Finished(end)) = batch.pop_if(|event| matches!(event, GenerateEvent::Finished(_)))
            && let Some(place) = self.ends.get_mut(number as usize)
        {
            *place = Some(end);
            if self.ends.iter().all(Option::is_some) {
                batch.push(GenerateEvent::Finished(sum(self.ends.drain(..).flatten())));
            }
        }
        batch
    }
}

/// Says which prompt an error is about.
fn of_prompt(mut error: KvistError, number: u32) -> KvistError {
    for violation in &mut error.fields {
        if let Some(place) = violation.field.strip_prefix("prompt") {
            violation.field = format!("prompt[{number}]{place}");
        }
        if let Some(rest) = error.message.strip_prefix("prompt") {
            error.message = format!("prompt[{number}]{rest}");
        }
    }
    error
}

/// One end of all; each engine's own account is in its log line.
fn sum(ends: impl Iterator<Item = GenerateEnd>) -> GenerateEnd {
    let empty = GenerateEnd { choices: Vec::new(), usage: Usage::default(), receipt: None };
    ends.fold(empty, |mut all, end| {
        all.choices.extend(end.choices);
        all.usage = Usage {
            prompt_tokens: all.usage.prompt_tokens.saturating_add(end.usage.prompt_tokens),
            completion_tokens: all.usage.completion_tokens.saturating_add(end.usage.completion_tokens),
            cached_tokens: all.usage.cached_tokens.saturating_add(end.usage.cached_tokens),
            reasoning_tokens: all.usage.reasoning_tokens.saturating_add(end.usage.reasoning_tokens),
        };
        all
    })
}
