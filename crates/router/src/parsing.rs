//! What an answer may hold beside text, and what the engine has to keep to so that it can be read.

use std::{collections::BTreeMap, sync::Arc};

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    controller::v1::Model,
    engine::v1::{StructuredOutput, structured_output::Constraint},
};
use kvist_text::{CallIdForm, Calls, ModelText, OfferedTool, Parsing, PromptEnd, ReasoningFamily, ToolFamily};
use serde_json::{Value, json};

use crate::generate::{AnswerForm, GenerateInput, Prompt, ToolChoice};

/// The word of a model's settings for "no parser".
const NO_PARSER: &str = "none";

/// Tools that an answer may call.
#[derive(Debug, Default)]
pub(crate) struct OfferedTools {
    form: AnswerForm,
    tools: Arc<[OfferedTool]>,
    /// Calls in the conversation so far; some templates number them.
    past_calls: usize,
    is_chat: bool,
    /// The whole answer keeps to a schema.
    is_constrained: bool,
    /// What follows the mark of a call does.
    is_strict: bool,
}

/// What to look for in an answer, and how ids of calls look.
#[derive(Clone, Debug)]
pub(crate) struct AnswerPlan {
    pub(crate) parsing: Parsing,
    pub(crate) call_ids: CallIds,
    pub(crate) single_call: bool,
}

/// Makes ids for calls: the same request has the same ones.
#[derive(Clone, Debug)]
pub(crate) struct CallIds {
    form: CallIdForm,
    request_id: Arc<str>,
    past_calls: usize,
}

impl CallIds {
    pub(crate) fn of(&self, choice: u32, call: u32, name: &str) -> String {
        // Letters and digits without those that look alike.
        const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
        let hashed = |length: usize| -> String {
            let seed = format!("{} {choice} {call}", self.request_id);
            let digest = kvist_text::digest_hex(seed.as_bytes());
            let bytes = digest.as_bytes().chunks_exact(2).filter_map(|pair| std::str::from_utf8(pair).ok());
            let numbers = bytes.filter_map(|pair| u8::from_str_radix(pair, 16).ok());
            numbers.map(|number| char::from(ALPHABET[usize::from(number % 32)])).take(length).collect()
        };
        match self.form {
            CallIdForm::Prefixed => format!("call_{}", hashed(24)),
            CallIdForm::NineCharacters => hashed(9),
            CallIdForm::Numbered => format!("functions.{name}:{}", self.past_calls + call as usize),
        }
    }
}

impl OfferedTools {
    /// Takes from a request what its answer may call, and makes the engine keep to a schema where calls are asked for or
    /// a tool is strict.
    ///
    /// # Errors
    /// The choice asks for what is not there, or for two things at once.
    pub(crate) fn take(input: &mut GenerateInput, family: Option<ToolFamily>) -> Result<Self, KvistError> {
        let form = std::mem::take(&mut input.form);
        let (is_chat, tools, past_calls): (bool, &[Value], usize) = match &input.prompt {
            Prompt::Chat(chat) => (true, &chat.tools, chat.messages.iter().map(count_calls).sum()),
            Prompt::Text(_) | Prompt::Tokens(_) => (false, &[], 0),
        };
        let name_of = |tool: &Value| tool.pointer("/function/name").and_then(Value::as_str).map(str::to_owned);
        let constraint = match &form.tool_choice {
            ToolChoice::Auto if !form.strict_tools.is_empty() => {
                Some(Constraint::StructuralTag(strict_tag(tools, &form.strict_tools, family)?.to_string()))
            }
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Required if tools.is_empty() => return Err(wrong("tool_choice", "needs tools")),
            ToolChoice::Required => Some(Constraint::JsonSchema(list_schema(tools, form.single_call).to_string())),
            ToolChoice::Named(name) => match tools.iter().find(|tool| name_of(tool).as_deref() == Some(name)) {
                Some(tool) => Some(Constraint::JsonSchema(parameters_of(tool).to_string())),
                None => return Err(wrong("tool_choice", format!("names `{name}`, which is not among the tools"))),
            },
        };
        let is_strict = matches!(constraint, Some(Constraint::StructuralTag(_)));
        let offered = |tool: &Value| name_of(tool).map(|name| OfferedTool::new(name, parameters_of(tool)));
        let tools = tools.iter().filter_map(offered).collect();
        if constraint.is_some() {
            if input.structured_output.is_some() {
                let why = "cannot be combined with strict tools or a choice that asks for tool calls";
                return Err(wrong("structured_output", why));
            }
            input.structured_output = Some(StructuredOutput { constraint });
        }
        let has_constraint = input.structured_output.as_ref().is_some_and(|output| output.constraint.is_some());
        Ok(Self { form, tools, past_calls, is_chat, is_constrained: has_constraint && !is_strict, is_strict })
    }

    /// Whether the model decides on calls and their arguments have to keep to a schema.
    pub(crate) fn are_strict(&self) -> bool {
        self.is_strict
    }

    /// Whether the answer has to be calls.
    pub(crate) fn are_asked_for(&self) -> bool {
        matches!(self.form.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// What to look for in the answer to a prompt.
    ///
    /// # Errors
    /// The model cannot be told of tools, or nothing is known of how it calls them.
    pub(crate) fn plan(
        self,
        model: &Model,
        text: Option<&ModelText>,
        prompt: &[u32],
        request_id: &Arc<str>,
    ) -> Result<AnswerPlan, KvistError> {
        let family = tool_family(model, text);
        let reasoning = if self.form.separate_reasoning && self.is_chat { reasoning_family(model, text) } else { None };
        let calls = match self.form.tool_choice {
            ToolChoice::None => Calls::None,
            ToolChoice::Required => Calls::List,
            ToolChoice::Named(name) => Calls::Named(name),
            ToolChoice::Auto if text.is_some_and(|text| !text.shows_tools()) => {
                return Err(unsupported_tools("the chat template of this model does not show tools to it"));
            }
            ToolChoice::Auto => match family {
                Some(family) => Calls::Free { family, tools: self.tools },
                None => return Err(unsupported_tools("nothing is known of how this model writes tool calls")),
            },
        };
        let prompt_end = match (reasoning, text) {
            _ if self.is_constrained => PromptEnd::Constrained,
            (Some(reasoning), Some(text)) => text.prompt_end(prompt, reasoning),
            _ => PromptEnd::Plain,
        };
        let call_ids = CallIds {
            form: family.map_or(CallIdForm::Prefixed, ToolFamily::call_id_form),
            request_id: Arc::clone(request_id),
            past_calls: self.past_calls,
        };
        let parsing = Parsing { reasoning, prompt_end, calls };
        Ok(AnswerPlan { parsing, call_ids, single_call: self.form.single_call })
    }
}

fn wrong(field: &str, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, why)
}

fn unsupported_tools(why: &str) -> KvistError {
    let help = "set `tool_choice` to `required` or to one tool by its name, or leave tools out";
    KvistError::field(Code::UnsupportedField, "tools", format!("{why}; {help}"))
}

fn count_calls(message: &Value) -> usize {
    message.get("tool_calls").and_then(Value::as_array).map_or(0, Vec::len)
}

/// What the model's resource says, or else its template. A name of a later version counts as not given.
pub(crate) fn tool_family(model: &Model, text: Option<&ModelText>) -> Option<ToolFamily> {
    match model.tool_parser.as_str() {
        NO_PARSER => None,
        name => ToolFamily::of_name(name).or_else(|| text.and_then(ModelText::tool_family)),
    }
}

fn reasoning_family(model: &Model, text: Option<&ModelText>) -> Option<ReasoningFamily> {
    match model.reasoning_parser.as_str() {
        NO_PARSER => None,
        name => ReasoningFamily::of_name(name).or_else(|| text.and_then(ModelText::reasoning_family)),
    }
}

fn parameters_of(tool: &Value) -> &Value {
    static NOTHING: std::sync::LazyLock<Value> =
        std::sync::LazyLock::new(|| json!({"type": "object", "properties": {}}));
    tool.pointer("/function/parameters").filter(|schema| schema.is_object()).unwrap_or(&NOTHING)
}

/// Free text in which a call, once begun, names one of the tools and keeps to its schema where the tool is strict.
fn strict_tag(tools: &[Value], strict: &[String], family: Option<ToolFamily>) -> Result<Value, KvistError> {
    let Some(form) = family.and_then(ToolFamily::json_form) else {
        let why = "calls of this model have no mark behind which an engine could keep to a schema; ask for calls \
                   (`tool_choice` required, or one tool by its name)";
        return Err(KvistError::field(Code::UnsupportedField, "tools.strict", why));
    };
    let structure = |tool: &Value| {
        let name = tool.pointer("/function/name").cloned().unwrap_or_default();
        let is_strict = name.as_str().is_some_and(|name| strict.iter().any(|other| other == name));
        let schema = if is_strict { parameters_of(tool).clone() } else { json!({"type": "object"}) };
        json!({"begin": format!("{}{name}{}", form.before_name, form.before_arguments), "schema": schema,
            "end": form.behind_arguments})
    };
    let structures: Vec<Value> = tools.iter().map(structure).collect();
    Ok(json!({"structures": structures, "triggers": [form.mark]}))
}

/// The schema of a list of at least one call.
fn list_schema(tools: &[Value], single_call: bool) -> Value {
    let mut definitions: BTreeMap<String, Value> = BTreeMap::new();
    let call = |(number, tool): (usize, &Value)| {
        let mut arguments = parameters_of(tool).clone();
        // A reference is meant within the tool's own schema, which is not the whole any more.
        let place = format!("tool{number}");
        if refer_to(&mut arguments, &format!("#/$defs/{place}")) {
            let reference = json!({"$ref": format!("#/$defs/{place}")});
            definitions.insert(place, std::mem::replace(&mut arguments, reference));
        }
        let name = tool.pointer("/function/name").cloned().unwrap_or_default();
        json!({"type": "object", "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": false})
    };
    let mut calls: Vec<Value> = tools.iter().enumerate().map(call).collect();
    let items = if calls.len() == 1 { calls.remove(0) } else { json!({"anyOf": calls}) };
    let mut schema = json!({"type": "array", "minItems": 1, "items": items});
    if single_call {
        schema["maxItems"] = 1.into();
    }
    if !definitions.is_empty() {
        schema["$defs"] = definitions.into_iter().collect::<serde_json::Map<_, _>>().into();
    }
    schema
}

/// Makes references to a schema's own root refer to another place. True when there were any.
fn refer_to(schema: &mut Value, place: &str) -> bool {
    match schema {
        Value::Object(map) => {
            let mut found = false;
            for (key, value) in map {
                match value {
                    Value::String(reference) if key == "$ref" && reference.starts_with('#') => {
                        *reference = format!("{place}{}", &reference[1..]);
                        found = true;
                    }
                    _ => found |= refer_to(value, place),
                }
            }
            found
        }
        Value::Array(items) => {
            let mut found = false;
            for item in items {
                found |= refer_to(item, place);
            }
            found
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    #[test]
    fn references_within_a_tools_schema_keep_their_aim() {
        let point = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}, "self": {"$ref": "#"}},
            "$defs": {"P": {"type": "integer"}}});
        let tools = [tool("f", json!({"type": "object"})), tool("g", point)];
        let call = |name: &str, arguments: Value| {
            json!({"type": "object", "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"], "additionalProperties": false})
        };
        let expected = json!({
            "type": "array", "minItems": 1, "maxItems": 1,
            "items": {"anyOf": [call("f", json!({"type": "object"})), call("g", json!({"$ref": "#/$defs/tool1"}))]},
            "$defs": {"tool1": {"type": "object", "properties": {"p": {"$ref": "#/$defs/tool1/$defs/P"},
                "self": {"$ref": "#/$defs/tool1"}}, "$defs": {"P": {"type": "integer"}}}},
        });
        assert_eq!(expected, list_schema(&tools, true));
    }

    #[test]
    fn ids_are_what_the_family_accepts_and_differ() {
        let ids = |form| CallIds { form, request_id: "r".into(), past_calls: 2 };
        let nine = ids(CallIdForm::NineCharacters);
        let (first, second) = (nine.of(0, 0, "f"), nine.of(0, 1, "f"));
        assert_ne!(first, second);
        assert_ne!(first, nine.of(1, 0, "f"));
        assert!(first.len() == 9 && first.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{first}");
        assert_eq!("functions.f:3", ids(CallIdForm::Numbered).of(0, 1, "f"));
        assert!(ids(CallIdForm::Prefixed).of(0, 0, "f").starts_with("call_"));
    }

    #[test]
    fn calls_that_are_asked_for_make_a_schema() {
        let input = |choice, tools: Vec<Value>| {
            let chat = kvist_text::Chat { tools, ..kvist_text::Chat::default() };
            let mut input = GenerateInput::new("m", Prompt::Chat(Box::new(chat)));
            input.form.tool_choice = choice;
            input
        };
        let schema = |choice| {
            let mut input = input(choice, vec![tool("f", json!({"type": "object"}))]);
            OfferedTools::take(&mut input, None).unwrap();
            input.structured_output.and_then(|output| output.constraint)
        };
        let named = ToolChoice::Named("f".to_owned());
        assert_eq!(Some(Constraint::JsonSchema(r#"{"type":"object"}"#.to_owned())), schema(named.clone()));
        assert!(matches!(schema(ToolChoice::Required), Some(Constraint::JsonSchema(_))));
        assert_eq!(None, schema(ToolChoice::Auto));
        for choice in [ToolChoice::Required, named.clone()] {
            let error = OfferedTools::take(&mut input(choice, Vec::new()), None).unwrap_err();
            assert_eq!("tool_choice", error.fields[0].field);
        }
        let mut both = input(named, vec![tool("f", json!({}))]);
        both.structured_output = Some(StructuredOutput { constraint: Some(Constraint::JsonObject(true)) });
        assert_eq!("structured_output", OfferedTools::take(&mut both, None).unwrap_err().fields[0].field);
        let strict = || {
            let tools =
                vec![tool("f", json!({"type": "object", "properties": {}})), tool("g", json!({"type": "object"}))];
            let mut strict = input(ToolChoice::Auto, tools);
            strict.form.strict_tools = vec!["f".to_owned()];
            strict
        };
        for family in [None, Some(ToolFamily::Llama3Json)] {
            let error = OfferedTools::take(&mut strict(), family).unwrap_err();
            assert_eq!((Code::UnsupportedField, "tools.strict"), (error.code, error.fields[0].field.as_str()));
        }
        let mut strict = strict();
        let tools = OfferedTools::take(&mut strict, Some(ToolFamily::Hermes)).unwrap();
        assert!(tools.are_strict() && !tools.are_asked_for() && !tools.is_constrained);
        let Some(Constraint::StructuralTag(tag)) = strict.structured_output.unwrap().constraint else { panic!() };
        let structure = |name: &str, schema: Value| {
            let begin = format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ");
            json!({"begin": begin, "schema": schema, "end": "}\n</tool_call>"})
        };
        let structures =
            [structure("f", json!({"type": "object", "properties": {}})), structure("g", json!({"type": "object"}))];
        let expected = json!({"structures": structures, "triggers": ["<tool_call>"]});
        assert_eq!(expected, serde_json::from_str::<Value>(&tag).unwrap());
    }
}
