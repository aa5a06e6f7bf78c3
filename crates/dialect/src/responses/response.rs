//! Answers of the Responses API.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;
use serde_json::{Map, Value, json};

use crate::{
    json::{write_display, write_string},
    output::{Choice, ChoiceEnding, FinishWord, UsageNumbers},
};

/// Writes the answer to one request: a stream of named and numbered events, or one object. There is one message.
#[derive(Clone, Debug)]
pub(crate) struct ResponsesWriter {
    response_id: String,
    message_id: String,
    created: u64,
    model: String,
    /// Fields of the request that the answer repeats.
    repeated: Map<String, Value>,
    /// The number of the next event.
    sequence_number: u64,
    /// What was streamed: the last events repeat it.
    text: String,
}

impl ResponsesWriter {
    pub(crate) fn new(request_id: &str, created: u64, model: &str, repeated: Map<String, Value>) -> Self {
        Self {
            response_id: format!("resp_{request_id}"),
            message_id: format!("msg_{request_id}"),
            created,
            model: model.to_owned(),
            repeated,
            sequence_number: 0,
            text: String::new(),
        }
    }

    pub(crate) fn write_start(&mut self, out: &mut BytesMut) {
        let response = self.response("in_progress", Vec::new(), None);
        self.write_event(out, "response.created", json!({"response": response}));
        self.write_event(out, "response.in_progress", json!({"response": response}));
        let mut item = self.message("in_progress", "");
        item["content"] = json!([]);
        self.write_event(out, "response.output_item.added", json!({"output_index": 0, "item": item}));
        let part = self.in_message(json!({"part": text_part("")}));
        self.write_event(out, "response.content_part.added", part);
    }

    pub(crate) fn write_delta(&mut self, out: &mut BytesMut, text: &str) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        // The one event that comes often.
        write_display(
            out,
            format_args!(
                "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\
                 \"sequence_number\":{},\"output_index\":0,\"content_index\":0,\"logprobs\":[],\"item_id\":",
                self.sequence_number
            ),
        );
        self.sequence_number += 1;
        write_string(out, &self.message_id);
        out.put_slice(b",\"delta\":");
        write_string(out, text);
        out.put_slice(b"}\n\n");
    }

    pub(crate) fn write_end(&mut self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        let finish = endings.first().map_or(FinishWord::Stop, |ending| ending.finish);
        let text = std::mem::take(&mut self.text);
        let done = self.in_message(json!({"text": text, "logprobs": []}));
        self.write_event(out, "response.output_text.done", done);
        let part = self.in_message(json!({"part": text_part(&text)}));
        self.write_event(out, "response.content_part.done", part);
        let status = status_of(finish);
        let item = self.message(status, &text);
        self.write_event(out, "response.output_item.done", json!({"output_index": 0, "item": item}));
        let response = self.response(status, vec![item], Some(usage));
        self.write_event(out, &format!("response.{status}"), json!({"response": response}));
    }

    /// A failure of a stream that has begun: its last event.
    pub(crate) fn write_error(&mut self, out: &mut BytesMut, error: &KvistError) {
        let mut response = self.response("failed", Vec::new(), None);
        response["error"] = json!({"code": error.code.openai_code(), "message": error.message});
        self.write_event(out, "response.failed", json!({"response": response}));
    }

    pub(crate) fn write_keep_alive(&self, out: &mut BytesMut) {
        out.put_slice(b": keep-alive\n\n");
    }

    pub(crate) fn write_whole(&self, out: &mut BytesMut, choices: &[Choice], usage: UsageNumbers) {
        let (finish, text) = choices.first().map_or((FinishWord::Stop, ""), |choice| (choice.finish, &choice.text));
        let status = status_of(finish);
        let response = self.response(status, vec![self.message(status, text)], Some(usage));
        out.put_slice(response.to_string().as_bytes());
    }

    fn message(&self, status: &str, text: &str) -> Value {
        json!({"id": self.message_id, "type": "message", "status": status, "role": "assistant",
            "content": [text_part(text)]})
    }

    /// What says of which part an event speaks, and more.
    fn in_message(&self, more: Value) -> Value {
        let mut event = json!({"item_id": self.message_id, "output_index": 0, "content_index": 0});
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        event
    }

    fn response(&self, status: &str, output: Vec<Value>, usage: Option<UsageNumbers>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({
            "id": self.response_id, "object": "response", "created_at": self.created,
            "status": status, "error": null, "incomplete_details": incomplete, "instructions": null,
            "max_output_tokens": null, "model": self.model, "output": output, "parallel_tool_calls": true,
            "previous_response_id": null, "reasoning": {"effort": null, "summary": null}, "store": false,
            "temperature": null, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
            "top_p": null, "truncation": "disabled", "usage": usage.map(usage_of), "metadata": {},
        });
        if let Value::Object(response) = &mut response {
            response.extend(self.repeated.clone());
        }
        response
    }

    fn write_event(&mut self, out: &mut BytesMut, name: &str, event: Value) {
        let mut numbered = json!({"type": name, "sequence_number": self.sequence_number});
        self.sequence_number += 1;
        if let (Value::Object(numbered), Value::Object(event)) = (&mut numbered, event) {
            numbered.extend(event);
        }
        write_display(out, format_args!("event: {name}\ndata: {numbered}\n\n"));
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn status_of(finish: FinishWord) -> &'static str {
    match finish {
        FinishWord::Stop => "completed",
        FinishWord::Length => "incomplete",
    }
}

fn usage_of(usage: UsageNumbers) -> Value {
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens } = usage;
    json!({"input_tokens": prompt_tokens, "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": u64::from(prompt_tokens) + u64::from(completion_tokens)})
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;

    const USAGE: UsageNumbers = UsageNumbers { prompt_tokens: 10, completion_tokens: 3, cached_tokens: 8 };

    fn events(write: impl FnOnce(&mut BytesMut)) -> Vec<Value> {
        let mut out = BytesMut::new();
        write(&mut out);
        let text = String::from_utf8(out.to_vec()).unwrap();
        let read = |event: &str| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
            data
        };
        text.strip_suffix("\n\n").unwrap().split("\n\n").map(read).collect()
    }

    fn writer() -> ResponsesWriter {
        let repeated = json!({"temperature": 0.5}).as_object().unwrap().clone();
        ResponsesWriter::new("r-1", 7, "m", repeated)
    }

    #[test]
    fn a_stream_event_by_event() {
        for (finish, last, reason) in [
            (FinishWord::Stop, "response.completed", Value::Null),
            (FinishWord::Length, "response.incomplete", json!({"reason": "max_output_tokens"})),
        ] {
            let mut writer = writer();
            let written = events(|out| {
                writer.write_start(out);
                writer.write_delta(out, "a\"");
                writer.write_delta(out, "");
                writer.write_delta(out, "b");
                writer.write_end(out, &[ChoiceEnding { index: 0, finish, stop_string: "" }], USAGE);
            });
            let names: Vec<&str> = written.iter().map(|event| event["type"].as_str().unwrap()).collect();
            assert_eq!(
                [
                    "response.created",
                    "response.in_progress",
                    "response.output_item.added",
                    "response.content_part.added",
                    "response.output_text.delta",
                    "response.output_text.delta",
                    "response.output_text.done",
                    "response.content_part.done",
                    "response.output_item.done",
                    last
                ],
                names[..]
            );
            let numbers: Vec<u64> = written.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
            assert_eq!((0..10).collect::<Vec<_>>(), numbers);
            assert_eq!("a\"b", written[6]["text"]);
            let response = &written[9]["response"];
            assert_eq!("a\"b", response["output"][0]["content"][0]["text"]);
            assert_eq!((&reason, &json!(0.5)), (&response["incomplete_details"], &response["temperature"]));
            let usage = json!({"input_tokens": 10, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 13});
            assert_eq!(usage, response["usage"]);
        }
    }

    #[test]
    fn a_failure_is_the_last_event() {
        let mut writer = writer();
        let written = events(|out| writer.write_error(out, &KvistError::new(Code::EngineLost, "gone")));
        assert_eq!(("response.failed", 1), (written[0]["type"].as_str().unwrap(), written.len()));
        assert_eq!(json!({"code": "engine_lost", "message": "gone"}), written[0]["response"]["error"]);
    }

    #[test]
    fn a_whole_answer_is_one_object() {
        let mut out = BytesMut::new();
        let finish = FinishWord::Length;
        let choice = Choice { index: 0, text: "t".to_owned(), finish, stop_string: String::new(), logprobs: None };
        writer().write_whole(&mut out, &[choice], USAGE);
        let response: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            ("resp_r-1", "incomplete"),
            (response["id"].as_str().unwrap(), response["status"].as_str().unwrap())
        );
        assert_eq!("t", response["output"][0]["content"][0]["text"]);
    }
}
