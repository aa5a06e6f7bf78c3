//! Requests of the OpenAI API.

use kvist_errors::{Code, KvistError};
use serde_json::{Map, Value};

/// Which API a request came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
}

/// What to go on from.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptForm {
    /// Messages as JSON objects, with text content.
    Chat {
        /// In order.
        messages: Vec<Value>,
        /// Further variables of the chat template.
        variables: Map<String, Value>,
    },
    /// Plain text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// How tokens are drawn; none means the engine's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Range (0, 1].
    pub top_p: Option<f32>,
    /// 0 means all.
    pub top_k: Option<u32>,
    /// Range [0, 1].
    pub min_p: Option<f32>,
    /// Range -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// Range -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// For equal answers.
    pub seed: Option<i64>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
}

/// Constrained output.
#[derive(Clone, Debug, PartialEq)]
pub enum Structured {
    /// Any JSON object.
    JsonObject,
    /// A JSON schema, as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar in the engine's notation.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Log-probabilities in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logprobs {
    /// Alternatives for each token.
    pub top: u32,
}

/// One request, whatever API it came by.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateInput {
    /// Which API.
    pub endpoint: Endpoint,
    /// Name of the model.
    pub model: String,
    /// What to go on from.
    pub prompt: PromptForm,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
    /// Tokens before which nothing ends the text.
    pub min_tokens: Option<u32>,
    /// Texts that end generation.
    pub stop: Vec<String>,
    /// Token ids that end generation.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string is part of the text.
    pub include_stop_string: bool,
    /// Go on after the model's own end.
    pub ignore_eos: bool,
    /// Constrained output.
    pub structured: Option<Structured>,
    /// Log-probabilities in the answer.
    pub logprobs: Option<Logprobs>,
    /// Choices.
    pub choices: u32,
    /// Answer as it comes.
    pub stream: bool,
    /// A last chunk with usage.
    pub include_usage: bool,
    /// Repeat the prompt before the answer (completions only).
    pub echo: bool,
    /// Separates caches.
    pub cache_salt: String,
    /// Smaller runs earlier.
    pub priority: i32,
    /// Fields that Kvist does not know.
    pub extras: Map<String, Value>,
}

/// Fields by which only the mesh steers engines.
const MESH_ONLY: [&str; 5] =
    ["kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_event_report_mode", "vllm_xargs"];

/// Fields of the API that change nothing in the answer and may be left without effect.
const WITHOUT_EFFECT: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "verbosity",
    "prompt_cache_retention",
];

/// Most texts in `stop`.
const MOST_STOPS: usize = 16;

/// Takes known fields out of a body; what stays is unknown.
struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    fn parse(body: &[u8]) -> Result<Self, KvistError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map }),
            Ok(_) => Err(KvistError::new(Code::InvalidArgument, "the body must be a JSON object")),
            Err(error) => Err(KvistError::new(
                Code::InvalidArgument,
                format!("the body is not JSON: line {}, column {}", error.line(), error.column()),
            )),
        }
    }

    /// The value of a field; null counts as absent.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f32>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "sampling parameters are single precision in every engine"
            )]
            Some(number) if (low..=high).contains(&number) => Ok(Some(number as f32)),
            _ => Err(wrong(name, format!("must be a number from {low} to {high}"))),
        }
    }

    fn unsigned(&mut self, name: &str, low: u32, high: u32) -> Result<Option<u32>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ if high == u32::MAX => Err(wrong(name, format!("must be a whole number of at least {low}"))),
            _ => Err(wrong(name, format!("must be a whole number from {low} to {high}"))),
        }
    }

    fn signed(&mut self, name: &str) -> Result<Option<i64>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_i64().map(Some).ok_or_else(|| wrong(name, "must be a whole number"))
    }

    fn boolean(&mut self, name: &str) -> Result<Option<bool>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| wrong(name, "must be true or false"))
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, KvistError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(wrong(name, "must be a string")),
        }
    }

    fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, KvistError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(wrong(name, "must be an object")),
        }
    }
}

fn wrong(field: impl Into<String>, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, why)
}

fn unsupported(field: impl Into<String>, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::UnsupportedField, field, why)
}

/// Reads a body of `/v1/chat/completions`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_chat_completion(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let messages = match fields.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        Some(Value::Array(_)) => return Err(wrong("messages", "must have at least one message")),
        Some(_) => return Err(wrong("messages", "must be an array of messages")),
        None => return Err(wrong("messages", "is missing")),
    };
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(position, message)| read_message(position, message))
        .collect::<Result<Vec<_>, _>>()?;
    let variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    refuse_tools(&mut fields)?;
    for field in ["audio", "modalities", "prediction", "web_search_options", "reasoning_effort"] {
        if let Some(value) = fields.take(field)
            && !(field == "modalities" && value == serde_json::json!(["text"]))
        {
            return Err(unsupported(field, "this model cannot honor it"));
        }
    }
    let wants = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.unsigned("top_logprobs", 0, 20)?;
    if top.is_some() && !wants {
        return Err(wrong("top_logprobs", "needs `logprobs: true`"));
    }
    let logprobs = wants.then_some(Logprobs { top: top.unwrap_or(0) });
    let newer = fields.unsigned("max_completion_tokens", 1, u32::MAX)?;
    let older = fields.unsigned("max_tokens", 1, u32::MAX)?;
    let prompt = PromptForm::Chat { messages, variables };
    read_common(fields, Endpoint::ChatCompletions, prompt, logprobs, newer.or(older))
}

/// Reads a body of `/v1/completions`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_completion(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let prompt = match fields.take("prompt") {
        Some(Value::String(text)) => PromptForm::Text(text),
        Some(Value::Array(items)) => read_prompt_list(items)?,
        Some(_) => return Err(wrong("prompt", "must be a string or a list of token ids")),
        None => return Err(wrong("prompt", "is missing")),
    };
    if let Some(suffix) = fields.text("suffix")?
        && !suffix.is_empty()
    {
        return Err(unsupported("suffix", "this model cannot insert"));
    }
    let best_of = fields.unsigned("best_of", 1, 1).map_err(|_| unsupported("best_of", "only 1 is possible"))?;
    let _ = best_of;
    let logprobs = fields.unsigned("logprobs", 0, 20)?.map(|top| Logprobs { top });
    // The default of this API.
    let max_tokens = fields.unsigned("max_tokens", 1, u32::MAX)?.or(Some(16));
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut input = read_common(fields, Endpoint::Completions, prompt, logprobs, max_tokens)?;
    if echo && input.logprobs.is_some() {
        return Err(unsupported(
            "echo",
            "together with `logprobs` it asks for the prompt's log-probabilities, which this version does not return",
        ));
    }
    input.echo = echo;
    Ok(input)
}

fn read_common(
    mut fields: Fields,
    endpoint: Endpoint,
    prompt: PromptForm,
    logprobs: Option<Logprobs>,
    max_tokens: Option<u32>,
) -> Result<GenerateInput, KvistError> {
    if let Some(field) = MESH_ONLY.into_iter().find(|field| fields.map.contains_key(*field)) {
        return Err(KvistError::field(Code::MeshOnlyField, field, "only the mesh sets it"));
    }
    let model = fields.text("model")?.filter(|model| !model.is_empty()).ok_or_else(|| wrong("model", "is missing"))?;
    let sampling = Sampling {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        top_p: fields.number("top_p", 0.0, 1.0)?,
        top_k: match fields.take("top_k") {
            // Engines and clients write "all" as 0 or -1.
            Some(value) if value.as_i64() == Some(-1) => Some(0),
            Some(value) => Some(
                value
                    .as_u64()
                    .and_then(|number| u32::try_from(number).ok())
                    .ok_or_else(|| wrong("top_k", "must be a whole number, -1 for all"))?,
            ),
            None => None,
        },
        min_p: fields.number("min_p", 0.0, 1.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01, 10.0)?,
        seed: fields.signed("seed")?,
        logit_bias: read_logit_bias(&mut fields)?,
    };
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        None => false,
        Some(_) if !stream => return Err(wrong("stream_options", "needs `stream: true`")),
        Some(options) => options.get("include_usage").and_then(Value::as_bool).unwrap_or(false),
    };
    let structured = read_structured(&mut fields)?;
    let input = GenerateInput {
        endpoint,
        model,
        prompt,
        sampling,
        max_tokens,
        min_tokens: fields.unsigned("min_tokens", 0, u32::MAX)?,
        stop: read_stop(&mut fields)?,
        stop_token_ids: match fields.take("stop_token_ids") {
            None => Vec::new(),
            Some(value) => read_token_ids("stop_token_ids", &value)?,
        },
        include_stop_string: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        structured,
        logprobs,
        choices: fields.unsigned("n", 1, 128)?.unwrap_or(1),
        stream,
        include_usage,
        echo: false,
        cache_salt: fields.text("cache_salt")?.unwrap_or_default(),
        priority: match fields.signed("priority")? {
            None => 0,
            Some(priority) => i32::try_from(priority).map_err(|_| wrong("priority", "is out of range"))?,
        },
        extras: Map::new(),
    };
    for field in WITHOUT_EFFECT {
        fields.take(field);
    }
    fields.map.retain(|_, value| !value.is_null());
    Ok(GenerateInput { extras: fields.map, ..input })
}

/// A message with its content as one text.
fn read_message(position: usize, message: Value) -> Result<Value, KvistError> {
    let path = format!("messages[{position}]");
    let Value::Object(mut message) = message else { return Err(wrong(path, "must be an object")) };
    match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        Some(_) => return Err(wrong(format!("{path}.role"), "must be a string")),
        None => return Err(wrong(format!("{path}.role"), "is missing")),
    }
    let content = match message.shift_remove("content") {
        Some(Value::String(text)) => text,
        None | Some(Value::Null) => {
            if message.contains_key("tool_calls") {
                String::new()
            } else {
                return Err(wrong(format!("{path}.content"), "is missing"));
            }
        }
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (number, part) in parts.iter().enumerate() {
                match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                    (Some("text"), Some(piece)) => text.push_str(piece),
                    (Some("text"), None) => {
                        return Err(wrong(format!("{path}.content[{number}].text"), "must be a string"));
                    }
                    (Some(kind), _) => {
                        return Err(unsupported(
                            format!("{path}.content[{number}].type"),
                            format!("this model takes text alone, not `{kind}`"),
                        ));
                    }
                    (None, _) => return Err(wrong(format!("{path}.content[{number}].type"), "is missing")),
                }
            }
            text
        }
        Some(_) => return Err(wrong(format!("{path}.content"), "must be a string or a list of parts")),
    };
    message.insert("content".to_owned(), content.into());
    Ok(Value::Object(message))
}

fn read_prompt_list(items: Vec<Value>) -> Result<PromptForm, KvistError> {
    match items.as_slice() {
        [] => Err(wrong("prompt", "must not be empty")),
        [Value::String(text)] => Ok(PromptForm::Text(text.clone())),
        [Value::Array(_)] => Ok(PromptForm::Tokens(read_token_ids("prompt[0]", &items[0])?)),
        [Value::String(_) | Value::Array(_), ..] => {
            Err(unsupported("prompt", "several prompts in one request are not supported; send one request each"))
        }
        _ => Ok(PromptForm::Tokens(read_token_ids("prompt", &Value::Array(items))?)),
    }
}

fn read_token_ids(field: &str, value: &Value) -> Result<Vec<u32>, KvistError> {
    let items = value.as_array().ok_or_else(|| wrong(field, "must be a list of token ids"))?;
    items
        .iter()
        .enumerate()
        .map(|(position, item)| {
            item.as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| wrong(format!("{field}[{position}]"), "must be a token id"))
        })
        .collect()
}

fn read_stop(fields: &mut Fields) -> Result<Vec<String>, KvistError> {
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => items
            .into_iter()
            .enumerate()
            .map(|(position, item)| match item {
                Value::String(text) => Ok(text),
                _ => Err(wrong(format!("stop[{position}]"), "must be a string")),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong("stop", "must be a string or a list of strings")),
    };
    if stops.len() > MOST_STOPS {
        return Err(wrong("stop", format!("may have at most {MOST_STOPS} strings")));
    }
    Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
}

fn read_logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, KvistError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    map.iter()
        .map(|(token, bias)| {
            let path = format!("logit_bias.{token}");
            let id = token.parse().map_err(|_| wrong(&path, "must be a token id"))?;
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            #[expect(clippy::cast_possible_truncation, reason = "logits are single precision")]
            bias.map(|bias| (id, bias as f32)).ok_or_else(|| wrong(path, "must be a number from -100 to 100"))
        })
        .collect()
}

fn refuse_tools(fields: &mut Fields) -> Result<(), KvistError> {
    let choice = fields.take("tool_choice");
    let none = choice.as_ref().is_none_or(|choice| choice == "none" || choice == "auto");
    let tools = ["tools", "functions"].map(|field| (field, fields.take(field)));
    fields.take("parallel_tool_calls");
    for (field, value) in tools {
        let empty = value.as_ref().is_none_or(|value| value.as_array().is_some_and(Vec::is_empty));
        if !empty && choice.as_ref().is_none_or(|choice| choice != "none") {
            return Err(unsupported(field, "tool calls are not supported by this version"));
        }
    }
    if !none {
        return Err(unsupported("tool_choice", "tool calls are not supported by this version"));
    }
    Ok(())
}

fn read_structured(fields: &mut Fields) -> Result<Option<Structured>, KvistError> {
    let mut found = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        match format.get("type").and_then(Value::as_str) {
            Some("text") => {}
            Some("json_object") => found.push(Structured::JsonObject),
            Some("json_schema") => {
                let schema = format.get("json_schema").and_then(|wrapper| wrapper.get("schema"));
                let schema = schema.filter(|schema| schema.is_object());
                let schema = schema.ok_or_else(|| wrong("response_format.json_schema.schema", "must be an object"))?;
                found.push(Structured::JsonSchema(schema.to_string()));
            }
            _ => return Err(wrong("response_format.type", "must be one of text, json_object, json_schema")),
        }
    }
    if let Some(schema) = fields.take("guided_json") {
        found.push(Structured::JsonSchema(match schema {
            Value::String(text) => text,
            other => other.to_string(),
        }));
    }
    found.extend(fields.text("guided_regex")?.map(Structured::Regex));
    found.extend(fields.text("guided_grammar")?.map(Structured::Grammar));
    if let Some(choices) = fields.take("guided_choice") {
        let texts = choices
            .as_array()
            .map(|items| items.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect::<Vec<_>>());
        let texts = texts
            .filter(|texts| !texts.is_empty())
            .ok_or_else(|| wrong("guided_choice", "must be a list of strings"))?;
        found.push(Structured::Choice(texts));
    }
    if found.len() > 1 {
        return Err(wrong("response_format", "only one constraint may be given"));
    }
    Ok(found.pop())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(more: &str) -> Result<GenerateInput, KvistError> {
        let body = format!(r#"{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]{more}}}"#);
        parse_chat_completion(body.as_bytes())
    }

    fn refused_field(more: &str) -> (Code, String) {
        let error = chat(more).unwrap_err();
        (error.code, error.fields[0].field.clone())
    }

    #[test]
    fn a_plain_request_has_defaults_and_no_extras() {
        let input = chat("").unwrap();
        assert_eq!((1, false, None, Map::new()), (input.choices, input.stream, input.max_tokens, input.extras));
        let newer = chat(r#", "max_tokens": 5, "max_completion_tokens": 7, "unheard_of": [1], "user": "u""#).unwrap();
        assert_eq!(
            (Some(7), r#"{"unheard_of":[1]}"#.to_owned()),
            (newer.max_tokens, Value::Object(newer.extras).to_string())
        );
    }

    #[test]
    fn wrong_fields_are_named() {
        for (more, code, field) in [
            (r#", "temperature": 3"#, Code::InvalidArgument, "temperature"),
            (r#", "max_tokens": 0"#, Code::InvalidArgument, "max_tokens"),
            (r#", "stop": [1]"#, Code::InvalidArgument, "stop[0]"),
            (r#", "top_logprobs": 2"#, Code::InvalidArgument, "top_logprobs"),
            (r#", "logit_bias": {"x": 1}"#, Code::InvalidArgument, "logit_bias.x"),
            (r#", "kv_transfer_params": {}"#, Code::MeshOnlyField, "kv_transfer_params"),
            (r#", "tools": [{}]"#, Code::UnsupportedField, "tools"),
            (r#", "stream_options": {}"#, Code::InvalidArgument, "stream_options"),
            (r#", "response_format": {"type": "xml"}"#, Code::InvalidArgument, "response_format.type"),
        ] {
            assert_eq!((code, field.to_owned()), refused_field(more), "{more}");
        }
        let image = br#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#;
        assert_eq!(Code::UnsupportedField, parse_chat_completion(image).unwrap_err().code);
        assert_eq!(Code::InvalidArgument, parse_chat_completion(b"{").unwrap_err().code);
    }

    #[test]
    fn prompts_come_as_text_or_tokens() {
        let prompt = |prompt: &str| {
            parse_completion(format!(r#"{{"model": "m", "prompt": {prompt}}}"#).as_bytes()).map(|input| input.prompt)
        };
        assert_eq!(PromptForm::Text("a".to_owned()), prompt(r#""a""#).unwrap());
        assert_eq!(PromptForm::Text("a".to_owned()), prompt(r#"["a"]"#).unwrap());
        assert_eq!(PromptForm::Tokens(vec![1, 2]), prompt("[1, 2]").unwrap());
        assert_eq!(PromptForm::Tokens(vec![1, 2]), prompt("[[1, 2]]").unwrap());
        assert_eq!(Code::UnsupportedField, prompt(r#"["a", "b"]"#).unwrap_err().code);
        assert_eq!("prompt[1]", prompt("[1, -2]").unwrap_err().fields[0].field);
    }
}
