//! Tokens of an answer to text: detokenizing, stop strings, reasons.

use std::sync::Arc;

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{FinishReason, Finished, TokenDelta, TokenLogprobs};
use kvist_text::{Detokenizer, ModelText, StopStrings};

use crate::generate::{ChoiceEnd, GenerateEnd, GenerateEvent, TextDelta, TokenLogprob, Usage};

#[derive(Debug)]
struct Choice {
    /// None when the engine has no tokenizer: the answer is token ids.
    detokenizer: Option<Detokenizer>,
    stops: Option<StopStrings>,
    matched: Option<usize>,
}

/// The answer to one request as it grows.
#[derive(Debug)]
pub(crate) struct Answer {
    text: Option<Arc<ModelText>>,
    choices: Vec<Choice>,
    return_token_ids: bool,
    prompt_tokens: u32,
    generated_tokens: u32,
    cached_tokens: Option<u32>,
}

/// What an answer asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerSettings {
    pub(crate) choices: u32,
    pub(crate) stop_strings: Vec<String>,
    pub(crate) include_stop_string: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) prompt_tokens: u32,
}

impl Answer {
    pub(crate) fn new(text: Option<Arc<ModelText>>, settings: AnswerSettings) -> Self {
        let search = StopStrings::new(settings.stop_strings, settings.include_stop_string);
        let choices = (0..settings.choices.max(1))
            .map(|_| Choice {
                detokenizer: text.as_ref().map(|text| text.detokenizer(true)),
                stops: (!search.is_empty()).then(|| search.clone()),
                matched: None,
            })
            .collect();
        Self {
            return_token_ids: settings.return_token_ids || text.is_none(),
            text,
            choices,
            prompt_tokens: settings.prompt_tokens,
            generated_tokens: 0,
            cached_tokens: None,
        }
    }

    /// Tokens that have arrived.
    pub(crate) fn generated_tokens(&self) -> u32 {
        self.generated_tokens
    }

    /// Prompt tokens that the engine found in its cache, as far as it has said so.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    /// Takes new tokens and appends what may be shown. True when every choice has met a stop string, so that the
    /// engine need not go on.
    pub(crate) fn push(&mut self, delta: TokenDelta, events: &mut Vec<GenerateEvent>) -> bool {
        self.generated_tokens = self.generated_tokens.saturating_add(u32::try_from(delta.token_ids.len()).unwrap_or(0));
        self.cached_tokens = delta.cached_tokens.or(self.cached_tokens);
        let Some(choice) = self.choices.get_mut(delta.index as usize) else { return false };
        if choice.matched.is_some() {
            return self.all_matched();
        }
        let mut text = String::new();
        if let Some(detokenizer) = &mut choice.detokenizer {
            delta.token_ids.iter().for_each(|id| detokenizer.push(*id, &mut text));
        }
        if let Some(stops) = &mut choice.stops
            && !text.is_empty()
        {
            let outcome = stops.feed(&text);
            (text, choice.matched) = (outcome.text, outcome.matched);
        }
        let has_matched = choice.matched.is_some();
        let logprobs = match &self.text {
            Some(model) if !delta.logprobs.is_empty() => with_bytes(model, &delta.token_ids, &delta.logprobs),
            None if !delta.logprobs.is_empty() => without_bytes(&delta.token_ids, &delta.logprobs),
            _ => Vec::new(),
        };
        let token_ids = if self.return_token_ids { delta.token_ids } else { Vec::new() };
        append(events, TextDelta { index: delta.index, text, token_ids, logprobs });
        has_matched && self.all_matched()
    }

    fn all_matched(&self) -> bool {
        self.choices.iter().all(|choice| choice.matched.is_some())
    }

    /// The engine has ended the request: appends what was held back, and the end.
    pub(crate) fn finish(&mut self, finished: Finished, events: &mut Vec<GenerateEvent>) {
        let mut ends = Vec::with_capacity(self.choices.len());
        for (index, choice) in (0u32..).zip(&mut self.choices) {
            let mut text = String::new();
            if choice.matched.is_none() {
                if let Some(detokenizer) = &mut choice.detokenizer {
                    detokenizer.finish(&mut text);
                }
                if let Some(stops) = &mut choice.stops {
                    let outcome = stops.feed(&text);
                    (text, choice.matched) = (outcome.text, outcome.matched);
                    if choice.matched.is_none() {
                        text.push_str(&stops.finish());
                    }
                }
            }
            append(events, TextDelta { index, text, ..TextDelta::default() });
            let stated = match index.checked_sub(1) {
                None => finished.reason(),
                Some(further) => finished
                    .choice_reasons
                    .get(further as usize)
                    .and_then(|reason| FinishReason::try_from(*reason).ok())
                    .unwrap_or_else(|| finished.reason()),
            };
            let stop_string = match (choice.matched, &choice.stops) {
                (Some(position), Some(stops)) => stops.get(position).to_owned(),
                _ => String::new(),
            };
            // The text ended at a stop string whatever the engine did in the same step.
            let reason = if choice.matched.is_some() { FinishReason::Stop } else { stated };
            match reason {
                FinishReason::Stop | FinishReason::Length => ends.push(ChoiceEnd {
                    index,
                    reason,
                    stop_string,
                    stop_token_id: finished.stop_token_id.filter(|_| choice.matched.is_none()),
                }),
                FinishReason::Aborted => {
                    let error = KvistError::new(Code::Cancelled, "the request was ended at the engine");
                    return events.push(GenerateEvent::Failed(error));
                }
                FinishReason::Unspecified => {
                    let error = KvistError::new(Code::EngineFailed, "the engine ended the request without a reason");
                    return events.push(GenerateEvent::Failed(error));
                }
            }
        }
        let receipt = finished.receipt;
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: receipt.map_or(self.generated_tokens, |receipt| receipt.completion_tokens),
            cached_tokens: receipt.map(|receipt| receipt.cached_tokens).or(self.cached_tokens).unwrap_or(0),
        };
        events.push(GenerateEvent::Finished(GenerateEnd { choices: ends, usage, receipt }));
    }
}

/// Appends a delta, to the last one when it is of the same choice: what is at hand together goes out together.
fn append(events: &mut Vec<GenerateEvent>, delta: TextDelta) {
    if delta.text.is_empty() && delta.token_ids.is_empty() && delta.logprobs.is_empty() {
        return;
    }
    if let Some(GenerateEvent::Delta(last)) = events.last_mut()
        && last.index == delta.index
    {
        last.text.push_str(&delta.text);
        last.token_ids.extend(delta.token_ids);
        last.logprobs.extend(delta.logprobs);
    } else {
        events.push(GenerateEvent::Delta(delta));
    }
}

fn with_bytes(model: &ModelText, ids: &[u32], logprobs: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    convert(ids, logprobs, |id| model.token_bytes(id).to_vec())
}

fn without_bytes(ids: &[u32], logprobs: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    convert(ids, logprobs, |_| Vec::new())
}

fn convert(ids: &[u32], logprobs: &[TokenLogprobs], bytes_of: impl Fn(u32) -> Vec<u8>) -> Vec<TokenLogprob> {
    ids.iter()
        .zip(logprobs)
        .map(|(id, wire)| TokenLogprob {
            token_id: *id,
            bytes: bytes_of(*id),
            logprob: wire.logprob,
            top: wire.top.iter().map(|top| (top.token_id, bytes_of(top.token_id), top.logprob)).collect(),
        })
        .collect()
}
