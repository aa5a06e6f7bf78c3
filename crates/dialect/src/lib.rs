//! Requests and answers of the OpenAI and Anthropic APIs to and from one internal request and event stream.
//!
//! Parsing refuses what cannot be honored, by field; unknown fields travel on. Writing goes straight into bytes: a
//! content delta costs an escape and a few copies, no tree of values.

mod anthropic;
mod fields;
mod input;
mod json;
mod openai;
mod output;
mod responses;
mod thinking;
mod tokenize;
mod tools;
mod writer;

pub use anthropic::{parse_count_tokens, parse_messages};
pub use fields::{RequestHead, parse_head};
pub use input::{Endpoint, GenerateInput, Logprobs, PromptForm, Sampling, Structured};
pub use openai::{
    EmbeddingEncoding, EmbeddingsInput, parse_chat_completion, parse_completion, parse_embeddings, write_embeddings,
};
pub use output::{Call, CallDelta, Choice, ChoiceEnding, FinishWord, LogprobRun, TokenLogprob, UsageNumbers};
pub use responses::parse_response;
pub use tokenize::{DetokenizeInput, TokenizeInput, parse_detokenize, parse_tokenize, write_tokens};
pub use tools::ToolChoice;
pub use writer::{AnswerHead, AnswerWriter};
