//! Messages of `kvist.router.v1` to and from the router's own values.

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{TokenLogprobs, TopLogprob},
    router::v1 as wire,
};
use prost_types::{Struct, value::Kind};
use serde_json::{Map, Number, Value};

use crate::generate::{
    AnswerForm, CallDelta, GenerateEnd, GenerateInput, Prompt, ReasoningDelta, TextDelta, TokenLogprob, ToolChoice,
};

/// Most stop strings of one request.
const MOST_STOP_STRINGS: usize = 16;
/// Most choices of one request.
const MOST_CHOICES: u32 = 128;

/// JSON of a protobuf struct. Whole numbers become whole again: protobuf knows only doubles.
pub(crate) fn to_json(fields: Struct) -> Map<String, Value> {
    fields.fields.into_iter().map(|(name, value)| (name, value_to_json(value))).collect()
}

pub(crate) fn value_to_json(value: prost_types::Value) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(truth)) => Value::Bool(truth),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) => number_to_json(number),
        Some(Kind::StructValue(fields)) => Value::Object(to_json(fields)),
        Some(Kind::ListValue(list)) => Value::Array(list.values.into_iter().map(value_to_json).collect()),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "checked to be exact")]
fn number_to_json(number: f64) -> Value {
    let whole = number as i64;
    if number.fract() == 0.0 && whole.unsigned_abs() <= (1 << 53) && whole as f64 == number {
        return Value::from(whole);
    }
    Number::from_f64(number).map_or(Value::Null, Value::Number)
}

/// The prompt of a request.
pub(crate) fn read_prompt(prompt: Option<wire::Prompt>, now_unix_seconds: i64) -> Result<Prompt, KvistError> {
    let wrong = |field: String, why: &str| KvistError::field(Code::InvalidArgument, field, why);
    match prompt.and_then(|prompt| prompt.form) {
        None => Err(wrong("prompt".to_owned(), "is missing")),
        Some(wire::prompt::Form::Text(text)) => Ok(Prompt::Text(text)),
        Some(wire::prompt::Form::Tokens(tokens)) => Ok(Prompt::Tokens(tokens.ids)),
        Some(wire::prompt::Form::ChatJson(chat)) => {
            let messages: Vec<Value> = read_json("prompt.chat_json.messages", &chat.messages)?;
            if messages.is_empty() {
                return Err(wrong("prompt.chat_json.messages".to_owned(), "must have at least one message"));
            }
            Ok(Prompt::Chat(Box::new(kvist_text::Chat {
                messages,
                tools: read_json("prompt.chat_json.tools", &chat.tools)?,
                variables: read_json("prompt.chat_json.template_variables", &chat.template_variables)?,
                add_generation_prompt: !chat.without_generation_prompt,
                now_unix_seconds,
            })))
        }
        Some(wire::prompt::Form::Chat(chat)) => {
            if chat.messages.is_empty() {
                return Err(wrong("prompt.chat.messages".to_owned(), "must have at least one message"));
            }
            let messages = chat.messages.into_iter().enumerate().map(|(position, message)| {
                if message.role.is_empty() {
                    return Err(wrong(format!("prompt.chat.messages[{position}].role"), "is missing"));
                }
                Ok(read_message(message))
            });
            Ok(Prompt::Chat(Box::new(kvist_text::Chat {
                messages: messages.collect::<Result<_, _>>()?,
                tools: chat.tools.into_iter().map(|tool| Value::Object(to_json(tool))).collect(),
                variables: chat.template_variables.map(to_json).unwrap_or_default(),
                add_generation_prompt: true,
                now_unix_seconds,
            })))
        }
    }
}

/// A list or an object of JSON text; an empty one for an empty text.
fn read_json<T: serde::de::DeserializeOwned + Default>(field: &str, text: &str) -> Result<T, KvistError> {
    if text.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_str(text).map_err(|error| {
        let why = format!("is not the JSON that it has to be: line {}, column {}", error.line(), error.column());
        KvistError::field(Code::InvalidArgument, field, why)
    })
}

fn read_message(message: wire::ChatMessage) -> Value {
    let mut object = Map::new();
    object.insert("role".to_owned(), message.role.into());
    object.insert("content".to_owned(), message.content.into());
    // Templates ask whether a field is there, so an empty one is left out.
    if !message.name.is_empty() {
        object.insert("name".to_owned(), message.name.into());
    }
    if !message.reasoning_content.is_empty() {
        object.insert("reasoning_content".to_owned(), message.reasoning_content.into());
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.into_iter().map(|call| Value::Object(to_json(call))).collect();
        object.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    if !message.tool_call_id.is_empty() {
        object.insert("tool_call_id".to_owned(), message.tool_call_id.into());
    }
    Value::Object(object)
}

/// The input of a `Generate` call.
pub(crate) fn read_request(request: wire::GenerateRequest, now_unix_seconds: i64) -> Result<GenerateInput, KvistError> {
    let wrong = |field: &str, why: &str| Err(KvistError::field(Code::InvalidArgument, field, why));
    let sampling = request.sampling.unwrap_or_default();
    let within = |value: Option<f32>, low: f32, high: f32| value.is_none_or(|value| (low..=high).contains(&value));
    let checks = [
        ("temperature", within(sampling.temperature, 0.0, 2.0), "must be from 0 to 2"),
        ("top_p", within(sampling.top_p, f32::MIN_POSITIVE, 1.0), "must be above 0 and at most 1"),
        ("min_p", within(sampling.min_p, 0.0, 1.0), "must be from 0 to 1"),
        ("frequency_penalty", within(sampling.frequency_penalty, -2.0, 2.0), "must be from -2 to 2"),
        ("presence_penalty", within(sampling.presence_penalty, -2.0, 2.0), "must be from -2 to 2"),
        ("repetition_penalty", within(sampling.repetition_penalty, f32::MIN_POSITIVE, f32::MAX), "must be above 0"),
        ("choices", sampling.choices.is_none_or(|n| (1..=MOST_CHOICES).contains(&n)), "must be from 1 to 128"),
    ];
    if let Some((field, _, why)) = checks.into_iter().find(|(_, holds, _)| !holds) {
        return wrong(&format!("sampling.{field}"), why);
    }
    let stop = request.stop.unwrap_or_default();
    if stop.max_tokens == Some(0) {
        return wrong("stop.max_tokens", "must be at least 1");
    }
    if request.stop_strings.len() > MOST_STOP_STRINGS {
        return wrong("stop_strings", "may have at most 16 texts");
    }
    Ok(GenerateInput {
        model: request.model,
        prompt: read_prompt(request.prompt, now_unix_seconds)?,
        sampling,
        stop,
        stop_strings: request.stop_strings.into_iter().filter(|stop| !stop.is_empty()).collect(),
        include_stop_string: request.include_stop_string,
        structured_output: request.structured_output,
        adapter: request.adapter,
        cache_salt: request.cache_salt,
        priority: request.priority,
        engine_extras: request.engine_extras.filter(|extras| !extras.fields.is_empty()),
        return_token_ids: request.return_token_ids,
        form: request.answer_form.map(read_form).unwrap_or_default(),
    })
}

fn read_form(form: wire::AnswerForm) -> AnswerForm {
    use wire::tool_choice::Choice;
    let tool_choice = match form.tool_choice.and_then(|choice| choice.choice) {
        None => ToolChoice::None,
        Some(Choice::Name(name)) => ToolChoice::Named(name),
        Some(Choice::Mode(mode)) => match wire::ToolMode::try_from(mode) {
            Ok(wire::ToolMode::Auto) => ToolChoice::Auto,
            Ok(wire::ToolMode::Required) => ToolChoice::Required,
            Ok(wire::ToolMode::Unspecified) | Err(_) => ToolChoice::None,
        },
    };
    AnswerForm {
        separate_reasoning: form.separate_reasoning,
        tool_choice,
        single_call: form.single_call,
        strict_tools: form.strict_tools,
    }
}

pub(crate) fn write_delta(delta: TextDelta) -> wire::TextDelta {
    let (logprobs, logprob_tokens) = delta.logprobs.into_iter().map(write_logprob).unzip();
    let TextDelta { index, text, token_ids, .. } = delta;
    wire::TextDelta { index, text, token_ids, logprobs, logprob_tokens }
}

fn write_logprob(token: TokenLogprob) -> (TokenLogprobs, wire::NamedToken) {
    let split = |(token_id, text, logprob): (u32, Vec<u8>, f32)| (TopLogprob { token_id, logprob }, text.into());
    let (top, top_texts) = token.top.into_iter().map(split).unzip();
    let named = wire::NamedToken { token_id: token.token_id, text: token.bytes.into(), top_texts };
    (TokenLogprobs { logprob: token.logprob, top }, named)
}

pub(crate) fn write_reasoning(delta: ReasoningDelta) -> wire::ReasoningDelta {
    wire::ReasoningDelta { index: delta.index, text: delta.text }
}

pub(crate) fn write_call(delta: CallDelta) -> wire::CallDelta {
    let CallDelta { index, call, head, arguments, is_end } = delta;
    let head = head.unwrap_or_default();
    wire::CallDelta { index, call, id: head.id, name: head.name, arguments, is_end }
}

pub(crate) fn write_end(end: GenerateEnd) -> wire::GenerateFinished {
    let choices = end.choices.into_iter().map(|choice| wire::ChoiceFinish {
        index: choice.index,
        reason: choice.reason.into(),
        stop_string: choice.stop_string,
        stop_token_id: choice.stop_token_id,
        complete_calls: choice.complete_calls,
    });
    wire::GenerateFinished {
        choices: choices.collect(),
        usage: Some(wire::Usage {
            prompt_tokens: end.usage.prompt_tokens,
            completion_tokens: end.usage.completion_tokens,
            cached_tokens: end.usage.cached_tokens,
            reasoning_tokens: end.usage.reasoning_tokens,
        }),
        receipt: end.receipt,
    }
}

/// The time that a `grpc-timeout` value leaves.
pub(crate) fn read_grpc_timeout(value: &str) -> Option<std::time::Duration> {
    use std::time::Duration;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(Some(Duration::from_millis(1500)), read_grpc_timeout("1500m"));
        assert_eq!(Some(Duration::from_secs(7200)), read_grpc_timeout("2H"));
        for wrong in ["", "5", "m", "123456789S", "-1S", "1µ"] {
            assert_eq!(None, read_grpc_timeout(wrong), "{wrong}");
        }
    }

    #[test]
    fn whole_numbers_stay_whole() {
        let value = |number| prost_types::Value { kind: Some(Kind::NumberValue(number)) };
        assert_eq!("3", value_to_json(value(3.0)).to_string());
        assert_eq!("0.5", value_to_json(value(0.5)).to_string());
        assert_eq!("null", value_to_json(value(f64::NAN)).to_string());
        assert_eq!("1e300", value_to_json(value(1e300)).to_string().replace('+', ""));
    }

    #[test]
    fn a_wrong_field_is_named() {
        let text = || Some(wire::Prompt { form: Some(wire::prompt::Form::Text("x".to_owned())) });
        let base = || wire::GenerateRequest { model: "m".to_owned(), prompt: text(), ..Default::default() };
        let field_of = |request| read_request(request, 0).unwrap_err().fields[0].field.clone();
        assert!(read_request(base(), 0).is_ok());
        assert_eq!("prompt", field_of(wire::GenerateRequest { prompt: None, ..base() }));
        let mut hot = base();
        hot.sampling =
            Some(kvist_proto::engine::v1::SamplingParameters { temperature: Some(3.0), ..Default::default() });
        assert_eq!("sampling.temperature", field_of(hot));
        let chat = wire::Chat { messages: vec![wire::ChatMessage::default()], ..Default::default() };
        let prompt = Some(wire::Prompt { form: Some(wire::prompt::Form::Chat(chat)) });
        assert_eq!("prompt.chat.messages[0].role", field_of(wire::GenerateRequest { prompt, ..base() }));
    }
}
