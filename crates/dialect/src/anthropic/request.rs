//! Requests of the Messages API.

use kvist_errors::KvistError;
use serde_json::{Map, Value, json};

use crate::{
    fields::{
        Fields, read_messages, read_model, read_priority, read_schema, read_stop, read_top_k, read_top_p,
        refuse_mesh_fields, text_of_part, unsupported, wrong,
    },
    input::{Endpoint, GenerateInput, PromptForm, Sampling, Structured},
    thinking::{set_effort, set_thinking},
    tools::{Definition, ToolChoice, ToolUse, read_tools, refuse_with_calls},
};

/// Fields of the API that change nothing in the answer and may be left without effect.
const WITHOUT_EFFECT: [&str; 4] = ["metadata", "service_tier", "cache_control", "inference_geo"];

/// Fields of the API that ask for what only its first maker's service has.
const NOT_HONORED: [&str; 4] = ["container", "context_management", "mcp_servers", "speed"];

/// Reads a body of `/v1/messages`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_messages(body: &[u8]) -> Result<GenerateInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let max_tokens = fields.unsigned("max_tokens", 1, u32::MAX)?.ok_or_else(|| wrong("max_tokens", "is missing"))?;
    read_request(fields, Some(max_tokens))
}

/// Reads a body of `/v1/messages/count_tokens`: the same, and nothing is generated.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_count_tokens(body: &[u8]) -> Result<GenerateInput, KvistError> {
    read_request(Fields::parse(body)?, None)
}

fn read_request(mut fields: Fields, max_tokens: Option<u32>) -> Result<GenerateInput, KvistError> {
    refuse_mesh_fields(&fields)?;
    for field in NOT_HONORED {
        if fields.take(field).is_some() {
            return Err(unsupported(field, "this version cannot honor it"));
        }
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        messages.push(json!({"role": "system", "content": read_system(system)?}));
    }
    let turns = read_messages(&mut fields)?;
    let last = turns.len() - 1;
    for (position, turn) in turns.into_iter().enumerate() {
        read_turn(position, turn, position == last, &mut messages)?;
    }
    let tools = read_tool_use(&mut fields)?;
    let mut variables = Map::new();
    read_thinking(&mut fields, max_tokens, &mut variables)?;
    let structured = read_format(&mut fields, &mut variables)?;
    refuse_with_calls("output_config.format", structured.is_some(), &tools)?;
    let model = read_model(&mut fields)?;
    let sampling = Sampling {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        top_p: read_top_p(&mut fields)?,
        top_k: read_top_k(&mut fields)?,
        ..Sampling::default()
    };
    let stop = read_stop(&mut fields, "stop_sequences")?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let cache_salt = fields.text("cache_salt")?.unwrap_or_default();
    let priority = read_priority(&mut fields)?;
    let prompt = PromptForm::Chat { messages, tools: tools.definitions, variables };
    Ok(GenerateInput {
        sampling,
        max_tokens,
        stop,
        structured,
        tool_choice: tools.choice,
        parallel_tool_calls: tools.parallel,
        strict_tools: tools.strict,
        stream,
        cache_salt,
        priority,
        extras: fields.into_extras(&WITHOUT_EFFECT),
        ..GenerateInput::new(Endpoint::Messages, model, prompt)
    })
}

fn read_system(system: Value) -> Result<String, KvistError> {
    match system {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let texts = blocks.iter().enumerate().map(|(number, block)| text_of(&format!("system[{number}]"), block));
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(wrong("system", "must be a string or a list of text blocks")),
    }
}

/// The text of a block that can be nothing else.
fn text_of<'a>(path: &str, block: &'a Value) -> Result<&'a str, KvistError> {
    text_of_part(block, &["text"], || path.to_owned())
}

/// What one message of the API says, as chat templates want it: results of tools are messages of their own there.
fn read_turn(position: usize, turn: Value, is_last: bool, messages: &mut Vec<Value>) -> Result<(), KvistError> {
    let path = format!("messages[{position}]");
    let Value::Object(mut turn) = turn else { return Err(wrong(path, "must be an object")) };
    let content = turn.shift_remove("content");
    let blocks = match content {
        Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
        Some(Value::Array(blocks)) => blocks,
        Some(_) => return Err(wrong(format!("{path}.content"), "must be a string or a list of blocks")),
        None => return Err(wrong(format!("{path}.content"), "is missing")),
    };
    match turn.get("role").and_then(Value::as_str) {
        Some("user") => read_user(&path, &blocks, messages),
        Some("assistant") if is_last => {
            Err(unsupported(&path, "an answer that goes on from a beginning of its own is not supported"))
        }
        Some("assistant") => read_assistant(&path, &blocks, messages),
        Some(_) => Err(wrong(format!("{path}.role"), "must be `user` or `assistant`")),
        None => Err(wrong(format!("{path}.role"), "is missing")),
    }
}

fn read_user(path: &str, blocks: &[Value], messages: &mut Vec<Value>) -> Result<(), KvistError> {
    let mut texts = Vec::new();
    let mut has_results = false;
    for (number, block) in blocks.iter().enumerate() {
        let path = format!("{path}.content[{number}]");
        if block.get("type").and_then(Value::as_str) != Some("tool_result") {
            texts.push(text_of(&path, block)?);
            continue;
        }
        let id = block.get("tool_use_id").and_then(Value::as_str);
        let id = id.ok_or_else(|| wrong(format!("{path}.tool_use_id"), "must be a string"))?;
        let content = match block.get("content") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                let texts = parts.iter().enumerate();
                let texts = texts.map(|(number, part)| text_of(&format!("{path}.content[{number}]"), part));
                texts.collect::<Result<Vec<_>, _>>()?.join("\n")
            }
            Some(_) => return Err(wrong(format!("{path}.content"), "must be a string or a list of blocks")),
        };
        has_results = true;
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
    }
    if !texts.is_empty() || !has_results {
        messages.push(json!({"role": "user", "content": texts.join("\n")}));
    }
    Ok(())
}

fn read_assistant(path: &str, blocks: &[Value], messages: &mut Vec<Value>) -> Result<(), KvistError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (number, block) in blocks.iter().enumerate() {
        let path = format!("{path}.content[{number}]");
        let string = |name: &str| {
            let value = block.get(name).and_then(Value::as_str);
            value.ok_or_else(|| wrong(format!("{path}.{name}"), "must be a string"))
        };
        match block.get("type").and_then(Value::as_str) {
            Some("thinking") => thoughts.push(string("thinking")?),
            // Readable to the servers of the API's maker alone.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let input = block.get("input").filter(|input| input.is_object());
                let input = input.ok_or_else(|| wrong(format!("{path}.input"), "must be an object"))?;
                let function = json!({"name": string("name")?, "arguments": input});
                calls.push(json!({"id": string("id")?, "type": "function", "function": function}));
            }
            _ => texts.push(text_of(&path, block)?),
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.join("\n")});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

/// Tools and what is said of calls.
fn read_tool_use(fields: &mut Fields) -> Result<ToolUse, KvistError> {
    const PATH: &str = "tool_choice";
    let tools = read_tools(fields, "input_schema", |path, mut item| {
        if let Some(kind) = item.get("type").and_then(Value::as_str).filter(|kind| *kind != "custom") {
            let why = format!("`{kind}` runs on the servers of the API's maker, and not here");
            return Err(unsupported(format!("{path}.type"), why));
        }
        Ok((path.to_owned(), Definition::take(&mut item, "input_schema")))
    })?;
    let Some(choice) = fields.object(PATH)? else { return tools.choose(None, PATH) };
    let one_at_most = match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(truth)) => *truth,
        Some(_) => return Err(wrong(format!("{PATH}.disable_parallel_tool_use"), "must be true or false")),
    };
    let chosen = match choice.get("type").and_then(Value::as_str) {
        Some("none") => ToolChoice::None,
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("tool") => match choice.get("name").and_then(Value::as_str) {
            Some(name) => ToolChoice::Named(name.to_owned()),
            None => return Err(wrong(format!("{PATH}.name"), "must be a string")),
        },
        _ => return Err(wrong(format!("{PATH}.type"), "must be one of auto, any, tool, none")),
    };
    ToolUse { parallel: !one_at_most, ..tools }.choose(Some(chosen), PATH)
}

/// Whether to think, and for how long: a matter of the template.
fn read_thinking(
    fields: &mut Fields,
    max_tokens: Option<u32>,
    variables: &mut Map<String, Value>,
) -> Result<(), KvistError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(()) };
    match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => set_thinking(false, variables),
        Some("adaptive") => set_thinking(true, variables),
        Some("enabled") => {
            let mut thinking = Fields { map: thinking };
            let budget = thinking.unsigned("budget_tokens", 1, u32::MAX);
            let path = "thinking.budget_tokens";
            let budget = budget.map_err(|_| wrong(path, "must be a whole number of at least 1"))?;
            let budget = budget.ok_or_else(|| wrong(path, "is missing"))?;
            if max_tokens.is_some_and(|most| budget >= most) {
                return Err(wrong(path, "must be below `max_tokens`"));
            }
            set_thinking(true, variables);
            variables.insert("thinking_budget".to_owned(), budget.into());
        }
        _ => return Err(wrong("thinking.type", "must be one of enabled, adaptive, disabled")),
    }
    Ok(())
}

/// The API has had two places for the schema of an answer.
fn read_format(fields: &mut Fields, variables: &mut Map<String, Value>) -> Result<Option<Structured>, KvistError> {
    let mut format = fields.object("output_format")?.map(|format| ("output_format", format));
    if let Some(mut config) = fields.object("output_config")? {
        set_effort("output_config.effort", config.shift_remove("effort"), variables)?;
        match config.shift_remove("format") {
            None | Some(Value::Null) => {}
            Some(Value::Object(map)) => format = Some(("output_config.format", map)),
            Some(_) => return Err(wrong("output_config.format", "must be an object")),
        }
    }
    let Some((path, format)) = format else { return Ok(None) };
    if format.get("type").and_then(Value::as_str) != Some("json_schema") {
        return Err(wrong(format!("{path}.type"), "must be json_schema"));
    }
    let schema = read_schema(&format!("{path}.schema"), format.get("schema"))?;
    Ok(Some(Structured::JsonSchema(schema)))
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;

    fn parse(more: &str) -> Result<GenerateInput, KvistError> {
        let body =
            format!(r#"{{"model": "m", "max_tokens": 5, "messages": [{{"role": "user", "content": "hi"}}]{more}}}"#);
        parse_messages(body.as_bytes())
    }

    fn messages(json: &str) -> Result<Vec<Value>, KvistError> {
        let body = format!(r#"{{"model": "m", "messages": {json}}}"#);
        match parse_count_tokens(body.as_bytes())?.prompt {
            PromptForm::Chat { messages, .. } => Ok(messages),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_field_arrives() {
        let input = parse(
            r#", "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "temperature": 0.5, "top_p": 0.25, "top_k": 3, "stop_sequences": ["x"], "stream": true, "metadata": {"user_id": "u"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"},
            "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "cache_salt": "s",
            "priority": 2, "output_format": {"type": "json_schema", "schema": {"type": "object"}}, "new_field": 1"#,
        )
        .unwrap();
        let PromptForm::Chat { messages, tools, variables } = input.prompt else { panic!() };
        let expected = json!([{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}]);
        assert_eq!((expected, 0), (Value::Array(messages), tools.len()));
        let expected = json!({"enable_thinking": false, "thinking": false, "reasoning_effort": "low"});
        assert_eq!(expected, Value::Object(variables));
        let sampling = Sampling { temperature: Some(0.5), top_p: Some(0.25), top_k: Some(3), ..Sampling::default() };
        assert_eq!((sampling, Some(5), vec!["x".to_owned()]), (input.sampling, input.max_tokens, input.stop));
        assert_eq!((true, "s", 2), (input.stream, input.cache_salt.as_str(), input.priority));
        assert_eq!(Some(Structured::JsonSchema(r#"{"type":"object"}"#.to_owned())), input.structured);
        assert_eq!(json!({"new_field": 1}), Value::Object(input.extras));
    }

    #[test]
    fn tools_of_the_past_become_messages_of_their_own() {
        let found = messages(
            r#"[{"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "go on"}]}]"#,
        );
        let calls = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
        let expected = json!([{"role": "user", "content": "q"},
            {"role": "assistant", "content": "t", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "r"}, {"role": "user", "content": "go on"}]);
        assert_eq!(expected, Value::Array(found.unwrap()));
        let only = messages(r#"[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]"#).unwrap();
        assert_eq!(json!([{"role": "tool", "tool_call_id": "1", "content": ""}]), Value::Array(only));
    }

    #[test]
    fn tools_and_thinking_arrive() {
        let input = parse(
            r#", "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": true, "cache_control": {}},
            {"type": "custom", "name": "g"}], "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 4}"#,
        )
        .unwrap();
        let PromptForm::Chat { tools, variables, .. } = input.prompt else { panic!() };
        let function = |function: Value| json!({"type": "function", "function": function});
        let expected = [
            function(json!({"name": "f", "description": "d", "parameters": {"type": "object"}})),
            function(json!({"name": "g", "parameters": {"type": "object", "properties": {}}})),
        ];
        assert_eq!(expected, tools[..]);
        assert_eq!(
            (ToolChoice::Required, false, vec!["f".to_owned()]),
            (input.tool_choice, input.parallel_tool_calls, input.strict_tools)
        );
        assert_eq!(json!({"enable_thinking": true, "thinking": true, "thinking_budget": 4}), Value::Object(variables));
        let named = parse(r#", "tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f"}"#).unwrap();
        assert_eq!(ToolChoice::Named("f".to_owned()), named.tool_choice);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (more, code, field) in [
            (r#", "temperature": 3"#, Code::InvalidArgument, "temperature"),
            (r#", "stop_sequences": [1]"#, Code::InvalidArgument, "stop_sequences[0]"),
            (r#", "system": 7"#, Code::InvalidArgument, "system"),
            (r#", "system": [{"type": "image"}]"#, Code::UnsupportedField, "system[0].type"),
            (r#", "tools": [{}]"#, Code::InvalidArgument, "tools[0].name"),
            (r#", "tools": [{"type": "web_search_20250305"}]"#, Code::UnsupportedField, "tools[0].type"),
            (r#", "tools": [{"name": "f", "input_schema": 1}]"#, Code::InvalidArgument, "tools[0].input_schema"),
            (r#", "tools": [{"name": "f"}, {"name": "f"}]"#, Code::InvalidArgument, "tools[1].name"),
            (r#", "tool_choice": {"type": "any"}"#, Code::InvalidArgument, "tool_choice"),
            (r#", "tool_choice": {"type": "tool"}"#, Code::InvalidArgument, "tool_choice.name"),
            (r#", "tool_choice": {}"#, Code::InvalidArgument, "tool_choice.type"),
            (r#", "thinking": {"type": "enabled"}"#, Code::InvalidArgument, "thinking.budget_tokens"),
            (
                r#", "thinking": {"type": "enabled", "budget_tokens": 9}"#,
                Code::InvalidArgument,
                "thinking.budget_tokens",
            ),
            (r#", "thinking": {"type": "much"}"#, Code::InvalidArgument, "thinking.type"),
            (
                r#", "tools": [{"name": "f"}], "output_format": {"type": "json_schema", "schema": {}}"#,
                Code::UnsupportedField,
                "output_config.format",
            ),
            (r#", "mcp_servers": []"#, Code::UnsupportedField, "mcp_servers"),
            (r#", "kv_transfer_params": {}"#, Code::MeshOnlyField, "kv_transfer_params"),
            (r#", "output_format": {"type": "xml"}"#, Code::InvalidArgument, "output_format.type"),
            (
                r#", "output_config": {"format": {"type": "json_schema"}}"#,
                Code::InvalidArgument,
                "output_config.format.schema",
            ),
            (r#", "output_config": {"effort": "much"}"#, Code::InvalidArgument, "output_config.effort"),
        ] {
            let error = parse(more).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{more}");
        }
        for (json, code, field) in [
            ("[]", Code::InvalidArgument, "messages"),
            (r#"[{"role": "system", "content": "x"}]"#, Code::InvalidArgument, "messages[0].role"),
            (r#"[{"content": "x"}]"#, Code::InvalidArgument, "messages[0].role"),
            (r#"[{"role": "user"}]"#, Code::InvalidArgument, "messages[0].content"),
            (
                r#"[{"role": "user", "content": [{"type": "image"}]}]"#,
                Code::UnsupportedField,
                "messages[0].content[0].type",
            ),
            (r#"[{"role": "assistant", "content": "x"}]"#, Code::UnsupportedField, "messages[0]"),
            (
                r#"[{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}, {"role": "user", "content": ""}]"#,
                Code::InvalidArgument,
                "messages[0].content[0].input",
            ),
        ] {
            let error = messages(json).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{json}");
        }
        let missing =
            parse_messages(br#"{"model": "m", "messages": [{"role": "user", "content": "hi"}]}"#).unwrap_err();
        assert_eq!("max_tokens", missing.fields[0].field);
    }

    proptest::proptest! {
        #[test]
        fn no_body_breaks_the_parser(
            body in "\\PC{0,80}", value in "(null|true|-1|0|1e400|\"x\"|\\[\\]|\\{\\}|\\[[0-9]\\])", field in 0usize..20,
        ) {
            let _ = parse_messages(body.as_bytes());
            let fields = [
                "temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "stream", "system", "messages", "tools",
                "tool_choice", "thinking", "output_format", "output_config", "metadata", "service_tier", "mcp_servers",
                "cache_salt", "priority", "model", "x",
            ];
            let name = fields[field];
            if let Err(error) = parse(&format!(r#", "{name}": {value}"#)) {
                proptest::prop_assert!(error.fields.iter().all(|violation| error.message.contains(&violation.field)));
                proptest::prop_assert_eq!(400, error.code.http_status());
            }
        }
    }
}
