//! Writing the answer to a request in the words of the API it came by.

use bytes::BytesMut;
use kvist_errors::KvistError;

use crate::{
    anthropic::MessagesWriter,
    input::Endpoint,
    openai::OpenAiWriter,
    output::{Choice, ChoiceEnding, LogprobRun, UsageNumbers},
};

/// Writes the answer to one request: a stream of events, or one whole answer.
#[derive(Clone, Debug)]
pub struct AnswerWriter(Form);

#[derive(Clone, Debug)]
enum Form {
    OpenAi(OpenAiWriter),
    Messages(MessagesWriter),
}

impl AnswerWriter {
    /// A writer for a request. `created` is in seconds since the Unix epoch; `include_usage` asks for a chunk of its own
    /// with usage where the API has a choice.
    #[must_use]
    pub fn new(
        endpoint: Endpoint,
        request_id: &str,
        created: u64,
        model: &str,
        include_usage: bool,
        prompt_tokens: u32,
    ) -> Self {
        let open_ai = |is_chat| Form::OpenAi(OpenAiWriter::new(is_chat, request_id, created, model, include_usage));
        Self(match endpoint {
            Endpoint::ChatCompletions => open_ai(true),
            Endpoint::Completions => open_ai(false),
            Endpoint::Messages => Form::Messages(MessagesWriter::new(request_id, model, prompt_tokens)),
        })
    }

    /// What comes before the text of a choice.
    pub fn write_start(&self, out: &mut BytesMut, index: u32) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_start(out, index),
            Form::Messages(writer) => writer.write_start(out),
        }
    }

    /// New text of a choice.
    pub fn write_delta(&self, out: &mut BytesMut, index: u32, text: &str, logprobs: Option<LogprobRun<'_>>) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_delta(out, index, text, logprobs),
            Form::Messages(writer) => writer.write_delta(out, text),
        }
    }

    /// The end of a stream that ended well. Never written after an error.
    pub fn write_end(&self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_end(out, endings, usage),
            Form::Messages(writer) => writer.write_end(out, endings, usage),
        }
    }

    /// An error in a stream that has begun. Nothing follows it.
    pub fn write_error(&self, out: &mut BytesMut, error: &KvistError) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_error(out, error),
            Form::Messages(writer) => writer.write_error(out, error),
        }
    }

    /// What keeps proxies awake while the request waits.
    pub fn write_keep_alive(&self, out: &mut BytesMut) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_keep_alive(out),
            Form::Messages(writer) => writer.write_keep_alive(out),
        }
    }

    /// A whole answer.
    pub fn write_whole(&self, out: &mut BytesMut, choices: &[Choice], usage: UsageNumbers) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_whole(out, choices, usage),
            Form::Messages(writer) => writer.write_whole(out, choices, usage),
        }
    }
}
