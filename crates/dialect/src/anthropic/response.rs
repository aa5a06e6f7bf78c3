//! Answers of the Messages API, written straight into bytes.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;

use crate::{
    json::{write_display, write_string},
    output::{Choice, ChoiceEnding, FinishWord, UsageNumbers},
};

/// Writes the answer to one request: a stream of named events, or one message. There is one choice.
#[derive(Clone, Debug)]
pub(crate) struct MessagesWriter {
    request_id: String,
    prompt_tokens: u32,
    /// A message up to its content.
    message_open: Vec<u8>,
}

impl MessagesWriter {
    pub(crate) fn new(request_id: &str, model: &str, prompt_tokens: u32) -> Self {
        let mut out = BytesMut::new();
        out.put_slice(b"{\"id\":");
        write_string(&mut out, &format!("msg_{request_id}"));
        out.put_slice(b",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        write_string(&mut out, model);
        out.put_slice(b",\"content\":[");
        Self { request_id: request_id.to_owned(), prompt_tokens, message_open: out.to_vec() }
    }

    /// The message without its content, and the start of its one block. What was cached is not known yet: the end says
    /// it.
    pub(crate) fn write_start(&self, out: &mut BytesMut) {
        out.put_slice(b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":");
        out.put_slice(&self.message_open);
        out.put_slice(b"],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        write_usage(out, UsageNumbers { prompt_tokens: self.prompt_tokens, ..UsageNumbers::default() });
        out.put_slice(b"}}\n\n");
        out.put_slice(
            b"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\
              \"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
        );
    }

    pub(crate) fn write_delta(&self, out: &mut BytesMut, text: &str) {
        if text.is_empty() {
            return;
        }
        out.put_slice(
            b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
              \"delta\":{\"type\":\"text_delta\",\"text\":",
        );
        write_string(out, text);
        out.put_slice(b"}}\n\n");
    }

    pub(crate) fn write_end(&self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        out.put_slice(b"event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n");
        out.put_slice(b"event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{");
        if let Some(ending) = endings.first() {
            write_stop(out, ending.finish, ending.stop_string);
        }
        out.put_slice(b"},\"usage\":");
        write_usage(out, usage);
        out.put_slice(b"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    }

    pub(crate) fn write_error(&self, out: &mut BytesMut, error: &KvistError) {
        out.put_slice(b"event: error\ndata: ");
        out.put_slice(&error.to_anthropic_json(Some(&self.request_id)));
        out.put_slice(b"\n\n");
    }

    pub(crate) fn write_keep_alive(&self, out: &mut BytesMut) {
        out.put_slice(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
    }

    pub(crate) fn write_whole(&self, out: &mut BytesMut, choices: &[Choice], usage: UsageNumbers) {
        out.put_slice(&self.message_open);
        if let Some(choice) = choices.first() {
            out.put_slice(b"{\"type\":\"text\",\"text\":");
            write_string(out, &choice.text);
            out.put_slice(b"}],");
            write_stop(out, choice.finish, &choice.stop_string);
        }
        out.put_slice(b",\"usage\":");
        write_usage(out, usage);
        out.put_u8(b'}');
    }
}

fn write_stop(out: &mut BytesMut, finish: FinishWord, stop_string: &str) {
    let reason = match finish {
        FinishWord::Length => "max_tokens",
        FinishWord::Stop if stop_string.is_empty() => "end_turn",
        FinishWord::Stop => "stop_sequence",
    };
    write_display(out, format_args!("\"stop_reason\":\"{reason}\",\"stop_sequence\":"));
    if stop_string.is_empty() {
        out.put_slice(b"null");
    } else {
        write_string(out, stop_string);
    }
}

/// Here `input_tokens` are those that no cache had, unlike in the OpenAI API.
fn write_usage(out: &mut BytesMut, usage: UsageNumbers) {
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens } = usage;
    let input_tokens = prompt_tokens.saturating_sub(cached_tokens);
    write_display(
        out,
        format_args!(
            "{{\"input_tokens\":{input_tokens},\"cache_creation_input_tokens\":0,\
             \"cache_read_input_tokens\":{cached_tokens},\"output_tokens\":{completion_tokens}}}"
        ),
    );
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;
    use serde_json::{Value, json};

    use super::*;

    const USAGE: UsageNumbers = UsageNumbers { prompt_tokens: 10, completion_tokens: 3, cached_tokens: 8 };

    fn events(write: impl FnOnce(&mut BytesMut)) -> Vec<(String, Value)> {
        let mut out = BytesMut::new();
        write(&mut out);
        let text = String::from_utf8(out.to_vec()).unwrap();
        let events = text.strip_suffix("\n\n").unwrap().split("\n\n");
        events
            .map(|event| {
                let (name, data) = event.split_once('\n').unwrap();
                let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
                let name = name.strip_prefix("event: ").unwrap();
                assert_eq!(name, data["type"]);
                (name.to_owned(), data)
            })
            .collect()
    }

    #[test]
    fn a_stream_event_by_event() {
        let writer = MessagesWriter::new("r-1", "m/\"x", 10);
        let written = events(|out| {
            writer.write_keep_alive(out);
            writer.write_start(out);
            writer.write_delta(out, "a\n");
            writer.write_delta(out, "");
            let ending = ChoiceEnding { index: 0, finish: FinishWord::Stop, stop_string: "END" };
            writer.write_end(out, &[ending], USAGE);
        });
        let names: Vec<&str> = written.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            [
                "ping",
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop"
            ],
            names[..]
        );
        let message = &written[1].1["message"];
        assert_eq!(
            (&json!("msg_r-1"), &json!("m/\"x"), &json!([])),
            (&message["id"], &message["model"], &message["content"])
        );
        assert_eq!((&json!(10), &json!(0)), (&message["usage"]["input_tokens"], &message["usage"]["output_tokens"]));
        assert_eq!(json!({"type": "text_delta", "text": "a\n"}), written[3].1["delta"]);
        assert_eq!(json!({"stop_reason": "stop_sequence", "stop_sequence": "END"}), written[5].1["delta"]);
        let usage = json!({"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8,
            "output_tokens": 3});
        assert_eq!(usage, written[5].1["usage"]);
    }

    #[test]
    fn a_whole_message_says_why_it_ended() {
        let writer = MessagesWriter::new("r-1", "m", 10);
        for (finish, stop_string, reason, sequence) in [
            (FinishWord::Stop, "", "end_turn", Value::Null),
            (FinishWord::Length, "", "max_tokens", Value::Null),
            (FinishWord::Stop, "x", "stop_sequence", json!("x")),
        ] {
            let mut out = BytesMut::new();
            let choice =
                Choice { index: 0, text: "t".to_owned(), finish, stop_string: stop_string.to_owned(), logprobs: None };
            writer.write_whole(&mut out, &[choice], USAGE);
            let message: Value = serde_json::from_slice(&out).unwrap();
            assert_eq!(json!([{"type": "text", "text": "t"}]), message["content"]);
            assert_eq!((&json!(reason), &sequence), (&message["stop_reason"], &message["stop_sequence"]));
            assert_eq!((&json!("message"), &json!("assistant")), (&message["type"], &message["role"]));
        }
    }

    #[test]
    fn an_error_names_the_request() {
        let writer = MessagesWriter::new("r-1", "m", 10);
        let written = events(|out| writer.write_error(out, &KvistError::new(Code::EngineLost, "gone")));
        assert_eq!(
            (json!("overloaded_error"), json!("r-1")),
            (written[0].1["error"]["type"].clone(), written[0].1["request_id"].clone())
        );
    }
}
