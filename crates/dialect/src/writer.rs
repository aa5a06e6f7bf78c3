//! Writing the answer to a request in the words of the API it came by.

use bytes::BytesMut;
use kvist_errors::KvistError;
use serde_json::{Map, Value};

use crate::{
    anthropic::MessagesWriter,
    input::Endpoint,
    openai::OpenAiWriter,
    output::{CallDelta, Choice, ChoiceEnding, LogprobRun, UsageNumbers},
    responses::ResponsesWriter,
};

/// Writes the answer to one request: a stream of events, or one whole answer.
#[derive(Clone, Debug)]
pub struct AnswerWriter(Form);

#[derive(Clone, Debug)]
enum Form {
    OpenAi(OpenAiWriter),
    Messages(MessagesWriter),
    Responses(ResponsesWriter),
}

/// What an answer needs to know of its request.
#[derive(Clone, Debug)]
pub struct AnswerHead<'a> {
    /// Which API.
    pub endpoint: Endpoint,
    /// The router's id of the request.
    pub request_id: &'a str,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// Name of the model, as the client wrote it.
    pub model: &'a str,
    /// A chunk of its own with usage, where the API has a choice.
    pub include_usage: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Fields that the API repeats.
    pub repeated: Map<String, Value>,
}

impl AnswerWriter {
    /// A writer for a request.
    #[must_use]
    pub fn new(head: AnswerHead<'_>) -> Self {
        let AnswerHead { endpoint, request_id, created, model, include_usage, prompt_tokens, repeated } = head;
        let open_ai = |is_chat| Form::OpenAi(OpenAiWriter::new(is_chat, request_id, created, model, include_usage));
        Self(match endpoint {
            Endpoint::ChatCompletions => open_ai(true),
            Endpoint::Completions => open_ai(false),
            Endpoint::Messages => Form::Messages(MessagesWriter::new(request_id, model, prompt_tokens)),
            Endpoint::Responses => Form::Responses(ResponsesWriter::new(request_id, created, model, repeated)),
        })
    }

    /// What comes before the text of a choice.
    pub fn write_start(&mut self, out: &mut BytesMut, index: u32) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_start(out, index),
            Form::Messages(writer) => writer.write_start(out),
            Form::Responses(writer) => writer.write_start(out),
        }
    }

    /// New text of a choice.
    pub fn write_delta(&mut self, out: &mut BytesMut, index: u32, text: &str, logprobs: Option<LogprobRun<'_>>) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_delta(out, index, text, logprobs),
            Form::Messages(writer) => writer.write_delta(out, text),
            Form::Responses(writer) => writer.write_delta(out, text),
        }
    }

    /// New thoughts of a choice.
    pub fn write_reasoning(&mut self, out: &mut BytesMut, index: u32, text: &str) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_reasoning(out, index, text),
            Form::Messages(writer) => writer.write_reasoning(out, text),
            Form::Responses(writer) => writer.write_reasoning(out, text),
        }
    }

    /// A part of a tool call of a choice.
    pub fn write_call(&mut self, out: &mut BytesMut, index: u32, call: CallDelta<'_>) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_call(out, index, call),
            Form::Messages(writer) => writer.write_call(out, call),
            Form::Responses(writer) => writer.write_call(out, call),
        }
    }

    /// The end of a stream that ended well. Never written after an error.
    pub fn write_end(&mut self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_end(out, endings, usage),
            Form::Messages(writer) => writer.write_end(out, endings, usage),
            Form::Responses(writer) => writer.write_end(out, endings, usage),
        }
    }

    /// An error in a stream that has begun. Nothing follows it.
    pub fn write_error(&mut self, out: &mut BytesMut, error: &KvistError) {
        match &mut self.0 {
            Form::OpenAi(writer) => writer.write_error(out, error),
            Form::Messages(writer) => writer.write_error(out, error),
            Form::Responses(writer) => writer.write_error(out, error),
        }
    }

    /// What keeps proxies awake while the request waits.
    pub fn write_keep_alive(&self, out: &mut BytesMut) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_keep_alive(out),
            Form::Messages(writer) => writer.write_keep_alive(out),
            Form::Responses(writer) => writer.write_keep_alive(out),
        }
    }

    /// A whole answer.
    pub fn write_whole(&self, out: &mut BytesMut, choices: &[Choice], usage: UsageNumbers) {
        match &self.0 {
            Form::OpenAi(writer) => writer.write_whole(out, choices, usage),
            Form::Messages(writer) => writer.write_whole(out, choices, usage),
            Form::Responses(writer) => writer.write_whole(out, choices, usage),
        }
    }
}
