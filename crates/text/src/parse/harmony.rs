//! The channels of gpt-oss: thoughts, calls and the answer are messages of their own.
//!
//! Format: <https://cookbook.openai.com/articles/openai-harmony>.

use super::{
    json::{Status, ValueEnd},
    marks::{Machine, Search, search},
    piece::{Pieces, Prose},
};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// Control tokens that have to reach the parser.
pub(crate) const MARKS: [&str; 7] = [START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN];

/// Longest head of a message: what is longer is no head.
const LONGEST_HEAD_BYTES: usize = 512;

#[derive(Debug)]
enum Body {
    Thoughts,
    Answer,
    /// A call whose arguments have not begun.
    Call,
    /// Arguments in JSON: their end is the end of the call. The token behind it ends generation and never arrives.
    Arguments(ValueEnd),
    /// What a tool of the model's own takes, such as a program: it ends with the message.
    Plain,
    /// Behind the arguments.
    Called,
}

#[derive(Debug)]
enum State {
    /// The prompt ends with the begin of a head, so an answer goes on with it. `raw` is what was taken of the head, from
    /// its first token on; empty where none is due.
    Head {
        raw: String,
        is_first: bool,
    },
    Body(Body),
    Between,
    /// Text outside of messages.
    Stray,
}

/// Reads the messages of an answer.
#[derive(Debug)]
pub(crate) struct Harmony {
    state: State,
    stray: Prose,
}

impl Harmony {
    pub(crate) fn new() -> Self {
        Self { state: State::Head { raw: String::new(), is_first: true }, stray: Prose::default() }
    }

    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Body(Body::Thoughts))
    }

    fn step_head(&mut self, rest: &str, mut raw: String, is_first: bool, out: &mut Pieces) -> Option<usize> {
        if rest.is_empty() {
            self.state = State::Head { raw, is_first };
            return None;
        }
        // A model that answers without a head at all: such text never begins with a token or a recipient.
        if is_first && raw.is_empty() {
            let mut begins = MARKS.into_iter().chain([" to="]);
            if !begins.clone().any(|begin| rest.starts_with(begin)) {
                if begins.any(|begin| begin.starts_with(rest)) {
                    self.state = State::Head { raw, is_first };
                    return None;
                }
                out.failed();
                self.state = State::Stray;
                return Some(0);
            }
        }
        // A message that ends within its head is none.
        let found = search(rest, &[MESSAGE, END, CALL, RETURN]);
        let taken = match found {
            Search::Mark(at, mark) => at + mark.len(),
            Search::Clear(length) => length,
        };
        raw.push_str(&rest[..taken]);
        match found {
            Search::Mark(_, MESSAGE) => self.begin_message(&raw, out),
            Search::Mark(..) => {
                self.state = State::Between;
            }
            Search::Clear(_) if raw.len() > LONGEST_HEAD_BYTES => {
                out.failed();
                self.stray.push(&raw, out);
                self.state = State::Stray;
            }
            Search::Clear(0) => {
                self.state = State::Head { raw, is_first };
                return None;
            }
            Search::Clear(_) => self.state = State::Head { raw, is_first },
        }
        Some(taken)
    }

    fn begin_message(&mut self, head: &str, out: &mut Pieces) {
        let recipient = head.split(" to=").nth(1).map(|behind| {
            let end = behind.find(|character: char| character.is_whitespace() || character == '<');
            &behind[..end.unwrap_or(behind.len())]
        });
        let channel = head.split(CHANNEL).nth(1).unwrap_or_default().trim_start();
        self.state = State::Body(match recipient {
            Some(recipient) if !matches!(recipient, "" | "user" | "assistant" | "all") => {
                out.call(recipient.strip_prefix("functions.").unwrap_or(recipient));
                Body::Call
            }
            _ if channel.starts_with("analysis") => Body::Thoughts,
            _ => Body::Answer,
        });
    }

    fn step_body(&mut self, rest: &str, body: Body, out: &mut Pieces) -> Option<usize> {
        // A message that begins ends the one before it.
        let found = search(rest, &[END, CALL, RETURN, START, CHANNEL]);
        let length = match found {
            Search::Mark(at, _) | Search::Clear(at) => at,
        };
        if length > 0 {
            let (taken, body) = self.take(&rest[..length], body, out);
            self.state = State::Body(body);
            return Some(taken);
        }
        let Search::Mark(_, mark) = found else {
            self.state = State::Body(body);
            return None;
        };
        if mark == CALL && matches!(body, Body::Plain) {
            out.call_end();
        }
        self.state = State::Between;
        Some(if matches!(mark, START | CHANNEL) { 0 } else { mark.len() })
    }

    /// Takes some text of a message, which is not empty.
    fn take(&mut self, text: &str, body: Body, out: &mut Pieces) -> (usize, Body) {
        let space = text.len() - text.trim_start().len();
        match body {
            Body::Thoughts => out.reasoning(text),
            Body::Answer => out.text(text),
            Body::Plain => out.arguments(text),
            Body::Call | Body::Called if space > 0 => return (space, body),
            Body::Call if text.starts_with('{') => return (0, Body::Arguments(ValueEnd::default())),
            Body::Call => return (0, Body::Plain),
            Body::Arguments(mut value) => {
                let (taken, status) = value.feed(text);
                out.arguments(&text[..taken]);
                let body = match status {
                    Status::More => Body::Arguments(value),
                    Status::Done => {
                        out.call_end();
                        Body::Called
                    }
                    Status::Broken => {
                        out.failed();
                        Body::Answer
                    }
                };
                return (taken, body);
            }
            Body::Called => {
                out.failed();
                return (0, Body::Answer);
            }
        }
        (text.len(), body)
    }

    fn step_between(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let first = rest.chars().next()?;
        if first.is_whitespace() {
            return Some(first.len_utf8());
        }
        if rest.starts_with(START) || rest.starts_with(CHANNEL) {
            self.state = State::Head { raw: String::new(), is_first: false };
            return Some(0);
        }
        if START.starts_with(rest) || CHANNEL.starts_with(rest) {
            return None;
        }
        out.failed();
        self.state = State::Stray;
        Some(0)
    }

    fn step_stray(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        match search(rest, &[START, CHANNEL, END, CALL, RETURN]) {
            Search::Mark(at, mark) => {
                self.stray.push(&rest[..at], out);
                self.state = State::Between;
                Some(if matches!(mark, START | CHANNEL) { at } else { at + mark.len() })
            }
            Search::Clear(0) => None,
            Search::Clear(length) => {
                self.stray.push(&rest[..length], out);
                Some(length)
            }
        }
    }
}

impl Machine for Harmony {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        match std::mem::replace(&mut self.state, State::Between) {
            State::Head { raw, is_first } => self.step_head(rest, raw, is_first, out),
            State::Body(body) => self.step_body(rest, body, out),
            State::Between => self.step_between(rest, out),
            State::Stray => {
                self.state = State::Stray;
                self.step_stray(rest, out)
            }
        }
    }

    /// A head that was cut says nothing; arguments that were cut stay open.
    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        match std::mem::replace(&mut self.state, State::Between) {
            State::Head { raw, is_first } if is_first && !raw.starts_with(CHANNEL) && !raw.starts_with(START) => {
                self.stray.push(&(raw + rest), out);
            }
            State::Head { .. } | State::Between => {}
            State::Body(body) if !rest.is_empty() => {
                self.take(rest, body, out);
            }
            State::Body(_) => {}
            State::Stray => self.stray.push(rest, out),
        }
        self.stray.finish(out);
    }
}
