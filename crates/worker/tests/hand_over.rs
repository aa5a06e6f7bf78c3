//! Two workers with the simulated engine that divide requests between them, over loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{sync::Arc, time::Duration};

use kvist_errors::Code;
use kvist_link::{LinkSettings, LinkState, RequestEvent, RequestStream, WorkerLink};
use kvist_proto::{
    engine::v1::{engine_request::Prompt, *},
    events::v1::LoadReport,
};
use kvist_worker::{SimWorkerEngine, WorkerServer, WorkerSettings};
use prost_types::{Struct, Value, value::Kind};
use serde_json::{Value as Json, json};

const PATIENCE: Duration = Duration::from_secs(20);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("not in time")
}

struct Worker {
    _server: WorkerServer,
    link: WorkerLink,
}

impl Worker {
    async fn start(role: &str, hand_over: Json, sim: Json) -> Self {
        let mut quick = json!({
            "block_size_tokens": 4, "blocks": 100, "prefill_tokens_per_second": 1e9, "decode_step_ms": 0.1,
        });
        quick.as_object_mut().unwrap().extend(sim.as_object().unwrap().clone());
        let settings = json!({
            "worker_uid": role, "model": "m", "hash_seed": 9, "role": role, "hand_over": hand_over, "sim": quick,
        });
        let settings = WorkerSettings::from_json(&settings.to_string()).unwrap();
        let engine = Arc::new(SimWorkerEngine::of(&settings));
        let server = WorkerServer::start(settings, engine).await.unwrap();
        let mut link = LinkSettings::new("r");
        link.load_interval = Duration::from_millis(10);
        let link = WorkerLink::connect(&server.addresses().grpc_address, link).unwrap();
        let mut states = link.watch_state();
        in_time(states.wait_for(|state| *state == LinkState::Connected)).await.unwrap();
        Self { _server: server, link }
    }

    async fn load(&self, what: &str, holds: impl Fn(&LoadReport) -> bool) {
        let seen = || self.link.load(0).map(|load| load.report).unwrap_or_default();
        let waiting = async {
            while !holds(&seen()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(in_time.is_ok(), "{what}: {:?}", seen());
    }
}

fn request(id: &str, prompt: &[u32], max_tokens: u32, kv_transfer: Option<KvTransferParameters>) -> EngineRequest {
    EngineRequest {
        request_id: id.to_owned(),
        prompt: Some(Prompt::Tokens(TokenIds { ids: prompt.to_vec() })),
        stop: Some(StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() }),
        kv_transfer,
        ..EngineRequest::default()
    }
}

fn keep(lease_id: &str) -> Option<KvTransferParameters> {
    let value = Value { kind: Some(Kind::BoolValue(true)) };
    let parameters = Some(Struct { fields: [("do_remote_decode".to_owned(), value)].into() });
    Some(KvTransferParameters { connector: "sim".to_owned(), lease_id: lease_id.to_owned(), parameters })
}

async fn read(mut stream: RequestStream) -> (Vec<u32>, RequestEvent) {
    let mut tokens = Vec::new();
    loop {
        match in_time(stream.next()).await.expect("a terminal event") {
            RequestEvent::Delta(delta) => tokens.extend(delta.token_ids),
            terminal => return (tokens, terminal),
        }
    }
}

async fn finished(stream: RequestStream) -> (Vec<u32>, Finished) {
    match read(stream).await {
        (tokens, RequestEvent::Finished(finished)) => (tokens, finished),
        (_, other) => panic!("expected an end, got {other:?}"),
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..41).map(|position| 1 + seed * 100 + position).collect()
}

/// Computes a prompt whose blocks are kept; returns what the decode engine needs.
async fn prefill(worker: &Worker, prompt: &[u32], lease_id: &str) -> Option<KvTransferParameters> {
    let (_, end) = finished(worker.link.start(request("a", prompt, 1, keep(lease_id)))).await;
    assert_eq!(FinishReason::Length, end.reason());
    end.kv_transfer
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decode_engine_computes_what_was_not_sent_and_the_lease_is_over() {
    let (first, second) =
        (Worker::start("prefill", json!({}), json!({})).await, Worker::start("decode", json!({}), json!({})).await);
    let given = prefill(&first, &prompt(0), "l-1").await;
    first.load("its blocks are kept", |load| load.pinned_blocks == 10 && load.used_blocks == 10).await;
    let (tokens, end) = finished(second.link.start(request("a", &prompt(0), 6, given))).await;
    let receipt = end.receipt.unwrap();
    assert_eq!((40, 40, 6), (receipt.cached_tokens, receipt.external_tokens, receipt.completion_tokens));
    first.load("nothing is kept", |load| load.pinned_blocks == 0 && load.used_blocks == 0).await;
    second.load("what came is counted", |load| load.external_tokens_total == 40).await;
    // The text is that of an engine that does all by itself, and what was sent is in the cache.
    let (alone, end) = finished(second.link.start(request("b", &prompt(0), 6, None))).await;
    assert_eq!((tokens, 0), (alone, end.receipt.unwrap().external_tokens));
    assert_eq!(40, end.receipt.unwrap().cached_tokens);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_goes_wrong_the_prompt_is_computed_or_the_request_fails_by_policy() {
    for fault in ["refuse", "break", "stall", "wrong_blocks"] {
        let first = Worker::start("prefill", json!({"lease_ms": 400}), json!({"transfer_fault": fault})).await;
        let computing = Worker::start("decode", json!({}), json!({"transfer_timeout_ms": 100})).await;
        let failing = Worker::start("decode", json!({"on_failure": "fail"}), json!({"transfer_timeout_ms": 100})).await;
        let given = prefill(&first, &prompt(0), "l-1").await;
        let (tokens, end) = finished(computing.link.start(request("a", &prompt(0), 6, given.clone()))).await;
        assert_eq!((6, 0), (tokens.len(), end.receipt.unwrap().external_tokens), "{fault}");
        assert_eq!(0, end.receipt.unwrap().cached_tokens, "{fault}");
        computing.load("it is counted", |load| load.failed_transfers_total == 1).await;
        // The other one has ended the lease where it said that it has the blocks.
        let given = prefill(&first, &prompt(0), "l-2").await;
        let (_, end) = read(failing.link.start(request("a", &prompt(0), 6, given))).await;
        let RequestEvent::Failed(error) = end else { panic!("{fault}: {end:?}") };
        assert_eq!((Code::KvTransferFailed, true), (error.code, error.not_started), "{fault}");
        first.load("no lease outlives its time", |load| load.pinned_blocks == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_of_another_prompt_is_never_used() {
    let (first, second) =
        (Worker::start("prefill", json!({}), json!({})).await, Worker::start("decode", json!({}), json!({})).await);
    let given = prefill(&first, &prompt(0), "l-1").await;
    let (tokens, end) = finished(second.link.start(request("a", &prompt(1), 6, given))).await;
    assert_eq!((0, 0), (end.receipt.unwrap().external_tokens, end.receipt.unwrap().cached_tokens));
    let (alone, _) = finished(second.link.start(request("b", &prompt(1), 6, None))).await;
    assert_eq!(tokens, alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_ends_when_it_is_released_or_when_its_time_is_over() {
    let short = Worker::start("prefill", json!({"lease_ms": 50}), json!({})).await;
    prefill(&short, &prompt(0), "l-1").await;
    short.load("it expires", |load| load.expired_leases_total == 1 && load.pinned_blocks == 0).await;
    let long = Worker::start("prefill", json!({"lease_ms": 3_600_000}), json!({})).await;
    prefill(&long, &prompt(0), "l-1").await;
    long.load("it is kept", |load| load.pinned_blocks == 10).await;
    long.link.release("l-1".to_owned());
    long.load("it is released", |load| load.pinned_blocks == 0 && load.expired_leases_total == 0).await;
    // Released while the prompt is computed: nothing will be kept.
    let slow = Worker::start("prefill", json!({"lease_ms": 3_600_000}), json!({"decode_step_ms": 200})).await;
    let stream = slow.link.start(request("a", &prompt(0), 2, keep("l-2")));
    slow.load("it runs", |load| load.running_requests == 1).await;
    slow.link.release("l-2".to_owned());
    let (_, end) = finished(stream).await;
    assert_eq!(None, end.kv_transfer);
    slow.load("nothing is kept", |load| load.pinned_blocks == 0 && load.used_blocks == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_its_kv_can_be_ended() {
    let first = Worker::start("prefill", json!({"lease_ms": 300}), json!({"transfer_fault": "stall"})).await;
    let second = Worker::start("decode", json!({}), json!({"transfer_timeout_ms": 60_000})).await;
    let given = prefill(&first, &prompt(0), "l-1").await;
    let stream = second.link.start(request("a", &prompt(0), 6, given));
    second.load("it waits", |load| load.waiting_requests == 1).await;
    stream.abort(AbortReason::Cancelled);
    let (tokens, end) = finished(stream).await;
    assert_eq!((0, FinishReason::Aborted), (tokens.len(), end.reason()));
    let (tokens, _) = finished(second.link.start(request("b", &prompt(2), 3, None))).await;
    assert_eq!(3, tokens.len());
    first.load("nothing is kept", |load| load.pinned_blocks == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_does_what_its_role_is() {
    let (first, second) =
        (Worker::start("prefill", json!({}), json!({})).await, Worker::start("decode", json!({}), json!({})).await);
    let layout = first.link.description().unwrap().kv_layout.clone().unwrap();
    assert_eq!(("sim", 1), (layout.connector.as_str(), layout.tensor_parallel_size));
    for (worker, given) in [(&second, keep("l-1")), (&first, prefill(&first, &prompt(0), "l-2").await)] {
        let (_, end) = read(worker.link.start(request("x", &prompt(3), 2, given))).await;
        let RequestEvent::Failed(error) = end else { panic!("{end:?}") };
        assert_eq!((Code::UnsupportedField, true), (error.code, error.not_started));
    }
}
