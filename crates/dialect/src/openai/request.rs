//! Requests of the OpenAI API.

use kvist_errors::KvistError;
use serde_json::{Map, Value};

use crate::{
    fields::{
        Fields, read_messages, read_model, read_priority, read_schema, read_stop, read_token_ids, read_top_k,
        read_top_p, refuse_mesh_fields, unsupported, wrong,
    },
    input::{Endpoint, GenerateInput, Logprobs, PromptForm, Sampling, Structured},
    openai::{message::read_message, prompts::take_prompts},
    thinking::set_effort,
    tools::{Definition, ToolUse, read_open_ai_choice, read_tools, refuse_with_calls},
};

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

/// Fields of other servers that change what the answer says or how it is written, and the value that asks for nothing.
/// They are refused when they ask for something: passing them on would change half of it or nothing.
const NOT_HONORED: [(&str, Harmless); 14] = [
    ("add_generation_prompt", Harmless::Boolean(true)),
    ("chat_template", Harmless::Null),
    ("continue_final_message", Harmless::Boolean(false)),
    ("length_penalty", Harmless::One),
    ("mm_processor_kwargs", Harmless::Null),
    ("prompt_embeds", Harmless::Null),
    ("prompt_logprobs", Harmless::Null),
    ("return_token_ids", Harmless::Boolean(false)),
    ("return_tokens_as_token_ids", Harmless::Boolean(false)),
    ("skip_special_tokens", Harmless::Boolean(true)),
    ("spaces_between_special_tokens", Harmless::Boolean(true)),
    ("thinking_token_budget", Harmless::Null),
    ("truncate_prompt_tokens", Harmless::Null),
    ("use_beam_search", Harmless::Boolean(false)),
];

/// The value of a field that asks for nothing; null always does.
#[derive(Clone, Copy)]
enum Harmless {
    Null,
    Boolean(bool),
    One,
}

impl Harmless {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Null => false,
            Self::Boolean(harmless) => value.as_bool() == Some(harmless),
            Self::One => value.as_f64() == Some(1.0),
        }
    }
}

/// Variables of chat templates that Kvist sets itself.
const OWN_VARIABLES: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// Most choices of one request.
const MOST_CHOICES: u32 = 128;

/// Reads a body of `/v1/chat/completions`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_chat_completion(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let (prompt, tools) = read_conversation(&mut fields)?;
    if fields.boolean("echo")?.unwrap_or(false) {
        return Err(unsupported("echo", "only the completions API repeats the prompt"));
    }
    for field in ["audio", "modalities", "prediction", "web_search_options"] {
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
    let include_reasoning = fields.boolean("include_reasoning")?.unwrap_or(true);
    let input = read_common(fields, Endpoint::ChatCompletions, prompt, logprobs, newer.or(older))?;
    refuse_with_calls("response_format", input.structured.is_some(), &tools)?;
    Ok(GenerateInput {
        tool_choice: tools.choice,
        parallel_tool_calls: tools.parallel,
        strict_tools: tools.strict,
        include_reasoning,
        ..input
    })
}

/// Messages, tools and what else a template is told.
pub(crate) fn read_conversation(fields: &mut Fields) -> Result<(PromptForm, ToolUse), KvistError> {
    let messages = read_messages(fields)?
        .into_iter()
        .enumerate()
        .map(|(position, message)| read_message(position, message))
        .collect::<Result<Vec<_>, _>>()?;
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = OWN_VARIABLES.into_iter().find(|name| variables.contains_key(*name)) {
        return Err(unsupported(format!("chat_template_kwargs.{name}"), "Kvist sets this variable itself"));
    }
    if let Some(documents) = fields.take("documents") {
        variables.insert("documents".to_owned(), documents);
    }
    set_effort("reasoning_effort", fields.take("reasoning_effort"), &mut variables)?;
    let mut tools = read_tool_use(fields)?;
    Ok((PromptForm::Chat { messages, tools: std::mem::take(&mut tools.definitions), variables }, tools))
}

/// Reads a body of `/v1/completions`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_completion(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let mut prompts = take_prompts(&mut fields, "prompt", MOST_CHOICES as usize, true)?.into_iter();
    let prompt = prompts.next().ok_or_else(|| wrong("prompt", "must not be empty"))?;
    let further_prompts: Vec<PromptForm> = prompts.collect();
    if let Some(suffix) = fields.text("suffix")?
        && !suffix.is_empty()
    {
        return Err(unsupported("suffix", "this model cannot insert"));
    }
    let best_of = fields.unsigned("best_of", 1, MOST_CHOICES)?;
    let logprobs = fields.unsigned("logprobs", 0, 20)?.map(|top| Logprobs { top });
    // The default of this API.
    let max_tokens = fields.unsigned("max_tokens", 1, u32::MAX)?.or(Some(16));
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut input = read_common(fields, Endpoint::Completions, prompt, logprobs, max_tokens)?;
    if best_of.is_some_and(|best_of| best_of != input.choices) {
        return Err(unsupported("best_of", "every choice is returned: it can only equal `n`"));
    }
    if echo && input.logprobs.is_some() {
        return Err(unsupported(
            "echo",
            "together with `logprobs` it asks for the prompt's log-probabilities, which this version does not return",
        ));
    }
    if (further_prompts.len() + 1).saturating_mul(input.choices as usize) > MOST_CHOICES as usize {
        return Err(wrong("n", format!("all prompts together may have at most {MOST_CHOICES} choices")));
    }
    input.further_prompts = further_prompts;
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
    refuse_mesh_fields(&fields)?;
    for (field, harmless) in NOT_HONORED {
        if fields.take(field).is_some_and(|value| !harmless.holds(&value)) {
            return Err(unsupported(field, "this version cannot honor it"));
        }
    }
    let model = read_model(&mut fields)?;
    let sampling = Sampling {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        top_p: read_top_p(&mut fields)?,
        top_k: read_top_k(&mut fields)?,
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
        Some(options) => read_stream_options(options)?,
    };
    let structured = read_structured(&mut fields)?;
    let input = GenerateInput {
        sampling,
        max_tokens,
        min_tokens: fields.unsigned("min_tokens", 0, u32::MAX)?,
        stop: read_stop(&mut fields, "stop")?,
        stop_token_ids: match fields.take("stop_token_ids") {
            None => Vec::new(),
            Some(value) => read_token_ids("stop_token_ids", &value)?,
        },
        include_stop_string: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        structured,
        logprobs,
        choices: fields.unsigned("n", 1, MOST_CHOICES)?.unwrap_or(1),
        stream,
        include_usage,
        cache_salt: fields.text("cache_salt")?.unwrap_or_default(),
        priority: read_priority(&mut fields)?,
        ..GenerateInput::new(endpoint, model, prompt)
    };
    Ok(GenerateInput { extras: fields.into_extras(&WITHOUT_EFFECT), ..input })
}

/// Whether the stream ends with usage.
fn read_stream_options(options: Map<String, Value>) -> Result<bool, KvistError> {
    let mut options = Fields { map: options };
    let path = |error: KvistError| {
        let field = error.fields.into_iter().next();
        field.map_or_else(
            || wrong("stream_options", "is wrong"),
            |violation| wrong(format!("stream_options.{}", violation.field), violation.description),
        )
    };
    if options.boolean("continuous_usage_stats").map_err(path)?.unwrap_or(false) {
        return Err(unsupported("stream_options.continuous_usage_stats", "usage comes once, at the end"));
    }
    Ok(options.boolean("include_usage").map_err(path)?.unwrap_or(false))
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

/// Tools and what is said of calls.
fn read_tool_use(fields: &mut Fields) -> Result<ToolUse, KvistError> {
    for older in ["functions", "function_call"] {
        if fields.take(older).is_some_and(|value| value != "none" && value != serde_json::json!([])) {
            return Err(unsupported(older, "this version takes the newer `tools` and `tool_choice`"));
        }
    }
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let tools = read_tools(fields, "parameters", |path, mut item| {
        match item.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(kind) => return Err(unsupported(format!("{path}.type"), format!("`{kind}` is not supported"))),
            None => return Err(wrong(format!("{path}.type"), "must be `function`")),
        }
        let path = format!("{path}.function");
        let Some(Value::Object(mut function)) = item.shift_remove("function") else {
            return Err(wrong(path, "must be an object"));
        };
        Ok((path, Definition::take(&mut function, "parameters")))
    })?;
    let choice = read_open_ai_choice(fields, |choice| choice.get("function")?.get("name")?.as_str())?;
    ToolUse { parallel, ..tools }.choose(choice, "tool_choice")
}

fn read_structured(fields: &mut Fields) -> Result<Option<Structured>, KvistError> {
    let mut found = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        match format.get("type").and_then(Value::as_str) {
            Some("text") => {}
            Some("json_object") => found.push(Structured::JsonObject),
            Some("json_schema") => {
                let schema = format.get("json_schema").and_then(|wrapper| wrapper.get("schema"));
                found.push(Structured::JsonSchema(read_schema("response_format.json_schema.schema", schema)?));
            }
            Some("structural_tag") => found.push(Structured::StructuralTag(Value::Object(format).to_string())),
            _ => {
                let kinds = "must be one of text, json_object, json_schema, structural_tag";
                return Err(wrong("response_format.type", kinds));
            }
        }
    }
    // vLLM's two spellings of the same.
    let newer = fields.object("structured_outputs")?.unwrap_or_default();
    let older: Map<String, Value> = ["json", "regex", "grammar", "choice"]
        .into_iter()
        .filter_map(|kind| Some((kind.to_owned(), fields.take(&format!("guided_{kind}"))?)))
        .collect();
    for (map, path) in [(newer, "structured_outputs."), (older, "guided_")] {
        for (kind, value) in map.into_iter().filter(|(_, value)| !value.is_null()) {
            found.extend(read_constraint(&kind, value, || format!("{path}{kind}"))?);
        }
    }
    if found.len() > 1 {
        return Err(wrong("response_format", "only one constraint may be given"));
    }
    Ok(found.pop())
}

fn read_constraint(kind: &str, value: Value, path: impl Fn() -> String) -> Result<Option<Structured>, KvistError> {
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        _ => Err(wrong(path(), "must be a string")),
    };
    match kind {
        "json" => match value {
            Value::String(schema) => Ok(Some(Structured::JsonSchema(schema))),
            Value::Object(_) => Ok(Some(Structured::JsonSchema(value.to_string()))),
            _ => Err(wrong(path(), "must be a JSON schema")),
        },
        "json_object" => match value.as_bool() {
            Some(wanted) => Ok(wanted.then_some(Structured::JsonObject)),
            None => Err(wrong(path(), "must be true or false")),
        },
        "regex" => text(value).map(Structured::Regex).map(Some),
        "grammar" => text(value).map(Structured::Grammar).map(Some),
        "structural_tag" => text(value).map(Structured::StructuralTag).map(Some),
        "choice" => {
            let texts = value.as_array().filter(|items| !items.is_empty()).and_then(|items| {
                items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
            });
            texts.map(Structured::Choice).map(Some).ok_or_else(|| wrong(path(), "must be a list of strings"))
        }
        _ => Err(unsupported(path(), "this version does not know the constraint")),
    }
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;
    use crate::{
        fields::{LONGEST_STOP_BYTES, SMALLEST_TOP_P},
        tools::ToolChoice,
    };

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
    fn every_field_arrives() {
        let input = chat(
            r#", "temperature": 0.5, "top_p": 0, "top_k": -1, "min_p": 0.25, "frequency_penalty": -1, "presence_penalty": 2,
            "repetition_penalty": 1.5, "seed": -7, "logit_bias": {"5": -100}, "max_completion_tokens": 9, "min_tokens": 2,
            "stop": "END", "stop_token_ids": [3], "include_stop_str_in_output": true, "ignore_eos": true,
            "response_format": {"type": "json_object"}, "logprobs": true, "top_logprobs": 3, "n": 2, "stream": true,
            "stream_options": {"include_usage": true, "include_obfuscation": false}, "cache_salt": "s", "priority": -1,
            "chat_template_kwargs": {"enable_thinking": false}, "documents": [], "reasoning_effort": "low",
            "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "include_reasoning": false,
            "skip_special_tokens": true, "user": "u", "new_field": 1, "absent": null"#,
        )
        .unwrap();
        let variables = serde_json::json!({"enable_thinking": false, "documents": [], "reasoning_effort": "low"});
        assert_eq!(
            GenerateInput {
                endpoint: Endpoint::ChatCompletions,
                model: "m".to_owned(),
                prompt: PromptForm::Chat {
                    messages: vec![serde_json::json!({"role": "user", "content": "hi"})],
                    tools: Vec::new(),
                    variables: variables.as_object().unwrap().clone(),
                },
                further_prompts: Vec::new(),
                sampling: Sampling {
                    temperature: Some(0.5),
                    top_p: Some(SMALLEST_TOP_P),
                    top_k: Some(0),
                    min_p: Some(0.25),
                    frequency_penalty: Some(-1.0),
                    presence_penalty: Some(2.0),
                    repetition_penalty: Some(1.5),
                    seed: Some(-7),
                    logit_bias: vec![(5, -100.0)],
                },
                max_tokens: Some(9),
                min_tokens: Some(2),
                stop: vec!["END".to_owned()],
                stop_token_ids: vec![3],
                include_stop_string: true,
                ignore_eos: true,
                structured: Some(Structured::JsonObject),
                tool_choice: ToolChoice::None,
                parallel_tool_calls: true,
                strict_tools: Vec::new(),
                include_reasoning: false,
                logprobs: Some(Logprobs { top: 3 }),
                choices: 2,
                stream: true,
                include_usage: true,
                echo: false,
                cache_salt: "s".to_owned(),
                priority: -1,
                repeated: Map::new(),
                extras: serde_json::json!({"new_field": 1}).as_object().unwrap().clone(),
            },
            input
        );
    }

    #[test]
    fn wrong_fields_are_named() {
        for (more, code, field) in [
            (r#", "temperature": 3"#, Code::InvalidArgument, "temperature"),
            (r#", "max_tokens": 0"#, Code::InvalidArgument, "max_tokens"),
            (r#", "n": 0"#, Code::InvalidArgument, "n"),
            (r#", "stop": [1]"#, Code::InvalidArgument, "stop[0]"),
            (r#", "stream": "yes""#, Code::InvalidArgument, "stream"),
            (r#", "top_logprobs": 2"#, Code::InvalidArgument, "top_logprobs"),
            (r#", "logit_bias": {"x": 1}"#, Code::InvalidArgument, "logit_bias.x"),
            (r#", "kv_transfer_params": {}"#, Code::MeshOnlyField, "kv_transfer_params"),
            (r#", "ec_transfer_params": null"#, Code::MeshOnlyField, "ec_transfer_params"),
            (r#", "vllm_xargs": {"a": 1}"#, Code::MeshOnlyField, "vllm_xargs"),
            (r#", "tools": [{}]"#, Code::InvalidArgument, "tools[0].type"),
            (r#", "tools": [{"type": "custom"}]"#, Code::UnsupportedField, "tools[0].type"),
            (r#", "tools": [{"type": "function"}]"#, Code::InvalidArgument, "tools[0].function"),
            (
                r#", "tools": [{"type": "function", "function": {"name": "a b"}}]"#,
                Code::InvalidArgument,
                "tools[0].function.name",
            ),
            (r#", "tool_choice": "required""#, Code::InvalidArgument, "tool_choice"),
            (r#", "tool_choice": "any""#, Code::InvalidArgument, "tool_choice"),
            (
                r#", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}"#,
                Code::InvalidArgument,
                "tool_choice",
            ),
            (r#", "tool_choice": {"type": "allowed_tools"}"#, Code::UnsupportedField, "tool_choice"),
            (
                r#", "tools": [{"type": "function", "function": {"name": "f"}}], "response_format": {"type": "json_object"}"#,
                Code::UnsupportedField,
                "response_format",
            ),
            (r#", "functions": [{}]"#, Code::UnsupportedField, "functions"),
            (r#", "chat_template_kwargs": {"tools": []}"#, Code::UnsupportedField, "chat_template_kwargs.tools"),
            (r#", "chat_template": "x""#, Code::UnsupportedField, "chat_template"),
            (r#", "prompt_logprobs": 1"#, Code::UnsupportedField, "prompt_logprobs"),
            (r#", "skip_special_tokens": false"#, Code::UnsupportedField, "skip_special_tokens"),
            (r#", "reasoning_effort": "much""#, Code::InvalidArgument, "reasoning_effort"),
            (r#", "stream_options": {}"#, Code::InvalidArgument, "stream_options"),
            (
                r#", "stream": true, "stream_options": {"include_usage": 1}"#,
                Code::InvalidArgument,
                "stream_options.include_usage",
            ),
            (
                r#", "stream": true, "stream_options": {"continuous_usage_stats": true}"#,
                Code::UnsupportedField,
                "stream_options.continuous_usage_stats",
            ),
            (r#", "response_format": {"type": "xml"}"#, Code::InvalidArgument, "response_format.type"),
            (
                r#", "response_format": {"type": "json_object"}, "guided_regex": "a""#,
                Code::InvalidArgument,
                "response_format",
            ),
            (r#", "guided_choice": ["a", 1]"#, Code::InvalidArgument, "guided_choice"),
            (r#", "structured_outputs": {"lark": "x"}"#, Code::UnsupportedField, "structured_outputs.lark"),
        ] {
            assert_eq!((code, field.to_owned()), refused_field(more), "{more}");
        }
        let long = format!(r#", "stop": ["a", "{}"]"#, "b".repeat(LONGEST_STOP_BYTES + 1));
        assert_eq!((Code::InvalidArgument, "stop[1]".to_owned()), refused_field(&long));
        assert_eq!(Code::InvalidArgument, parse_chat_completion(b"{").unwrap_err().code);
        assert_eq!(Code::InvalidArgument, parse_chat_completion(b"[]").unwrap_err().code);
        assert_eq!("messages", parse_chat_completion(br#"{"model": "m"}"#).unwrap_err().fields[0].field);
    }

    #[test]
    fn tools_arrive_as_templates_show_them() {
        let input = chat(
            r#", "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true}},
            {"type": "function", "function": {"name": "g", "strict": null}}], "parallel_tool_calls": false,
            "tool_choice": {"type": "function", "function": {"name": "g"}}"#,
        )
        .unwrap();
        let PromptForm::Chat { tools, .. } = input.prompt else { panic!() };
        let function = |function: Value| serde_json::json!({"type": "function", "function": function});
        let expected = [
            function(serde_json::json!({"name": "f", "description": "d", "parameters": {"type": "object"}})),
            function(serde_json::json!({"name": "g", "parameters": {"type": "object", "properties": {}}})),
        ];
        assert_eq!(expected, tools[..]);
        assert_eq!(
            (ToolChoice::Named("g".to_owned()), false, vec!["f".to_owned()]),
            (input.tool_choice, input.parallel_tool_calls, input.strict_tools)
        );
        let choice = |more: &str| {
            chat(&format!(r#", "tools": [{{"type": "function", "function": {{"name": "f"}}}}]{more}"#))
                .unwrap()
                .tool_choice
        };
        assert_eq!(ToolChoice::Auto, choice(""));
        assert_eq!(ToolChoice::Required, choice(r#", "tool_choice": "required""#));
        assert_eq!(ToolChoice::None, chat(r#", "tool_choice": "auto""#).unwrap().tool_choice);
    }

    #[test]
    fn no_effort_at_all_switches_thinking_off() {
        let variables = |more: &str| match chat(more).unwrap().prompt {
            PromptForm::Chat { variables, .. } => Value::Object(variables),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            serde_json::json!({"enable_thinking": false, "thinking": false, "reasoning_effort": "none"}),
            variables(r#", "reasoning_effort": "none""#)
        );
        let own = r#", "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}"#;
        assert_eq!(Value::Bool(true), variables(own)["enable_thinking"]);
    }

    #[test]
    fn constraints_have_several_spellings() {
        for (more, expected) in [
            (r#", "response_format": {"type": "text"}"#, None),
            (
                r#", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}"#,
                Some(Structured::JsonSchema(r#"{"type":"object"}"#.to_owned())),
            ),
            (r#", "guided_json": {"a": 1}"#, Some(Structured::JsonSchema(r#"{"a":1}"#.to_owned()))),
            (r#", "structured_outputs": {"json": "{}"}"#, Some(Structured::JsonSchema("{}".to_owned()))),
            (r#", "structured_outputs": {"regex": "a+", "json": null}"#, Some(Structured::Regex("a+".to_owned()))),
            (r#", "guided_choice": ["a", "b"]"#, Some(Structured::Choice(vec!["a".to_owned(), "b".to_owned()]))),
        ] {
            assert_eq!(expected, chat(more).unwrap().structured, "{more}");
        }
    }

    #[test]
    fn completions_have_their_own_rules() {
        let parse = |more: &str| parse_completion(format!(r#"{{"model": "m", "prompt": "p"{more}}}"#).as_bytes());
        let input = parse(r#", "logprobs": 0, "n": 3, "best_of": 3"#).unwrap();
        assert_eq!((Some(16), Some(Logprobs { top: 0 }), 3), (input.max_tokens, input.logprobs, input.choices));
        assert!(parse(r#", "echo": true"#).unwrap().echo);
        for (more, field) in [
            (r#", "best_of": 2"#, "best_of"),
            (r#", "suffix": "x""#, "suffix"),
            (r#", "echo": true, "logprobs": 1"#, "echo"),
        ] {
            let error = parse(more).unwrap_err();
            assert_eq!((Code::UnsupportedField, field), (error.code, error.fields[0].field.as_str()));
        }
    }

    proptest::proptest! {
        #[test]
        fn no_body_breaks_the_parser(body in "\\PC{0,80}", value in "(null|true|-1|0|1e400|\"x\"|\\[\\]|\\{\\}|\\[[0-9]\\])", field in 0usize..48) {
            let _ = parse_chat_completion(body.as_bytes());
            let fields = [
                "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
                "seed", "logit_bias", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
                "include_stop_str_in_output", "ignore_eos", "response_format", "logprobs", "top_logprobs", "n", "stream",
                "stream_options", "cache_salt", "priority", "chat_template_kwargs", "documents", "tools", "tool_choice",
                "functions", "function_call", "guided_json", "guided_regex", "guided_choice", "structured_outputs", "echo",
                "prompt", "best_of", "suffix", "messages", "model", "user", "metadata", "modalities", "audio",
                "prompt_logprobs", "chat_template", "kv_hints", "reasoning_effort",
            ];
            let name = fields[field];
            for outcome in [
                chat(&format!(r#", "{name}": {value}"#)),
                parse_completion(format!(r#"{{"model": "m", "prompt": "p", "{name}": {value}}}"#).as_bytes()),
            ] {
                if let Err(error) = outcome {
                    proptest::prop_assert!(error.fields.iter().all(|violation| error.message.contains(&violation.field)));
                    proptest::prop_assert_eq!(400, error.code.http_status());
                }
            }
        }
    }

    #[test]
    fn several_prompts_share_what_is_asked_and_the_limit_of_choices() {
        let parse = |body: &str| parse_completion(format!(r#"{{"model": "m", {body}}}"#).as_bytes());
        let input = parse(r#""prompt": ["a", [1, 2], ""], "n": 2"#).unwrap();
        assert_eq!((PromptForm::Text("a".to_owned()), 2), (input.prompt, input.choices));
        assert_eq!(vec![PromptForm::Tokens(vec![1, 2]), PromptForm::Text(String::new())], input.further_prompts);
        let prompts = vec![r#""a""#; 65].join(",");
        assert!(parse(&format!(r#""prompt": [{prompts}]"#)).is_ok());
        assert_eq!("n", parse(&format!(r#""prompt": [{prompts}], "n": 2"#)).unwrap_err().fields[0].field);
        let prompts = vec![r#""a""#; 129].join(",");
        assert_eq!("prompt", parse(&format!(r#""prompt": [{prompts}]"#)).unwrap_err().fields[0].field);
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
        assert_eq!("prompt", prompt("[]").unwrap_err().fields[0].field);
        assert_eq!("prompt[1]", prompt(r#"["a", []]"#).unwrap_err().fields[0].field);
        assert_eq!("prompt[1]", prompt(r#"["a", 1]"#).unwrap_err().fields[0].field);
        assert_eq!("prompt[1]", prompt("[1, -2]").unwrap_err().fields[0].field);
    }
}
