//! A request in the server's words. Pure.
//!
//! What the server would refuse by itself is left to it, whose messages are good; what it cannot do, or would take
//! silently in another meaning, is refused here.

use http::HeaderMap;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{
    EngineRequest, SamplingParameters, engine_request::Prompt, structured_output::Constraint,
};
use prost_types::{Struct, value::Kind};
use serde_json::{Map, Value, json};

use crate::{client::put, facts::ServerFacts, settings::Api};

/// Fields that Kvist does not know and the server does.
const EXTRAS: [&str; 3] = ["allowed_token_ids", "bad_words", "thinking_token_budget"];

/// A request that can be sent.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) body: Value,
    pub(crate) headers: HeaderMap,
    pub(crate) prompt_tokens: u32,
    pub(crate) choices: u32,
    /// Alternatives for each token; none where nobody asked for log-probabilities.
    pub(crate) alternatives: Option<u32>,
    pub(crate) adapter: String,
    pub(crate) rank: u32,
    pub(crate) expected_cached_tokens: u32,
}

/// Puts a request in the words of the server.
///
/// # Errors
/// It asks for what this server cannot do; the engine has not started on it.
pub(crate) fn prepare(request: EngineRequest, facts: &ServerFacts) -> Result<Prepared, KvistError> {
    prepared(request, facts).map_err(KvistError::before_start)
}

fn prepared(request: EngineRequest, facts: &ServerFacts) -> Result<Prepared, KvistError> {
    let Some(Prompt::Tokens(tokens)) = request.prompt else {
        return Err(KvistError::field(Code::InvalidArgument, "tokens", "the prompt must be token ids"));
    };
    let prompt_tokens = u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
    let room = facts.context_tokens.saturating_sub(prompt_tokens);
    if room == 0 {
        let message = format!(
            "the prompt has {prompt_tokens} tokens, and the context of {} must hold one more",
            facts.context_tokens
        );
        return Err(KvistError::new(Code::ContextLengthExceeded, message));
    }
    let sampling = request.sampling.unwrap_or_default();
    let alternatives = sampling.top_logprobs;
    let choices = sampling.choices.unwrap_or(1).max(1);
    for (field, is_asked, why) in [
        ("kv_transfer", request.kv_transfer.is_some(), "an attached server takes no part in a KV hand-over"),
        ("kv_hints", request.kv_hints.is_some(), "an attached server takes no hints to its cache"),
        ("sampling.prompt_logprobs", sampling.prompt_logprobs.is_some(), "streams of an attached server have none"),
        (
            "sampling.top_logprobs",
            alternatives.is_some() && facts.api == Api::Completions,
            "this server is asked by /v1/completions, which names tokens by their text; start it with --enable-scale-out",
        ),
        ("cache_salt", !request.cache_salt.is_empty() && !facts.takes_salts, "this server does not know salts"),
        (
            "priority",
            request.priority != 0 && !facts.orders_by_priority,
            "the server is not said to order by priority: engine_arguments.scheduling-policy",
        ),
    ] {
        if is_asked {
            return Err(KvistError::field(Code::UnsupportedField, field, why));
        }
    }
    if request.adapter == facts.model || (!request.adapter.is_empty() && !facts.has_adapters) {
        return Err(KvistError::new(Code::UnknownModel, "the server has no such adapter"));
    }
    let mut words = sampling_words(&sampling);
    let stop = request.stop.unwrap_or_default();
    if stop.max_tokens == Some(0) {
        return Err(KvistError::field(Code::InvalidArgument, "stop.max_tokens", "must be at least 1"));
    }
    let mut put_word = |name: &str, value: Value| words.insert(name.to_owned(), value);
    put_word("max_tokens", stop.max_tokens.map_or(room, |most| most.min(room)).into());
    if let Some(least) = stop.min_tokens.filter(|least| *least > 0) {
        put_word("min_tokens", least.into());
    }
    if !stop.stop_token_ids.is_empty() {
        put_word("stop_token_ids", stop.stop_token_ids.into());
    }
    if stop.ignore_eos {
        put_word("ignore_eos", true.into());
    }
    if choices > 1 {
        put_word("n", choices.into());
    }
    if let Some((kind, value)) = request.structured_output.and_then(|output| output.constraint).and_then(constraint) {
        put_word("structured_outputs", json!({kind: value}));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in fields(request.engine_extras.unwrap_or_default()) {
        match (name.as_str(), value) {
            ("session_id", Value::String(session)) => put(&mut headers, "x-session-id", &session),
            (known, value) if EXTRAS.contains(&known) => drop(put_word(known, value)),
            (other, _) => {
                let why = format!("an attached server takes {}, session_id", EXTRAS.join(", "));
                return Err(KvistError::field(Code::UnsupportedField, format!("engine_extras.{other}"), why));
            }
        }
    }
    put(&mut headers, "x-request-id", &request.request_id);
    put(&mut headers, "traceparent", &request.traceparent);
    put(&mut headers, "tracestate", &request.tracestate);
    if facts.ranks.len() > 1 {
        let called = facts.ranks.get(request.rank as usize).map_or(request.rank, |rank| rank.called);
        put(&mut headers, "x-data-parallel-rank", &called.to_string());
    }
    let model = if request.adapter.is_empty() { &facts.model } else { &request.adapter };
    let mut body = json!({
        "model": model,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if !request.cache_salt.is_empty() {
        body["cache_salt"] = request.cache_salt.into();
    }
    if request.priority != 0 {
        body["priority"] = request.priority.into();
    }
    say(&mut body, facts.api, tokens.ids, words);
    Ok(Prepared {
        body,
        headers,
        prompt_tokens,
        choices,
        alternatives,
        adapter: request.adapter,
        rank: request.rank,
        // The last token is always computed.
        expected_cached_tokens: request.expected_cached_tokens.unwrap_or(0).min(prompt_tokens - 1),
    })
}

/// Adds the prompt and how tokens are drawn, where the door expects them.
pub(crate) fn say(body: &mut Value, api: Api, prompt: Vec<u32>, mut words: Map<String, Value>) {
    match api {
        Api::Generate => {
            body["token_ids"] = prompt.into();
            // Texts are made by the router.
            words.insert("detokenize".to_owned(), false.into());
            body["sampling_params"] = words.into();
        }
        Api::Completions => {
            body["prompt"] = prompt.into();
            body["return_token_ids"] = true.into();
            if let Some(fields) = body.as_object_mut() {
                fields.extend(words);
            }
        }
    }
}

fn sampling_words(sampling: &SamplingParameters) -> Map<String, Value> {
    let mut words = Map::new();
    for (name, value) in [
        ("temperature", sampling.temperature.map(shortest)),
        ("top_p", sampling.top_p.map(shortest)),
        ("top_k", sampling.top_k.map(Value::from)),
        ("min_p", sampling.min_p.map(shortest)),
        ("frequency_penalty", sampling.frequency_penalty.map(shortest)),
        ("presence_penalty", sampling.presence_penalty.map(shortest)),
        ("repetition_penalty", sampling.repetition_penalty.map(shortest)),
        ("seed", sampling.seed.map(Value::from)),
        ("logprobs", sampling.top_logprobs.map(Value::from)),
    ] {
        if let Some(value) = value {
            words.insert(name.to_owned(), value);
        }
    }
    if !sampling.logit_bias.is_empty() {
        let bias = sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), shortest(*bias)));
        words.insert("logit_bias".to_owned(), Value::Object(bias.collect()));
    }
    words
}

/// A constraint by the name that vLLM has for it.
fn constraint(constraint: Constraint) -> Option<(&'static str, Value)> {
    match constraint {
        Constraint::JsonObject(is_asked) => is_asked.then(|| ("json_object", true.into())),
        Constraint::JsonSchema(schema) => Some(("json", schema.into())),
        Constraint::Regex(regex) => Some(("regex", regex.into())),
        Constraint::Grammar(grammar) => Some(("grammar", grammar.into())),
        Constraint::Choice(choices) => Some(("choice", choices.texts.into())),
        Constraint::StructuralTag(tag) => Some(("structural_tag", tag.into())),
    }
}

/// A number as people wrote it: 0.7 and not 0.699999988079071.
fn shortest(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn fields(fields: Struct) -> impl Iterator<Item = (String, Value)> {
    fields.fields.into_iter().map(|(name, value)| (name, plain(value)))
}

/// A protobuf value as JSON; whole numbers, which have lost their type on the way, are integers again.
fn plain(value: prost_types::Value) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => value.into(),
        Some(Kind::NumberValue(value)) if value.fract() == 0.0 && value.abs() < 9e15 => (value as i64).into(),
        Some(Kind::NumberValue(value)) => value.into(),
        Some(Kind::StringValue(value)) => value.into(),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(plain).collect(),
        Some(Kind::StructValue(value)) => Value::Object(fields(value).collect()),
    }
}
