//! What a model said, taken apart: thoughts, text, tool calls.
//!
//! The parsers read text that arrives in pieces and tell the same whatever the pieces are. What they cannot read they
//! pass on as text, and count. Each takes time in proportion to the text.

mod call;
mod family;
mod harmony;
mod json;
mod literal;
mod marked;
mod marks;
mod named;
mod piece;
mod pythonic;
mod reasoning;
mod sections;
mod tagged;
mod tool;

use std::sync::Arc;

pub use family::{CallIdForm, JsonCallForm, ReasoningFamily, ToolFamily};
pub use piece::{Piece, Pieces};
pub use reasoning::PromptEnd;
pub use tool::OfferedTool;

use family::ToolReader;
use marks::Fed;

/// What calls may be in an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Calls {
    /// None: nothing is read as a call.
    #[default]
    None,
    /// Those that the model makes of itself.
    Free {
        /// How it writes them.
        family: ToolFamily,
        /// The tools.
        tools: Arc<[OfferedTool]>,
    },
    /// A schema makes the whole answer a list of calls.
    List,
    /// A schema makes the whole answer the arguments of this tool.
    Named(String),
}

/// What to look for in an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsing {
    /// Thoughts, and how they are marked.
    pub reasoning: Option<ReasoningFamily>,
    /// Where the prompt has left the model.
    pub prompt_end: PromptEnd,
    /// Calls.
    pub calls: Calls,
}

impl Parsing {
    /// Whether there is nothing to look for.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.reasoning.is_none() && self.calls == Calls::None
    }

    /// Control tokens that have to reach the parser as text.
    #[must_use]
    pub fn marks(&self) -> Vec<&'static str> {
        let mut marks = self.reasoning.map(ReasoningFamily::marks).unwrap_or_default();
        if let Calls::Free { family, .. } = &self.calls {
            marks.extend(family.marks());
        }
        marks
    }
}

/// Takes one choice of an answer apart.
#[derive(Debug)]
pub struct AnswerParser {
    thoughts: Option<Fed<reasoning::Thoughts>>,
    channels: Option<Fed<harmony::Harmony>>,
    calls: Option<ToolReader>,
    /// Of the first stage, for the second.
    between: Pieces,
}

impl AnswerParser {
    /// A parser.
    #[must_use]
    pub fn new(parsing: &Parsing) -> Self {
        let is_constrained = matches!(parsing.calls, Calls::List | Calls::Named(_));
        let is_harmony = parsing.reasoning == Some(ReasoningFamily::GptOss)
            || matches!(&parsing.calls, Calls::Free { family: ToolFamily::GptOss, .. });
        let form = parsing.reasoning.and_then(ReasoningFamily::form);
        let calls = match &parsing.calls {
            Calls::None => None,
            Calls::Free { family, tools } => family.reader(tools),
            Calls::List => Some(ToolReader::constrained()),
            Calls::Named(name) => Some(ToolReader::named(name.clone())),
        };
        Self {
            thoughts: form.map(|form| Fed::new(reasoning::Thoughts::new(form, parsing.prompt_end))),
            channels: (is_harmony && !is_constrained && parsing.prompt_end != PromptEnd::Constrained)
                .then(|| Fed::new(harmony::Harmony::new())),
            calls,
            between: Pieces::default(),
        }
    }

    /// Whether the text that comes next belongs to thoughts, as far as is known.
    #[must_use]
    pub fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(|thoughts| thoughts.machine.is_thinking())
            || self.channels.as_ref().is_some_and(|channels| channels.machine.is_thinking())
    }

    /// Takes the next text.
    pub fn feed(&mut self, text: &str, out: &mut Pieces) {
        if let Some(channels) = &mut self.channels {
            return channels.feed(text, out);
        }
        let Some(thoughts) = &mut self.thoughts else { return self.feed_calls(text, out) };
        let mut between = std::mem::take(&mut self.between);
        thoughts.feed(text, &mut between);
        self.pass(&mut between, out);
        self.between = between;
    }

    /// The text has ended.
    pub fn finish(&mut self, out: &mut Pieces) {
        if let Some(channels) = &mut self.channels {
            return channels.finish(out);
        }
        if let Some(thoughts) = &mut self.thoughts {
            let mut between = std::mem::take(&mut self.between);
            thoughts.finish(&mut between);
            self.pass(&mut between, out);
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(out);
        }
    }

    fn pass(&mut self, between: &mut Pieces, out: &mut Pieces) {
        for piece in between.drain() {
            match piece {
                Piece::Text(text) => self.feed_calls(&text, out),
                Piece::Reasoning(text) => out.reasoning(&text),
                _ => {}
            }
        }
    }

    fn feed_calls(&mut self, text: &str, out: &mut Pieces) {
        match &mut self.calls {
            Some(calls) => calls.feed(text, out),
            None => out.text(text),
        }
    }
}
