//! Several prompts in one request of the completions API.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use kvist_errors::Code;
use kvist_worker::SimWorkerSettings;
use serde_json::{Value, json};
use support::*;

const PATH: &str = "/v1/completions";

async fn ask(address: std::net::SocketAddr, body: Value) -> Answer {
    read(send(address, post(PATH, &body)).await).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_prompt_has_its_choices_in_order_as_if_asked_alone() {
    let sim = SimWorkerSettings { decode_step_ms: 0.2, ..SimWorkerSettings::default() };
    let workers = [TestWorker::start_sim(0, sim.clone()).await, TestWorker::start_sim(1, sim).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let address = router.addresses().http_address;
    let prompts = [json!("first"), json!([115, 101, 99]), json!("the third one")];
    let body = |prompt: &Value| json!({"model": MODEL, "prompt": prompt, "n": 2, "max_tokens": 5, "echo": true});
    let mut alone = Vec::new();
    let (mut prompt_tokens, mut completion_tokens) = (0, 0);
    for prompt in &prompts {
        let answer = ask(address, body(prompt)).await.json();
        alone.extend(answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()));
        prompt_tokens += answer["usage"]["prompt_tokens"].as_u64().unwrap();
        completion_tokens += answer["usage"]["completion_tokens"].as_u64().unwrap();
    }
    let together = ask(address, body(&json!(prompts))).await.json();
    let choices = together["choices"].as_array().unwrap();
    assert_eq!(alone, choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>());
    assert_eq!(
        (0..6).collect::<Vec<_>>(),
        choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>()
    );
    assert_eq!(json!(prompt_tokens), together["usage"]["prompt_tokens"]);
    assert_eq!(json!(completion_tokens), together["usage"]["completion_tokens"]);

    let mut streamed = body(&json!(prompts));
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let body = ask(address, streamed).await.body;
    let events = events(&body);
    assert_eq!(Some(&"[DONE]"), events.last());
    let mut texts = vec![String::new(); 6];
    let mut ends = [0; 6];
    let mut usages = Vec::new();
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event).unwrap();
        usages.extend(event.get("usage").filter(|usage| !usage.is_null()).cloned());
        for choice in event["choices"].as_array().unwrap() {
            let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            texts[index].push_str(choice["text"].as_str().unwrap());
            ends[index] += u32::from(!choice["finish_reason"].is_null());
        }
    }
    assert_eq!(alone, texts);
    assert_eq!([1; 6], ends);
    assert_eq!(1, usages.len());
    assert_eq!(json!(prompt_tokens), usages[0]["prompt_tokens"]);
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_refused_is_named_and_none_runs_on() {
    let worker = TestWorker::start(0, Script::Hold("a")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let answer = ask(address, json!({"model": MODEL, "prompt": ["good", [1, 99_999]]})).await;
    assert_eq!((400, json!("prompt[1][1]")), (answer.status, answer.json()["error"]["param"].clone()));
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    until("the good one does not run on", || worker.engine.running_requests() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_fails_ends_all() {
    let workers = [TestWorker::start(0, Script::Hold("a")).await, TestWorker::start(1, Script::Hold("b")).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let address = router.addresses().http_address;
    let body = json!({"model": MODEL, "prompt": ["one", "two"], "stream": true});
    let asking = tokio::spawn(async move { ask(address, body).await });
    let running = |worker: &TestWorker| worker.engine.running_requests();
    until("both run", || workers.iter().map(running).sum::<usize>() == 2).await;
    let first = workers.iter().find(|worker| running(worker) > 0).unwrap();
    first.engine.fail_one(Code::EngineFailed);
    let answer = limited(asking).await.unwrap();
    assert_eq!(1, answer.body.matches("\"error\":").count(), "{}", answer.body);
    assert!(!answer.body.contains("[DONE]") && !answer.body.contains("\"finish_reason\":\""), "{}", answer.body);
    until("the other was ended", || workers.iter().map(running).sum::<usize>() == 0).await;
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_all() {
    let worker = TestWorker::start(0, Script::Hold("a")).await;
    let router = router(settings(), &[&worker]).await;
    let body = json!({"model": MODEL, "prompt": ["one", "two", "three"], "stream": true});
    let response = send(router.addresses().http_address, post(PATH, &body)).await;
    until("all run", || worker.engine.running_requests() == 3).await;
    drop(response);
    until("all were ended", || worker.engine.running_requests() == 0).await;
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}
