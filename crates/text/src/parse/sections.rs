//! Tool calls in sections of control tokens: DeepSeek and Kimi.

use super::{
    json::{Status, ValueEnd},
    marks::{Machine, Search, search},
    piece::{Pieces, Prose},
};

/// How a family writes its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SectionForm {
    /// Begins the calls of a turn.
    pub(crate) section_open: &'static str,
    /// Ends them.
    pub(crate) section_close: &'static str,
    /// Begins one call: its head follows.
    pub(crate) call_open: &'static str,
    /// Ends the head: the arguments follow.
    pub(crate) separator: &'static str,
    /// Ends one call.
    pub(crate) call_close: &'static str,
    /// What the head says.
    pub(crate) head: Head,
}

/// What stands in the head of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// The name.
    Name,
    /// `function`; the name follows behind the separator on a line of its own, and the arguments in a code fence.
    Kind,
    /// `functions.NAME:NUMBER`.
    Numbered,
}

const FENCE_OPEN: &str = "```json\n";
const FENCE: &str = "```";
/// Longest head of a call: what is longer is no name.
const LONGEST_HEAD_BYTES: usize = 512;

#[derive(Debug)]
enum State {
    Text,
    /// In a section, between calls.
    Section,
    /// Behind the begin of a call, of which `raw` holds what was taken.
    Head {
        raw: String,
    },
    Arguments {
        name: String,
        raw: String,
        value: Option<ValueEnd>,
    },
    Behind,
}

/// Reads text with calls in sections.
#[derive(Debug)]
pub(crate) struct SectionCalls {
    form: SectionForm,
    state: State,
    prose: Prose,
}

impl SectionCalls {
    pub(crate) fn new(form: SectionForm) -> Self {
        Self { form, state: State::Text, prose: Prose::default() }
    }

    fn fail(&mut self, raw: &str, out: &mut Pieces) {
        out.failed();
        self.prose.push(raw, out);
        self.state = State::Text;
    }

    fn step_text(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        // A call without a section is a call all the same.
        match search(rest, &[self.form.section_open, self.form.call_open]) {
            Search::Mark(at, mark) => {
                self.prose.push(&rest[..at], out);
                let is_call = mark == self.form.call_open;
                self.state = if is_call { State::Head { raw: mark.to_owned() } } else { State::Section };
                Some(at + mark.len())
            }
            Search::Clear(0) => None,
            Search::Clear(length) => {
                self.prose.push(&rest[..length], out);
                Some(length)
            }
        }
    }

    /// Between calls: `Some` when something was taken.
    fn step_section(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let SectionForm { section_close, call_open, call_close, .. } = self.form;
        let is_behind = matches!(self.state, State::Behind);
        let first = rest.chars().next()?;
        if first.is_whitespace() {
            return Some(first.len_utf8());
        }
        if is_behind {
            if self.form.head == Head::Kind && rest.starts_with(FENCE) {
                return Some(FENCE.len());
            }
            if self.form.head == Head::Kind && FENCE.starts_with(rest) {
                return None;
            }
            if rest.starts_with(call_close) {
                self.state = State::Section;
                return Some(call_close.len());
            }
            if call_close.starts_with(rest) {
                return None;
            }
            // A call that is not closed before the next thing is read all the same.
            if !rest.starts_with(section_close) && !rest.starts_with(call_open) {
                if section_close.starts_with(rest) || call_open.starts_with(rest) {
                    return None;
                }
                out.failed();
            }
            self.state = State::Section;
            return Some(0);
        }
        if rest.starts_with(call_open) {
            self.state = State::Head { raw: call_open.to_owned() };
            return Some(call_open.len());
        }
        if rest.starts_with(section_close) {
            self.prose.call();
            self.state = State::Text;
            return Some(section_close.len());
        }
        if section_close.starts_with(rest) || call_open.starts_with(rest) {
            return None;
        }
        self.fail("", out);
        Some(0)
    }

    fn step_head(&mut self, rest: &str, mut raw: String, out: &mut Pieces) -> Option<usize> {
        let SectionForm { call_open, separator, head, .. } = self.form;
        let found = search(rest, &[separator]);
        let taken = match found {
            Search::Mark(at, mark) => at + mark.len(),
            Search::Clear(length) => length,
        };
        raw.push_str(&rest[..taken]);
        if let Search::Mark(..) = found {
            let written = raw[call_open.len()..raw.len() - separator.len()].trim().to_owned();
            let name = match head {
                Head::Kind => (written == "function").then(String::new),
                Head::Name => Some(written).filter(|name| !name.is_empty()),
                Head::Numbered => name_of_id(&written),
            };
            match name {
                Some(name) => self.state = State::Arguments { name, raw, value: None },
                None => self.fail(&raw, out),
            }
            return Some(taken);
        }
        if raw.len() > LONGEST_HEAD_BYTES {
            self.fail(&raw, out);
            return Some(taken);
        }
        self.state = State::Head { raw };
        (taken > 0).then_some(taken)
    }

    fn step_arguments(
        &mut self,
        rest: &str,
        mut name: String,
        mut raw: String,
        value: Option<ValueEnd>,
        out: &mut Pieces,
    ) -> Option<usize> {
        if let Some(mut value) = value {
            if rest.is_empty() {
                self.state = State::Arguments { name, raw, value: Some(value) };
                return None;
            }
            let (taken, status) = value.feed(rest);
            out.arguments(&rest[..taken]);
            match status {
                Status::More => self.state = State::Arguments { name, raw, value: Some(value) },
                Status::Broken => self.fail("", out),
                Status::Done => {
                    out.call_end();
                    self.state = State::Behind;
                }
            }
            return Some(taken);
        }
        if self.form.head == Head::Kind && name.is_empty() {
            // The line of the name, then the fence.
            let Some(end) = rest.find('\n') else {
                if raw.len() + rest.len() > LONGEST_HEAD_BYTES * 2 {
                    self.fail(&raw, out);
                    return Some(0);
                }
                self.state = State::Arguments { name, raw, value: None };
                return None;
            };
            let behind = &rest[end + 1..];
            if !behind.starts_with(FENCE_OPEN) {
                if FENCE_OPEN.starts_with(behind) {
                    self.state = State::Arguments { name, raw, value: None };
                    return None;
                }
                self.fail(&raw, out);
                return Some(0);
            }
            rest[..end].trim().clone_into(&mut name);
            let taken = end + 1 + FENCE_OPEN.len();
            raw.push_str(&rest[..taken]);
            if name.is_empty() {
                self.fail(&raw, out);
            } else {
                self.state = State::Arguments { name, raw, value: None };
            }
            return Some(taken);
        }
        let Some(first) = rest.chars().next() else {
            self.state = State::Arguments { name, raw, value: None };
            return None;
        };
        if first.is_whitespace() {
            raw.push(first);
            self.state = State::Arguments { name, raw, value: None };
            return Some(first.len_utf8());
        }
        if first != '{' {
            self.fail(&raw, out);
            return Some(0);
        }
        out.call(&name);
        self.prose.call();
        self.state = State::Arguments { name, raw: String::new(), value: Some(ValueEnd::default()) };
        Some(0)
    }
}

/// The name within `functions.NAME:NUMBER`.
fn name_of_id(id: &str) -> Option<String> {
    let (name, number) = id.rsplit_once(':')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let name = name.strip_prefix("functions.").unwrap_or(name);
    (is_number && !name.is_empty()).then(|| name.to_owned())
}

impl Machine for SectionCalls {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.step_text(rest, out),
            State::Head { raw } => self.step_head(rest, raw, out),
            State::Arguments { name, raw, value } => self.step_arguments(rest, name, raw, value, out),
            state @ (State::Behind | State::Section) => {
                self.state = state;
                self.step_section(rest, out)
            }
        }
    }

    /// A call that was cut before its arguments is text, and one that was cut in them stays open.
    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.prose.push(rest, out),
            State::Head { raw } | State::Arguments { raw, value: None, .. } => self.prose.push(&(raw + rest), out),
            State::Arguments { .. } | State::Section | State::Behind => {}
        }
        self.prose.finish(out);
    }
}
