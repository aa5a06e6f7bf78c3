//! Thoughts between two marks at the begin of an answer.

use super::{
    marks::{Machine, Search, search},
    piece::Pieces,
};

/// How a family marks its thoughts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThoughtForm {
    /// Begins them.
    pub(crate) open: &'static str,
    /// Ends them.
    pub(crate) close: &'static str,
    /// Thoughts come first even when nothing says so.
    pub(crate) begins_with_thoughts: bool,
}

/// What the prompt has already said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// Nothing of thoughts.
    #[default]
    Plain,
    /// It ends in thoughts that the answer goes on with.
    InThoughts,
    /// It ends behind thoughts, so that the answer has none.
    BehindThoughts,
    /// A constraint makes the answer begin with what is asked for, unless it opens thoughts itself.
    Constrained,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Begin { thoughts_without_mark: bool },
    Thoughts { has_words: bool },
    Behind,
    Answer,
}

/// Tells thoughts from the answer.
#[derive(Debug)]
pub(crate) struct Thoughts {
    form: ThoughtForm,
    state: State,
    /// Spaces before the first word of all, or behind the last word of the thoughts so far.
    space: String,
}

impl Thoughts {
    pub(crate) fn new(form: ThoughtForm, prompt_end: PromptEnd) -> Self {
        let state = match prompt_end {
            PromptEnd::InThoughts => State::Begin { thoughts_without_mark: true },
            PromptEnd::BehindThoughts => State::Behind,
            PromptEnd::Constrained => State::Begin { thoughts_without_mark: false },
            PromptEnd::Plain => State::Begin { thoughts_without_mark: form.begins_with_thoughts },
        };
        Self { form, state, space: String::new() }
    }

    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thoughts { .. } | State::Begin { thoughts_without_mark: true })
    }

    fn step_thoughts(&mut self, rest: &str, has_words: bool, out: &mut Pieces) -> Option<usize> {
        let (taken, ended) = match search(rest, &[self.form.close]) {
            Search::Mark(at, close) => (at, Some(close)),
            Search::Clear(0) => return None,
            Search::Clear(length) => (length, None),
        };
        let part = &rest[..taken];
        let begin = if has_words { part } else { part.trim_start() };
        let words = begin.trim_end();
        if !words.is_empty() {
            out.reasoning(&std::mem::take(&mut self.space));
            out.reasoning(words);
            self.state = State::Thoughts { has_words: true };
        }
        if has_words || !words.is_empty() {
            self.space.push_str(&begin[words.len()..]);
        }
        let Some(close) = ended else { return Some(taken) };
        self.space.clear();
        self.state = State::Behind;
        Some(taken + close.len())
    }
}

impl Machine for Thoughts {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let first = rest.chars().next()?;
        match self.state {
            State::Answer => {
                out.text(rest);
                Some(rest.len())
            }
            State::Behind if first.is_whitespace() => Some(first.len_utf8()),
            State::Behind => {
                self.state = State::Answer;
                Some(0)
            }
            State::Begin { .. } if first.is_whitespace() => {
                self.space.push(first);
                Some(first.len_utf8())
            }
            State::Begin { .. } if rest.starts_with(self.form.open) => {
                self.space.clear();
                self.state = State::Thoughts { has_words: false };
                Some(self.form.open.len())
            }
            State::Begin { .. } if self.form.open.starts_with(rest) => None,
            State::Begin { thoughts_without_mark } => {
                if thoughts_without_mark {
                    self.space.clear();
                    self.state = State::Thoughts { has_words: false };
                } else {
                    out.text(&std::mem::take(&mut self.space));
                    self.state = State::Answer;
                }
                Some(0)
            }
            State::Thoughts { has_words } => self.step_thoughts(rest, has_words, out),
        }
    }

    fn finish(&mut self, rest: &str, out: &mut Pieces) {
        let space = std::mem::take(&mut self.space);
        match self.state {
            State::Thoughts { .. } if rest.is_empty() => {}
            State::Thoughts { .. } => {
                out.reasoning(&space);
                out.reasoning(rest);
            }
            State::Begin { thoughts_without_mark: true } => out.reasoning(rest),
            State::Begin { .. } => {
                out.text(&space);
                out.text(rest);
            }
            State::Behind | State::Answer => out.text(rest),
        }
    }
}
