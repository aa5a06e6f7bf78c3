//! The Messages API of Anthropic.

mod request;
mod response;

pub use request::{parse_count_tokens, parse_messages};
pub(crate) use response::MessagesWriter;
