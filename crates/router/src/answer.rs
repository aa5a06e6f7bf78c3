//! Tokens of an answer to text, thoughts and calls: detokenizing, stop strings, parsers, reasons.

use std::sync::Arc;

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{FinishReason, Finished, TokenDelta, TokenLogprobs};
use kvist_text::{AnswerParser, Detokenizer, ModelText, Piece, Pieces, StopStrings};
use prometheus_client::metrics::counter::Counter;

use crate::{
    generate::{
        CallDelta, CallHead, ChoiceEnd, GenerateEnd, GenerateEvent, ReasoningDelta, TextDelta, TokenLogprob, Usage,
    },
    parsing::{AnswerPlan, CallIds},
};

#[derive(Debug)]
struct Choice {
    /// None when the engine has no tokenizer: the answer is token ids.
    detokenizer: Option<Detokenizer>,
    stops: Option<StopStrings>,
    matched: Option<usize>,
    /// None when the text is shown as it is.
    parser: Option<AnswerParser>,
    /// Calls that have begun, and those of them that are complete.
    calls: u32,
    complete_calls: u32,
    /// A further call was not asked for: the answer ends before it.
    has_called: bool,
}

impl Choice {
    fn has_ended(&self) -> bool {
        self.matched.is_some() || self.has_called
    }
}

/// The answer to one request as it grows.
#[derive(Debug)]
pub(crate) struct Answer {
    text: Option<Arc<ModelText>>,
    choices: Vec<Choice>,
    return_token_ids: bool,
    single_call: bool,
    call_ids: Option<CallIds>,
    pieces: Pieces,
    /// Counts what parsers could not read.
    parse_failures: Option<Counter>,
    prompt_tokens: u32,
    generated_tokens: u32,
    reasoning_tokens: u32,
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
    /// What to look for in the text; none for nothing.
    pub(crate) plan: Option<AnswerPlan>,
    pub(crate) parse_failures: Option<Counter>,
}

impl Answer {
    pub(crate) fn new(text: Option<Arc<ModelText>>, settings: AnswerSettings) -> Self {
        let search = StopStrings::new(settings.stop_strings, settings.include_stop_string);
        let plan = settings.plan.filter(|plan| text.is_some() && !plan.parsing.is_nothing());
        let marks = plan.as_ref().map(|plan| plan.parsing.marks()).unwrap_or_default();
        let choices = (0..settings.choices.max(1))
            .map(|_| Choice {
                detokenizer: text.as_ref().map(|text| text.detokenizer_with(&marks)),
                stops: (!search.is_empty()).then(|| search.clone()),
                matched: None,
                parser: plan.as_ref().map(|plan| AnswerParser::new(&plan.parsing)),
                calls: 0,
                complete_calls: 0,
                has_called: false,
            })
            .collect();
        Self {
            return_token_ids: settings.return_token_ids || text.is_none(),
            text,
            choices,
            single_call: plan.as_ref().is_some_and(|plan| plan.single_call),
            call_ids: plan.map(|plan| plan.call_ids),
            pieces: Pieces::default(),
            parse_failures: settings.parse_failures,
            prompt_tokens: settings.prompt_tokens,
            generated_tokens: 0,
            reasoning_tokens: 0,
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

    /// Takes new tokens and appends what may be shown. True when every choice has ended of itself, so that the engine
    /// need not go on.
    pub(crate) fn push(&mut self, delta: TokenDelta, events: &mut Vec<GenerateEvent>) -> bool {
        self.generated_tokens = self.generated_tokens.saturating_add(u32::try_from(delta.token_ids.len()).unwrap_or(0));
        self.cached_tokens = delta.cached_tokens.or(self.cached_tokens);
        let Some(choice) = self.choices.get_mut(delta.index as usize) else { return false };
        if choice.has_ended() {
            return self.all_ended();
        }
        let mut text = String::new();
        if choice.parser.is_some() {
            for id in &delta.token_ids {
                self.push_parsed(delta.index, *id, events);
            }
        } else {
            if let Some(detokenizer) = &mut choice.detokenizer {
                delta.token_ids.iter().for_each(|id| detokenizer.push(*id, &mut text));
            }
            text = choice.until_stop(text);
        }
        let logprobs = match &self.text {
            Some(model) if !delta.logprobs.is_empty() => with_bytes(model, &delta.token_ids, &delta.logprobs),
            None if !delta.logprobs.is_empty() => without_bytes(&delta.token_ids, &delta.logprobs),
            _ => Vec::new(),
        };
        let token_ids = if self.return_token_ids { delta.token_ids } else { Vec::new() };
        append(events, TextDelta { index: delta.index, text, token_ids, logprobs });
        self.all_ended()
    }

    /// Takes one token of a choice that is taken apart. One at a time, so that each counts where it belongs.
    fn push_parsed(&mut self, index: u32, id: u32, events: &mut Vec<GenerateEvent>) {
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        let Choice { detokenizer: Some(detokenizer), parser: Some(parser), .. } = choice else { return };
        if choice.matched.is_some() || choice.has_called {
            return;
        }
        if parser.is_thinking() {
            self.reasoning_tokens = self.reasoning_tokens.saturating_add(1);
        }
        let mut text = String::new();
        detokenizer.push(id, &mut text);
        let text = choice.until_stop(text);
        if let Some(parser) = &mut choice.parser {
            parser.feed(&text, &mut self.pieces);
        }
        self.tell(index, events);
    }

    /// Tells of what a parser has read.
    fn tell(&mut self, index: u32, events: &mut Vec<GenerateEvent>) {
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        for piece in self.pieces.drain() {
            if choice.has_called {
                // Behind the one call that was asked for.
                continue;
            }
            match piece {
                Piece::Text(text) => append(events, TextDelta { index, text, ..TextDelta::default() }),
                Piece::Reasoning(text) => append_reasoning(events, ReasoningDelta { index, text }),
                Piece::CallStart { .. } if self.single_call && choice.calls > 0 => choice.has_called = true,
                Piece::CallStart { name } => {
                    let id = self.call_ids.as_ref().map(|ids| ids.of(index, choice.calls, &name)).unwrap_or_default();
                    let head = Some(CallHead { id, name });
                    append_call(events, CallDelta { index, call: choice.calls, head, ..CallDelta::default() });
                    choice.calls += 1;
                }
                Piece::Arguments(arguments) => {
                    let call = choice.calls.saturating_sub(1);
                    append_call(events, CallDelta { index, call, arguments, ..CallDelta::default() });
                }
                Piece::CallEnd => {
                    choice.complete_calls += 1;
                    let call = choice.calls.saturating_sub(1);
                    append_call(events, CallDelta { index, call, is_end: true, ..CallDelta::default() });
                }
            }
        }
    }

    fn all_ended(&self) -> bool {
        self.choices.iter().all(Choice::has_ended)
    }

    /// Appends what was held back of a choice.
    fn finish_text(&mut self, index: u32, events: &mut Vec<GenerateEvent>) {
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        let mut text = String::new();
        if !choice.has_ended() {
            if let Some(detokenizer) = &mut choice.detokenizer {
                detokenizer.finish(&mut text);
            }
            text = choice.until_stop(text);
            if let (Some(stops), None) = (&mut choice.stops, choice.matched) {
                text.push_str(&stops.finish());
            }
        }
        match &mut choice.parser {
            Some(parser) => {
                parser.feed(&text, &mut self.pieces);
                parser.finish(&mut self.pieces);
                self.tell(index, events);
            }
            None => append(events, TextDelta { index, text, ..TextDelta::default() }),
        }
    }

    /// The engine has ended the request: appends what was held back, and the end.
    pub(crate) fn finish(&mut self, finished: Finished, events: &mut Vec<GenerateEvent>) {
        let mut ends = Vec::with_capacity(self.choices.len());
        for index in (0u32..).take(self.choices.len()) {
            self.finish_text(index, events);
            let Some(choice) = self.choices.get(index as usize) else { continue };
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
            // The text ended where it did whatever the engine did in the same step.
            let reason = if choice.has_ended() { FinishReason::Stop } else { stated };
            match reason {
                FinishReason::Stop | FinishReason::Length => ends.push(ChoiceEnd {
                    index,
                    reason,
                    stop_string,
                    stop_token_id: finished.stop_token_id.filter(|_| !choice.has_ended()),
                    complete_calls: choice.complete_calls,
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
        if let Some(failures) = &self.parse_failures {
            failures.inc_by(u64::from(self.pieces.failures()));
        }
        let receipt = finished.receipt;
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: receipt.map_or(self.generated_tokens, |receipt| receipt.completion_tokens),
            cached_tokens: receipt.map(|receipt| receipt.cached_tokens).or(self.cached_tokens).unwrap_or(0),
            reasoning_tokens: self.reasoning_tokens,
        };
        events.push(GenerateEvent::Finished(GenerateEnd { choices: ends, usage, receipt }));
    }
}

impl Choice {
    /// The part of new text before a stop string, as far as it may be shown.
    fn until_stop(&mut self, text: String) -> String {
        match &mut self.stops {
            Some(stops) if !text.is_empty() => {
                let outcome = stops.feed(&text);
                self.matched = outcome.matched;
                outcome.text
            }
            _ => text,
        }
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

fn append_reasoning(events: &mut Vec<GenerateEvent>, delta: ReasoningDelta) {
    match events.last_mut() {
        Some(GenerateEvent::Reasoning(last)) if last.index == delta.index => last.text.push_str(&delta.text),
        _ => events.push(GenerateEvent::Reasoning(delta)),
    }
}

fn append_call(events: &mut Vec<GenerateEvent>, delta: CallDelta) {
    match events.last_mut() {
        Some(GenerateEvent::Call(last)) if (last.index, last.call) == (delta.index, delta.call) => {
            last.arguments.push_str(&delta.arguments);
            last.is_end |= delta.is_end;
        }
        _ => events.push(GenerateEvent::Call(delta)),
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
