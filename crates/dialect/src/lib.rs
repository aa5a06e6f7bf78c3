//! OpenAI requests and answers to and from one internal request and event stream.
//!
//! Parsing refuses what cannot be honored, by field; unknown fields travel on. Writing goes straight into bytes: a
//! content delta costs an escape and a few copies, no tree of values.

mod request;
mod response;

pub use request::{
    Endpoint, GenerateInput, Logprobs, PromptForm, Sampling, Structured, parse_chat_completion, parse_completion,
};
pub use response::{AnswerWriter, Choice, FinishWord, LogprobRun, TokenLogprob, UsageNumbers};
