//! Answers of the OpenAI API, written straight into bytes.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;

use crate::{
    json::{write_display, write_list, write_number, write_string},
    output::{Call, CallDelta, Choice, ChoiceEnding, LogprobRun, TokenLogprob, UsageNumbers},
};

/// Writes the answer to one request: a stream of events, or one whole answer.
///
/// What is the same in every chunk is put together once; a delta then costs a few copies and the escape of its text.
#[derive(Clone, Debug)]
pub(crate) struct OpenAiWriter {
    is_chat: bool,
    include_usage: bool,
    /// A chunk up to the index of its choice.
    chunk_open: Vec<u8>,
    /// What closes a chunk behind its finish reason.
    chunk_close: &'static [u8],
    /// The chunk that carries usage, up to its value.
    usage_open: Vec<u8>,
    /// A whole answer up to its choices.
    whole_open: Vec<u8>,
}

impl OpenAiWriter {
    /// A writer for a request of the chat API, or of the completions API. `created` is in seconds since the Unix epoch.
    pub(crate) fn new(is_chat: bool, request_id: &str, created: u64, model: &str, include_usage: bool) -> Self {
        let (prefix, chunk, whole) = if is_chat {
            ("chatcmpl-", "chat.completion.chunk", "chat.completion")
        } else {
            ("cmpl-", "text_completion", "text_completion")
        };
        let open = |start: &str, object: &str, end: &str| {
            let mut out = BytesMut::from(start.as_bytes());
            out.put_slice(b"{\"id\":");
            write_string(&mut out, &format!("{prefix}{request_id}"));
            write_display(&mut out, format_args!(",\"object\":\"{object}\",\"created\":{created},\"model\":"));
            write_string(&mut out, model);
            out.put_slice(end.as_bytes());
            out.to_vec()
        };
        Self {
            is_chat,
            include_usage,
            chunk_open: open("data: ", chunk, ",\"choices\":[{\"index\":"),
            chunk_close: if include_usage { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" },
            usage_open: open("data: ", chunk, ",\"choices\":[],\"usage\":"),
            whole_open: open("", whole, ",\"choices\":["),
        }
    }

    /// The first chunk of a choice, which states the role; completions have none.
    pub(crate) fn write_start(&self, out: &mut BytesMut, index: u32) {
        if self.is_chat {
            self.open_chunk(out, index, 0);
            out.put_slice(
                b",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null",
            );
            out.put_slice(self.chunk_close);
        }
    }

    /// New text of a choice.
    pub(crate) fn write_delta(&self, out: &mut BytesMut, index: u32, text: &str, logprobs: Option<LogprobRun<'_>>) {
        self.open_chunk(out, index, text.len());
        if self.is_chat {
            out.put_slice(b",\"delta\":{\"content\":");
            write_string(out, text);
            out.put_slice(b"},\"logprobs\":");
        } else {
            out.put_slice(b",\"text\":");
            write_string(out, text);
            out.put_slice(b",\"logprobs\":");
        }
        self.write_logprobs(out, logprobs);
        out.put_slice(b",\"finish_reason\":null");
        out.put_slice(self.chunk_close);
    }

    /// New thoughts of a choice.
    pub(crate) fn write_reasoning(&self, out: &mut BytesMut, index: u32, text: &str) {
        self.open_chunk(out, index, text.len());
        out.put_slice(b",\"delta\":{\"reasoning_content\":");
        write_string(out, text);
        self.close_delta(out);
    }

    /// A part of a tool call of a choice: the first has its id and its name.
    pub(crate) fn write_call(&self, out: &mut BytesMut, index: u32, call: CallDelta<'_>) {
        let CallDelta { call, head, arguments, .. } = call;
        if head.is_none() && arguments.is_empty() {
            return;
        }
        self.open_chunk(out, index, arguments.len());
        out.put_slice(b",\"delta\":{\"tool_calls\":[{\"index\":");
        write_number(out, call);
        if let Some((id, name)) = head {
            out.put_slice(b",\"id\":");
            write_string(out, id);
            out.put_slice(b",\"type\":\"function\",\"function\":{\"name\":");
            write_string(out, name);
            out.put_slice(b",\"arguments\":");
        } else {
            out.put_slice(b",\"function\":{\"arguments\":");
        }
        write_string(out, arguments);
        out.put_slice(b"}}]");
        self.close_delta(out);
    }

    fn close_delta(&self, out: &mut BytesMut) {
        out.put_slice(b"},\"logprobs\":null,\"finish_reason\":null");
        out.put_slice(self.chunk_close);
    }

    /// The end of a stream that ended well: of each choice, then usage, when asked for, and the end mark. Never written
    /// after an error.
    pub(crate) fn write_end(&self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        for ending in endings {
            self.open_chunk(out, ending.index, 0);
            out.put_slice(if self.is_chat { b",\"delta\":{}" } else { b",\"text\":\"\"" });
            out.put_slice(b",\"logprobs\":null,\"finish_reason\":\"");
            out.put_slice(ending.finish.as_str().as_bytes());
            out.put_u8(b'"');
            out.put_slice(self.chunk_close);
        }
        if self.include_usage {
            out.put_slice(&self.usage_open);
            write_usage(out, usage);
            out.put_slice(b"}\n\n");
        }
        out.put_slice(b"data: [DONE]\n\n");
    }

    /// An error in a stream that has begun. Nothing follows it.
    pub(crate) fn write_error(&self, out: &mut BytesMut, error: &KvistError) {
        out.put_slice(b"data: ");
        out.put_slice(&error.to_openai_json());
        out.put_slice(b"\n\n");
    }

    /// A comment that keeps proxies awake while the request waits.
    pub(crate) fn write_keep_alive(&self, out: &mut BytesMut) {
        out.put_slice(b": keep-alive\n\n");
    }

    /// A whole answer.
    pub(crate) fn write_whole(&self, out: &mut BytesMut, choices: &[Choice], usage: UsageNumbers) {
        let text_bytes: usize = choices.iter().map(|choice| choice.text.len()).sum();
        out.reserve(self.whole_open.len() + text_bytes + 256);
        out.put_slice(&self.whole_open);
        write_list(out, choices, |out, choice| {
            out.put_slice(b"{\"index\":");
            write_number(out, choice.index);
            if self.is_chat {
                out.put_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
                if choice.text.is_empty() && !choice.calls.is_empty() {
                    out.put_slice(b"null");
                } else {
                    write_string(out, &choice.text);
                }
                if !choice.reasoning.is_empty() {
                    out.put_slice(b",\"reasoning_content\":");
                    write_string(out, &choice.reasoning);
                }
                if !choice.calls.is_empty() {
                    out.put_slice(b",\"tool_calls\":[");
                    write_list(out, &choice.calls, write_whole_call);
                    out.put_u8(b']');
                }
                out.put_slice(b",\"refusal\":null},\"logprobs\":");
            } else {
                out.put_slice(b",\"text\":");
                write_string(out, &choice.text);
                out.put_slice(b",\"logprobs\":");
            }
            self.write_logprobs(out, choice.logprobs.as_deref().map(|tokens| LogprobRun { tokens, text_offset: 0 }));
            out.put_slice(b",\"finish_reason\":\"");
            out.put_slice(choice.finish.as_str().as_bytes());
            out.put_slice(b"\"}");
        });
        out.put_slice(b"],\"usage\":");
        write_usage(out, usage);
        out.put_u8(b'}');
    }

    fn open_chunk(&self, out: &mut BytesMut, index: u32, text_bytes: usize) {
        out.reserve(self.chunk_open.len() + text_bytes + 128);
        out.put_slice(&self.chunk_open);
        write_number(out, index);
    }

    fn write_logprobs(&self, out: &mut BytesMut, logprobs: Option<LogprobRun<'_>>) {
        let Some(run) = logprobs else { return out.put_slice(b"null") };
        if self.is_chat {
            write_chat_logprobs(out, run.tokens);
        } else {
            write_completion_logprobs(out, run);
        }
    }
}

fn write_whole_call(out: &mut BytesMut, call: &Call) {
    out.put_slice(b"{\"id\":");
    write_string(out, &call.id);
    out.put_slice(b",\"type\":\"function\",\"function\":{\"name\":");
    write_string(out, &call.name);
    out.put_slice(b",\"arguments\":");
    write_string(out, &call.arguments);
    out.put_slice(b"}}");
}

fn write_chat_logprobs(out: &mut BytesMut, tokens: &[TokenLogprob]) {
    out.put_slice(b"{\"content\":[");
    write_list(out, tokens, |out, token| {
        write_chat_token(out, &token.bytes, token.logprob);
        out.put_slice(b",\"top_logprobs\":[");
        write_list(out, &token.top, |out, (bytes, logprob)| {
            write_chat_token(out, bytes, *logprob);
            out.put_u8(b'}');
        });
        out.put_slice(b"]}");
    });
    out.put_slice(b"],\"refusal\":null}");
}

/// A token of the chat API, without the closing brace.
fn write_chat_token(out: &mut BytesMut, bytes: &[u8], logprob: f32) {
    out.put_slice(b"{\"token\":");
    write_string(out, &String::from_utf8_lossy(bytes));
    out.put_slice(b",\"logprob\":");
    write_logprob(out, logprob);
    out.put_slice(b",\"bytes\":[");
    write_list(out, bytes, |out, byte| write_number(out, u32::from(*byte)));
    out.put_u8(b']');
}

fn write_completion_logprobs(out: &mut BytesMut, run: LogprobRun<'_>) {
    out.put_slice(b"{\"tokens\":[");
    write_list(out, run.tokens, |out, token| write_completion_token(out, &token.bytes));
    out.put_slice(b"],\"token_logprobs\":[");
    write_list(out, run.tokens, |out, token| write_logprob(out, token.logprob));
    out.put_slice(b"],\"top_logprobs\":[");
    write_list(out, run.tokens, |out, token| {
        // The chosen token is always among them; a key appears once, though tokens may share their text.
        let chosen = std::iter::once((token.bytes.as_slice(), token.logprob));
        let top = token.top.iter().map(|(bytes, logprob)| (bytes.as_slice(), *logprob));
        let mut written: Vec<&[u8]> = Vec::with_capacity(token.top.len() + 1);
        out.put_u8(b'{');
        for (bytes, logprob) in top.chain(chosen) {
            if written.contains(&bytes) {
                continue;
            }
            if !written.is_empty() {
                out.put_u8(b',');
            }
            written.push(bytes);
            write_completion_token(out, bytes);
            out.put_u8(b':');
            write_logprob(out, logprob);
        }
        out.put_u8(b'}');
    });
    out.put_slice(b"],\"text_offset\":[");
    let mut offset = run.text_offset;
    write_list(out, run.tokens, |out, token| {
        write_number(out, offset);
        offset = offset.saturating_add(token.characters());
    });
    out.put_slice(b"]}");
}

/// A token of the completions API: its text, or its bytes as that API spells those that are no text.
fn write_completion_token(out: &mut BytesMut, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => write_string(out, text),
        Err(_) => {
            out.put_slice(b"\"bytes:");
            for byte in bytes {
                write_display(out, format_args!("\\\\x{byte:02x}"));
            }
            out.put_u8(b'"');
        }
    }
}

fn write_usage(out: &mut BytesMut, usage: UsageNumbers) {
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens } = usage;
    let total = u64::from(prompt_tokens) + u64::from(completion_tokens);
    write_display(
        out,
        format_args!(
            "{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":{completion_tokens},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{cached_tokens}}},\
             \"completion_tokens_details\":{{\"reasoning_tokens\":{reasoning_tokens}}}}}"
        ),
    );
}

/// JSON has no infinities; the API writes the least probable as -9999.
fn write_logprob(out: &mut BytesMut, logprob: f32) {
    let finite = if logprob.is_finite() { logprob } else { -9999.0 };
    write_display(out, format_args!("{finite:?}"));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::output::FinishWord;

    fn ending(finish: FinishWord) -> ChoiceEnding<'static> {
        ChoiceEnding { index: 0, finish, stop_string: "" }
    }

    fn written(write: impl FnOnce(&mut BytesMut)) -> String {
        let mut out = BytesMut::new();
        write(&mut out);
        String::from_utf8(out.to_vec()).unwrap()
    }

    fn event(text: &str) -> Value {
        let line = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
        // An event is one line: a line break inside would end it early.
        assert!(!line.contains(['\n', '\r']));
        serde_json::from_str(line).unwrap()
    }

    fn token(bytes: &[u8], logprob: f32, top: &[(&[u8], f32)]) -> TokenLogprob {
        TokenLogprob {
            bytes: bytes.to_vec(),
            logprob,
            top: top.iter().map(|(bytes, logprob)| (bytes.to_vec(), *logprob)).collect(),
        }
    }

    #[test]
    fn a_chat_stream_byte_by_byte() {
        let writer = OpenAiWriter::new(true, "r-1", 7, "m/\"x", true);
        let text = written(|out| {
            writer.write_keep_alive(out);
            writer.write_start(out, 0);
            writer.write_delta(out, 12, "Hi\n\u{1}é", None);
            let usage = UsageNumbers { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1, reasoning_tokens: 0 };
            writer.write_end(out, &[ending(FinishWord::Stop)], usage);
        });
        let head =
            r#"data: {"id":"chatcmpl-r-1","object":"chat.completion.chunk","created":7,"model":"m/\"x","choices":["#;
        let expected = [
            ": keep-alive".to_owned(),
            format!(
                r#"{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
            ),
            format!(
                r#"{head}{{"index":12,"delta":{{"content":"Hi\n\u0001é"}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
            ),
            format!(r#"{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}],"usage":null}}"#),
            format!(
                r#"{head}],"usage":{{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{{"cached_tokens":1}},"completion_tokens_details":{{"reasoning_tokens":0}}}}}}"#
            ),
            "data: [DONE]".to_owned(),
        ];
        assert_eq!(expected.map(|event| event + "\n\n").concat(), text);
    }

    #[test]
    fn a_stream_with_thoughts_and_calls_byte_by_byte() {
        let writer = OpenAiWriter::new(true, "r-1", 7, "m", false);
        let text = written(|out| {
            writer.write_reasoning(out, 0, "hm\n");
            let head = Some(("call_1", "f"));
            writer.write_call(out, 0, CallDelta { call: 0, head, arguments: "", is_end: false });
            writer.write_call(out, 0, CallDelta { call: 0, head: None, arguments: "{\"a\"", is_end: false });
            writer.write_call(out, 0, CallDelta { call: 0, head: None, arguments: "", is_end: true });
            let head = Some(("call_2", "g"));
            writer.write_call(out, 0, CallDelta { call: 1, head, arguments: "{}", is_end: true });
            writer.write_end(out, &[ending(FinishWord::ToolCalls)], UsageNumbers::default());
        });
        let head = r#"data: {"id":"chatcmpl-r-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":"#;
        let tail = r#","logprobs":null,"finish_reason":null}]}"#;
        let expected = [
            format!(r#"{head}{{"reasoning_content":"hm\n"}}{tail}"#),
            format!(
                r#"{head}{{"tool_calls":[{{"index":0,"id":"call_1","type":"function","function":{{"name":"f","arguments":""}}}}]}}{tail}"#
            ),
            format!(r#"{head}{{"tool_calls":[{{"index":0,"function":{{"arguments":"{{\"a\""}}}}]}}{tail}"#),
            format!(
                r#"{head}{{"tool_calls":[{{"index":1,"id":"call_2","type":"function","function":{{"name":"g","arguments":"{{}}"}}}}]}}{tail}"#
            ),
            format!(r#"{head}{{}},"logprobs":null,"finish_reason":"tool_calls"}}]}}"#),
            "data: [DONE]".to_owned(),
        ];
        assert_eq!(expected.map(|event| event + "\n\n").concat(), text);
    }

    #[test]
    fn a_whole_answer_has_thoughts_and_calls() {
        let call = Call { id: "c".to_owned(), name: "f".to_owned(), arguments: "{\"a".to_owned(), is_complete: false };
        let choice =
            Choice { reasoning: "hm".to_owned(), calls: vec![call], finish: FinishWord::Length, ..Choice::default() };
        let writer = OpenAiWriter::new(true, "r", 7, "m", false);
        let answer: Value =
            serde_json::from_str(&written(|out| writer.write_whole(out, &[choice], UsageNumbers::default()))).unwrap();
        assert_eq!(
            json!({"index": 0, "message": {"role": "assistant", "content": null, "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a"}}],
                "refusal": null}, "logprobs": null, "finish_reason": "length"}),
            answer["choices"][0]
        );
    }

    #[test]
    fn a_completion_stream_byte_by_byte() {
        let writer = OpenAiWriter::new(false, "r-1", 7, "m", false);
        let text = written(|out| {
            writer.write_start(out, 0);
            writer.write_delta(out, 0, "Hi", None);
            writer.write_end(out, &[ending(FinishWord::Length)], UsageNumbers::default());
        });
        let head = r#"data: {"id":"cmpl-r-1","object":"text_completion","created":7,"model":"m","choices":["#;
        let expected = [
            format!(r#"{head}{{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}}]}}"#),
            format!(r#"{head}{{"index":0,"text":"","logprobs":null,"finish_reason":"length"}}]}}"#),
            "data: [DONE]".to_owned(),
        ];
        assert_eq!(expected.map(|event| event + "\n\n").concat(), text);
    }

    #[test]
    fn an_error_event_has_no_end_mark() {
        let writer = OpenAiWriter::new(true, "r", 7, "m", false);
        let error = kvist_errors::KvistError::new(kvist_errors::Code::EngineLost, "the engine was lost");
        assert_eq!(
            concat!(
                r#"data: {"error":{"message":"the engine was lost","type":"service_unavailable","param":null,"code":"engine_lost"}}"#,
                "\n\n"
            ),
            written(|out| writer.write_error(out, &error))
        );
    }

    #[test]
    fn chat_logprobs_carry_text_and_bytes() {
        let tokens = [token(b"a", -0.5, &[(b"a", -0.5), (&[0xC3], f32::NEG_INFINITY)])];
        let writer = OpenAiWriter::new(true, "r", 7, "m", false);
        let run = LogprobRun { tokens: &tokens, text_offset: 0 };
        assert_eq!(
            json!({"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\u{FFFD}", "logprob": -9999.0, "bytes": [195]}]}], "refusal": null}),
            event(&written(|out| writer.write_delta(out, 0, "a", Some(run))))["choices"][0]["logprobs"]
        );
    }

    #[test]
    fn completion_logprobs_carry_offsets_and_the_chosen_token() {
        // "é" comes in two tokens; the second run begins where the first ended.
        let first = [token(b"a", -0.5, &[(b"b", -0.25), (b"b", -4.0)]), token(&[0xC3], -1.0, &[])];
        let second = [token(&[0xA9], -2.0, &[]), token(b"z", -3.0, &[(b"z", -3.0)])];
        let writer = OpenAiWriter::new(false, "r", 7, "m", false);
        let logprobs = |run: LogprobRun<'_>| {
            event(&written(|out| writer.write_delta(out, 0, "", Some(run))))["choices"][0]["logprobs"].clone()
        };
        let run = LogprobRun { tokens: &first, text_offset: 10 };
        assert_eq!(
            json!({"tokens": ["a", "bytes:\\xc3"], "token_logprobs": [-0.5, -1.0],
                "top_logprobs": [{"b": -0.25, "a": -0.5}, {"bytes:\\xc3": -1.0}], "text_offset": [10, 11]}),
            logprobs(run)
        );
        assert_eq!(12, run.end_offset());
        assert_eq!(
            json!([12, 12]),
            logprobs(LogprobRun { tokens: &second, text_offset: run.end_offset() })["text_offset"]
        );
    }

    #[test]
    fn whole_answers_have_every_choice() {
        let choices = [
            Choice {
                index: 0,
                text: "\u{1}\"\\".to_owned(),
                finish: FinishWord::Length,
                logprobs: Some(Vec::new()),
                ..Choice::default()
            },
            Choice { index: 1, finish: FinishWord::Stop, ..Choice::default() },
        ];
        let usage = UsageNumbers {
            prompt_tokens: u32::MAX,
            completion_tokens: u32::MAX,
            reasoning_tokens: 7,
            cached_tokens: 0,
        };
        let whole = |is_chat: bool| -> Value {
            let writer = OpenAiWriter::new(is_chat, "r", 7, "m", true);
            serde_json::from_str(&written(|out| writer.write_whole(out, &choices, usage))).unwrap()
        };
        let usage = json!({"prompt_tokens": u32::MAX, "completion_tokens": u32::MAX, "total_tokens": 8_589_934_590_u64,
            "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 7}});
        assert_eq!(
            json!({"id": "chatcmpl-r", "object": "chat.completion", "created": 7, "model": "m", "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "\u{1}\"\\", "refusal": null},
                    "logprobs": {"content": [], "refusal": null}, "finish_reason": "length"},
                {"index": 1, "message": {"role": "assistant", "content": "", "refusal": null},
                    "logprobs": null, "finish_reason": "stop"}], "usage": usage}),
            whole(true)
        );
        assert_eq!(
            json!({"id": "cmpl-r", "object": "text_completion", "created": 7, "model": "m", "choices": [
                {"index": 0, "text": "\u{1}\"\\", "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                    "text_offset": []}, "finish_reason": "length"},
                {"index": 1, "text": "", "logprobs": null, "finish_reason": "stop"}], "usage": usage}),
            whole(false)
        );
    }

    proptest! {
        #[test]
        fn any_text_survives(
            text in any::<String>(),
            model in any::<String>(),
            index in any::<u32>(),
            include_usage in any::<bool>(),
        ) {
            for is_chat in [true, false] {
                let writer = OpenAiWriter::new(is_chat, "r", 7, &model, include_usage);
                let (object, id, mut choice) = match is_chat {
                    true => ("chat.completion.chunk", "chatcmpl-r", json!({"delta": {"content": text}})),
                    false => ("text_completion", "cmpl-r", json!({"text": text})),
                };
                choice["index"] = index.into();
                choice["logprobs"] = Value::Null;
                choice["finish_reason"] = Value::Null;
                let mut expected = json!({"id": id, "object": object, "created": 7, "model": model, "choices": [choice]});
                if include_usage {
                    expected["usage"] = Value::Null;
                }
                prop_assert_eq!(expected, event(&written(|out| writer.write_delta(out, index, &text, None))));
            }
        }

        #[test]
        fn any_logprobs_survive(
            tokens in prop::collection::vec(
                (prop::collection::vec(any::<u8>(), 0..4), any::<f32>(), prop::collection::vec((prop::collection::vec(any::<u8>(), 0..3), any::<f32>()), 0..4)),
                0..4,
            ),
        ) {
            let tokens: Vec<TokenLogprob> =
                tokens.into_iter().map(|(bytes, logprob, top)| TokenLogprob { bytes, logprob, top }).collect();
            let run = LogprobRun { tokens: &tokens, text_offset: 0 };
            // An `f32` is read back as the `f64` of the same text.
            let number = |logprob: f32| -> Value {
                let finite = if logprob.is_finite() { logprob } else { -9999.0 };
                serde_json::from_str(&format!("{finite:?}")).unwrap()
            };
            let chat = OpenAiWriter::new(true, "r", 7, "m", false);
            let one = |bytes: &[u8], logprob: f32| {
                json!({"token": String::from_utf8_lossy(bytes), "logprob": number(logprob), "bytes": bytes})
            };
            let expected: Vec<Value> = tokens
                .iter()
                .map(|token| {
                    let mut value = one(&token.bytes, token.logprob);
                    value["top_logprobs"] = token.top.iter().map(|(bytes, logprob)| one(bytes, *logprob)).collect();
                    value
                })
                .collect();
            let answer = event(&written(|out| chat.write_delta(out, 0, "", Some(run))));
            prop_assert_eq!(&json!(expected), &answer["choices"][0]["logprobs"]["content"]);

            let completion = OpenAiWriter::new(false, "r", 7, "m", false);
            let answer = event(&written(|out| completion.write_delta(out, 0, "", Some(run))));
            let logprobs = &answer["choices"][0]["logprobs"];
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                prop_assert_eq!(Some(tokens.len()), logprobs[list].as_array().map(Vec::len));
            }
            for (position, token) in tokens.iter().enumerate() {
                prop_assert_eq!(&number(token.logprob), &logprobs["token_logprobs"][position]);
                let key = logprobs["tokens"][position].as_str().unwrap();
                prop_assert!(logprobs["top_logprobs"][position].get(key).is_some());
            }
        }
    }
}
