//! Embeddings over both doors, on engines that were started for them and on engines that were not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod support;

use std::time::Duration;

use kvist_edge::RouterProcess;
use kvist_errors::{Code, from_status};
use kvist_proto::{
    engine::v1::{Embedding, TokenIds},
    router::v1::{self as wire, prompt::Form, router_service_client::RouterServiceClient},
};
use kvist_worker::SimWorkerSettings;
use serde_json::{Value, json};
use support::{MODEL, Script, TestWorker, limited, post, read, router, send, settings, until};

const DIMENSIONS: u32 = 8;

fn embeds(tokens_per_second: f64) -> SimWorkerSettings {
    let prefill_tokens_per_second = tokens_per_second;
    SimWorkerSettings { embedding_dimensions: DIMENSIONS, prefill_tokens_per_second, ..SimWorkerSettings::default() }
}

async fn ask(router: &RouterProcess, body: Value) -> support::Answer {
    read(send(router.addresses().http_address, post("/v1/embeddings", &body)).await).await
}

async fn embed(router: &RouterProcess, input: Value) -> (Vec<Value>, u64) {
    let answer = ask(router, json!({"model": MODEL, "input": input})).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    let body = answer.json();
    let data = body["data"].as_array().unwrap();
    let indices: Vec<u64> = data.iter().map(|one| one["index"].as_u64().unwrap()).collect();
    assert_eq!((0..data.len() as u64).collect::<Vec<_>>(), indices);
    (data.iter().map(|one| one["embedding"].clone()).collect(), body["usage"]["prompt_tokens"].as_u64().unwrap())
}

async fn client(router: &RouterProcess) -> RouterServiceClient<tonic::transport::Channel> {
    let endpoint =
        tonic::transport::Endpoint::from_shared(format!("http://{}", router.addresses().grpc_address)).unwrap();
    RouterServiceClient::new(limited(endpoint.connect()).await.unwrap())
}

fn prompt(form: Form) -> wire::Prompt {
    wire::Prompt { form: Some(form) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_and_tokens_are_embedded_alike_over_both_doors() {
    let worker = TestWorker::start_sim(0, embeds(1e9)).await;
    let router = router(settings(), &[&worker]).await;
    // Digits, so that each byte is a token of the simulated model.
    let (by_text, tokens) = embed(&router, json!("123")).await;
    assert_eq!((1, 3, DIMENSIONS as usize), (by_text.len(), tokens, by_text[0].as_array().unwrap().len()));
    let (by_ids, _) = embed(&router, json!([49, 50, 51])).await;
    assert_eq!(by_text, by_ids);
    let (several, tokens) = embed(&router, json!(["123", "45678", "123"])).await;
    assert_eq!((3, 11), (several.len(), tokens));
    assert!(several[0] == by_text[0] && several[2] == by_text[0] && several[1] != by_text[0]);
    let (lists, _) = embed(&router, json!([[49, 50, 51], [1]])).await;
    assert_eq!(by_text[0], lists[0]);

    let base64 = ask(&router, json!({"model": MODEL, "input": "123", "encoding_format": "base64"})).await;
    assert!(base64.headers.contains_key("x-request-id"));
    // Four bytes a number, four characters for three bytes.
    assert_eq!(44, base64.json()["data"][0]["embedding"].as_str().unwrap().len());

    let mut client = client(&router).await;
    let inputs = vec![prompt(Form::Text("123".to_owned())), prompt(Form::Tokens(TokenIds { ids: vec![49, 50, 51] }))];
    let request = wire::EmbedRequest { model: MODEL.to_owned(), inputs, request_id: "mine".to_owned() };
    let response = limited(client.embed(request)).await.unwrap();
    assert_eq!("r1-mine", response.metadata().get("x-request-id").unwrap());
    let embeddings: Vec<Embedding> = response.into_inner().embeddings;
    assert_eq!((2, 3), (embeddings.len(), embeddings[0].prompt_tokens));
    #[expect(clippy::cast_possible_truncation, reason = "they were single precision before")]
    let over_http: Vec<f32> =
        by_text[0].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect();
    assert_eq!((&over_http, &over_http), (&embeddings[0].values, &embeddings[1].values));
    assert_eq!((0, 0), (router.status().active_requests, router.status().reservations));
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_does_one_thing_and_says_which() {
    let worker = TestWorker::start_sim(0, embeds(1e9)).await;
    let embedding = router(settings(), &[&worker]).await;
    let refused =
        read(send(embedding.addresses().http_address, post("/v1/chat/completions", &support::chat(json!({})))).await)
            .await;
    assert_eq!((400, json!("model")), (refused.status, refused.json()["error"]["param"].clone()), "{}", refused.body);
    assert!(refused.body.contains("generate no text"), "{}", refused.body);
    embedding.stop().await;

    let worker = TestWorker::start(1, Script::Answer("hi")).await;
    let generating = router(settings(), &[&worker]).await;
    let refused = ask(&generating, json!({"model": MODEL, "input": "123"})).await;
    assert_eq!((400, json!("model")), (refused.status, refused.json()["error"]["param"].clone()), "{}", refused.body);
    assert!(refused.body.contains("make no embeddings"), "{}", refused.body);
    let inputs = vec![prompt(Form::Text("123".to_owned()))];
    let request = wire::EmbedRequest { model: MODEL.to_owned(), inputs, ..wire::EmbedRequest::default() };
    let status = limited(client(&generating).await.embed(request)).await.unwrap_err();
    assert_eq!((tonic::Code::InvalidArgument, Code::UnsupportedField), (status.code(), from_status(&status).code));
    generating.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_an_input_is_named() {
    let worker = TestWorker::start_sim(0, SimWorkerSettings { context_tokens: 16, ..embeds(1e9) }).await;
    let router = router(settings(), &[&worker]).await;
    // An input may fill the context: nothing is generated behind it.
    assert_eq!(16, embed(&router, json!("sixteen letters.")).await.1);
    for (input, code, param) in [
        (json!("seventeen letters"), "context_length_exceeded", Value::Null),
        (json!([[1], [2, 9_999_999]]), "invalid_argument", json!("input[1][1]")),
        (json!(["a", ""]), "invalid_argument", json!("input[1]")),
    ] {
        let answer = ask(&router, json!({"model": MODEL, "input": input})).await;
        let error = answer.json()["error"].clone();
        assert_eq!(
            (400, json!(code), param),
            (answer.status, error["code"].clone(), error["param"].clone()),
            "{error}"
        );
    }
    let answer = ask(&router, json!({"model": "nothing", "input": "a"})).await;
    assert_eq!((404, json!("model_not_found")), (answer.status, answer.json()["error"]["code"].clone()));
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_request_spreads_keeps_its_order_and_survives_a_lost_engine() {
    // Slow enough that the request is under way when the worker dies.
    let mut workers = [TestWorker::start_sim(0, embeds(300.0)).await, TestWorker::start_sim(1, embeds(300.0)).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let texts: Vec<String> = (0..150).map(|number| format!("{number:04}")).collect();
    let body = json!({"model": MODEL, "input": texts});
    let asking = tokio::spawn(send(router.addresses().http_address, post("/v1/embeddings", &body)));
    until("both workers have a part", || router.status().reservations >= 2).await;
    workers[0].kill();
    let answer = read(limited(asking).await.unwrap()).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    let answer = answer.json();
    let data = answer["data"].as_array().unwrap();
    assert_eq!((150, 600), (data.len(), answer["usage"]["prompt_tokens"].as_u64().unwrap()));
    for number in [0, 31, 32, 149] {
        let (alone, _) = embed(&router, json!(texts[number])).await;
        assert_eq!(alone[0], data[number]["embedding"], "{number}");
    }
    assert_eq!(0, router.status().reservations);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_everything() {
    let worker = TestWorker::start_sim(0, embeds(1.0)).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let asking = tokio::spawn(async move {
        send(address, post("/v1/embeddings", &json!({"model": MODEL, "input": "a long wait"}))).await
    });
    until("it is placed", || router.status().reservations == 1).await;
    asking.abort();
    until("nothing is left", || router.status().reservations == 0 && router.status().active_requests == 0).await;
    let limit = json!({"model": MODEL, "input": "a long wait"});
    let mut request = post("/v1/embeddings", &limit);
    request.headers_mut().insert("x-request-timeout-ms", "50".parse().unwrap());
    let late = read(send(address, request).await).await;
    assert_eq!((504, json!("deadline_exceeded")), (late.status, late.json()["error"]["code"].clone()), "{}", late.body);
    assert!(router.drain(Duration::from_secs(5)).await);
    router.stop().await;
}
