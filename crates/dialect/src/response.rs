//! Answers of the OpenAI API, written straight into bytes.

use crate::request::Endpoint;

/// Why a choice ended, as the API says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishWord {
    /// A stop token or string.
    Stop,
    /// The budget is used up.
    Length,
}

impl FinishWord {
    /// The word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageNumbers {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens found in a cache.
    pub cached_tokens: u32,
}

/// Log-probabilities at one position, with the texts of the tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Bytes of the token.
    pub bytes: Vec<u8>,
    /// Its log-probability.
    pub logprob: f32,
    /// Alternatives, best first.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// One choice of a whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Position.
    pub index: u32,
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub finish: FinishWord,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// Writes the answer to one request.
#[derive(Clone, Debug)]
pub struct AnswerWriter {
    endpoint: Endpoint,
    include_usage: bool,
    /// `"id":…,"object":…,"created":…,"model":…` of every chunk.
    chunk_head: Vec<u8>,
    /// The same for a whole answer.
    whole_head: Vec<u8>,
}

impl AnswerWriter {
    /// A writer for a request. `created` is in seconds since the Unix epoch.
    #[must_use]
    pub fn new(endpoint: Endpoint, request_id: &str, created: u64, model: &str, include_usage: bool) -> Self {
        let (prefix, chunk, whole) = match endpoint {
            Endpoint::ChatCompletions => ("chatcmpl-", "chat.completion.chunk", "chat.completion"),
            Endpoint::Completions => ("cmpl-", "text_completion", "text_completion"),
        };
        let head = |object: &str| {
            let mut head = b"{\"id\":".to_vec();
            write_string(&mut head, &format!("{prefix}{request_id}"));
            head.extend_from_slice(format!(",\"object\":\"{object}\",\"created\":{created},\"model\":").as_bytes());
            write_string(&mut head, model);
            head
        };
        Self { endpoint, include_usage, chunk_head: head(chunk), whole_head: head(whole) }
    }

    /// The first chunk of a choice, which states the role; completions have none.
    pub fn write_start(&self, out: &mut Vec<u8>, index: u32) {
        if self.endpoint == Endpoint::ChatCompletions {
            self.open_chunk(out, index);
            out.extend_from_slice(
                b"\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null",
            );
            self.close_chunk(out);
        }
    }

    /// New text of a choice.
    pub fn write_delta(&self, out: &mut Vec<u8>, index: u32, text: &str, logprobs: Option<&[TokenLogprob]>) {
        self.open_chunk(out, index);
        match self.endpoint {
            Endpoint::ChatCompletions => {
                out.extend_from_slice(b"\"delta\":{\"content\":");
                write_string(out, text);
                out.push(b'}');
            }
            Endpoint::Completions => {
                out.extend_from_slice(b"\"text\":");
                write_string(out, text);
            }
        }
        out.extend_from_slice(b",\"logprobs\":");
        self.write_logprobs(out, logprobs);
        out.extend_from_slice(b",\"finish_reason\":null");
        self.close_chunk(out);
    }

    /// The end of a choice.
    pub fn write_finish(&self, out: &mut Vec<u8>, index: u32, finish: FinishWord) {
        self.open_chunk(out, index);
        out.extend_from_slice(match self.endpoint {
            Endpoint::ChatCompletions => b"\"delta\":{}",
            Endpoint::Completions => b"\"text\":\"\"",
        });
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":\"");
        out.extend_from_slice(finish.as_str().as_bytes());
        out.push(b'"');
        self.close_chunk(out);
    }

    /// The end of a stream that ended well: usage, when asked for, and the end mark. Never written after an error.
    pub fn write_done(&self, out: &mut Vec<u8>, usage: UsageNumbers) {
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(&self.chunk_head);
            out.extend_from_slice(b",\"choices\":[],\"usage\":");
            write_usage(out, usage);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// An error in a stream that has begun. Nothing follows it.
    pub fn write_error(&self, out: &mut Vec<u8>, error: &kvist_errors::KvistError) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&error.to_openai_json());
        out.extend_from_slice(b"\n\n");
    }

    /// A whole answer.
    pub fn write_whole(&self, out: &mut Vec<u8>, choices: &[Choice], usage: UsageNumbers) {
        out.extend_from_slice(&self.whole_head);
        out.extend_from_slice(b",\"choices\":[");
        for (position, choice) in choices.iter().enumerate() {
            if position > 0 {
                out.push(b',');
            }
            out.extend_from_slice(format!("{{\"index\":{},", choice.index).as_bytes());
            match self.endpoint {
                Endpoint::ChatCompletions => {
                    out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
                    write_string(out, &choice.text);
                    out.extend_from_slice(b",\"refusal\":null}");
                }
                Endpoint::Completions => {
                    out.extend_from_slice(b"\"text\":");
                    write_string(out, &choice.text);
                }
            }
            out.extend_from_slice(b",\"logprobs\":");
            self.write_logprobs(out, choice.logprobs.as_deref());
            out.extend_from_slice(format!(",\"finish_reason\":\"{}\"}}", choice.finish.as_str()).as_bytes());
        }
        out.extend_from_slice(b"],\"usage\":");
        write_usage(out, usage);
        out.push(b'}');
    }

    fn open_chunk(&self, out: &mut Vec<u8>, index: u32) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.chunk_head);
        out.extend_from_slice(b",\"choices\":[{\"index\":");
        write_number(out, index);
        out.push(b',');
    }

    fn close_chunk(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(if self.include_usage { b"}],\"usage\":null}\n\n" as &[u8] } else { b"}]}\n\n" });
    }

    fn write_logprobs(&self, out: &mut Vec<u8>, logprobs: Option<&[TokenLogprob]>) {
        let Some(logprobs) = logprobs else { return out.extend_from_slice(b"null") };
        match self.endpoint {
            Endpoint::ChatCompletions => {
                out.extend_from_slice(b"{\"content\":[");
                write_list(out, logprobs, |out, token| {
                    write_chat_token(out, &token.bytes, token.logprob);
                    out.extend_from_slice(b",\"top_logprobs\":[");
                    write_list(out, &token.top, |out, (bytes, logprob)| {
                        write_chat_token(out, bytes, *logprob);
                        out.push(b'}');
                    });
                    out.extend_from_slice(b"]}");
                });
                out.extend_from_slice(b"],\"refusal\":null}");
            }
            Endpoint::Completions => {
                out.extend_from_slice(b"{\"tokens\":[");
                write_list(out, logprobs, |out, token| write_string(out, &String::from_utf8_lossy(&token.bytes)));
                out.extend_from_slice(b"],\"token_logprobs\":[");
                write_list(out, logprobs, |out, token| write_logprob(out, token.logprob));
                out.extend_from_slice(b"],\"top_logprobs\":[");
                write_list(out, logprobs, |out, token| {
                    out.push(b'{');
                    write_list(out, &token.top, |out, (bytes, logprob)| {
                        write_string(out, &String::from_utf8_lossy(bytes));
                        out.push(b':');
                        write_logprob(out, *logprob);
                    });
                    out.push(b'}');
                });
                out.extend_from_slice(b"],\"text_offset\":[]}");
            }
        }
    }
}

/// A token of the chat API, without the closing brace.
fn write_chat_token(out: &mut Vec<u8>, bytes: &[u8], logprob: f32) {
    out.extend_from_slice(b"{\"token\":");
    write_string(out, &String::from_utf8_lossy(bytes));
    out.extend_from_slice(b",\"logprob\":");
    write_logprob(out, logprob);
    out.extend_from_slice(b",\"bytes\":[");
    write_list(out, bytes, |out, byte| write_number(out, u32::from(*byte)));
    out.push(b']');
}

fn write_list<T>(out: &mut Vec<u8>, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    for (position, item) in items.iter().enumerate() {
        if position > 0 {
            out.push(b',');
        }
        write(out, item);
    }
}

fn write_usage(out: &mut Vec<u8>, usage: UsageNumbers) {
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens } = usage;
    let total = u64::from(prompt_tokens) + u64::from(completion_tokens);
    out.extend_from_slice(
        format!(
            "{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":{completion_tokens},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{cached_tokens}}}}}"
        )
        .as_bytes(),
    );
}

/// JSON has no infinities; the API writes the least probable as -9999.
fn write_logprob(out: &mut Vec<u8>, logprob: f32) {
    let finite = if logprob.is_finite() { logprob } else { -9999.0 };
    out.extend_from_slice(format!("{finite:?}").as_bytes());
}

fn write_number(out: &mut Vec<u8>, number: u32) {
    if let Ok(digit @ 0..=9) = u8::try_from(number) {
        out.push(b'0' + digit);
    } else {
        out.extend_from_slice(number.to_string().as_bytes());
    }
}

/// A JSON string: runs of plain bytes are copied at once.
fn write_string(out: &mut Vec<u8>, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut start = 0;
    for (position, byte) in bytes.iter().enumerate() {
        if *byte >= 0x20 && *byte != b'"' && *byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[start..position]);
        start = position + 1;
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            other => out.extend_from_slice(&[
                b'\\',
                b'u',
                b'0',
                b'0',
                HEX[usize::from(other >> 4)],
                HEX[usize::from(other & 15)],
            ]),
        }
    }
    out.extend_from_slice(&bytes[start..]);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn events(text: &str) -> Vec<Value> {
        text.split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }

    #[test]
    fn a_chat_stream_is_what_clients_expect() {
        let writer = AnswerWriter::new(Endpoint::ChatCompletions, "r-1", 7, "m", true);
        let text = written(|out| {
            writer.write_start(out, 0);
            writer.write_delta(out, 0, "Hi\n", None);
            writer.write_finish(out, 0, FinishWord::Stop);
            writer.write_done(out, UsageNumbers { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1 });
        });
        let text = text.strip_suffix("data: [DONE]\n\n").unwrap();
        let chunk = |delta: Value, finish: Value| {
            json!({"id": "chatcmpl-r-1", "object": "chat.completion.chunk", "created": 7, "model": "m",
            "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}], "usage": null})
        };
        assert_eq!(
            vec![
                chunk(json!({"role": "assistant", "content": ""}), Value::Null),
                chunk(json!({"content": "Hi\n"}), Value::Null),
                chunk(json!({}), "stop".into()),
                json!({"id": "chatcmpl-r-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}}),
            ],
            events(text)
        );
    }

    #[test]
    fn whole_answers_parse() {
        let logprobs = Some(vec![TokenLogprob {
            bytes: vec![0xC3],
            logprob: f32::NEG_INFINITY,
            top: vec![(b"a".to_vec(), -0.5)],
        }]);
        let choice = Choice { index: 0, text: "\u{1}\"\\".to_owned(), finish: FinishWord::Length, logprobs };
        for (endpoint, text) in
            [(Endpoint::ChatCompletions, "/choices/0/message/content"), (Endpoint::Completions, "/choices/0/text")]
        {
            let writer = AnswerWriter::new(endpoint, "r", 7, "m", false);
            let value: Value = serde_json::from_str(&written(|out| {
                writer.write_whole(out, std::slice::from_ref(&choice), UsageNumbers::default())
            }))
            .unwrap();
            assert_eq!(Some("\u{1}\"\\"), value.pointer(text).and_then(Value::as_str));
            assert_eq!("length", value["choices"][0]["finish_reason"]);
        }
    }

    proptest! {
        #[test]
        fn any_text_survives(text in any::<String>(), index in 0u32..200) {
            let writer = AnswerWriter::new(Endpoint::ChatCompletions, "r", 7, "m", false);
            let event = events(&written(|out| writer.write_delta(out, index, &text, None))).remove(0);
            prop_assert_eq!(Some(text.as_str()), event.pointer("/choices/0/delta/content").and_then(Value::as_str));
            prop_assert_eq!(Some(u64::from(index)), event["choices"][0]["index"].as_u64());
        }
    }
}
