//! Tool calls as Python writes them: `[get_weather(city='Oslo', days=[1, 2]), f()]`, as in Llama 4 and Olmo.
//!
//! The list begins the answer. Nothing else marks it, so its first call has to be of a tool that was offered; a list of
//! other things is an answer in text. A call is read when it is whole; one that is cut is told with the arguments that were
//! complete and stays open, and what is left is text.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{
    literal::read_literal,
    marks::Machine,
    piece::{Pieces, Prose},
    tool::OfferedTool,
};

/// Llama 4 may write these around the list.
pub(crate) const OPEN: &str = "<|python_start|>";
pub(crate) const CLOSE: &str = "<|python_end|>";

#[derive(Debug)]
enum State {
    /// Before the list.
    Begin,
    /// Before a call of the list.
    Next,
    /// In a call.
    Call(CallEnd),
    /// Behind a call.
    Behind,
    /// Behind the list.
    End,
    Text,
}

/// Finds the end of a call: the bracket that closes its arguments.
#[derive(Debug, Default)]
struct CallEnd {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

impl CallEnd {
    /// Whether the call ends with this character.
    fn feed(&mut self, character: char) -> bool {
        match self.quote {
            Some(_) if self.is_escaped => self.is_escaped = false,
            Some(_) if character == '\\' => self.is_escaped = true,
            Some(quote) if character == quote => self.quote = None,
            Some(_) => {}
            None => match character {
                '"' | '\'' => self.quote = Some(character),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => {
                    self.depth = self.depth.saturating_sub(1);
                    return self.depth == 0;
                }
                _ => {}
            },
        }
        false
    }

    /// Whether the arguments have begun.
    fn has_arguments(&self) -> bool {
        self.depth > 0
    }
}

/// Reads an answer that may be a list of calls.
#[derive(Debug)]
pub(crate) struct PythonCalls {
    tools: Arc<[OfferedTool]>,
    state: State,
    /// What was taken of the list and is not told of.
    raw: String,
    /// Where the call begins in it.
    call_at: usize,
    has_begun: bool,
    prose: Prose,
}

/// What was read of a call's arguments.
struct Arguments<'a> {
    read: Map<String, Value>,
    is_whole: bool,
    /// What could not be read.
    rest: &'a str,
}

impl PythonCalls {
    pub(crate) fn new(tools: Arc<[OfferedTool]>) -> Self {
        let state = State::Begin;
        Self { tools, state, raw: String::new(), call_at: 0, has_begun: false, prose: Prose::default() }
    }

    fn take(&mut self, character: char, out: &mut Pieces) -> State {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Begin if character.is_whitespace() => State::Begin,
            State::Begin if character == '[' => State::Next,
            state @ (State::Next | State::Behind) if character.is_whitespace() => state,
            State::Behind if character == ',' => State::Next,
            State::Behind if character == ']' => {
                self.raw.clear();
                State::End
            }
            State::Next if is_of_name(character) => {
                self.call_at = self.raw.len() - character.len_utf8();
                State::Call(CallEnd::default())
            }
            State::Call(end) if !end.has_arguments() && is_of_name(character) => State::Call(end),
            State::Call(mut end) => {
                // Up to its arguments a call is the name of a tool.
                let is_begin = !end.has_arguments();
                let is_offered = character == '(' && self.is_offered(self.raw.get(self.call_at..self.raw.len() - 1));
                if is_begin && !is_offered {
                    self.give_up(out)
                } else if end.feed(character) {
                    self.end_call(out)
                } else {
                    State::Call(end)
                }
            }
            _ => self.give_up(out),
        }
    }

    fn is_offered(&self, name: Option<&str>) -> bool {
        self.tools.iter().any(|tool| Some(tool.name.as_str()) == name)
    }

    /// What was taken is text after all. It counts as a failure where a call has been told of.
    fn give_up(&mut self, out: &mut Pieces) -> State {
        if self.has_begun {
            out.failed();
        }
        self.prose.push(&std::mem::take(&mut self.raw), out);
        State::Text
    }

    fn end_call(&mut self, out: &mut Pieces) -> State {
        let raw = std::mem::take(&mut self.raw);
        let call = raw.get(self.call_at..).unwrap_or_default();
        let (name, arguments) = call.split_once('(').unwrap_or_default();
        let Some(arguments) = read_arguments(arguments.strip_suffix(')').unwrap_or(arguments), true) else {
            self.raw = raw;
            return self.give_up(out);
        };
        let is_whole = arguments.is_whole;
        self.tell(name, arguments, out);
        if is_whole {
            return State::Behind;
        }
        out.failed();
        self.prose.push(")", out);
        State::Text
    }

    fn tell(&mut self, name: &str, arguments: Arguments<'_>, out: &mut Pieces) {
        self.has_begun = true;
        self.prose.call();
        out.call(name);
        let json = Value::Object(arguments.read).to_string();
        if arguments.is_whole {
            out.arguments(&json);
            out.call_end();
        } else {
            out.arguments(json.strip_suffix('}').unwrap_or(&json));
            self.prose.push(arguments.rest, out);
        }
    }
}

impl Machine for PythonCalls {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let first = rest.chars().next()?;
        let mark = match self.state {
            State::Text => {
                self.prose.push(rest, out);
                return Some(rest.len());
            }
            State::Begin if first == '<' && self.raw.trim().is_empty() => OPEN,
            State::End if first == '<' => CLOSE,
            State::End => {
                self.state = State::Text;
                return Some(0);
            }
            _ => "",
        };
        if !mark.is_empty() {
            if rest.starts_with(mark) {
                if mark == OPEN {
                    self.raw.push_str(mark);
                } else {
                    self.state = State::Text;
                }
                return Some(mark.len());
            }
            if mark.starts_with(rest) {
                return None;
            }
        }
        self.raw.push(first);
        self.state = self.take(first, out);
        Some(first.len_utf8())
    }

    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        let raw = std::mem::take(&mut self.raw);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Call(end) if end.has_arguments() => {
                let call = raw.get(self.call_at..).unwrap_or_default();
                let (name, arguments) = call.split_once('(').unwrap_or_default();
                match read_arguments(arguments, false) {
                    Some(arguments) => self.tell(name, arguments, out),
                    None => self.prose.push(&raw, out),
                }
            }
            _ => self.prose.push(&raw, out),
        }
        self.prose.push(rest, out);
        self.prose.finish(out);
    }
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '.' | '-')
}

/// Reads `key=value` and so on; none when not even the first can be read. Unless the text `is_all`, only a comma shows that
/// a value is whole.
fn read_arguments(text: &str, is_all: bool) -> Option<Arguments<'_>> {
    let mut read = Map::new();
    let mut rest = text.trim_start();
    loop {
        if rest.is_empty() {
            return (is_all || !read.is_empty()).then_some(Arguments { read, is_whole: is_all, rest });
        }
        let argument = rest.split_once('=').and_then(|(key, value)| {
            let key = Some(key.trim()).filter(|key| !key.is_empty() && key.chars().all(is_of_name))?;
            let (value, behind) = read_literal(value.trim_start())?;
            let behind = behind.trim_start();
            let next = behind.strip_prefix(',').or_else(|| (is_all && behind.is_empty()).then_some(behind))?;
            Some((key, value, next.trim_start()))
        });
        let Some((key, value, next)) = argument else {
            return (!read.is_empty()).then_some(Arguments { read, is_whole: false, rest });
        };
        read.insert(key.to_owned(), value);
        rest = next;
    }
}
