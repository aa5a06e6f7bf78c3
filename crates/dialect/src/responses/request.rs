//! Requests of the Responses API.

use kvist_errors::KvistError;
use serde_json::{Map, Value, json};

use crate::{
    fields::{
        Fields, read_model, read_priority, read_schema, read_top_p, refuse_mesh_fields, text_of_part, unsupported,
        wrong,
    },
    input::{Endpoint, GenerateInput, PromptForm, Sampling, Structured},
    thinking::set_effort,
    tools::{Definition, ToolUse, read_open_ai_choice, read_tools, refuse_with_calls},
};

/// Fields of the API that change nothing in the answer and may be left without effect.
const WITHOUT_EFFECT: [&str; 7] = [
    // It counts calls of the tools that the API's maker runs.
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
];

/// Fields that ask for what an earlier request has left behind, or for something to be left.
const NEEDS_A_STORE: [&str; 4] = ["background", "conversation", "previous_response_id", "prompt"];

/// Fields that the answer repeats.
const REPEATED: [&str; 9] = [
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
];

/// Reads a body of `/v1/responses`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_response(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    refuse_mesh_fields(&fields)?;
    for field in NEEDS_A_STORE {
        if fields.take(field).is_some_and(|value| value != false) {
            return Err(unsupported(field, "this server keeps nothing between requests"));
        }
    }
    if fields.boolean("store")? != Some(false) {
        return Err(unsupported("store", "this server keeps no answers: it must be false"));
    }
    let repeated = REPEATED.into_iter().filter_map(|name| Some((name.to_owned(), fields.map.get(name)?.clone())));
    let repeated: Map<String, Value> = repeated.filter(|(_, value)| !value.is_null()).collect();
    let tools = read_tool_use(&mut fields)?;
    let mut variables = Map::new();
    read_reasoning(&mut fields, &mut variables)?;
    refuse_others(&mut fields)?;
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.take("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => read_items(&items, &mut messages)?,
        Some(_) => return Err(wrong("input", "must be a string or a list of items, and not empty")),
        None => return Err(wrong("input", "is missing")),
    }
    let structured = read_format(&mut fields)?;
    refuse_with_calls("text.format", structured.is_some(), &tools)?;
    let model = read_model(&mut fields)?;
    let sampling = Sampling {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        top_p: read_top_p(&mut fields)?,
        ..Sampling::default()
    };
    let max_tokens = fields.unsigned("max_output_tokens", 1, u32::MAX)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let cache_salt = fields.text("cache_salt")?.unwrap_or_default();
    let priority = read_priority(&mut fields)?;
    let prompt = PromptForm::Chat { messages, tools: tools.definitions, variables };
    Ok(GenerateInput {
        sampling,
        max_tokens,
        structured,
        tool_choice: tools.choice,
        parallel_tool_calls: tools.parallel,
        strict_tools: tools.strict,
        stream,
        cache_salt,
        priority,
        repeated,
        extras: fields.into_extras(&WITHOUT_EFFECT),
        ..GenerateInput::new(Endpoint::Responses, model, prompt)
    })
}

/// Tools and what is said of calls.
fn read_tool_use(fields: &mut Fields) -> Result<ToolUse, KvistError> {
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let tools = read_tools(fields, "parameters", |path, mut item| {
        match item.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(kind) => {
                let why = format!("`{kind}` runs on the servers of the API's maker, and not here");
                return Err(unsupported(format!("{path}.type"), why));
            }
            None => return Err(wrong(format!("{path}.type"), "must be `function`")),
        }
        Ok((path.to_owned(), Definition::take(&mut item, "parameters")))
    })?;
    let choice = read_open_ai_choice(fields, |choice| choice.get("name")?.as_str())?;
    ToolUse { parallel, ..tools }.choose(choice, "tool_choice")
}

/// How much to think. Thoughts come whole: there are no summaries of them.
fn read_reasoning(fields: &mut Fields, variables: &mut Map<String, Value>) -> Result<(), KvistError> {
    let Some(reasoning) = fields.object("reasoning")? else { return Ok(()) };
    for (name, value) in reasoning {
        match name.as_str() {
            _ if value.is_null() => {}
            "effort" => set_effort("reasoning.effort", Some(value), variables)?,
            // It leaves the choice to the server.
            "summary" | "generate_summary" if value == "auto" => {}
            _ => return Err(unsupported(format!("reasoning.{name}"), "this version cannot honor it")),
        }
    }
    Ok(())
}

fn refuse_others(fields: &mut Fields) -> Result<(), KvistError> {
    if fields.text("truncation")?.is_some_and(|truncation| truncation != "disabled") {
        return Err(unsupported("truncation", "a prompt that is too long is refused, not cut"));
    }
    if fields.unsigned("top_logprobs", 0, 20)?.is_some_and(|top| top > 0) {
        return Err(unsupported("top_logprobs", "this version does not return them here"));
    }
    match fields.take("include") {
        None => {}
        // Thoughts are in the answer as they are, so that a client can send them back.
        Some(Value::Array(items)) if items.iter().all(|item| item == "reasoning.encrypted_content") => {}
        Some(_) => return Err(unsupported("include", "there is nothing more to include")),
    }
    if let Some(options) = fields.object("stream_options")?
        && let Some((name, _)) = options.iter().find(|(name, _)| *name != "include_obfuscation")
    {
        return Err(unsupported(format!("stream_options.{name}"), "this version cannot honor it"));
    }
    Ok(())
}

/// What the items of a conversation say, as chat templates want it.
fn read_items(items: &[Value], messages: &mut Vec<Value>) -> Result<(), KvistError> {
    // Of the turn that comes next.
    let mut thoughts = String::new();
    for (position, item) in items.iter().enumerate() {
        let path = format!("input[{position}]");
        let Some(item) = item.as_object() else { return Err(wrong(path, "must be an object")) };
        let text = |name: &str| {
            let value = item.get(name).and_then(Value::as_str);
            value.ok_or_else(|| wrong(format!("{path}.{name}"), "must be a string"))
        };
        match item.get("type").and_then(Value::as_str) {
            None | Some("message") => {
                let role = match text("role")? {
                    // Models know the older name.
                    "developer" => "system",
                    role @ ("user" | "assistant" | "system") => role,
                    _ => return Err(wrong(format!("{path}.role"), "must be user, assistant, system or developer")),
                };
                let mut message = json!({"role": role, "content": read_content(&path, item.get("content"))?});
                let thoughts = std::mem::take(&mut thoughts);
                if role == "assistant" && !thoughts.is_empty() {
                    message["reasoning_content"] = thoughts.into();
                }
                messages.push(message);
            }
            Some("function_call") => {
                let arguments = text("arguments")?;
                let arguments = match serde_json::from_str(arguments) {
                    Ok(parsed @ Value::Object(_)) => parsed,
                    _ => arguments.into(),
                };
                let function = json!({"name": text("name")?, "arguments": arguments});
                let call = json!({"id": text("call_id")?, "type": "function", "function": function});
                push_call(messages, call, std::mem::take(&mut thoughts));
            }
            Some("reasoning") => thoughts = read_thoughts(&path, item)?,
            Some("function_call_output") => {
                let content = read_content(&path, item.get("output"))?;
                messages.push(json!({"role": "tool", "tool_call_id": text("call_id")?, "content": content}));
            }
            Some(kind) => {
                return Err(unsupported(format!("{path}.type"), format!("this version does not take `{kind}`")));
            }
        }
    }
    if messages.last().is_some_and(|message| message["role"] == "assistant") {
        let path = format!("input[{}]", items.len() - 1);
        return Err(unsupported(path, "an answer that goes on from a beginning of its own is not supported"));
    }
    Ok(())
}

/// Calls of one turn belong to one message.
fn push_call(messages: &mut Vec<Value>, call: Value, thoughts: String) {
    if let Some(last) = messages.last_mut()
        && last["role"] == "assistant"
        && thoughts.is_empty()
    {
        match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
        return;
    }
    let mut message = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.into();
    }
    messages.push(message);
}

/// The text of an item of thoughts; where there is only a summary, that.
fn read_thoughts(path: &str, item: &Map<String, Value>) -> Result<String, KvistError> {
    for (name, kind) in [("content", "reasoning_text"), ("summary", "summary_text")] {
        match item.get(name) {
            None | Some(Value::Null) => {}
            Some(Value::Array(parts)) if parts.is_empty() => {}
            Some(Value::Array(parts)) => {
                let read = |(number, part)| text_of_part(part, &[kind], || format!("{path}.{name}[{number}]"));
                return Ok(parts.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.join("\n"));
            }
            Some(_) => return Err(wrong(format!("{path}.{name}"), "must be a list of parts")),
        }
    }
    Ok(String::new())
}

fn read_content(path: &str, content: Option<&Value>) -> Result<String, KvistError> {
    match content {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let read = |(number, part)| {
                text_of_part(part, &["input_text", "output_text", "text"], || format!("{path}.content[{number}]"))
            };
            Ok(parts.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(wrong(format!("{path}.content"), "must be a string or a list of parts")),
    }
}

fn read_format(fields: &mut Fields) -> Result<Option<Structured>, KvistError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    if let Some((name, _)) =
        text.iter().find(|(name, value)| !value.is_null() && !matches!(name.as_str(), "format" | "verbosity"))
    {
        return Err(unsupported(format!("text.{name}"), "this version does not know it"));
    }
    let Some(format) = text.get("format").filter(|format| !format.is_null()) else { return Ok(None) };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Structured::JsonObject)),
        Some("json_schema") => {
            let schema = read_schema("text.format.schema", format.get("schema"))?;
            Ok(Some(Structured::JsonSchema(schema)))
        }
        _ => Err(wrong("text.format.type", "must be one of text, json_object, json_schema")),
    }
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;

    fn parse(more: &str) -> Result<GenerateInput, KvistError> {
        parse_response(format!(r#"{{"model": "m", "input": "hi", "store": false{more}}}"#).as_bytes())
    }

    fn messages(input: &str) -> Result<Value, KvistError> {
        let body = format!(r#"{{"model": "m", "store": false, "input": {input}}}"#);
        match parse_response(body.as_bytes())?.prompt {
            PromptForm::Chat { messages, .. } => Ok(Value::Array(messages)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_field_arrives() {
        let input = parse(
            r#", "instructions": "be short", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7, "stream": true,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
            "tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "metadata": {"a": "b"}, "truncation": "disabled",
            "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}, "cache_salt": "s", "priority": 3, "background": false, "new_field": 1"#,
        )
        .unwrap();
        let PromptForm::Chat { messages, tools, variables } = input.prompt else { panic!() };
        assert_eq!((0, json!({"reasoning_effort": "low"})), (tools.len(), Value::Object(variables)));
        let expected = json!([{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]);
        assert_eq!(expected, Value::Array(messages));
        assert_eq!(
            (Some(0.5), Some(0.25), Some(7)),
            (input.sampling.temperature, input.sampling.top_p, input.max_tokens)
        );
        assert_eq!(Some(Structured::JsonSchema(r#"{"type":"object"}"#.to_owned())), input.structured);
        assert_eq!((true, "s", 3), (input.stream, input.cache_salt.as_str(), input.priority));
        assert_eq!(json!({"new_field": 1}), Value::Object(input.extras));
        let repeated = json!({"instructions": "be short", "max_output_tokens": 7, "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"}, "temperature": 0.5, "tool_choice": "none",
            "tools": [{"type": "function", "name": "f"}], "top_p": 0.25});
        assert_eq!(repeated, Value::Object(input.repeated));
    }

    #[test]
    fn items_become_messages() {
        let found = messages(
            r#"[{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "broken"},
            {"type": "function_call_output", "call_id": "1", "output": "r"}]"#,
        );
        let calls = json!([
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "broken"}},
        ]);
        let expected = json!([{"role": "system", "content": "d"}, {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "1", "content": "r"}]);
        assert_eq!(expected, found.unwrap());
    }

    #[test]
    fn wrong_fields_are_named() {
        for (more, code, field) in [
            (r#", "store": true"#, Code::UnsupportedField, "store"),
            (r#", "previous_response_id": "x""#, Code::UnsupportedField, "previous_response_id"),
            (r#", "background": true"#, Code::UnsupportedField, "background"),
            (r#", "conversation": "x""#, Code::UnsupportedField, "conversation"),
            (r#", "tools": [{}]"#, Code::InvalidArgument, "tools[0].type"),
            (r#", "tools": [{"type": "web_search"}]"#, Code::UnsupportedField, "tools[0].type"),
            (r#", "tools": [{"type": "function"}]"#, Code::InvalidArgument, "tools[0].name"),
            (r#", "tool_choice": "required""#, Code::InvalidArgument, "tool_choice"),
            (r#", "tool_choice": {"type": "function"}"#, Code::InvalidArgument, "tool_choice"),
            (r#", "tool_choice": {"type": "mcp"}"#, Code::UnsupportedField, "tool_choice"),
            (r#", "reasoning": {"effort": "much"}"#, Code::InvalidArgument, "reasoning.effort"),
            (r#", "reasoning": {"summary": "detailed"}"#, Code::UnsupportedField, "reasoning.summary"),
            (
                r#", "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "json_object"}}"#,
                Code::UnsupportedField,
                "text.format",
            ),
            (r#", "truncation": "auto""#, Code::UnsupportedField, "truncation"),
            (r#", "include": ["x"]"#, Code::UnsupportedField, "include"),
            (r#", "top_logprobs": 2"#, Code::UnsupportedField, "top_logprobs"),
            (r#", "max_output_tokens": 0"#, Code::InvalidArgument, "max_output_tokens"),
            (r#", "text": {"format": {"type": "xml"}}"#, Code::InvalidArgument, "text.format.type"),
            (r#", "text": {"other": 1}"#, Code::UnsupportedField, "text.other"),
            (r#", "vllm_xargs": {}"#, Code::MeshOnlyField, "vllm_xargs"),
        ] {
            let error = parse(more).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{more}");
        }
        assert_eq!("store", parse_response(br#"{"model": "m", "input": "x"}"#).unwrap_err().fields[0].field);
        for (input, code, field) in [
            ("[]", Code::InvalidArgument, "input"),
            ("7", Code::InvalidArgument, "input"),
            ("[7]", Code::InvalidArgument, "input[0]"),
            (r#"[{"role": "robot", "content": "x"}]"#, Code::InvalidArgument, "input[0].role"),
            (r#"[{"role": "user"}]"#, Code::InvalidArgument, "input[0].content"),
            (r#"[{"role": "assistant", "content": "x"}]"#, Code::UnsupportedField, "input[0]"),
            (r#"[{"type": "item_reference", "id": "x"}]"#, Code::UnsupportedField, "input[0].type"),
            (
                r#"[{"role": "user", "content": [{"type": "input_image"}]}]"#,
                Code::UnsupportedField,
                "input[0].content[0].type",
            ),
        ] {
            let error = messages(input).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{input}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_body_breaks_the_parser(
            body in "\\PC{0,80}", value in "(null|true|-1|0|1e400|\"x\"|\\[\\]|\\{\\}|\\[[0-9]\\])", field in 0usize..22,
        ) {
            let _ = parse_response(body.as_bytes());
            let fields = [
                "temperature", "top_p", "max_output_tokens", "stream", "instructions", "input", "tools", "tool_choice",
                "reasoning", "text", "metadata", "truncation", "include", "background", "store", "previous_response_id",
                "cache_salt", "priority", "model", "top_logprobs", "stream_options", "x",
            ];
            let name = fields[field];
            if let Err(error) = parse(&format!(r#", "{name}": {value}"#)) {
                proptest::prop_assert!(error.fields.iter().all(|violation| error.message.contains(&violation.field)));
                proptest::prop_assert_eq!(400, error.code.http_status());
            }
        }
    }
}
