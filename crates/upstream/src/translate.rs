//! Between Kvist's one form of a request and OpenAI's chat completions, for clients that speak another API.

use bytes::Bytes;
use futures::{Stream, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{FinishReason, structured_output::Constraint};
use kvist_router::{ChoiceEnd, GenerateEnd, GenerateEvent, GenerateInput, Prompt, TextDelta, Usage};
use serde_json::{Map, Value, json};

use crate::{
    metrics::Counted,
    source::{Source, lost},
};

/// Most bytes of an event.
const LONGEST_EVENT: usize = 16 * 1024 * 1024;

fn unsupported(field: &str) -> KvistError {
    KvistError::field(Code::UnsupportedField, field, "the provider of this model cannot honor it over this API")
}

/// The body of a chat completion that asks for the same.
pub(crate) fn chat_body(input: GenerateInput, model: &str) -> Result<Bytes, KvistError> {
    let Prompt::Chat(chat) = input.prompt else { return Err(unsupported("prompt")) };
    let mut body = Map::new();
    body.insert("model".to_owned(), model.into());
    body.insert("messages".to_owned(), Value::Array(chat.messages));
    body.insert("stream".to_owned(), true.into());
    body.insert("stream_options".to_owned(), json!({"include_usage": true}));
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(name.to_owned(), value);
        }
    };
    let (sampling, stop) = (input.sampling, input.stop);
    put("temperature", sampling.temperature.map(shortest));
    put("top_p", sampling.top_p.map(shortest));
    put("top_k", sampling.top_k.map(Value::from));
    put("min_p", sampling.min_p.map(shortest));
    put("frequency_penalty", sampling.frequency_penalty.map(shortest));
    put("presence_penalty", sampling.presence_penalty.map(shortest));
    put("repetition_penalty", sampling.repetition_penalty.map(shortest));
    put("seed", sampling.seed.map(Value::from));
    put("n", sampling.choices.map(Value::from));
    put("max_tokens", stop.max_tokens.map(Value::from));
    put("min_tokens", stop.min_tokens.map(Value::from));
    put("stop", (!input.stop_strings.is_empty()).then(|| json!(input.stop_strings)));
    put("cache_salt", (!input.cache_salt.is_empty()).then(|| input.cache_salt.into()));
    match input.structured_output.and_then(|output| output.constraint) {
        None => {}
        Some(Constraint::JsonObject(_)) => put("response_format", Some(json!({"type": "json_object"}))),
        Some(Constraint::JsonSchema(schema)) => {
            let schema: Value = serde_json::from_str(&schema).map_err(|_| unsupported("response_format"))?;
            let schema = json!({"name": "answer", "strict": true, "schema": schema});
            put("response_format", Some(json!({"type": "json_schema", "json_schema": schema})));
        }
        Some(_) => return Err(unsupported("structured_outputs")),
    }
    for (field, is_used) in [
        ("tools", !chat.tools.is_empty()),
        ("logit_bias", !sampling.logit_bias.is_empty()),
        ("logprobs", sampling.top_logprobs.is_some()),
        ("stop_token_ids", !stop.stop_token_ids.is_empty()),
        ("ignore_eos", stop.ignore_eos),
        ("include_stop_str_in_output", input.include_stop_string),
        ("adapter", !input.adapter.is_empty()),
    ] {
        if is_used {
            return Err(unsupported(field));
        }
    }
    if let Some(field) = input.engine_extras.as_ref().and_then(|extras| extras.fields.keys().next()) {
        return Err(unsupported(field));
    }
    Ok(Value::Object(body).to_string().into())
}

/// A number as people wrote it: 0.7 and not 0.699999988079071.
fn shortest(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

struct Translation {
    source: Source,
    counted: Counted,
    held: Vec<u8>,
    ends: Vec<Option<FinishReason>>,
    usage: Usage,
    has_ended: bool,
}

/// The events of a stream of chat completion chunks. It ends well only where the provider has given every choice a
/// reason and then its end mark.
pub(crate) fn events(source: Source, counted: Counted, choices: u32) -> impl Stream<Item = Vec<GenerateEvent>> + Send {
    let ends = vec![None; choices as usize];
    let translation =
        Translation { source, counted, held: Vec::new(), ends, usage: Usage::default(), has_ended: false };
    stream::unfold(translation, |mut translation| async move {
        let batch = translation.next_batch().await?;
        Some((batch, translation))
    })
}

impl Translation {
    async fn next_batch(&mut self) -> Option<Vec<GenerateEvent>> {
        while !self.has_ended {
            let mut batch = Vec::new();
            let taken = match self.source.next().await {
                Ok(Some(piece)) => self.take(&piece, &mut batch),
                Ok(None) => Err(lost()),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                self.has_ended = true;
                self.counted.ended(error.code.name());
                batch.push(GenerateEvent::Failed(error));
            }
            if !batch.is_empty() {
                return Some(batch);
            }
        }
        None
    }

    fn take(&mut self, piece: &[u8], batch: &mut Vec<GenerateEvent>) -> Result<(), KvistError> {
        self.held.extend_from_slice(piece);
        if self.held.len() > LONGEST_EVENT {
            return Err(KvistError::new(Code::EngineFailed, "the provider sent an event without an end"));
        }
        let Some(last) = self.held.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let rest = self.held.split_off(last + 1);
        let lines = std::mem::replace(&mut self.held, rest);
        for line in lines.split(|byte| *byte == b'\n') {
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                return self.end(batch);
            }
            let chunk: Value = serde_json::from_slice(data)
                .map_err(|_| KvistError::new(Code::EngineFailed, "the provider sent an event that is not JSON"))?;
            self.chunk(&chunk, batch)?;
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: &Value, batch: &mut Vec<GenerateEvent>) -> Result<(), KvistError> {
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Err(KvistError::new(Code::EngineFailed, "the provider failed while it answered"));
        }
        let number = |path: &str| chunk.pointer(path).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        if let Some(prompt_tokens) = number("/usage/prompt_tokens") {
            self.usage = Usage {
                prompt_tokens,
                completion_tokens: number("/usage/completion_tokens").unwrap_or(0),
                cached_tokens: number("/usage/prompt_tokens_details/cached_tokens").unwrap_or(0),
                reasoning_tokens: number("/usage/completion_tokens_details/reasoning_tokens").unwrap_or(0),
            };
        }
        for choice in chunk.get("choices").and_then(Value::as_array).into_iter().flatten() {
            let index = choice.get("index").and_then(Value::as_u64).unwrap_or(0);
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let Some(end) = self.ends.get_mut(index as usize) else { continue };
            if choice.pointer("/delta/tool_calls").is_some_and(|calls| !calls.is_null()) {
                return Err(KvistError::new(Code::NotImplemented, "tool calls of a provider are not translated"));
            }
            let text = choice.pointer("/delta/content").and_then(Value::as_str).unwrap_or_default();
            if !text.is_empty() {
                batch.push(GenerateEvent::Delta(TextDelta { index, text: text.to_owned(), ..TextDelta::default() }));
            }
            match choice.get("finish_reason").and_then(Value::as_str) {
                None => {}
                Some("length") => *end = Some(FinishReason::Length),
                Some("stop") => *end = Some(FinishReason::Stop),
                Some(reason) => {
                    let reason: String = reason.chars().take(40).collect();
                    let message = format!("the provider ended the answer for a reason of its own: {reason}");
                    return Err(KvistError::new(Code::EngineFailed, message));
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, batch: &mut Vec<GenerateEvent>) -> Result<(), KvistError> {
        let ends: Option<Vec<FinishReason>> = self.ends.iter().copied().collect();
        let Some(ends) = ends else {
            return Err(KvistError::new(Code::EngineFailed, "the provider ended the answer without a reason"));
        };
        self.has_ended = true;
        self.counted.ended("finished");
        let choices = (0u32..)
            .zip(ends)
            .map(|(index, reason)| ChoiceEnd {
                index,
                reason,
                stop_string: String::new(),
                stop_token_id: None,
                complete_calls: 0,
            })
            .collect();
        batch.push(GenerateEvent::Finished(GenerateEnd { choices, usage: self.usage, receipt: None }));
        Ok(())
    }
}
