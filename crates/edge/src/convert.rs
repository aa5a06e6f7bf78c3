//! The dialect's request as the router's, and the router's events as the dialect's.

use kvist_dialect::{FinishWord, GenerateInput, PromptForm, Structured, TokenLogprob, UsageNumbers};
use kvist_proto::{
    engine::v1::{
        Choices, FinishReason, SamplingParameters, StopConditions, StructuredOutput, TokenIds, TokenLogprobs,
        structured_output::Constraint,
    },
    router::v1::{Chat, ChatMessage, GenerateFinished, GenerateRequest, Prompt, prompt::Form},
};
use kvist_router::Generation;
use prost_types::{ListValue, Struct, Value, value::Kind};

pub(crate) fn request(input: GenerateInput, request_id: String) -> GenerateRequest {
    let form = match input.prompt {
        PromptForm::Text(text) => Form::Text(text),
        PromptForm::Tokens(ids) => Form::Tokens(TokenIds { ids }),
        PromptForm::Chat { messages, variables } => Form::Chat(Chat {
            messages: messages.into_iter().map(message).collect(),
            tools: Vec::new(),
            template_variables: (!variables.is_empty()).then(|| structure(variables)),
        }),
    };
    let sampling = input.sampling;
    GenerateRequest {
        model: input.model,
        prompt: Some(Prompt { form: Some(form) }),
        sampling: Some(SamplingParameters {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            repetition_penalty: sampling.repetition_penalty,
            seed: sampling.seed,
            logit_bias: sampling.logit_bias.into_iter().collect(),
            top_logprobs: input.logprobs.map(|logprobs| logprobs.top),
            prompt_logprobs: None,
            choices: Some(input.choices),
        }),
        stop: Some(StopConditions {
            max_tokens: input.max_tokens,
            min_tokens: input.min_tokens,
            stop_token_ids: input.stop_token_ids,
            ignore_eos: input.ignore_eos,
        }),
        stop_strings: input.stop,
        include_stop_string: input.include_stop_string,
        structured_output: input.structured.map(|structured| StructuredOutput {
            constraint: Some(match structured {
                Structured::JsonObject => Constraint::JsonObject(true),
                Structured::JsonSchema(schema) => Constraint::JsonSchema(schema),
                Structured::Regex(regex) => Constraint::Regex(regex),
                Structured::Grammar(grammar) => Constraint::Grammar(grammar),
                Structured::Choice(texts) => Constraint::Choice(Choices { texts }),
                Structured::StructuralTag(tag) => Constraint::StructuralTag(tag),
            }),
        }),
        cache_salt: input.cache_salt,
        priority: input.priority,
        request_id,
        engine_extras: (!input.extras.is_empty()).then(|| structure(input.extras)),
        ..GenerateRequest::default()
    }
}

fn message(value: serde_json::Value) -> ChatMessage {
    let text = |name: &str| value.get(name).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    let calls = value.get("tool_calls").and_then(serde_json::Value::as_array);
    ChatMessage {
        role: text("role"),
        content: text("content"),
        name: text("name"),
        tool_call_id: text("tool_call_id"),
        tool_calls: calls
            .into_iter()
            .flatten()
            .filter_map(|call| call.as_object().map(|call| structure(call.clone())))
            .collect(),
    }
}

fn structure(map: serde_json::Map<String, serde_json::Value>) -> Struct {
    Struct { fields: map.into_iter().map(|(key, value)| (key, protobuf_value(value))).collect() }
}

fn protobuf_value(value: serde_json::Value) -> Value {
    let kind = match value {
        serde_json::Value::Null => Kind::NullValue(0),
        serde_json::Value::Bool(boolean) => Kind::BoolValue(boolean),
        serde_json::Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        serde_json::Value::String(text) => Kind::StringValue(text),
        serde_json::Value::Array(items) => {
            Kind::ListValue(ListValue { values: items.into_iter().map(protobuf_value).collect() })
        }
        serde_json::Value::Object(map) => Kind::StructValue(structure(map)),
    };
    Value { kind: Some(kind) }
}

pub(crate) fn logprobs(generation: &Generation, ids: &[u32], logprobs: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    let bytes = |id: u32| generation.text().token_bytes(id).to_vec();
    ids.iter()
        .zip(logprobs)
        .map(|(id, logprobs)| TokenLogprob {
            bytes: bytes(*id),
            logprob: logprobs.logprob,
            top: logprobs.top.iter().map(|top| (bytes(top.token_id), top.logprob)).collect(),
        })
        .collect()
}

pub(crate) fn finish_word(finished: &GenerateFinished) -> FinishWord {
    match finished.choices.first().map(kvist_proto::router::v1::ChoiceFinish::reason) {
        Some(FinishReason::Length) => FinishWord::Length,
        _ => FinishWord::Stop,
    }
}

pub(crate) fn usage(finished: &GenerateFinished) -> UsageNumbers {
    let usage = finished.usage.unwrap_or_default();
    UsageNumbers {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens,
    }
}
