//! Tool calls as JSON, behind a mark: Hermes and Qwen, Llama, Mistral, Granite, and output that a schema constrains.

use super::{
    call::{CallBody, KnownTools},
    json::{Status, ValueEnd},
    marks::{Machine, Search, search},
    piece::{Pieces, Prose},
};

/// How a family writes its calls.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MarkedForm {
    /// Begins a call or a list of calls.
    pub(crate) open: &'static str,
    /// Ends it; empty when nothing does.
    pub(crate) close: &'static str,
    /// The answer may begin with a call without a mark.
    pub(crate) begins_with_calls: bool,
    /// What may stand between two calls, beside spaces.
    pub(crate) between: &'static [char],
    /// The name may stand as it is before the arguments: `NAME[ARGS]{…}`.
    pub(crate) has_bare_names: bool,
}

/// Behind a bare name.
const ARGUMENTS_MARK: &str = "[ARGS]";
/// Behind a bare name, before an id of the model's own.
const ID_MARK: &str = "[CALL_ID]";

#[derive(Debug)]
enum State {
    Text,
    /// Behind the mark, of which `raw` holds what was taken.
    Begin {
        raw: String,
    },
    Body {
        raw: String,
        body: CallBody,
    },
    BareName {
        raw: String,
    },
    BareArguments {
        value: ValueEnd,
    },
    /// Behind a call; `raw` holds what may stand between two.
    Behind {
        raw: String,
    },
}

/// Reads text with marked calls.
#[derive(Debug)]
pub(crate) struct MarkedCalls {
    form: MarkedForm,
    known: KnownTools,
    state: State,
    prose: Prose,
}

impl MarkedCalls {
    pub(crate) fn new(form: MarkedForm, known: KnownTools) -> Self {
        let state = if form.begins_with_calls { State::Begin { raw: String::new() } } else { State::Text };
        Self { form, known, state, prose: Prose::default() }
    }

    /// What was taken is text after all. It counts as a failure where a mark had promised a call.
    fn give_up(&mut self, raw: &str, out: &mut Pieces) {
        if !self.form.open.is_empty() && raw.contains(self.form.open) {
            out.failed();
        }
        self.prose.push(raw, out);
        self.state = State::Text;
    }

    fn step_text(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let found = if self.form.open.is_empty() { Search::Clear(rest.len()) } else { search(rest, &[self.form.open]) };
        match found {
            Search::Mark(at, open) => {
                self.prose.push(&rest[..at], out);
                self.state = State::Begin { raw: open.to_owned() };
                Some(at + open.len())
            }
            Search::Clear(0) => None,
            Search::Clear(length) => {
                self.prose.push(&rest[..length], out);
                Some(length)
            }
        }
    }

    fn step_begin(&mut self, rest: &str, mut raw: String, out: &mut Pieces) -> Option<usize> {
        let open = self.form.open;
        let Some(first) = rest.chars().next() else {
            self.state = State::Begin { raw };
            return None;
        };
        let mut taken = 0;
        if first.is_whitespace() {
            raw.push(first);
            taken = first.len_utf8();
            self.state = State::Begin { raw };
        } else if matches!(first, '{' | '[') {
            self.state = State::Body { raw, body: CallBody::new(self.known.clone()) };
        } else if !open.is_empty() && !raw.contains(open) && rest.starts_with(open) {
            raw.push_str(open);
            taken = open.len();
            self.state = State::Begin { raw };
        } else if !raw.contains(open) && open.starts_with(rest) {
            self.state = State::Begin { raw };
            return None;
        } else if self.form.has_bare_names && is_name(first) {
            self.state = State::BareName { raw };
        } else {
            self.give_up(&raw, out);
        }
        Some(taken)
    }

    fn step_body(&mut self, rest: &str, raw: String, mut body: CallBody, out: &mut Pieces) -> Option<usize> {
        if rest.is_empty() {
            self.state = State::Body { raw, body };
            return None;
        }
        let (taken, status) = body.feed(rest, out);
        if body.has_begun() {
            self.prose.call();
        }
        match status {
            Status::More => self.state = State::Body { raw, body },
            Status::Done => self.state = State::Behind { raw: String::new() },
            // The call that was told of stays as it is; what follows is text.
            Status::Broken if body.has_begun() => {
                out.failed();
                self.prose.push(&body.take_raw(), out);
                self.state = State::Text;
            }
            Status::Broken => self.give_up(&(raw + &body.take_raw()), out),
        }
        Some(taken)
    }

    fn step_bare_name(&mut self, rest: &str, mut raw: String, out: &mut Pieces) -> Option<usize> {
        let Some(first) = rest.chars().next() else {
            self.state = State::BareName { raw };
            return None;
        };
        let written = raw.strip_prefix(self.form.open).unwrap_or(&raw);
        for mark in [ARGUMENTS_MARK, ID_MARK] {
            if rest.starts_with(mark) {
                raw.push_str(mark);
                self.state = State::BareName { raw };
                return Some(mark.len());
            }
            if mark.starts_with(rest) {
                self.state = State::BareName { raw };
                return None;
            }
        }
        if first == '{' {
            let name = written.split([' ', '\n', '[']).find(|word| !word.is_empty()).unwrap_or_default();
            out.call(name);
            self.prose.call();
            self.state = State::BareArguments { value: ValueEnd::default() };
            return Some(0);
        }
        if is_name(first) || first == ' ' || first == '\n' {
            raw.push(first);
            self.state = State::BareName { raw };
            return Some(first.len_utf8());
        }
        self.give_up(&raw, out);
        Some(0)
    }

    fn step_bare_arguments(&mut self, rest: &str, mut value: ValueEnd, out: &mut Pieces) -> Option<usize> {
        if rest.is_empty() {
            self.state = State::BareArguments { value };
            return None;
        }
        let (taken, status) = value.feed(rest);
        out.arguments(&rest[..taken]);
        match status {
            Status::More => self.state = State::BareArguments { value },
            Status::Done => {
                out.call_end();
                self.state = State::Behind { raw: String::new() };
            }
            Status::Broken => {
                out.failed();
                self.state = State::Text;
            }
        }
        Some(taken)
    }

    fn step_behind(&mut self, rest: &str, mut raw: String, out: &mut Pieces) -> Option<usize> {
        let MarkedForm { open, close, begins_with_calls, between, .. } = self.form;
        let Some(first) = rest.chars().next() else {
            self.state = State::Behind { raw };
            return None;
        };
        if first.is_whitespace() || between.contains(&first) {
            raw.push(first);
            self.state = State::Behind { raw };
            return Some(first.len_utf8());
        }
        if !close.is_empty() && rest.starts_with(close) {
            return Some(close.len());
        }
        if begins_with_calls && (first == '{' || !open.is_empty() && rest.starts_with(open)) {
            self.state = State::Begin { raw };
            return Some(0);
        }
        if close.starts_with(rest) || open.starts_with(rest) {
            self.state = State::Behind { raw };
            return None;
        }
        // Another call without the end of the one before it is read; anything else is not what was promised.
        if !close.is_empty() && !rest.starts_with(open) {
            out.failed();
        }
        self.prose.push(&raw, out);
        Some(0)
    }
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-' | '.' | ':' | '/')
}

impl Machine for MarkedCalls {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.step_text(rest, out),
            State::Begin { raw } => self.step_begin(rest, raw, out),
            State::Body { raw, body } => self.step_body(rest, raw, body, out),
            State::BareName { raw } => self.step_bare_name(rest, raw, out),
            State::BareArguments { value } => self.step_bare_arguments(rest, value, out),
            State::Behind { raw } => self.step_behind(rest, raw, out),
        }
    }

    /// A call that was cut before its name is text, and one that was cut behind it stays open.
    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.prose.push(rest, out),
            State::Begin { raw } | State::BareName { raw } => self.prose.push(&(raw + rest), out),
            State::Body { raw, mut body } if !body.has_begun() => {
                self.prose.push(&(raw + &body.take_raw() + rest), out);
            }
            State::Behind { raw } => self.prose.push(&raw, out),
            State::Body { mut body, .. } => body.flush(out),
            State::BareArguments { .. } => {}
        }
        self.prose.finish(out);
    }
}
