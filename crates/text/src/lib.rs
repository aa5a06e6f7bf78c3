//! Tokenizers, chat templates, incremental detokenizing, stop strings, parsers of tool calls and thoughts.
//!
//! Pure: files arrive as bytes and the time of day as an argument. A fast tokenizer does the work and the Hugging Face
//! one is its oracle: both encode a corpus when a model is loaded, and a difference means that the slow one is used.

mod abilities;
mod control;
mod detokenize;
mod encode;
mod model;
mod output_parts;
mod parse;
mod python;
mod segments;
mod stop;
mod template;
mod vocabulary;

pub use detokenize::Detokenizer;
pub use model::{Chat, ModelText, TextError, TextHeader, digest_hex};
pub use parse::{
    AnswerParser, CallIdForm, Calls, JsonCallForm, OfferedTool, Parsing, Piece, Pieces, PromptEnd, ReasoningFamily,
    ToolFamily,
};
pub use stop::{StopOutcome, StopStrings};

#[cfg(test)]
pub(crate) mod sample;
