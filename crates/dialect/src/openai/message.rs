//! Messages of the chat API.

use kvist_errors::KvistError;
use serde_json::{Map, Value};

use crate::fields::{text_of_part, wrong};

/// A message with its content as one text. Parts are put on lines of their own, as other servers do.
pub(crate) fn read_message(position: usize, message: Value) -> Result<Value, KvistError> {
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
            let read = |(number, part)| text_of_part(part, &["text"], || format!("{path}.content[{number}]"));
            parts.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        Some(_) => return Err(wrong(format!("{path}.content"), "must be a string or a list of parts")),
    };
    message.insert("content".to_owned(), content.into());
    read_past_thoughts(&path, &mut message)?;
    read_past_calls(&path, &mut message)?;
    Ok(Value::Object(message))
}

/// Calls that the assistant made earlier: the API carries arguments as JSON text, templates want the object.
fn read_past_calls(path: &str, message: &mut Map<String, Value>) -> Result<(), KvistError> {
    match message.get_mut("tool_calls") {
        None => {}
        // Templates ask whether there are calls at all.
        Some(Value::Null) => {
            message.shift_remove("tool_calls");
        }
        Some(Value::Array(calls)) => {
            for (number, call) in calls.iter_mut().enumerate() {
                let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
                    return Err(wrong(format!("{path}.tool_calls[{number}].function"), "must be an object"));
                };
                if let Some(Value::String(arguments)) = function.get("arguments")
                    && let Ok(parsed @ Value::Object(_)) = serde_json::from_str(arguments)
                {
                    function.insert("arguments".to_owned(), parsed);
                }
            }
        }
        Some(_) => return Err(wrong(format!("{path}.tool_calls"), "must be an array")),
    }
    Ok(())
}

/// What the assistant thought earlier, which servers call by two names. Templates know the older one.
fn read_past_thoughts(path: &str, message: &mut Map<String, Value>) -> Result<(), KvistError> {
    const NAME: &str = "reasoning_content";
    for name in [NAME, "reasoning"] {
        match message.shift_remove(name) {
            None | Some(Value::Null) => {}
            Some(thoughts @ Value::String(_)) => {
                message.entry(NAME).or_insert(thoughts);
                // The other name would say the same.
                message.shift_remove("reasoning");
                break;
            }
            Some(_) => return Err(wrong(format!("{path}.{name}"), "must be a string")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;

    fn message(json: &str) -> Result<Value, KvistError> {
        read_message(0, serde_json::from_str(json).unwrap())
    }

    #[test]
    fn messages_hold_one_text() {
        let parts = r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#;
        assert_eq!(serde_json::json!({"role": "user", "content": "a\nb"}), message(parts).unwrap());
        for (json, code, field) in [
            (r#"{"role": "user"}"#, Code::InvalidArgument, "messages[0].content"),
            (r#"{"content": "x"}"#, Code::InvalidArgument, "messages[0].role"),
            (r#"7"#, Code::InvalidArgument, "messages[0]"),
            (
                r#"{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}"#,
                Code::UnsupportedField,
                "messages[0].content[0].type",
            ),
            (
                r#"{"role": "user", "content": [{"type": "text"}]}"#,
                Code::InvalidArgument,
                "messages[0].content[0].text",
            ),
            (
                r#"{"role": "assistant", "content": "", "tool_calls": [{}]}"#,
                Code::InvalidArgument,
                "messages[0].tool_calls[0].function",
            ),
        ] {
            let error = message(json).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{json}");
        }
    }

    #[test]
    fn arguments_of_past_calls_are_objects() {
        let json = r#"{"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
            {"id": "2", "type": "function", "function": {"name": "f", "arguments": "broken"}}]}"#;
        let message = message(json).unwrap();
        assert_eq!(serde_json::json!({"a": 1}), message["tool_calls"][0]["function"]["arguments"]);
        assert_eq!("broken", message["tool_calls"][1]["function"]["arguments"]);
        assert_eq!("", message["content"]);
    }

    #[test]
    fn thoughts_have_one_name() {
        for json in [
            r#"{"role": "assistant", "content": "x", "reasoning": "hm"}"#,
            r#"{"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning": "hm"}"#,
        ] {
            let expected = serde_json::json!({"role": "assistant", "content": "x", "reasoning_content": "hm"});
            assert_eq!(expected, message(json).unwrap());
        }
        let error = message(r#"{"role": "assistant", "content": "x", "reasoning_content": 1}"#).unwrap_err();
        assert_eq!("messages[0].reasoning_content", error.fields[0].field);
    }
}
