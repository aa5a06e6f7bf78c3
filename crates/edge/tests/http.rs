//! The HTTP edge as clients see it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use http_body_util::BodyExt as _;
use kvist_errors::Code;
use kvist_proto::engine::v1::AbortReason;
use kvist_router::RouterSettings;
use kvist_worker::SimWorkerSettings;
use serde_json::{Value, json};
use support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_has_text_reason_and_usage() {
    let worker = TestWorker::start(0, Script::Answer("Hello, wörld")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let mut request = post("/v1/chat/completions", &chat(json!({"temperature": 0, "max_tokens": 50})));
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    let answer = read(send(address, request).await).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    assert_eq!("r1-mine", answer.headers["x-request-id"]);
    let json = answer.json();
    assert_eq!("Hello, wörld", json["choices"][0]["message"]["content"]);
    assert_eq!(
        ("stop", "chatcmpl-r1-mine"),
        (json["choices"][0]["finish_reason"].as_str().unwrap(), json["id"].as_str().unwrap())
    );
    let prompt = worker.engine.requests.lock()[0].clone();
    assert_eq!(Some(50), prompt.stop.unwrap().max_tokens);
    assert_eq!(
        (13, 1),
        (
            json["usage"]["completion_tokens"].as_u64().unwrap(),
            json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        )
    );
    let completion = json!({"model": "alias", "prompt": "ab", "echo": true});
    let answer = read(send(address, post("/v1/completions", &completion)).await).await;
    assert_eq!("abHello, wörld", answer.json()["choices"][0]["text"]);
    assert_eq!(2, answer.json()["usage"]["prompt_tokens"]);
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_with_usage_and_an_end_mark() {
    let worker = TestWorker::start(0, Script::Answer("Hello")).await;
    let router = router(settings(), &[&worker]).await;
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let response = send(router.addresses().http_address, post("/v1/chat/completions", &body)).await;
    assert_eq!("text/event-stream; charset=utf-8", response.headers()["content-type"]);
    let answer = read(response).await;
    let events = events(&answer.body);
    assert_eq!("Hello", content(&answer.body));
    assert_eq!(Some(&"[DONE]"), events.last());
    let first: Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!("assistant", first["choices"][0]["delta"]["role"]);
    let usage: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(5, usage["usage"]["completion_tokens"]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_the_text_and_the_work() {
    let mut worker = TestWorker::start(0, Script::Hold("One STOP two")).await;
    let router = router(settings(), &[&worker]).await;
    for (stream, include, expected) in [(false, false, "One "), (true, true, "One STOP")] {
        let body = chat(json!({"stream": stream, "stop": ["STOP"], "include_stop_str_in_output": include}));
        let answer = read(send(router.addresses().http_address, post("/v1/chat/completions", &body)).await).await;
        assert!(matches!(worker.next().await, Seen::Submitted(_)));
        assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::StopString)));
        let text = if stream {
            content(&answer.body)
        } else {
            assert_eq!("stop", answer.json()["choices"][0]["finish_reason"]);
            answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(expected, text);
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_lost_before_the_first_token_is_not_noticed() {
    let mut workers = [TestWorker::start(0, Script::Hold("")).await, TestWorker::start(1, Script::Hold("")).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let address = router.addresses().http_address;
    let asking =
        tokio::spawn(async move { read(send(address, post("/v1/chat/completions", &chat(json!({})))).await).await });
    let [left, right] = &mut workers;
    let (first, second) = tokio::select! {
        Seen::Submitted(_) = left.next() => (left, right),
        Seen::Submitted(_) = right.next() => (right, left),
    };
    second.engine.script(Script::Answer("from the other"));
    first.kill();
    let answer = limited(asking).await.unwrap();
    assert_eq!(200, answer.status, "{}", answer.body);
    assert_eq!("from the other", answer.json()["choices"][0]["message"]["content"]);
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_started_is_tried_once_elsewhere_and_then_fails() {
    let workers = [
        TestWorker::start(0, Script::Fail(Code::QueueFull, true)).await,
        TestWorker::start(1, Script::Fail(Code::QueueFull, true)).await,
        TestWorker::start(2, Script::Fail(Code::QueueFull, true)).await,
    ];
    let router = router(settings(), &[&workers[0], &workers[1], &workers[2]]).await;
    let answer =
        read(send(router.addresses().http_address, post("/v1/chat/completions", &chat(json!({"stream": true})))).await)
            .await;
    assert_eq!((429, "queue_full"), (answer.status, answer.json()["error"]["code"].as_str().unwrap()));
    assert_eq!("true", answer.headers["x-should-retry"]);
    assert_eq!(2, workers.iter().map(|worker| worker.engine.requests.lock().len()).sum::<usize>());
    for worker in &workers {
        worker.engine.script(Script::Fail(Code::EngineFailed, false));
        worker.engine.requests.lock().clear();
    }
    let answer =
        read(send(router.addresses().http_address, post("/v1/chat/completions", &chat(json!({})))).await).await;
    assert_eq!(500, answer.status);
    assert_eq!(1, workers.iter().map(|worker| worker.engine.requests.lock().len()).sum::<usize>());
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_request_is_not_tried_elsewhere_and_named_as_the_client_said_it() {
    let workers = [
        TestWorker::start(0, Script::Refuse("sampling.choices")).await,
        TestWorker::start(1, Script::Refuse("sampling.choices")).await,
    ];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let answer =
        read(send(router.addresses().http_address, post("/v1/chat/completions", &chat(json!({"n": 2})))).await).await;
    let error = answer.json()["error"].clone();
    assert_eq!(
        (400, "n", "n: cannot be honored"),
        (answer.status, error["param"].as_str().unwrap(), error["message"].as_str().unwrap(),)
    );
    assert_eq!(1, workers.iter().map(|worker| worker.engine.requests.lock().len()).sum::<usize>());
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_lost_in_mid_stream_ends_it_with_an_error_and_no_end_mark() {
    let mut worker = TestWorker::start(0, Script::Hold("Half an")).await;
    let router = router(settings(), &[&worker]).await;
    let response =
        send(router.addresses().http_address, post("/v1/chat/completions", &chat(json!({"stream": true})))).await;
    assert_eq!(200, response.status());
    worker.next().await;
    worker.kill();
    let answer = read(response).await;
    let last: Value = serde_json::from_str(events(&answer.body).last().unwrap()).unwrap();
    assert_eq!("engine_lost", last["error"]["code"]);
    assert!(!answer.body.contains("[DONE]") && !answer.body.contains("\"finish_reason\":\""), "{}", answer.body);
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_takes_its_request_along() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    for (script, stream) in [(Script::Hold("begun"), true), (Script::Hold(""), false), (Script::Hold(""), true)] {
        let is_begun = matches!(script, Script::Hold("begun"));
        worker.engine.script(script);
        let asking = tokio::spawn(async move {
            let response = send(address, post("/v1/chat/completions", &chat(json!({"stream": stream})))).await;
            assert!(is_begun, "only a begun stream answers");
            response
        });
        let Seen::Submitted(id) = worker.next().await else { panic!("nothing was submitted") };
        assert_eq!(1, router.core().open_reservations());
        if is_begun {
            drop(limited(asking).await.unwrap());
        } else {
            asking.abort();
        }
        assert_eq!(Seen::Aborted(id, AbortReason::Cancelled), worker.next().await);
        until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0)
            .await;
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_is_kept_alive_and_then_answers() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(RouterSettings { keep_alive_interval_ms: 20, ..settings() }, &[&worker]).await;
    let response =
        send(router.addresses().http_address, post("/v1/chat/completions", &chat(json!({"stream": true})))).await;
    assert_eq!(200, response.status());
    worker.next().await;
    let mut body = response.into_body();
    let mut text = String::new();
    while let Some(frame) = limited(body.frame()).await {
        text.push_str(std::str::from_utf8(frame.unwrap().data_ref().unwrap()).unwrap());
        if text.matches(": keep-alive\n\n").count() >= 3 {
            // Nothing is held any more when this comes a second time.
            worker.engine.release("at last");
        }
    }
    let text = text.replace(": keep-alive\n\n", "");
    assert_eq!("at last", content(&text));
    assert_eq!(Some(&"[DONE]"), events(&text).last());
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_and_the_end_of_the_process_end_requests_truthfully() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let mut request = post("/v1/chat/completions", &chat(json!({})));
    request.headers_mut().insert("x-request-timeout-ms", "50".parse().unwrap());
    let answer = read(send(address, request).await).await;
    assert_eq!((504, "deadline_exceeded"), (answer.status, answer.json()["error"]["code"].as_str().unwrap()));
    worker.next().await;
    assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::Deadline)));

    worker.engine.script(Script::Hold("Half"));
    let response = send(address, post("/v1/chat/completions", &chat(json!({"stream": true})))).await;
    assert!(!router.drain(std::time::Duration::from_millis(20)).await);
    let refused = read(send(address, post("/v1/chat/completions", &chat(json!({})))).await).await;
    assert_eq!((503, "draining"), (refused.status, refused.json()["error"]["code"].as_str().unwrap()));
    let reading = tokio::spawn(read(response));
    limited(router.stop()).await;
    let answer = limited(reading).await.unwrap();
    let last: Value = serde_json::from_str(events(&answer.body).last().unwrap()).unwrap();
    assert_eq!("draining", last["error"]["code"]);
    assert!(!answer.body.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_said_in_the_words_of_the_api() {
    let worker = TestWorker::start(0, Script::Answer("x")).await;
    let router = router(RouterSettings { body_limit_bytes: 2000, ..settings() }, &[&worker]).await;
    let address = router.addresses().http_address;
    let chat_path = "/v1/chat/completions";
    for (request, status, code, param) in [
        (
            post(chat_path, &json!({"model": "other", "messages": [{"role": "user", "content": ""}]})),
            404,
            "model_not_found",
            json!("model"),
        ),
        (post(chat_path, &chat(json!({"temperature": 9}))), 400, "invalid_argument", json!("temperature")),
        (
            post(chat_path, &chat(json!({"kv_transfer_params": {}}))),
            400,
            "unsupported_parameter",
            json!("kv_transfer_params"),
        ),
        (post(chat_path, &chat(json!({"logprobs": true}))), 400, "unsupported_parameter", json!("logprobs")),
        (post(chat_path, &chat(json!({"max_tokens": 5000}))), 400, "context_length_exceeded", Value::Null),
        (post(chat_path, &chat(json!({"messages": "x".repeat(3000)}))), 413, "request_too_large", Value::Null),
        (post("/v1/completions", &json!({"model": MODEL, "prompt": ""})), 400, "invalid_argument", json!("prompt")),
        (
            post("/v1/completions", &json!({"model": MODEL, "prompt": [99999]})),
            400,
            "invalid_argument",
            json!("prompt[0]"),
        ),
        (get("/v1/nothing"), 404, "not_found", Value::Null),
        (get("/v1/models/none"), 404, "model_not_found", json!("model")),
    ] {
        let answer = read(send(address, request).await).await;
        let error = &answer.json()["error"];
        assert_eq!((status, code), (answer.status, error["code"].as_str().unwrap()), "{}", answer.body);
        assert_eq!(param, error["param"]);
        assert!(error["message"].is_string() && error["type"].is_string());
    }
    let models = read(send(address, get("/v1/models")).await).await.json();
    assert_eq!((MODEL, 1), (models["data"][0]["id"].as_str().unwrap(), models["data"].as_array().unwrap().len()));
    assert_eq!(MODEL, read(send(address, get("/v1/models/test%2Fmodel")).await).await.json()["id"]);
    assert_eq!(200, read(send(address, get("/readyz")).await).await.status);
    assert_eq!("0.1.0", read(send(address, get("/version")).await).await.json()["version"]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_asked_for_and_separate_caches() {
    let folder =
        std::env::temp_dir().join(format!("kvist-keys-{}-{:x}", std::process::id(), std::ptr::from_ref(&()) as usize));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("keys");
    // SHA-256 of `secret`.
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    std::fs::write(&file, format!("alice:{hash}:salt\n")).unwrap();
    let worker = TestWorker::start(0, Script::Answer("x")).await;
    let router = router(RouterSettings { api_keys_file: Some(file), ..settings() }, &[&worker]).await;
    let address = router.addresses().http_address;
    let answer = read(send(address, post("/v1/chat/completions", &chat(json!({})))).await).await;
    assert_eq!((401, "Bearer"), (answer.status, answer.headers["www-authenticate"].to_str().unwrap()));
    let mut request = post("/v1/chat/completions", &chat(json!({})));
    request.headers_mut().insert("authorization", "Bearer secret".parse().unwrap());
    assert_eq!(200, read(send(address, request).await).await.status);
    assert_eq!("salt", worker.engine.requests.lock()[0].cache_salt);
    assert_eq!(200, read(send(address, get("/health")).await).await.status);
    router.stop().await;
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_choices_come_from_an_engine_that_makes_one() {
    let sim = SimWorkerSettings { decode_step_ms: 0.2, ..SimWorkerSettings::default() };
    let worker = TestWorker::start_sim(0, sim).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let whole = chat(json!({"n": 3, "max_tokens": 5, "ignore_eos": true}));
    let answer = read(send(address, post("/v1/chat/completions", &whole)).await).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!((3, 15), (choices.len(), answer["usage"]["completion_tokens"].as_u64().unwrap()));
    assert!(choices.iter().all(|choice| choice["finish_reason"] == "length" && choice["message"]["content"] != ""));
    let streamed = chat(json!({"n": 3, "max_tokens": 5, "ignore_eos": true, "stream": true}));
    let body = read(send(address, post("/v1/chat/completions", &streamed)).await).await.body;
    assert_eq!(3, body.matches("\"finish_reason\":\"length\"").count(), "{body}");
    assert_eq!(Some(&"[DONE]"), events(&body).last());
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_get_each_their_own_whole_answer() {
    let sim = SimWorkerSettings { prefill_tokens_per_second: 1e6, decode_step_ms: 1.0, ..SimWorkerSettings::default() };
    let workers = [TestWorker::start_sim(0, sim.clone()).await, TestWorker::start_sim(1, sim).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let address = router.addresses().http_address;
    let mut asking = tokio::task::JoinSet::new();
    for number in 0..32 {
        asking.spawn(async move {
            let tokens = 1 + number * 2;
            let options = json!({"include_usage": true});
            let messages = json!([{"role": "user", "content": format!("{number}: {}", "word ".repeat(200))}]);
            let body = chat(json!({
                "stream": number % 4 != 0, "messages": messages, "max_tokens": tokens, "ignore_eos": true,
                "stream_options": if number % 4 != 0 { options } else { Value::Null },
            }));
            (number, tokens, read(send(address, post("/v1/chat/completions", &body)).await).await)
        });
    }
    let mut texts = std::collections::HashMap::new();
    while let Some(answer) = limited(asking.join_next()).await {
        let (number, tokens, answer) = answer.unwrap();
        assert_eq!(200, answer.status, "{}", answer.body);
        let (usage, reason, text) = if number % 4 == 0 {
            let json = answer.json();
            let choice = &json["choices"][0];
            (
                json["usage"].clone(),
                choice["finish_reason"].clone(),
                choice["message"]["content"].as_str().unwrap().to_owned(),
            )
        } else {
            let events = events(&answer.body);
            assert_eq!(Some(&"[DONE]"), events.last());
            let at = |from_end: usize| serde_json::from_str::<Value>(events[events.len() - from_end]).unwrap();
            (at(2)["usage"].clone(), at(3)["choices"][0]["finish_reason"].clone(), content(&answer.body))
        };
        assert_eq!((json!(tokens), json!("length")), (usage["completion_tokens"].clone(), reason));
        texts.insert(number, text);
    }
    assert_eq!(32, texts.len());
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
    assert!(metrics.contains("kvist_router_active_requests 0\n"), "{metrics}");
    assert!(metrics.contains("outcome=\"length\",surface=\"http\"} 32\n"), "{metrics}");
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_time_a_prompt_goes_where_its_cache_is() {
    let mut workers = Vec::new();
    for number in 0..3 {
        workers.push(TestWorker::start_sim(number, SimWorkerSettings::default()).await);
    }
    let router = router(settings(), &workers.iter().collect::<Vec<_>>()).await;
    until("all sources are exact", || router.status().exact_index_sources == 3).await;
    let address = router.addresses().http_address;
    let body = chat(json!({
        "max_tokens": 3, "messages": [{"role": "user", "content": "a long prompt ".repeat(60)}],
    }));
    let first = read(send(address, post("/v1/chat/completions", &body)).await).await.json();
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let usable = u32::try_from((prompt - 1) / 16).unwrap();
    assert_eq!(0, first["usage"]["prompt_tokens_details"]["cached_tokens"]);
    // The ledger's statement travels beside the answer; a moment later the index has it.
    until("the index knows the blocks", || {
        router.core().index().sources().iter().any(|source| source.next_sequence > 0)
    })
    .await;
    for _ in 0..5 {
        let again = read(send(address, post("/v1/chat/completions", &body)).await).await.json();
        assert_eq!(usable * 16, again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as u32);
        assert_eq!(first["choices"], again["choices"]);
    }
    router.stop().await;
}
