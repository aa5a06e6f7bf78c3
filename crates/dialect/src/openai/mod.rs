//! The chat completions and completions APIs of OpenAI.

mod message;
mod request;
mod response;

pub(crate) use request::read_conversation;
pub use request::{parse_chat_completion, parse_completion};
pub(crate) use response::OpenAiWriter;
