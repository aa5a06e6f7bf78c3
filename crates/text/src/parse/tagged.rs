//! Tool calls whose arguments stand in tags: Qwen3-Coder and GLM.
//!
//! The values are no JSON. What is to be a text is known from the tool's schema alone, so a call is read when it is
//! whole; one that is cut is told with the arguments that were complete and stays open, and what is left is text.

use std::sync::Arc;

use serde_json::Value;

use super::{
    marks::{Machine, Search, search},
    piece::{Pieces, Prose},
    tool::OfferedTool,
};

/// How a family writes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaggedForm {
    /// `<function=NAME><parameter=KEY>…</parameter></function>`.
    Qwen3Coder,
    /// `NAME<arg_key>KEY</arg_key><arg_value>…</arg_value>`.
    Glm,
}

pub(crate) const OPEN: &str = "<tool_call>";
pub(crate) const CLOSE: &str = "</tool_call>";

/// What was read of a call.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call<'a> {
    name: &'a str,
    /// Key and value of each argument that is complete.
    arguments: Vec<(&'a str, &'a str)>,
    is_whole: bool,
    /// What could not be read.
    rest: &'a str,
}

/// Reads text with calls in tags.
#[derive(Debug)]
pub(crate) struct TaggedCalls {
    form: TaggedForm,
    tools: Arc<[OfferedTool]>,
    prose: Prose,
    /// What stands behind the begin of a call; none outside of one.
    call: Option<String>,
}

impl TaggedCalls {
    pub(crate) fn new(form: TaggedForm, tools: Arc<[OfferedTool]>) -> Self {
        Self { form, tools, prose: Prose::default(), call: None }
    }

    /// Tells of a call, or passes it on as text.
    fn tell(&mut self, body: &str, is_closed: bool, out: &mut Pieces) {
        let call = match self.form {
            TaggedForm::Qwen3Coder => read_qwen3_coder(body),
            TaggedForm::Glm => read_glm(body, is_closed),
        };
        let Some(call) = call else {
            if is_closed {
                out.failed();
            }
            self.prose.push(&format!("{OPEN}{body}{}", if is_closed { CLOSE } else { "" }), out);
            return;
        };
        self.prose.call();
        out.call(call.name);
        let tool = self.tools.iter().find(|tool| tool.name == call.name);
        let mut json = "{".to_owned();
        for (position, (key, value)) in call.arguments.iter().enumerate() {
            let is_text = tool.is_some_and(|tool| tool.takes_text(key));
            json.push_str(if position > 0 { ", " } else { "" });
            json.push_str(&format!("{}: {}", Value::from(*key), to_json(value, is_text)));
        }
        if call.is_whole {
            json.push('}');
            out.arguments(&json);
            out.call_end();
        } else {
            out.arguments(&json);
            if is_closed {
                out.failed();
            }
            self.prose.push(call.rest, out);
        }
    }
}

impl Machine for TaggedCalls {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let mark = if self.call.is_some() { CLOSE } else { OPEN };
        match (search(rest, &[mark]), self.call.take()) {
            (Search::Mark(at, _), None) => {
                self.prose.push(&rest[..at], out);
                self.call = Some(String::new());
                Some(at + OPEN.len())
            }
            (Search::Mark(at, _), Some(mut body)) => {
                body.push_str(&rest[..at]);
                self.tell(&body, true, out);
                Some(at + CLOSE.len())
            }
            (Search::Clear(length), mut call) => {
                match &mut call {
                    Some(body) => body.push_str(&rest[..length]),
                    None => self.prose.push(&rest[..length], out),
                }
                self.call = call;
                (length > 0).then_some(length)
            }
        }
    }

    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        match self.call.take() {
            Some(body) => self.tell(&(body + rest), false, out),
            None => self.prose.push(rest, out),
        }
        self.prose.finish(out);
    }
}

/// The text up to a mark, and what follows the mark.
fn until<'a>(text: &'a str, mark: &str) -> Option<(&'a str, &'a str)> {
    text.split_once(mark)
}

fn read_qwen3_coder(body: &str) -> Option<Call<'_>> {
    let (name, mut rest) = until(body.trim_start().strip_prefix("<function=")?, ">")?;
    let name = Some(name.trim()).filter(|name| !name.is_empty())?;
    let mut call = Call { name, ..Call::default() };
    loop {
        rest = rest.trim_start();
        if let Some(behind) = rest.strip_prefix("</function>") {
            call.is_whole = behind.trim().is_empty();
            call.rest = behind;
            return Some(call);
        }
        let parameter = rest.strip_prefix("<parameter=").and_then(|rest| until(rest, ">"));
        let Some((key, (value, behind))) =
            parameter.and_then(|(key, rest)| Some((key.trim(), until(rest, "</parameter>")?)))
        else {
            call.rest = rest;
            return Some(call);
        };
        // The template sets values on lines of their own.
        let value = value.strip_prefix('\n').unwrap_or(value);
        call.arguments.push((key, value.strip_suffix('\n').unwrap_or(value)));
        rest = behind;
    }
}

fn read_glm(body: &str, is_closed: bool) -> Option<Call<'_>> {
    let (name, mut rest) = match body.find("<arg_key>") {
        Some(at) => body.split_at(at),
        // Only the end shows that the name is whole.
        None if is_closed => (body, ""),
        None => return None,
    };
    let name = Some(name.trim()).filter(|name| !name.is_empty() && !name.contains(char::is_whitespace))?;
    let mut call = Call { name, ..Call::default() };
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            call.is_whole = is_closed;
            return Some(call);
        }
        let pair = rest.strip_prefix("<arg_key>").and_then(|rest| until(rest, "</arg_key>"));
        let pair = pair.and_then(|(key, rest)| {
            let value = rest.trim_start().strip_prefix("<arg_value>")?;
            Some((key.trim(), until(value, "</arg_value>")?))
        });
        let Some((key, (value, behind))) = pair else {
            call.rest = rest;
            return Some(call);
        };
        call.arguments.push((key, value));
        rest = behind;
    }
}

/// A value as JSON: as it is where it is JSON and need not be a text.
fn to_json(value: &str, is_text: bool) -> String {
    let trimmed = value.trim();
    if !is_text && serde_json::from_str::<Value>(trimmed).is_ok() {
        return trimmed.to_owned();
    }
    Value::from(value).to_string()
}
