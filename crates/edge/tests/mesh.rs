//! The whole way of a request in one process: HTTP edge, router, link, worker, simulated engine, over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use kvist_edge::{RouterProcess, RouterProcessSettings};
use kvist_proto::{
    controller::v1::{ClusterState, ClusterVersion, Model, WorkerEntry},
    router::v1::{
        ExplainRequest, ListSourcesRequest, Target, explain_request::Subject,
        router_service_client::RouterServiceClient,
    },
};
use kvist_router::RouterSettings;
use kvist_worker::{SimWorkerEngine, SimWorkerSettings, WorkerServer, WorkerSettings};
use prost::Message as _;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(30);

struct Mesh {
    router: RouterProcess,
    workers: Vec<Option<WorkerServer>>,
    state: ClusterState,
}

/// Asks until the answer is there; fails the test when it never is.
async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(tokio::time::Instant::now() < deadline, "never came true: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl Mesh {
    async fn start(workers: usize, sim: SimWorkerSettings) -> Self {
        let mut router_settings = RouterSettings::new("r");
        router_settings.default_deadline = Duration::from_secs(60);
        let router = RouterProcess::start(RouterProcessSettings {
            router: router_settings,
            http_listen: "127.0.0.1:0".to_owned(),
            grpc_listen: "127.0.0.1:0".to_owned(),
            body_limit_bytes: 1 << 20,
        })
        .await
        .unwrap();
        let mut mesh = Self {
            router,
            workers: Vec::new(),
            state: ClusterState {
                version: Some(ClusterVersion { store_epoch: 1, revision: 1 }),
                cluster: "test".to_owned(),
                hash_seed: 5,
                models: vec![Model { name: "sim".to_owned(), uid: "m-1".to_owned(), ..Model::default() }],
                ..ClusterState::default()
            },
        };
        for number in 0..workers {
            let settings = WorkerSettings {
                worker_uid: format!("w-{number}"),
                model: "sim".to_owned(),
                hash_seed: 5,
                ..WorkerSettings::default()
            };
            let worker = WorkerServer::start(settings, Arc::new(SimWorkerEngine::new(sim.clone()))).await.unwrap();
            mesh.state.workers.push(WorkerEntry {
                target: Some(Target {
                    worker_uid: format!("w-{number}"),
                    address: worker.addresses().grpc_address.clone(),
                    ..Target::default()
                }),
                model: "sim".to_owned(),
                incarnation: worker.addresses().incarnation,
                ranks: 1,
                block_size_tokens: sim.block_size_tokens,
                ..WorkerEntry::default()
            });
            mesh.workers.push(Some(worker));
        }
        assert!(mesh.router.core().apply_cluster_state(&mesh.state.encode_to_vec()).unwrap());
        assert!(!mesh.router.core().apply_cluster_state(&mesh.state.encode_to_vec()).unwrap());
        eventually("a first answer", || async {
            let (status, _) =
                mesh.post("/v1/completions", json!({"model": "sim", "prompt": "x", "max_tokens": 1})).await;
            (status == 200).then_some(())
        })
        .await;
        eventually("all sources exact", || async {
            let sources = mesh.grpc().list_sources(ListSourcesRequest {}).await.unwrap().into_inner().sources;
            (sources.len() == workers && sources.iter().all(|source| source.state == 1)).then_some(())
        })
        .await;
        mesh
    }

    fn grpc(&self) -> RouterServiceClient<tonic::transport::Channel> {
        let endpoint = format!("http://{}", self.router.addresses().grpc);
        RouterServiceClient::new(tonic::transport::Endpoint::from_shared(endpoint).unwrap().connect_lazy())
    }

    async fn open(&self, path: &str, body: Value) -> axum::http::Response<hyper::body::Incoming> {
        let request = axum::http::Request::post(format!("http://{}{path}", self.router.addresses().http))
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        Client::builder(TokioExecutor::new()).build_http::<Body>().request(request).await.unwrap()
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Bytes) {
        let response = tokio::time::timeout(LIMIT, self.open(path, body)).await.unwrap();
        let status = response.status().as_u16();
        (status, tokio::time::timeout(LIMIT, response.into_body().collect()).await.unwrap().unwrap().to_bytes())
    }

    async fn chat(&self, text: &str, more: Value) -> Value {
        let mut body = json!({"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": text}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = self.post("/v1/chat/completions", body).await;
        assert_eq!(200, status, "{}", String::from_utf8_lossy(&answer));
        serde_json::from_slice(&answer).unwrap()
    }

    async fn no_reservations(&self) {
        eventually("no reservation is open", || async { (self.router.core().open_reservations() == 0).then_some(()) })
            .await;
    }
}

fn slow() -> SimWorkerSettings {
    SimWorkerSettings { decode_step_microseconds: 20_000, ..SimWorkerSettings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_time_a_prompt_goes_where_its_cache_is() {
    let mesh = Mesh::start(3, SimWorkerSettings::default()).await;
    let text = "a long prompt ".repeat(40);
    let first = mesh.chat(&text, json!({})).await;
    assert_eq!(0, first["usage"]["prompt_tokens_details"]["cached_tokens"]);
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let expected = (prompt_tokens - 1) / 32 * 32;
    // The ledger's statement travels beside the answer; a moment later every index has it.
    for _ in 0..5 {
        let cached = eventually("the index knows the blocks", || async {
            let again = mesh.chat(&text, json!({})).await;
            let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            (cached > 0).then_some((cached, again))
        })
        .await;
        assert_eq!(expected, cached.0);
        assert_eq!(first["choices"][0]["message"], cached.1["choices"][0]["message"]);
        let id = cached.1["id"].as_str().unwrap().to_owned();
        let explained = mesh.grpc().explain(ExplainRequest { subject: Some(Subject::RequestId(id)) }).await.unwrap();
        let decision = explained.into_inner().decisions.remove(0);
        assert_eq!((3, "length"), (decision.candidates.len(), decision.outcome.as_str()));
        let chosen = &decision.candidates[decision.chosen_candidate.unwrap() as usize];
        assert_eq!(expected, u64::from(chosen.matches[0].blocks) * 32);
        assert_eq!(expected, u64::from(decision.receipt.unwrap().cached_tokens));
    }
    mesh.no_reservations().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_and_whole_answers_are_equal() {
    let mesh = Mesh::start(1, SimWorkerSettings::default()).await;
    let whole = mesh.chat("hello", json!({"max_tokens": 40})).await;
    let body = json!({"model": "sim", "max_tokens": 40, "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": "hello"}]});
    let (status, bytes) = mesh.post("/v1/chat/completions", body).await;
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert_eq!(200, status);
    let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!(Some("data: [DONE]"), events.pop());
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(&event[6..]).unwrap()).collect();
    let streamed: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], streamed);
    assert_eq!(40, events.last().unwrap()["usage"]["completion_tokens"]);
    // A stop string ends the text before it.
    let stop: String = streamed.chars().skip(10).take(3).collect();
    let stopped = mesh.chat("hello", json!({"max_tokens": 40, "stop": stop})).await;
    let expected = &streamed[..streamed.find(&stop).unwrap()];
    assert_eq!(
        (expected, "stop"),
        (
            stopped["choices"][0]["message"]["content"].as_str().unwrap(),
            stopped["choices"][0]["finish_reason"].as_str().unwrap()
        )
    );
    mesh.no_reservations().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_worker_ends_a_begun_stream_with_an_error_and_spares_what_had_no_token() {
    let mut mesh = Mesh::start(2, slow()).await;
    let body =
        json!({"model": "sim", "max_tokens": 5000, "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let mut response = mesh.open("/v1/chat/completions", body).await.into_body();
    let mut seen = String::new();
    while !seen.contains("\"content\":\"") || seen.matches("data:").count() < 4 {
        let frame = tokio::time::timeout(LIMIT, response.frame()).await.unwrap().unwrap().unwrap();
        seen.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    // Which worker it runs on is known by its load; that one dies without a word.
    let busy = eventually("one worker is busy", || async {
        let targets =
            mesh.grpc().list_targets(kvist_proto::router::v1::ListTargetsRequest {}).await.unwrap().into_inner();
        targets.targets.iter().position(|target| target.reservations > 0)
    })
    .await;
    let worker = mesh.workers[busy].take().unwrap();
    worker.stop().await;
    let rest = tokio::time::timeout(LIMIT, response.collect()).await.unwrap().unwrap().to_bytes();
    let rest = String::from_utf8(rest.to_vec()).unwrap();
    assert!(rest.contains("\"error\""), "{rest}");
    assert!(!rest.contains("[DONE]") && !rest.contains("finish_reason\":\"stop\""), "{rest}");
    // The other serves on.
    mesh.chat("still there?", json!({})).await;
    mesh.no_reservations().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_stops_the_engine() {
    let mesh = Mesh::start(1, slow()).await;
    let body =
        json!({"model": "sim", "max_tokens": 5000, "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let mut response = mesh.open("/v1/chat/completions", body).await.into_body();
    tokio::time::timeout(LIMIT, response.frame()).await.unwrap().unwrap().unwrap();
    drop(response);
    mesh.no_reservations().await;
    eventually("the engine is idle", || async {
        let targets =
            mesh.grpc().list_targets(kvist_proto::router::v1::ListTargetsRequest {}).await.unwrap().into_inner();
        let load = targets.targets[0].load?;
        (load.running_requests == 0 && load.generated_tokens_total < 4000).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_said_alike_over_http_and_grpc() {
    let mesh = Mesh::start(1, SimWorkerSettings::default()).await;
    for (body, status, code) in [
        (json!({"model": "no", "prompt": "x"}), 404, "model_not_found"),
        (json!({"model": "sim", "prompt": "x", "temperature": 9}), 400, "invalid_argument"),
        (json!({"model": "sim", "prompt": "x", "nonsense": 1}), 400, "unsupported_parameter"),
        (json!({"model": "sim", "prompt": "x", "max_tokens": 900_000}), 400, "context_length_exceeded"),
    ] {
        let (found, answer) = mesh.post("/v1/completions", body).await;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!((status, code), (found, answer["error"]["code"].as_str().unwrap()));
    }
    let request = kvist_proto::router::v1::GenerateRequest { model: "no".to_owned(), ..Default::default() };
    let error = kvist_errors::from_status(&mesh.grpc().generate(request).await.unwrap_err());
    assert_eq!(("UNKNOWN_MODEL", "model"), (error.code.name(), error.fields[0].field.as_str()));
}
