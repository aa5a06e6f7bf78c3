//! Answers of the Messages API, written straight into bytes.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;
use serde_json::Value;

use crate::{
    json::{write_display, write_list, write_string},
    output::{CallDelta, Choice, ChoiceEnding, FinishWord, UsageNumbers},
};

/// The block of a message that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    ToolUse,
}

/// Writes the answer to one request: a stream of named events, or one message. There is one choice.
#[derive(Clone, Debug)]
pub(crate) struct MessagesWriter {
    request_id: String,
    prompt_tokens: u32,
    /// A message up to its content.
    message_open: Vec<u8>,
    open: Option<Block>,
    /// Blocks that have begun.
    blocks: u32,
}

impl MessagesWriter {
    pub(crate) fn new(request_id: &str, model: &str, prompt_tokens: u32) -> Self {
        let mut out = BytesMut::new();
        out.put_slice(b"{\"id\":");
        write_string(&mut out, &format!("msg_{request_id}"));
        out.put_slice(b",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        write_string(&mut out, model);
        out.put_slice(b",\"content\":[");
        let message_open = out.to_vec();
        Self { request_id: request_id.to_owned(), prompt_tokens, message_open, open: None, blocks: 0 }
    }

    /// The message without its content. What was cached is not known yet: the end says it.
    pub(crate) fn write_start(&self, out: &mut BytesMut) {
        out.put_slice(b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":");
        out.put_slice(&self.message_open);
        out.put_slice(b"],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        write_usage(out, UsageNumbers { prompt_tokens: self.prompt_tokens, ..UsageNumbers::default() });
        out.put_slice(b"}}\n\n");
    }

    pub(crate) fn write_delta(&mut self, out: &mut BytesMut, text: &str) {
        if text.is_empty() {
            return;
        }
        self.enter(out, Block::Text);
        self.write_part(out, "text_delta", "text", text);
    }

    pub(crate) fn write_reasoning(&mut self, out: &mut BytesMut, text: &str) {
        self.enter(out, Block::Thinking);
        self.write_part(out, "thinking_delta", "thinking", text);
    }

    pub(crate) fn write_call(&mut self, out: &mut BytesMut, call: CallDelta<'_>) {
        if let Some((id, name)) = call.head {
            self.leave(out);
            self.open_block(out, Block::ToolUse);
            out.put_slice(b"{\"type\":\"tool_use\",\"id\":");
            write_string(out, id);
            out.put_slice(b",\"name\":");
            write_string(out, name);
            out.put_slice(b",\"input\":{}}}\n\n");
        }
        if !call.arguments.is_empty() {
            self.write_part(out, "input_json_delta", "partial_json", call.arguments);
        }
        if call.is_end {
            self.leave(out);
        }
    }

    /// Goes on with the block that is open, or begins one of this kind.
    fn enter(&mut self, out: &mut BytesMut, block: Block) {
        if self.open == Some(block) {
            return;
        }
        self.leave(out);
        self.open_block(out, block);
        out.put_slice(match block {
            Block::Thinking => b"{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}}\n\n",
            Block::Text | Block::ToolUse => b"{\"type\":\"text\",\"text\":\"\"}}\n\n",
        });
    }

    fn open_block(&mut self, out: &mut BytesMut, block: Block) {
        self.open = Some(block);
        write_display(
            out,
            format_args!(
                "event: content_block_start\ndata: {{\"type\":\"content_block_start\",\"index\":{},\"content_block\":",
                self.blocks
            ),
        );
        self.blocks += 1;
    }

    fn leave(&mut self, out: &mut BytesMut) {
        if self.open.take().is_some() {
            let index = self.blocks.saturating_sub(1);
            write_display(
                out,
                format_args!(
                    "event: content_block_stop\ndata: {{\"type\":\"content_block_stop\",\"index\":{index}}}\n\n"
                ),
            );
        }
    }

    fn write_part(&self, out: &mut BytesMut, kind: &str, field: &str, text: &str) {
        let index = self.blocks.saturating_sub(1);
        write_display(
            out,
            format_args!(
                "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{index},\
                 \"delta\":{{\"type\":\"{kind}\",\"{field}\":"
            ),
        );
        write_string(out, text);
        out.put_slice(b"}}\n\n");
    }

    pub(crate) fn write_end(&mut self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        if self.blocks == 0 {
            // Clients expect a block in every message.
            self.enter(out, Block::Text);
        }
        self.leave(out);
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
            write_content(out, choice);
            out.put_slice(b"],");
            write_stop(out, choice.finish, &choice.stop_string);
        }
        out.put_slice(b",\"usage\":");
        write_usage(out, usage);
        out.put_u8(b'}');
    }
}

fn write_content(out: &mut BytesMut, choice: &Choice) {
    if !choice.reasoning.is_empty() {
        out.put_slice(b"{\"type\":\"thinking\",\"thinking\":");
        write_string(out, &choice.reasoning);
        out.put_slice(b",\"signature\":\"\"},");
    }
    let has_text = !choice.text.is_empty() || choice.calls.is_empty();
    if has_text {
        out.put_slice(b"{\"type\":\"text\",\"text\":");
        write_string(out, &choice.text);
        out.put_slice(if choice.calls.is_empty() { b"}" } else { b"}," });
    }
    write_list(out, &choice.calls, |out, call| {
        out.put_slice(b"{\"type\":\"tool_use\",\"id\":");
        write_string(out, &call.id);
        out.put_slice(b",\"name\":");
        write_string(out, &call.name);
        out.put_slice(b",\"input\":");
        match serde_json::from_str(&call.arguments) {
            Ok(input @ Value::Object(_)) => write_display(out, format_args!("{input}")),
            // Arguments that the budget cut are no JSON, and a block takes nothing else: this is the form that the API's
            // maker proposes for such text.
            _ => {
                out.put_slice(b"{\"INVALID_JSON\":");
                write_string(out, &call.arguments);
                out.put_u8(b'}');
            }
        }
        out.put_u8(b'}');
    });
}

fn write_stop(out: &mut BytesMut, finish: FinishWord, stop_string: &str) {
    let reason = match finish {
        FinishWord::Length => "max_tokens",
        FinishWord::ToolCalls => "tool_use",
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
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens, .. } = usage;
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
    use serde_json::json;

    use super::*;
    use crate::output::Call;

    const USAGE: UsageNumbers =
        UsageNumbers { prompt_tokens: 10, completion_tokens: 3, cached_tokens: 8, reasoning_tokens: 0 };

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
        let mut writer = MessagesWriter::new("r-1", "m/\"x", 10);
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
    fn a_stream_with_thoughts_and_calls_byte_by_byte() {
        let mut writer = MessagesWriter::new("r-1", "m", 10);
        let mut out = BytesMut::new();
        writer.write_reasoning(&mut out, "hm");
        writer.write_reasoning(&mut out, "!");
        writer.write_delta(&mut out, "I look.");
        writer.write_call(&mut out, CallDelta { call: 0, head: Some(("c1", "f")), arguments: "", is_end: false });
        writer.write_call(&mut out, CallDelta { call: 0, head: None, arguments: "{\"a\"", is_end: false });
        writer.write_call(&mut out, CallDelta { call: 0, head: None, arguments: ":1}", is_end: true });
        writer.write_call(&mut out, CallDelta { call: 1, head: Some(("c2", "g")), arguments: "{", is_end: false });
        let ending = ChoiceEnding { index: 0, finish: FinishWord::ToolCalls, stop_string: "" };
        writer.write_end(&mut out, &[ending], USAGE);
        let event = |name: &str, data: &str| format!("event: {name}\ndata: {{\"type\":\"{name}\"{data}}}\n\n");
        let start = |index: u32, block: &str| {
            event("content_block_start", &format!(",\"index\":{index},\"content_block\":{block}"))
        };
        let delta =
            |index: u32, delta: &str| event("content_block_delta", &format!(",\"index\":{index},\"delta\":{delta}"));
        let stop = |index: u32| event("content_block_stop", &format!(",\"index\":{index}"));
        let expected = [
            start(0, r#"{"type":"thinking","thinking":"","signature":""}"#),
            delta(0, r#"{"type":"thinking_delta","thinking":"hm"}"#),
            delta(0, r#"{"type":"thinking_delta","thinking":"!"}"#),
            stop(0),
            start(1, r#"{"type":"text","text":""}"#),
            delta(1, r#"{"type":"text_delta","text":"I look."}"#),
            stop(1),
            start(2, r#"{"type":"tool_use","id":"c1","name":"f","input":{}}"#),
            delta(2, r#"{"type":"input_json_delta","partial_json":"{\"a\""}"#),
            delta(2, r#"{"type":"input_json_delta","partial_json":":1}"}"#),
            stop(2),
            start(3, r#"{"type":"tool_use","id":"c2","name":"g","input":{}}"#),
            delta(3, r#"{"type":"input_json_delta","partial_json":"{"}"#),
            stop(3),
            event(
                "message_delta",
                concat!(
                    r#","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":2,"#,
                    r#""cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":3}"#
                ),
            ),
            event("message_stop", ""),
        ];
        assert_eq!(expected.concat(), String::from_utf8(out.to_vec()).unwrap());
    }

    #[test]
    fn an_answer_without_a_word_has_an_empty_block() {
        let mut writer = MessagesWriter::new("r-1", "m", 10);
        let ending = ChoiceEnding { index: 0, finish: FinishWord::Stop, stop_string: "" };
        let written = events(|out| writer.write_end(out, &[ending], USAGE));
        let names: Vec<&str> = written.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(["content_block_start", "content_block_stop", "message_delta", "message_stop"], names[..]);
    }

    #[test]
    fn a_whole_message_has_blocks_of_all_kinds() {
        let call = |arguments: &str, is_complete| Call {
            id: "c".to_owned(),
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
            is_complete,
        };
        let choice = Choice {
            reasoning: "hm".to_owned(),
            text: "t".to_owned(),
            calls: vec![call(r#"{"a": [1]}"#, true), call(r#"{"a"#, false)],
            finish: FinishWord::Length,
            ..Choice::default()
        };
        let mut out = BytesMut::new();
        MessagesWriter::new("r", "m", 1).write_whole(&mut out, &[choice], USAGE);
        let message: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            json!([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": "{\"a"}}]),
            message["content"]
        );
        assert_eq!(json!("max_tokens"), message["stop_reason"]);
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
            let stop_string = stop_string.to_owned();
            let choice = Choice { text: "t".to_owned(), finish, stop_string, ..Choice::default() };
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
