//! Requests of the APIs as the router's input.

use std::borrow::Cow;

use kvist_dialect as dialect;
use kvist_errors::KvistError;
use kvist_proto::engine::v1::{
    Choices, SamplingParameters, StopConditions, StructuredOutput, structured_output::Constraint,
};
use kvist_router::{AnswerForm, Chat, GenerateInput, Prompt, TokenLogprob, ToolChoice};
use prost_types::{ListValue, Struct, value::Kind};
use serde_json::{Map, Value};

/// What the edge itself needs of a request once the router has the rest.
pub(crate) struct Form {
    pub(crate) endpoint: dialect::Endpoint,
    pub(crate) model: String,
    /// Of all prompts together.
    pub(crate) choices: u32,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    pub(crate) include_reasoning: bool,
    /// Fields of the request that the answer repeats.
    pub(crate) repeated: Map<String, Value>,
    /// Prompts beside the first.
    pub(crate) further_prompts: Vec<Prompt>,
    /// For each choice the prompt that is repeated before its answer; empty when none is.
    pub(crate) echo: Vec<Prompt>,
}

/// A prompt as the router takes it.
pub(crate) fn prompt_of(form: dialect::PromptForm, add_generation_prompt: bool, now_unix_seconds: i64) -> Prompt {
    match form {
        dialect::PromptForm::Text(text) => Prompt::Text(text),
        dialect::PromptForm::Tokens(ids) => Prompt::Tokens(ids),
        dialect::PromptForm::Chat { messages, tools, variables } => {
            Prompt::Chat(Box::new(Chat { messages, tools, variables, add_generation_prompt, now_unix_seconds }))
        }
    }
}

/// Splits a parsed request.
pub(crate) fn split(input: dialect::GenerateInput, now_unix_seconds: i64) -> (Form, GenerateInput) {
    let prompt = prompt_of(input.prompt, true, now_unix_seconds);
    let further_prompts: Vec<Prompt> =
        input.further_prompts.into_iter().map(|prompt| prompt_of(prompt, true, now_unix_seconds)).collect();
    let of_choices = std::iter::once(&prompt).chain(&further_prompts);
    let of_choices = of_choices.flat_map(|prompt| std::iter::repeat_n(prompt, input.choices as usize));
    let form = Form {
        endpoint: input.endpoint,
        model: input.model.clone(),
        choices: u32::try_from(1 + further_prompts.len()).unwrap_or(u32::MAX).saturating_mul(input.choices),
        stream: input.stream,
        include_usage: input.include_usage,
        logprobs: input.logprobs.is_some(),
        include_reasoning: input.include_reasoning,
        repeated: input.repeated,
        echo: if input.echo { of_choices.cloned().collect() } else { Vec::new() },
        further_prompts,
    };
    let sampling = SamplingParameters {
        temperature: input.sampling.temperature,
        top_p: input.sampling.top_p,
        top_k: input.sampling.top_k,
        min_p: input.sampling.min_p,
        frequency_penalty: input.sampling.frequency_penalty,
        presence_penalty: input.sampling.presence_penalty,
        repetition_penalty: input.sampling.repetition_penalty,
        seed: input.sampling.seed,
        logit_bias: input.sampling.logit_bias.into_iter().collect(),
        top_logprobs: input.logprobs.map(|logprobs| logprobs.top),
        prompt_logprobs: None,
        choices: (input.choices != 1).then_some(input.choices),
    };
    let stop = StopConditions {
        max_tokens: input.max_tokens,
        min_tokens: input.min_tokens,
        stop_token_ids: input.stop_token_ids,
        ignore_eos: input.ignore_eos,
    };
    let generate = GenerateInput {
        sampling,
        stop,
        stop_strings: input.stop,
        include_stop_string: input.include_stop_string,
        structured_output: input.structured.map(structured),
        form: AnswerForm {
            // The completions API shows text as it was generated.
            separate_reasoning: input.endpoint != dialect::Endpoint::Completions,
            tool_choice: tool_choice(input.tool_choice),
            single_call: !input.parallel_tool_calls,
            strict_tools: input.strict_tools,
        },
        cache_salt: input.cache_salt,
        priority: input.priority,
        engine_extras: (!input.extras.is_empty()).then(|| to_struct(input.extras)),
        ..GenerateInput::new(input.model, prompt)
    };
    (form, generate)
}

fn tool_choice(choice: dialect::ToolChoice) -> ToolChoice {
    match choice {
        dialect::ToolChoice::None => ToolChoice::None,
        dialect::ToolChoice::Auto => ToolChoice::Auto,
        dialect::ToolChoice::Required => ToolChoice::Required,
        dialect::ToolChoice::Named(name) => ToolChoice::Named(name),
    }
}

fn structured(output: dialect::Structured) -> StructuredOutput {
    let constraint = match output {
        dialect::Structured::JsonObject => Constraint::JsonObject(true),
        dialect::Structured::JsonSchema(schema) => Constraint::JsonSchema(schema),
        dialect::Structured::Regex(regex) => Constraint::Regex(regex),
        dialect::Structured::Grammar(grammar) => Constraint::Grammar(grammar),
        dialect::Structured::Choice(texts) => Constraint::Choice(Choices { texts }),
        dialect::Structured::StructuralTag(tag) => Constraint::StructuralTag(tag),
    };
    StructuredOutput { constraint: Some(constraint) }
}

/// A JSON object as a protobuf struct.
fn to_struct(map: Map<String, Value>) -> Struct {
    Struct { fields: map.into_iter().map(|(name, value)| (name, to_value(value))).collect() }
}

fn to_value(value: Value) -> prost_types::Value {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(truth) => Kind::BoolValue(truth),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text),
        Value::Array(items) => Kind::ListValue(ListValue { values: items.into_iter().map(to_value).collect() }),
        Value::Object(map) => Kind::StructValue(to_struct(map)),
    };
    prost_types::Value { kind: Some(kind) }
}

/// Log-probabilities as the API's writer takes them.
pub(crate) fn logprobs(tokens: Vec<TokenLogprob>) -> Vec<dialect::TokenLogprob> {
    tokens
        .into_iter()
        .map(|token| dialect::TokenLogprob {
            bytes: token.bytes,
            logprob: token.logprob,
            top: token.top.into_iter().map(|(_, bytes, logprob)| (bytes, logprob)).collect(),
        })
        .collect()
}

/// An error whose fields are named as the APIs name them; engines speak of `kvist.engine.v1.EngineRequest`.
pub(crate) fn in_words_of_the_api(mut error: KvistError) -> KvistError {
    for violation in &mut error.fields {
        let name = api_field(&violation.field).into_owned();
        if let Some(rest) = error.message.strip_prefix(&violation.field) {
            error.message = format!("{name}{rest}");
        }
        violation.field = name;
    }
    error
}

fn api_field(field: &str) -> Cow<'_, str> {
    if let Some(place) = field.strip_prefix("inputs[") {
        return format!("input[{place}").into();
    }
    let name = match field {
        "sampling.choices" => "n",
        "sampling.prompt_logprobs" => "logprobs",
        "inputs" => "input",
        other => other.strip_prefix("sampling.").or_else(|| other.strip_prefix("stop.")).unwrap_or(other),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_client_asked_reaches_the_router() {
        let body = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":0.5,"n":2,"max_tokens":7,
            "stop":"x","logprobs":true,"top_logprobs":2,"custom":{"a":[1,null]},"stream":true,"priority":-1}"#;
        let (form, input) = split(dialect::parse_chat_completion(body).unwrap(), 0);
        assert_eq!((2, true, true), (form.choices, form.stream, form.logprobs));
        assert_eq!(
            (Some(0.5), Some(2), Some(2)),
            (input.sampling.temperature, input.sampling.choices, input.sampling.top_logprobs)
        );
        assert_eq!((Some(7), vec!["x".to_owned()], -1), (input.stop.max_tokens, input.stop_strings, input.priority));
        let extras = input.engine_extras.unwrap();
        assert!(matches!(extras.fields["custom"].kind, Some(Kind::StructValue(_))));
    }
}
