//! What an answer says, whatever API it goes by.

/// Why a choice ended, as the API says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FinishWord {
    /// A stop token or string.
    #[default]
    Stop,
    /// The budget is used up.
    Length,
    /// The model has called tools and waits for what they say.
    ToolCalls,
}

impl FinishWord {
    /// The word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The end of one choice of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceEnding<'a> {
    /// Which choice.
    pub index: u32,
    /// Why it ended.
    pub finish: FinishWord,
    /// The stop string that was found; empty for none.
    pub stop_string: &'a str,
}

/// What a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageNumbers {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens found in a cache.
    pub cached_tokens: u32,
    /// Generated tokens that were thoughts.
    pub reasoning_tokens: u32,
}

/// Log-probabilities at one position, with the texts of the tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Bytes of the token.
    pub bytes: Vec<u8>,
    /// Its log-probability.
    pub logprob: f32,
    /// Alternatives, best first.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// Tokens that belong to one piece of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogprobRun<'a> {
    /// In order.
    pub tokens: &'a [TokenLogprob],
    /// Characters of the choice's text before them; the completions API states it for each token.
    pub text_offset: u32,
}

impl LogprobRun<'_> {
    /// Characters of the text after these tokens: the offset of the next run.
    #[must_use]
    pub fn end_offset(&self) -> u32 {
        self.tokens.iter().fold(self.text_offset, |offset, token| offset.saturating_add(token.characters()))
    }
}

impl TokenLogprob {
    /// Characters that begin in this token; one that is spread over several counts where it begins.
    pub(crate) fn characters(&self) -> u32 {
        let begins = self.bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
        u32::try_from(begins).unwrap_or(u32::MAX)
    }
}

/// A part of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallDelta<'a> {
    /// Which call of its choice, from 0. Calls follow each other: none goes on behind the begin of the next.
    pub call: u32,
    /// Id and name, with its first part.
    pub head: Option<(&'a str, &'a str)>,
    /// More of its arguments, which are JSON text.
    pub arguments: &'a str,
    /// Whether they are complete.
    pub is_end: bool,
}

/// A whole tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// JSON text.
    pub arguments: String,
    /// Whether the arguments are complete; the budget may have cut them.
    pub is_complete: bool,
}

/// One choice of a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Position.
    pub index: u32,
    /// Its text.
    pub text: String,
    /// Its thoughts.
    pub reasoning: String,
    /// Tools that it calls.
    pub calls: Vec<Call>,
    /// Why it ended.
    pub finish: FinishWord,
    /// The stop string that was found; empty for none.
    pub stop_string: String,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
}
