//! An edge before routers of other processes: what clients see is what a router's own edge shows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{net::SocketAddr, time::Duration};

use kvist_edge::{EdgeProcess, RouterProcess};
use kvist_errors::Code;
use kvist_proto::engine::v1::AbortReason;
use kvist_router::RouterSettings;
use kvist_worker::SimWorkerSettings;
use serde_json::{Value, json};
use support::*;

/// An edge before these routers, once it is ready.
async fn edge_of(routers: &[&RouterProcess], more: RouterSettings) -> EdgeProcess {
    let remote_routers = routers.iter().map(|router| router.addresses().grpc_address.to_string()).collect();
    let edge = EdgeProcess::start(RouterSettings { remote_routers, ..more }).await.unwrap();
    ready(&edge, 200).await;
    edge
}

async fn ready(edge: &EdgeProcess, status: u16) {
    let deadline = tokio::time::Instant::now() + TIME_LIMIT;
    loop {
        let answer = read(send(edge.addresses().http_address, get("/readyz")).await).await;
        if answer.status == status {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{}", answer.body);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Without what differs from one request to the next.
fn without_ids(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for name in ["id", "item_id", "created", "created_at", "call_id", "request_id"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(without_ids);
        }
        Value::Array(items) => items.iter_mut().for_each(without_ids),
        _ => {}
    }
}

/// What an answer says, be it whole or a stream: events in order, with the text of neighbours joined, since how many
/// tokens come together is a matter of time.
fn said(answer: &Answer) -> (u16, Vec<Value>) {
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let parts: Vec<&str> = if answer.headers["content-type"].to_str().unwrap().starts_with("text/event-stream") {
        data.collect()
    } else {
        vec![&answer.body]
    };
    let mut values: Vec<Value> = Vec::new();
    for part in parts {
        let mut value: Value = serde_json::from_str(part).unwrap_or_else(|_| json!(part));
        without_ids(&mut value);
        for path in ["/choices/0/delta/content", "/choices/0/text", "/delta/text", "/delta"] {
            let Some(text) = value.pointer(path).and_then(Value::as_str).map(str::to_owned) else { continue };
            let mut shape = value.clone();
            *shape.pointer_mut(path).unwrap() = Value::Null;
            shape.as_object_mut().unwrap().remove("sequence_number");
            if let Some(last) = values.last_mut() {
                let before = last.pointer(path).and_then(Value::as_str).map(str::to_owned);
                let mut last_shape = last.clone();
                last_shape.as_object_mut().map(|fields| fields.remove("sequence_number"));
                if let (Some(before), Some(place)) = (before, last_shape.pointer_mut(path)) {
                    *place = Value::Null;
                    if last_shape == shape {
                        *last.pointer_mut(path).unwrap() = json!(before + &text);
                        value = Value::Null;
                    }
                }
            }
            break;
        }
        if !value.is_null() {
            value.as_object_mut().map(|fields| fields.remove("sequence_number"));
            values.push(value);
        }
    }
    (answer.status, values)
}

async fn ask(address: SocketAddr, path: &str, body: &Value) -> Answer {
    read(send(address, post(path, body)).await).await
}

/// Tools whose keys are in an order of their own.
fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "description": "Tells the weather",
        "parameters": {"type": "object", "required": ["town"], "properties": {"town": {"type": "string"}, "at": {"type": "integer"}}},
    }}])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_endpoint_answers_as_the_routers_own_edge() {
    let sim = SimWorkerSettings { decode_step_ms: 0.2, ..SimWorkerSettings::default() };
    let worker = TestWorker::start_sim(0, sim).await;
    let router = router(settings(), &[&worker]).await;
    let edge = edge_of(&[&router], settings()).await;
    let (own, alone) = (router.addresses().http_address, edge.addresses().http_address);
    let messages = json!([{"role": "system", "content": "é"}, {"role": "user", "content": "Tell me"}]);
    let chat = |more: Value| {
        let mut body = json!({"model": MODEL, "messages": messages, "max_tokens": 6, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let completion =
        json!({"model": MODEL, "prompt": ["ab", [99, 100]], "n": 2, "max_tokens": 4, "ignore_eos": true, "echo": true});
    let streamed = |mut body: Value| {
        body["stream"] = json!(true);
        body
    };
    let cases = [
        ("/v1/chat/completions", chat(json!({}))),
        ("/v1/chat/completions", chat(json!({"stream": true, "stream_options": {"include_usage": true}}))),
        (
            "/v1/chat/completions",
            chat(json!({"n": 3, "temperature": 0.5, "seed": 3, "priority": 2, "cache_salt": "s"})),
        ),
        ("/v1/completions", completion.clone()),
        ("/v1/messages", json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})),
        (
            "/v1/messages",
            streamed(json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})),
        ),
        ("/v1/messages/count_tokens", json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})),
        ("/v1/responses", json!({"model": MODEL, "input": "hi", "store": false, "max_output_tokens": 3})),
        ("/v1/responses", streamed(json!({"model": MODEL, "input": "hi", "store": false, "max_output_tokens": 3}))),
        ("/tokenize", json!({"model": MODEL, "messages": messages, "tools": tools(), "add_generation_prompt": false})),
        ("/detokenize", json!({"model": MODEL, "tokens": [104, 105]})),
        // From here on what is refused, by the edge and by the router.
        ("/v1/chat/completions", chat(json!({"temperature": 9}))),
        ("/v1/chat/completions", chat(json!({"model": "nothing"}))),
        ("/v1/chat/completions", chat(json!({"logprobs": true}))),
        ("/v1/chat/completions", chat(json!({"max_tokens": 500_000}))),
        ("/v1/completions", json!({"model": MODEL, "prompt": [1, 99_999]})),
        ("/v1/embeddings", json!({"model": MODEL, "input": "x"})),
    ];
    for (number, (path, body)) in cases.into_iter().enumerate() {
        // The first time something is cached that was not.
        ask(own, path, &body).await;
        let (expected, got) = (ask(own, path, &body).await, ask(alone, path, &body).await);
        assert_eq!(number < 11, got.status == 200, "{path} {body}: {}", got.body);
        assert_eq!(said(&expected), said(&got), "{path} {body}");
        assert!(got.headers.contains_key("x-request-id"), "{path}");
    }
    for path in ["/v1/models", "/v1/models/test%2Fmodel", "/v1/models/nothing", "/version"] {
        let (expected, got) = (read(send(own, get(path)).await).await, read(send(alone, get(path)).await).await);
        assert_eq!(said(&expected), said(&got), "{path}");
    }
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    edge.stop().await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_gets_the_same_request_and_the_client_the_same_calls() {
    // Of a model whose calls are known, and whose template writes out all that it is given.
    let template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% if m.reasoning_content %}<think></think>{% endif %}\
                    {% endfor %}{% if tools %}<tool_call>{% endif %}";
    let answer = "<think>hm</think>I look.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Oslo\"}}\n</tool_call>";
    let worker = TestWorker::start_with_template(Script::Answer(answer), template).await;
    let router = router(settings(), &[&worker]).await;
    let edge = edge_of(&[&router], settings()).await;
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\"z\": 1, \"a\": 2}"}});
    let body = json!({
        "model": MODEL, "tools": tools(), "stop": ["END"], "seed": 7, "logit_bias": {"65": 1.5}, "custom": {"b": 1, "a": [true]},
        "messages": [
            {"role": "user", "content": "Tell me", "own": 1},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ],
    });
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let expected = ask(router.addresses().http_address, "/v1/chat/completions", &body).await;
        let got = ask(edge.addresses().http_address, "/v1/chat/completions", &body).await;
        assert_eq!(200, got.status, "{}", got.body);
        assert!(got.body.contains("weather") && got.body.contains("reasoning_content"), "{}", got.body);
        assert_eq!(said(&expected), said(&got));
    }
    let mut requests = worker.engine.requests.lock().clone();
    for request in &mut requests {
        request.request_id = String::new();
        request.traceparent = String::new();
        request.expected_cached_tokens = None;
        request.time_left = None;
    }
    assert_eq!(requests[0], requests[1]);
    edge.stop().await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_the_work() {
    let mut worker = TestWorker::start(0, Script::Hold("begun")).await;
    let router = router(settings(), &[&worker]).await;
    let edge = edge_of(&[&router], settings()).await;
    let body = chat(json!({"stream": true}));
    let response = send(edge.addresses().http_address, post("/v1/chat/completions", &body)).await;
    assert!(matches!(worker.next().await, Seen::Submitted(_)));
    drop(response);
    assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::Cancelled)));
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    assert!(edge.remote().drain(TIME_LIMIT).await);
    edge.stop().await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_gone_is_replaced_before_an_answer_and_told_within_one() {
    let worker = TestWorker::start(0, Script::Hold("begun")).await;
    let first = router(settings(), &[&worker]).await;
    let second = router(RouterSettings { name: "r2".to_owned(), ..settings() }, &[&worker]).await;
    let edge = edge_of(&[&first, &second], settings()).await;
    let address = edge.addresses().http_address;
    let body = chat(json!({"stream": true}));
    // One stream at each of them.
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(tokio::spawn(read(send(address, post("/v1/chat/completions", &body)).await)));
    }
    until("both answer", || first.core().active_requests() == 1 && second.core().active_requests() == 1).await;
    first.stop().await;
    worker.engine.release(" and ended");
    let mut ends = Vec::new();
    for stream in streams {
        let body = limited(stream).await.unwrap().body;
        ends.push((body.contains("\"error\""), body.contains("[DONE]")));
    }
    ends.sort_unstable();
    assert_eq!(vec![(false, true), (true, false)], ends);
    // Whosever turn it is, the one that is left answers.
    worker.engine.script(Script::Answer("here"));
    for _ in 0..4 {
        let answer = ask(address, "/v1/chat/completions", &chat(json!({}))).await;
        assert_eq!(200, answer.status, "{}", answer.body);
    }
    second.stop().await;
    let answer = ask(address, "/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(
        (503, json!(Code::RouterUnavailable.openai_code())),
        (answer.status, answer.json()["error"]["code"].clone())
    );
    ready(&edge, 503).await;
    edge.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_with_an_error_when_the_edge_does_and_nothing_new_is_taken() {
    let worker = TestWorker::start(0, Script::Hold("begun")).await;
    let router = router(settings(), &[&worker]).await;
    let edge = edge_of(&[&router], settings()).await;
    let address = edge.addresses().http_address;
    let running =
        tokio::spawn(async move { ask(address, "/v1/chat/completions", &chat(json!({"stream": true}))).await });
    until("it runs", || worker.engine.running_requests() == 1).await;
    assert!(!edge.remote().drain(Duration::from_millis(1)).await);
    ready(&edge, 503).await;
    let refused = ask(address, "/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!((503, json!("draining")), (refused.status, refused.json()["error"]["code"].clone()));
    edge.stop().await;
    let body = limited(running).await.unwrap().body;
    assert!(body.contains("\"error\"") && !body.contains("[DONE]"), "{body}");
    until("nothing is left", || router.core().active_requests() == 0).await;
    router.stop().await;
}
