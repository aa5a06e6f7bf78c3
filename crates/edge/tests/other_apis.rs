//! The Messages and Responses APIs and the token endpoints as clients see them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use kvist_errors::Code;
use kvist_router::RouterSettings;
use serde_json::{Value, json};
use support::*;

fn message(extra: Value) -> Value {
    chat(match extra {
        Value::Object(mut extra) => {
            extra.entry("max_tokens").or_insert(json!(50));
            Value::Object(extra)
        }
        other => other,
    })
}

/// Names and data of a stream.
fn named_events(body: &str) -> Vec<(String, Value)> {
    let events = body.strip_suffix("\n\n").unwrap().split("\n\n");
    events
        .map(|event| {
            let (name, data) = event.split_once("\ndata: ").unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whole_and_as_a_stream_says_the_same() {
    let worker = TestWorker::start(0, Script::Answer("Hello, wörld")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let whole = read(send(address, post("/v1/messages", &message(json!({"system": "Be short."})))).await).await;
    assert_eq!(200, whole.status, "{}", whole.body);
    assert_eq!(whole.headers["request-id"], whole.headers["x-request-id"]);
    let whole = whole.json();
    assert_eq!(json!([{"type": "text", "text": "Hello, wörld"}]), whole["content"]);
    assert_eq!(("end_turn", Value::Null), (whole["stop_reason"].as_str().unwrap(), whole["stop_sequence"].clone()));
    // The scripted engine finds one token in its cache.
    let prompt_tokens = whole["usage"]["input_tokens"].as_u64().unwrap() + 1;
    assert_eq!(
        (1, 13),
        (
            whole["usage"]["cache_read_input_tokens"].as_u64().unwrap(),
            whole["usage"]["output_tokens"].as_u64().unwrap()
        )
    );

    let streamed =
        read(send(address, post("/v1/messages", &message(json!({"system": "Be short.", "stream": true})))).await).await;
    let events = named_events(&streamed.body);
    let text: String =
        events.iter().filter_map(|(_, data)| data.pointer("/delta/text").and_then(Value::as_str)).collect();
    assert_eq!("Hello, wörld", text);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    assert_eq!(
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ],
        names[..]
    );
    assert_eq!(prompt_tokens, events[0].1["message"]["usage"]["input_tokens"].as_u64().unwrap());
    assert_eq!(whole["usage"], events[events.len() - 2].1["usage"]);

    // What is counted is what is used, and what both APIs see is the same prompt.
    let mut counted = message(json!({"system": "Be short."}));
    counted.as_object_mut().unwrap().remove("max_tokens");
    let count = read(send(address, post("/v1/messages/count_tokens", &counted)).await).await;
    assert_eq!(json!({"input_tokens": prompt_tokens}), count.json());
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say it"}]);
    let tokens = read(send(address, post("/tokenize", &json!({"model": MODEL, "messages": messages}))).await).await;
    assert_eq!(
        (prompt_tokens, 4096),
        (tokens.json()["count"].as_u64().unwrap(), tokens.json()["max_model_len"].as_u64().unwrap())
    );
    let prompts: Vec<_> = worker.engine.requests.lock().iter().map(|request| request.prompt.clone()).collect();
    assert_eq!(prompts[0], prompts[1]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_sequence_is_named() {
    let worker = TestWorker::start(0, Script::Hold("One STOP two")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    for stream in [false, true] {
        let body = message(json!({"stop_sequences": ["STOP"], "stream": stream}));
        let answer = read(send(address, post("/v1/messages", &body)).await).await;
        let ending = if stream {
            named_events(&answer.body).into_iter().find(|(name, _)| name == "message_delta").unwrap().1["delta"].clone()
        } else {
            assert_eq!("One ", answer.json()["content"][0]["text"]);
            answer.json()
        };
        assert_eq!((&json!("stop_sequence"), &json!("STOP")), (&ending["stop_reason"], &ending["stop_sequence"]));
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_the_form_of_the_api_before_and_after_the_first_byte() {
    let mut worker = TestWorker::start(0, Script::Fail(Code::EngineFailed, false)).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let failed = read(send(address, post("/v1/messages", &message(json!({"stream": true})))).await).await;
    let request_id = failed.headers["request-id"].to_str().unwrap();
    let expected = json!({"type": "error", "error": {"type": "api_error", "message": "as the script says"}, "request_id": request_id});
    assert_eq!((500, expected), (failed.status, failed.json()));
    for (body, status, kind, field) in [
        (message(json!({"temperature": 9})), 400, "invalid_request_error", "temperature"),
        (message(json!({"max_tokens": 0})), 400, "invalid_request_error", "max_tokens"),
        (message(json!({"model": "other"})), 404, "not_found_error", "other"),
        (message(json!({"tools": [{}]})), 400, "invalid_request_error", "tools"),
    ] {
        let refused = read(send(address, post("/v1/messages", &body)).await).await;
        let json = refused.json();
        assert_eq!((status, &json!("error"), &json!(kind)), (refused.status, &json["type"], &json["error"]["type"]));
        assert!(json["error"]["message"].as_str().unwrap().contains(field), "{json}");
    }
    worker.engine.script(Script::Hold("one"));
    let answering = send(address, post("/v1/messages", &message(json!({"stream": true})))).await;
    let reading = tokio::spawn(read(answering));
    // The failed one is seen first.
    for _ in 0..2 {
        assert!(matches!(worker.next().await, Seen::Submitted(_)));
    }
    worker.kill();
    let broken = limited(reading).await.unwrap();
    let events = named_events(&broken.body);
    let (name, data) = events.last().unwrap();
    assert_eq!(("error", &json!("overloaded_error")), (name.as_str(), &data["error"]["type"]));
    assert!(!broken.body.contains("message_stop") && !broken.body.contains("[DONE]"), "{}", broken.body);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_may_come_in_the_header_of_either_api() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("keys-{}", std::process::id()));
    // SHA-256 of `secret`.
    std::fs::write(&file, "me:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n").unwrap();
    let worker = TestWorker::start(0, Script::Answer("x")).await;
    let router = router(RouterSettings { api_keys_file: Some(file.clone()), ..settings() }, &[&worker]).await;
    let address = router.addresses().http_address;
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let refused = read(send(address, post(path, &message(json!({})))).await).await;
        assert_eq!((401, json!("authentication_error")), (refused.status, refused.json()["error"]["type"].clone()));
    }
    for (name, value) in [("x-api-key", "secret"), ("authorization", "Bearer secret")] {
        let mut request = post("/v1/messages", &message(json!({})));
        request.headers_mut().insert(name, value.parse().unwrap());
        assert_eq!(200, read(send(address, request).await).await.status, "{name}");
    }
    let mut wrong = post("/v1/messages", &message(json!({})));
    wrong.headers_mut().insert("x-api-key", "other".parse().unwrap());
    assert_eq!(401, read(send(address, wrong).await).await.status);
    router.stop().await;
    std::fs::remove_file(file).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_whole_and_as_a_stream_says_the_same() {
    let mut worker = TestWorker::start(0, Script::Answer("Hello, wörld")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let ask = |more: Value| {
        let mut body = json!({"model": MODEL, "input": "Say it", "store": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post("/v1/responses", &body)
    };
    let whole = read(send(address, ask(json!({"instructions": "Be short."}))).await).await;
    assert_eq!(200, whole.status, "{}", whole.body);
    let whole = whole.json();
    assert_eq!(
        ("completed", "Be short."),
        (whole["status"].as_str().unwrap(), whole["instructions"].as_str().unwrap())
    );
    assert_eq!("Hello, wörld", whole["output"][0]["content"][0]["text"]);
    let streamed = read(send(address, ask(json!({"instructions": "Be short.", "stream": true}))).await).await;
    let events = named_events(&streamed.body);
    for (number, (_, event)) in (0u64..).zip(&events) {
        assert_eq!(Some(number), event["sequence_number"].as_u64());
    }
    let deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    assert_eq!("Hello, wörld", deltas.map(|(_, event)| event["delta"].as_str().unwrap()).collect::<String>());
    let (name, last) = events.last().unwrap();
    assert_eq!("response.completed", name);
    assert_eq!(
        (&whole["usage"], &whole["output"][0]["content"]),
        (&last["response"]["usage"], &last["response"]["output"][0]["content"])
    );

    let stored = read(send(address, ask(json!({"store": true}))).await).await;
    assert_eq!((400, json!("store")), (stored.status, stored.json()["error"]["param"].clone()));

    worker.engine.script(Script::Hold("one"));
    let reading = tokio::spawn(read(send(address, ask(json!({"stream": true}))).await));
    for _ in 0..3 {
        assert!(matches!(worker.next().await, Seen::Submitted(_)));
    }
    worker.kill();
    let broken = limited(reading).await.unwrap();
    let events = named_events(&broken.body);
    let (name, last) = events.last().unwrap();
    assert_eq!(("response.failed", &json!("engine_lost")), (name.as_str(), &last["response"]["error"]["code"]));
    assert!(!broken.body.contains("response.completed"));
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_come_and_go() {
    let worker = TestWorker::start(0, Script::Answer("x")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let tokens = read(send(address, post("/tokenize", &json!({"model": MODEL, "prompt": "abc"}))).await).await.json();
    assert_eq!(json!({"count": 3, "max_model_len": 4096, "tokens": [97, 98, 99]}), tokens);
    let body = json!({"model": MODEL, "tokens": tokens["tokens"]});
    let text = read(send(address, post("/detokenize", &body)).await).await.json();
    assert_eq!(json!({"prompt": "abc"}), text);
    let refused = read(send(address, post("/detokenize", &json!({"model": MODEL, "tokens": "abc"}))).await).await;
    assert_eq!((400, json!("tokens")), (refused.status, refused.json()["error"]["param"].clone()));
    router.stop().await;
}
