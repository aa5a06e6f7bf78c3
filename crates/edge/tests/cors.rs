//! What a browser is told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use bytes::Bytes;
use http_body_util::Full;
use kvist_errors::Code;
use kvist_router::RouterSettings;
use serde_json::json;
use support::{Script, TestWorker, chat, get, post, read, router, send, settings};

const PAGE: &str = "https://chat.example.com";

fn from_page(mut request: http::Request<Full<Bytes>>) -> http::Request<Full<Bytes>> {
    request.headers_mut().insert("origin", PAGE.parse().unwrap());
    request
}

fn preflight() -> http::Request<Full<Bytes>> {
    let mut request = from_page(get("/v1/chat/completions"));
    *request.method_mut() = http::Method::OPTIONS;
    let headers = request.headers_mut();
    headers.insert("access-control-request-method", "POST".parse().unwrap());
    headers.insert("access-control-request-headers", "authorization,x-stainless-os".parse().unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_page_may_ask_and_read_refusals_too() {
    let worker = TestWorker::start(0, Script::Answer("hi")).await;
    let allowing = RouterSettings { cors_allowed_origins: vec![PAGE.to_owned()], ..settings() };
    let router = router(allowing, &[&worker]).await;
    let address = router.addresses().http_address;
    let told = read(send(address, preflight()).await).await;
    assert_eq!((204, PAGE), (told.status, told.headers["access-control-allow-origin"].to_str().unwrap()));
    assert_eq!("authorization,x-stainless-os", told.headers["access-control-allow-headers"]);
    for (body, status) in [(chat(json!({})), 200), (chat(json!({"stream": true})), 200), (json!({"model": "m"}), 400)] {
        let answer = read(send(address, from_page(post("/v1/chat/completions", &body))).await).await;
        assert_eq!((status, PAGE), (answer.status, answer.headers["access-control-allow-origin"].to_str().unwrap()));
        let readable = answer.headers["access-control-expose-headers"].to_str().unwrap();
        assert!(readable.contains("x-request-id") && answer.headers["vary"] == "origin", "{:?}", answer.headers);
        assert!(answer.headers.keys().all(|name| !name.as_str().starts_with("x-ratelimit")), "nobody has limits yet");
    }
    let mut other = post("/v1/chat/completions", &chat(json!({})));
    other.headers_mut().insert("origin", "https://other.example.com".parse().unwrap());
    assert!(!read(send(address, other).await).await.headers.contains_key("access-control-allow-origin"));
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_setting_no_page_may() {
    let worker = TestWorker::start(0, Script::Answer("hi")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    assert_eq!(404, read(send(address, preflight()).await).await.status);
    let answer = read(send(address, from_page(post("/v1/chat/completions", &chat(json!({}))))).await).await;
    assert!(answer.status == 200 && !answer.headers.contains_key("access-control-allow-origin"));
    router.stop().await;
    let wrong = RouterSettings { cors_allowed_origins: vec!["chat.example.com".to_owned()], ..settings() };
    let error = kvist_edge::RouterProcess::start(wrong).await.unwrap_err();
    assert_eq!((Code::InvalidArgument, "cors_allowed_origins[0]"), (error.code, error.fields[0].field.as_str()));
}
