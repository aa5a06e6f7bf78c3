//! Tool calls written as JSON: one object with a name and arguments, or a list of such objects.

use std::sync::Arc;

use super::{
    json::{Status, ValueEnd},
    piece::Pieces,
    tool::OfferedTool,
};

/// The tools that may be called, where a call has no mark and only its name tells it from other JSON.
pub(crate) type KnownTools = Option<Arc<[OfferedTool]>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Open,
    /// Before a key; `true` where the object may end instead.
    Key(bool),
    InKey,
    Colon(Field),
    Value(Field),
    InValue(Field),
    Comma,
}

/// One `{"name": …, "arguments": …}` as it grows. Keys come in any order; arguments pass through as they are written.
#[derive(Debug)]
pub(crate) struct CallObject {
    at: At,
    value: ValueEnd,
    /// The key or value that is being read and cannot pass through.
    buffer: String,
    /// What was taken while the call could still turn out to be something else.
    raw: String,
    known: KnownTools,
    has_name: bool,
    has_arguments: bool,
    /// Arguments that came before the name.
    waiting: Option<String>,
    passes_through: bool,
}

impl CallObject {
    pub(crate) fn new(known: KnownTools) -> Self {
        Self {
            at: At::Open,
            value: ValueEnd::default(),
            buffer: String::new(),
            raw: String::new(),
            known,
            has_name: false,
            has_arguments: false,
            waiting: None,
            passes_through: false,
        }
    }

    /// What was taken and not told: all of it as long as the call has not begun.
    pub(crate) fn take_raw(&mut self) -> String {
        std::mem::take(&mut self.raw)
    }

    /// Whether the call has been told of.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_name
    }

    /// Nothing more comes: tells of arguments that were waited for and will not be complete.
    pub(crate) fn flush(&mut self, out: &mut Pieces) {
        if self.has_name && self.at == At::InValue(Field::Arguments) {
            out.arguments(&std::mem::take(&mut self.buffer));
        }
    }

    /// Takes text from the front. After `Done` and `Broken` the object is not fed again.
    pub(crate) fn feed(&mut self, text: &str, out: &mut Pieces) -> (usize, Status) {
        let mut from = 0;
        while from < text.len() {
            let rest = &text[from..];
            let (taken, status) = match self.at {
                At::InKey | At::InValue(_) => self.feed_value(rest, out),
                _ => self.feed_between(rest, out),
            };
            if !self.has_name {
                self.raw.push_str(&rest[..taken]);
            }
            from += taken;
            if status != Status::More {
                return (from, status);
            }
        }
        (from, Status::More)
    }

    /// One character outside of keys and values, or none where a value begins.
    fn feed_between(&mut self, rest: &str, out: &mut Pieces) -> (usize, Status) {
        let Some(first) = rest.chars().next() else { return (0, Status::More) };
        if first.is_ascii_whitespace() {
            return (1, Status::More);
        }
        let (next, taken) = match (self.at, first) {
            (At::Open, '{') => (At::Key(true), 1),
            (At::Key(_), '"') => (At::InKey, 0),
            (At::Colon(field), ':') => (At::Value(field), 1),
            (At::Value(Field::Name), '"') => (At::InValue(Field::Name), 0),
            (At::Value(field @ (Field::Arguments | Field::Other)), _) => {
                self.passes_through = field == Field::Arguments && matches!(first, '{' | '[') && self.has_name;
                (At::InValue(field), 0)
            }
            (At::Comma, ',') => (At::Key(false), 1),
            (At::Comma | At::Key(true), '}') => return (1, self.end(out)),
            _ => return (0, Status::Broken),
        };
        self.at = next;
        self.value = ValueEnd::default();
        self.buffer.clear();
        (taken, Status::More)
    }

    fn feed_value(&mut self, rest: &str, out: &mut Pieces) -> (usize, Status) {
        let (taken, status) = self.value.feed(rest);
        let part = &rest[..taken];
        if self.passes_through {
            out.arguments(part);
        } else {
            self.buffer.push_str(part);
        }
        if status == Status::Broken {
            self.flush(out);
        }
        if status != Status::Done {
            return (taken, status);
        }
        let value = std::mem::take(&mut self.buffer);
        let field = match self.at {
            At::InKey => {
                let Ok(key) = serde_json::from_str::<String>(&value) else { return (taken, Status::Broken) };
                self.at = At::Colon(match key.as_str() {
                    "name" if !self.has_name => Field::Name,
                    "arguments" | "parameters" if !self.has_arguments => Field::Arguments,
                    _ => Field::Other,
                });
                return (taken, Status::More);
            }
            At::InValue(field) => field,
            _ => Field::Other,
        };
        self.at = At::Comma;
        match field {
            Field::Other => {}
            Field::Arguments => {
                self.has_arguments = true;
                if !self.passes_through {
                    let arguments = object_of(value);
                    if self.has_name {
                        out.arguments(&arguments);
                    } else {
                        self.waiting = Some(arguments);
                    }
                }
                self.passes_through = false;
            }
            Field::Name => {
                let Ok(name) = serde_json::from_str::<String>(&value) else { return (taken, Status::Broken) };
                if name.is_empty()
                    || self.known.as_ref().is_some_and(|known| known.iter().all(|tool| tool.name != name))
                {
                    return (taken, Status::Broken);
                }
                self.has_name = true;
                self.raw.clear();
                out.call(&name);
                if let Some(arguments) = self.waiting.take() {
                    out.arguments(&arguments);
                }
            }
        }
        (taken, Status::More)
    }

    fn end(&mut self, out: &mut Pieces) -> Status {
        if !self.has_name {
            return Status::Broken;
        }
        if !self.has_arguments {
            out.arguments("{}");
        }
        out.call_end();
        Status::Done
    }
}

/// Arguments that are no object: some models write the JSON as a string, or `null` for none.
fn object_of(value: String) -> String {
    if value == "null" {
        return "{}".to_owned();
    }
    match serde_json::from_str::<String>(&value) {
        Ok(inner) if inner.trim_start().starts_with('{') => inner,
        _ => value,
    }
}

/// One call, or a list of calls in brackets.
#[derive(Debug)]
pub(crate) struct CallBody {
    known: KnownTools,
    call: Option<CallObject>,
    is_list: bool,
    /// In a list: behind a call, where a comma or the end must come.
    is_behind: bool,
    raw: String,
    has_begun: bool,
}

impl CallBody {
    pub(crate) fn new(known: KnownTools) -> Self {
        Self { known, call: None, is_list: false, is_behind: false, raw: String::new(), has_begun: false }
    }

    /// What was taken and not told.
    pub(crate) fn take_raw(&mut self) -> String {
        let mut raw = std::mem::take(&mut self.raw);
        if let Some(call) = &mut self.call {
            raw.push_str(&call.take_raw());
        }
        raw
    }

    /// Nothing more comes.
    pub(crate) fn flush(&mut self, out: &mut Pieces) {
        if let Some(call) = &mut self.call {
            call.flush(out);
        }
    }

    /// Whether a call has been told of.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun || self.call.as_ref().is_some_and(CallObject::has_begun)
    }

    /// Takes text from the front. After `Done` and `Broken` the body is not fed again.
    pub(crate) fn feed(&mut self, text: &str, out: &mut Pieces) -> (usize, Status) {
        let mut from = 0;
        while from < text.len() {
            let rest = &text[from..];
            if let Some(call) = &mut self.call {
                let (taken, status) = call.feed(rest, out);
                from += taken;
                if call.has_begun() && !self.has_begun {
                    self.has_begun = true;
                    self.raw.clear();
                }
                match status {
                    Status::More => return (from, Status::More),
                    Status::Broken => return (from, Status::Broken),
                    Status::Done => self.call = None,
                }
                if !self.is_list {
                    return (from, Status::Done);
                }
                self.is_behind = true;
                continue;
            }
            let Some(first) = rest.chars().next() else { break };
            match first {
                _ if first.is_ascii_whitespace() => {}
                '[' if !self.is_list => self.is_list = true,
                ',' if self.is_behind => self.is_behind = false,
                ']' if self.is_behind => return (from + 1, Status::Done),
                '{' if !self.is_behind => {
                    self.call = Some(CallObject::new(self.known.clone()));
                    continue;
                }
                _ => return (from, Status::Broken),
            }
            if !self.has_begun {
                self.raw.push(first);
            }
            from += first.len_utf8();
        }
        (from, Status::More)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::Piece;

    fn pieces(text: &str) -> (Vec<Piece>, String, Status) {
        let mut out = Pieces::default();
        let mut body = CallBody::new(None);
        let (taken, status) = body.feed(text, &mut out);
        let rest = body.take_raw() + &text[taken..];
        (out.drain().collect(), rest, status)
    }

    fn call(name: &str, arguments: &str) -> Vec<Piece> {
        vec![Piece::CallStart { name: name.to_owned() }, Piece::Arguments(arguments.to_owned()), Piece::CallEnd]
    }

    #[test]
    fn keys_come_in_any_order_and_arguments_stay_as_written() {
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a":  1.0}}"#, r#"{"a":  1.0}"#),
            (r#"{"id": [1], "parameters": {"a": "}"}, "name": "f"}"#, r#"{"a": "}"}"#),
            (r#"{"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": null}"#, "{}"),
            (r#"{"name": "\u0066", "arguments": "{\"a\": \"é\"}"}"#, r#"{"a": "é"}"#),
        ] {
            assert_eq!((call("f", arguments), String::new(), Status::Done), pieces(text), "{text}");
        }
    }

    #[test]
    fn a_list_holds_calls_and_nothing_else() {
        let both = [call("f", "{}"), call("g", "[1]")].concat();
        let text = r#" [ {"name": "f"} , {"name": "g", "arguments": [1]} ] x"#;
        assert_eq!((both, " x".to_owned(), Status::Done), pieces(text));
        for text in ["[]", "[1]", r#"[["f"]]"#, "{}", r#"{"name": 1}"#, r#"{"a" 1}"#, "x", r#"{"name": ""}"#] {
            assert_eq!((Vec::new(), text.to_owned(), Status::Broken), pieces(text), "{text}");
        }
    }
}
