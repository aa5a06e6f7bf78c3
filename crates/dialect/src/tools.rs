//! Tools of a request: what may be called, and whether something must be.

use std::collections::HashSet;

use kvist_errors::KvistError;
use serde_json::{Map, Value, json};

use crate::fields::{Fields, unsupported, wrong};

/// Most tools of one request.
const MOST_TOOLS: usize = 1024;

/// Longest name of a tool.
const LONGEST_NAME_BYTES: usize = 128;

/// What a request says of calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// No tool is called.
    #[default]
    None,
    /// The model decides.
    Auto,
    /// At least one tool is called.
    Required,
    /// This tool is called, once.
    Named(String),
}

/// Tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ToolUse {
    /// Definitions in the form of the chat API, which is what templates show; empty when none may be called.
    pub(crate) definitions: Vec<Value>,
    /// Which may be called.
    pub(crate) choice: ToolChoice,
    /// Whether one answer may hold several calls.
    pub(crate) parallel: bool,
    /// Names of the tools whose arguments have to keep to their schema.
    pub(crate) strict: Vec<String>,
}

/// One tool, in the words of its API.
pub(crate) struct Definition {
    pub(crate) name: Option<Value>,
    pub(crate) description: Option<Value>,
    pub(crate) parameters: Option<Value>,
    pub(crate) strict: Option<Value>,
}

impl Definition {
    /// Takes a tool's fields out of its object; `schema_field` is the name of its schema there.
    pub(crate) fn take(object: &mut Map<String, Value>, schema_field: &str) -> Self {
        let mut take = |name: &str| object.shift_remove(name);
        Self {
            name: take("name"),
            description: take("description"),
            parameters: take(schema_field),
            strict: take("strict"),
        }
    }
}

/// Reads a list of tools. `read` takes one apart: its path is given, and the names of its fields in errors are
/// `name_field` and `schema_field`.
pub(crate) fn read_tools(
    fields: &mut Fields,
    schema_field: &str,
    read: impl Fn(&str, Map<String, Value>) -> Result<(String, Definition), KvistError>,
) -> Result<ToolUse, KvistError> {
    let items = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(wrong("tools", "must be an array")),
    };
    if items.len() > MOST_TOOLS {
        return Err(wrong("tools", format!("may have at most {MOST_TOOLS} tools")));
    }
    let mut tools = ToolUse { parallel: true, ..ToolUse::default() };
    let mut names = HashSet::new();
    for (position, item) in items.into_iter().enumerate() {
        let path = format!("tools[{position}]");
        let Value::Object(item) = item else { return Err(wrong(path, "must be an object")) };
        let (path, definition) = read(&path, item)?;
        let name = read_name(&format!("{path}.name"), definition.name)?;
        if !names.insert(name.clone()) {
            return Err(wrong(format!("{path}.name"), "is the name of another tool as well"));
        }
        let mut function = json!({"name": name});
        match definition.description {
            None | Some(Value::Null) => {}
            Some(description @ Value::String(_)) => function["description"] = description,
            Some(_) => return Err(wrong(format!("{path}.description"), "must be a string")),
        }
        // Left out, the tool takes nothing.
        function["parameters"] = match definition.parameters {
            None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
            Some(schema @ Value::Object(_)) => schema,
            Some(_) => return Err(wrong(format!("{path}.{schema_field}"), "must be a JSON schema")),
        };
        match definition.strict {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(Value::Bool(true)) => tools.strict.push(name),
            Some(_) => return Err(wrong(format!("{path}.strict"), "must be true or false")),
        }
        tools.definitions.push(json!({"type": "function", "function": function}));
    }
    Ok(tools)
}

fn read_name(path: &str, name: Option<Value>) -> Result<String, KvistError> {
    let Some(Value::String(name)) = name else { return Err(wrong(path, "must be a string")) };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/');
    if name.is_empty() || name.len() > LONGEST_NAME_BYTES || !name.bytes().all(is_name) {
        let why = format!("must be 1 to {LONGEST_NAME_BYTES} letters, digits or _ - . : /");
        return Err(wrong(path, why));
    }
    Ok(name)
}

impl ToolUse {
    /// Applies what the request says of calls. `None` is the default of all APIs: the model decides. `path` is what the
    /// API calls the choice.
    pub(crate) fn choose(mut self, choice: Option<ToolChoice>, path: &str) -> Result<Self, KvistError> {
        let has_tools = !self.definitions.is_empty();
        self.choice = match choice {
            Some(ToolChoice::Required) if !has_tools => return Err(wrong(path, "needs `tools`")),
            Some(ToolChoice::Named(name)) if !self.definitions.iter().any(|tool| tool["function"]["name"] == *name) => {
                return Err(wrong(path, format!("names `{name}`, which is not among `tools`")));
            }
            None | Some(ToolChoice::Auto) if !has_tools => ToolChoice::None,
            None => ToolChoice::Auto,
            Some(choice) => choice,
        };
        // What may not be called is not shown, so that no model tries.
        if self.choice == ToolChoice::None {
            self = Self { parallel: self.parallel, ..Self::default() };
        }
        Ok(self)
    }
}

/// The choice as the APIs of OpenAI write it: a word, or the tool by its name.
pub(crate) fn read_open_ai_choice(
    fields: &mut Fields,
    name_of: impl Fn(&Map<String, Value>) -> Option<&str>,
) -> Result<Option<ToolChoice>, KvistError> {
    const PATH: &str = "tool_choice";
    match fields.take(PATH) {
        None => Ok(None),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok(Some(ToolChoice::None)),
            "auto" => Ok(Some(ToolChoice::Auto)),
            "required" => Ok(Some(ToolChoice::Required)),
            _ => Err(wrong(PATH, "must be none, auto, required or one tool by its name")),
        },
        Some(Value::Object(map)) => match map.get("type").and_then(Value::as_str) {
            Some("function") => match name_of(&map) {
                Some(name) => Ok(Some(ToolChoice::Named(name.to_owned()))),
                None => Err(wrong(PATH, "must name a tool")),
            },
            Some(kind) => Err(unsupported(PATH, format!("this version does not know the kind `{kind}`"))),
            None => Err(wrong(PATH, "must have a `type`")),
        },
        Some(_) => Err(wrong(PATH, "must be a string or an object")),
    }
}

/// Refuses a constraint on an answer that may be a call: an engine keeps to one of both.
pub(crate) fn refuse_with_calls(path: &str, is_constrained: bool, tools: &ToolUse) -> Result<(), KvistError> {
    if is_constrained && tools.choice != ToolChoice::None {
        let why = "an answer that is held to a form cannot be a tool call; set `tool_choice` to none";
        return Err(unsupported(path, why));
    }
    Ok(())
}
