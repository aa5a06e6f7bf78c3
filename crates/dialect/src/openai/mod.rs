//! The chat completions and completions APIs of OpenAI.

mod embeddings;
mod message;
mod prompts;
mod request;
mod response;

pub use embeddings::{EmbeddingEncoding, EmbeddingsInput, parse_embeddings, write_embeddings};
pub(crate) use request::read_conversation;
pub use request::{parse_chat_completion, parse_completion};
pub(crate) use response::OpenAiWriter;
