//! Answers of the Responses API.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;
use serde_json::{Map, Value, json};

use crate::{
    json::{write_display, write_string},
    output::{CallDelta, Choice, ChoiceEnding, FinishWord, UsageNumbers},
};

/// Writes the answer to one request: a stream of named and numbered events, or one object.
///
/// Thoughts, text and calls are items of their own, one behind the other.
#[derive(Clone, Debug)]
pub(crate) struct ResponsesWriter {
    request_id: String,
    created: u64,
    model: String,
    /// Fields of the request that the answer repeats.
    repeated: Map<String, Value>,
    /// The number of the next event.
    sequence_number: u64,
    open: Option<Item>,
    /// Items that are complete: the last event repeats them.
    done: Vec<Value>,
}

/// An item that is being written.
#[derive(Clone, Debug)]
struct Item {
    kind: Kind,
    /// What was streamed: the last events repeat it.
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { id: String, name: String },
}

impl Kind {
    /// The event that carries a part of it.
    fn event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Message => "response.output_text",
            Self::Call { .. } => "response.function_call_arguments",
        }
    }

    /// What its parts are in; a call has none.
    fn part(&self, text: &str) -> Option<Value> {
        match self {
            Self::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
            Self::Message => Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})),
            Self::Call { .. } => None,
        }
    }
}

impl ResponsesWriter {
    pub(crate) fn new(request_id: &str, created: u64, model: &str, repeated: Map<String, Value>) -> Self {
        Self {
            request_id: request_id.to_owned(),
            created,
            model: model.to_owned(),
            repeated,
            sequence_number: 0,
            open: None,
            done: Vec::new(),
        }
    }

    pub(crate) fn write_start(&mut self, out: &mut BytesMut) {
        let response = self.response("in_progress", Vec::new(), None);
        self.write_event(out, "response.created", json!({"response": response}));
        self.write_event(out, "response.in_progress", json!({"response": response}));
    }

    pub(crate) fn write_delta(&mut self, out: &mut BytesMut, text: &str) {
        if !text.is_empty() {
            self.enter(out, Kind::Message);
            self.write_part(out, text);
        }
    }

    pub(crate) fn write_reasoning(&mut self, out: &mut BytesMut, text: &str) {
        self.enter(out, Kind::Reasoning);
        self.write_part(out, text);
    }

    pub(crate) fn write_call(&mut self, out: &mut BytesMut, call: CallDelta<'_>) {
        if let Some((id, name)) = call.head {
            self.enter(out, Kind::Call { id: id.to_owned(), name: name.to_owned() });
        }
        if !call.arguments.is_empty() {
            self.write_part(out, call.arguments);
        }
        if call.is_end {
            self.leave(out, "completed");
        }
    }

    /// Goes on with the item that is open, or begins one of this kind.
    fn enter(&mut self, out: &mut BytesMut, kind: Kind) {
        match &self.open {
            Some(open) if open.kind == kind => return,
            // A call that was not said to be complete is not, whatever comes behind it.
            Some(Item { kind: Kind::Call { .. }, .. }) => self.leave(out, "incomplete"),
            _ => self.leave(out, "completed"),
        }
        let output_index = self.done.len();
        let mut item = self.item(&kind, output_index, "", "in_progress");
        let part = kind.part("");
        if part.is_some() {
            item["content"] = json!([]);
        }
        self.write_event(out, "response.output_item.added", json!({"output_index": output_index, "item": item}));
        if let Some(part) = part {
            let mut event = self.place(&kind);
            event["part"] = part;
            self.write_event(out, "response.content_part.added", event);
        }
        self.open = Some(Item { kind, text: String::new() });
    }

    /// The event that comes often.
    fn write_part(&mut self, out: &mut BytesMut, text: &str) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let name = open.kind.event();
        write_display(
            out,
            format_args!(
                "event: {name}.delta\ndata: {{\"type\":\"{name}.delta\",\"sequence_number\":{},\"output_index\":{},",
                self.sequence_number,
                self.done.len()
            ),
        );
        self.sequence_number += 1;
        out.put_slice(match open.kind {
            Kind::Message => b"\"content_index\":0,\"logprobs\":[],\"item_id\":",
            Kind::Reasoning => b"\"content_index\":0,\"item_id\":",
            Kind::Call { .. } => b"\"item_id\":",
        });
        let id = item_id(&self.request_id, &open.kind, self.done.len());
        write_string(out, &id);
        out.put_slice(b",\"delta\":");
        write_string(out, text);
        out.put_slice(b"}\n\n");
    }

    fn leave(&mut self, out: &mut BytesMut, status: &str) {
        let Some(Item { kind, text }) = self.open.take() else { return };
        let mut event = self.place(&kind);
        match &kind {
            Kind::Call { name, .. } => {
                event["name"] = name.as_str().into();
                event["arguments"] = text.as_str().into();
            }
            Kind::Message => {
                event["text"] = text.as_str().into();
                event["logprobs"] = json!([]);
            }
            Kind::Reasoning => event["text"] = text.as_str().into(),
        }
        self.write_event(out, &format!("{}.done", kind.event()), event);
        if let Some(part) = kind.part(&text) {
            let mut event = self.place(&kind);
            event["part"] = part;
            self.write_event(out, "response.content_part.done", event);
        }
        let output_index = self.done.len();
        let item = self.item(&kind, output_index, &text, status);
        self.write_event(out, "response.output_item.done", json!({"output_index": output_index, "item": item}));
        self.done.push(item);
    }

    pub(crate) fn write_end(&mut self, out: &mut BytesMut, endings: &[ChoiceEnding<'_>], usage: UsageNumbers) {
        let status = status_of(endings.first().map_or(FinishWord::Stop, |ending| ending.finish));
        if self.open.is_none() && self.done.is_empty() {
            self.enter(out, Kind::Message);
        }
        let is_call = matches!(self.open, Some(Item { kind: Kind::Call { .. }, .. }));
        self.leave(out, if is_call { "incomplete" } else { status });
        let done = std::mem::take(&mut self.done);
        let response = self.response(status, done, Some(usage));
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
        let nothing = Choice::default();
        let choice = choices.first().unwrap_or(&nothing);
        let status = status_of(choice.finish);
        let mut items: Vec<Value> = Vec::new();
        if !choice.reasoning.is_empty() {
            items.push(self.item(&Kind::Reasoning, items.len(), &choice.reasoning, "completed"));
        }
        if !choice.text.is_empty() || choice.calls.is_empty() {
            let of_text = if choice.calls.is_empty() { status } else { "completed" };
            items.push(self.item(&Kind::Message, items.len(), &choice.text, of_text));
        }
        for call in &choice.calls {
            let kind = Kind::Call { id: call.id.clone(), name: call.name.clone() };
            let of_call = if call.is_complete { "completed" } else { "incomplete" };
            items.push(self.item(&kind, items.len(), &call.arguments, of_call));
        }
        let response = self.response(status, items, Some(usage));
        out.put_slice(response.to_string().as_bytes());
    }

    fn item(&self, kind: &Kind, output_index: usize, text: &str, status: &str) -> Value {
        let id = item_id(&self.request_id, kind, output_index);
        match kind {
            Kind::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": [kind.part(text)]})
            }
            Kind::Message => json!({"id": id, "type": "message", "status": status, "role": "assistant",
                "content": [kind.part(text)]}),
            Kind::Call { id: call_id, name } => json!({"id": id, "type": "function_call", "status": status,
                "call_id": call_id, "name": name, "arguments": text}),
        }
    }

    /// Of which item and part an event speaks.
    fn place(&self, kind: &Kind) -> Value {
        let output_index = self.done.len();
        let mut place = json!({"item_id": item_id(&self.request_id, kind, output_index), "output_index": output_index});
        if !matches!(kind, Kind::Call { .. }) {
            place["content_index"] = 0.into();
        }
        place
    }

    fn response(&self, status: &str, output: Vec<Value>, usage: Option<UsageNumbers>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({
            "id": format!("resp_{}", self.request_id), "object": "response", "created_at": self.created,
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

/// Ids of items are unique in an answer; that of its first message is the answer's own.
fn item_id(request_id: &str, kind: &Kind, output_index: usize) -> String {
    let prefix = match kind {
        Kind::Reasoning => "rs",
        Kind::Message => "msg",
        Kind::Call { .. } => "fc",
    };
    match output_index {
        0 => format!("{prefix}_{request_id}"),
        index => format!("{prefix}_{request_id}_{index}"),
    }
}

fn status_of(finish: FinishWord) -> &'static str {
    match finish {
        FinishWord::Stop | FinishWord::ToolCalls => "completed",
        FinishWord::Length => "incomplete",
    }
}

fn usage_of(usage: UsageNumbers) -> Value {
    let UsageNumbers { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens } = usage;
    json!({"input_tokens": prompt_tokens, "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": completion_tokens, "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": u64::from(prompt_tokens) + u64::from(completion_tokens)})
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;

    use super::*;
    use crate::output::Call;

    const USAGE: UsageNumbers =
        UsageNumbers { prompt_tokens: 10, completion_tokens: 3, cached_tokens: 8, reasoning_tokens: 2 };

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
                "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 13});
            assert_eq!(usage, response["usage"]);
        }
    }

    #[test]
    fn a_stream_with_thoughts_and_calls_event_by_event() {
        let mut writer = writer();
        let written = events(|out| {
            writer.write_start(out);
            writer.write_reasoning(out, "hm");
            writer.write_call(out, CallDelta { call: 0, head: Some(("c1", "f")), arguments: "{\"a\"", is_end: false });
            writer.write_call(out, CallDelta { call: 0, head: None, arguments: ": 1}", is_end: true });
            writer.write_call(out, CallDelta { call: 1, head: Some(("c2", "g")), arguments: "{", is_end: false });
            writer.write_end(out, &[ChoiceEnding { index: 0, finish: FinishWord::Length, stop_string: "" }], USAGE);
        });
        let numbers: Vec<u64> = written.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!((0..written.len() as u64).collect::<Vec<_>>(), numbers);
        let thoughts = json!({"id": "rs_r-1", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}]});
        let first = json!({"id": "fc_r-1_1", "type": "function_call", "status": "completed", "call_id": "c1", "name": "f",
            "arguments": "{\"a\": 1}"});
        let second = json!({"id": "fc_r-1_2", "type": "function_call", "status": "incomplete", "call_id": "c2",
            "name": "g", "arguments": "{"});
        let begun = |item: &Value, field: &str, empty: Value| {
            let mut item = item.clone();
            item["status"] = "in_progress".into();
            item[field] = empty;
            item
        };
        let part = |text: &str| json!({"type": "reasoning_text", "text": text});
        let place = json!({"item_id": "rs_r-1", "output_index": 0, "content_index": 0});
        let expected = [
            ("output_item.added", json!({"output_index": 0, "item": begun(&thoughts, "content", json!([]))})),
            ("content_part.added", merged(&place, json!({"part": part("")}))),
            ("reasoning_text.delta", merged(&place, json!({"delta": "hm"}))),
            ("reasoning_text.done", merged(&place, json!({"text": "hm"}))),
            ("content_part.done", merged(&place, json!({"part": part("hm")}))),
            ("output_item.done", json!({"output_index": 0, "item": thoughts})),
            ("output_item.added", json!({"output_index": 1, "item": begun(&first, "arguments", json!(""))})),
            ("function_call_arguments.delta", json!({"item_id": "fc_r-1_1", "output_index": 1, "delta": "{\"a\""})),
            ("function_call_arguments.delta", json!({"item_id": "fc_r-1_1", "output_index": 1, "delta": ": 1}"})),
            (
                "function_call_arguments.done",
                json!({"item_id": "fc_r-1_1", "output_index": 1, "name": "f", "arguments": "{\"a\": 1}"}),
            ),
            ("output_item.done", json!({"output_index": 1, "item": first})),
            ("output_item.added", json!({"output_index": 2, "item": begun(&second, "arguments", json!(""))})),
            ("function_call_arguments.delta", json!({"item_id": "fc_r-1_2", "output_index": 2, "delta": "{"})),
            (
                "function_call_arguments.done",
                json!({"item_id": "fc_r-1_2", "output_index": 2, "name": "g", "arguments": "{"}),
            ),
            ("output_item.done", json!({"output_index": 2, "item": second})),
        ];
        for ((name, expected), (number, event)) in expected.into_iter().zip(written.iter().enumerate().skip(2)) {
            let head = json!({"type": format!("response.{name}"), "sequence_number": number});
            assert_eq!(&merged(&head, expected), event);
        }
        let response = &written.last().unwrap()["response"];
        assert_eq!((18, &json!("incomplete")), (written.len(), &response["status"]));
        assert_eq!(json!([thoughts, first, second]), response["output"]);
    }

    fn merged(left: &Value, right: Value) -> Value {
        let mut merged = left.clone();
        merged.as_object_mut().unwrap().extend(right.as_object().unwrap().clone());
        merged
    }

    #[test]
    fn a_whole_answer_has_an_item_for_each_kind() {
        let call = Call { id: "c".to_owned(), name: "f".to_owned(), arguments: "{}".to_owned(), is_complete: true };
        let choice = Choice {
            reasoning: "hm".to_owned(),
            calls: vec![call],
            finish: FinishWord::ToolCalls,
            ..Choice::default()
        };
        let mut out = BytesMut::new();
        writer().write_whole(&mut out, &[choice], USAGE);
        let response: Value = serde_json::from_slice(&out).unwrap();
        let kinds: Vec<&str> =
            response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(
            ("completed", ["reasoning", "function_call"].as_slice()),
            (response["status"].as_str().unwrap(), &kinds[..])
        );
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
        let choice = Choice { text: "t".to_owned(), finish, ..Choice::default() };
        writer().write_whole(&mut out, &[choice], USAGE);
        let response: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            ("resp_r-1", "incomplete"),
            (response["id"].as_str().unwrap(), response["status"].as_str().unwrap())
        );
        assert_eq!("t", response["output"][0]["content"][0]["text"]);
    }
}
