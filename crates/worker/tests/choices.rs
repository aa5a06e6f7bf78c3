//! Several choices from an engine that makes one of each request.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_link::{LinkSettings, LinkState, RequestEvent, RequestStream, WorkerLink};
use kvist_proto::{
    engine::v1::{
        AbortReason, EngineRequest, FinishReason, Finished, SamplingParameters, TokenIds, engine_request::Prompt,
    },
    events::v1::Receipt,
};
use kvist_worker::{Engine, EngineDescription, EngineHost, RequestSink, WorkerServer, WorkerSettings};
use parking_lot::Mutex;

const PATIENCE: Duration = Duration::from_secs(20);

/// Holds what it is given until the test says what becomes of it.
#[derive(Default)]
struct Held {
    sinks: Mutex<BTreeMap<String, RequestSink>>,
    seeds: Mutex<Vec<Option<i64>>>,
    aborted: Mutex<Vec<String>>,
}

impl Held {
    fn take(&self, id: &str) -> RequestSink {
        self.sinks.lock().remove(id).unwrap()
    }

    fn say(&self, id: &str, token: u32, cached: u32) {
        self.sinks.lock()[id].tokens(vec![token], vec![], Some(cached));
    }
}

impl Engine for Held {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        Ok(EngineDescription { block_size_tokens: 4, ..EngineDescription::default() })
    }

    fn start(&self, _: EngineHost) -> Result<(), KvistError> {
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let sampling = request.sampling.unwrap();
        assert_eq!((None, sink.request_id()), (sampling.choices, request.request_id.as_str()));
        self.seeds.lock().push(sampling.seed);
        self.sinks.lock().insert(request.request_id, sink);
    }

    fn abort(&self, id: &str, _: AbortReason) {
        self.aborted.lock().push(id.to_owned());
        let sink = self.sinks.lock().remove(id);
        if let Some(sink) = sink {
            sink.finished(end(FinishReason::Aborted, 0));
        }
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        Ok(0)
    }

    fn close(&self) {}
}

fn end(reason: FinishReason, completion_tokens: u32) -> Finished {
    let receipt = Receipt { prompt_tokens: 2, completion_tokens, cached_tokens: 1, ..Receipt::default() };
    Finished { reason: reason.into(), receipt: Some(receipt), ..Finished::default() }
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("not in time")
}

async fn until(holds: impl Fn() -> bool) {
    in_time(async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

async fn ask(choices: u32) -> (Arc<Held>, WorkerServer, RequestStream) {
    let engine = Arc::new(Held::default());
    let server = WorkerServer::start(WorkerSettings::default(), Arc::clone(&engine) as Arc<dyn Engine>).await.unwrap();
    let link = WorkerLink::connect(&server.addresses().grpc_address, LinkSettings::new("r")).unwrap();
    in_time(link.watch_state().wait_for(|state| *state == LinkState::Connected)).await.unwrap();
    let stream = link.start(EngineRequest {
        request_id: "r".to_owned(),
        prompt: Some(Prompt::Tokens(TokenIds { ids: vec![1, 2] })),
        sampling: Some(SamplingParameters { choices: Some(choices), seed: Some(40), ..SamplingParameters::default() }),
        ..EngineRequest::default()
    });
    until(|| engine.sinks.lock().len() == choices as usize).await;
    (engine, server, stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_are_told_apart_and_end_together() {
    let (engine, server, mut stream) = ask(3).await;
    assert_eq!(vec![Some(40), Some(41), Some(42)], *engine.seeds.lock());
    for (index, id) in (0..).zip(["r#0", "r#1", "r#2"]) {
        engine.say(id, 7 + index, 1);
    }
    engine.take("r#2").finished(end(FinishReason::Length, 1));
    engine.take("r#0").finished(end(FinishReason::Stop, 1));
    let mut seen = BTreeMap::new();
    while seen.len() < 3 {
        let Some(RequestEvent::Delta(delta)) = in_time(stream.next()).await else { panic!("expected tokens") };
        assert_eq!(delta.index == 0, delta.cached_tokens.is_some());
        seen.insert(delta.index, delta.token_ids);
    }
    assert_eq!(BTreeMap::from([(0, vec![7]), (1, vec![8]), (2, vec![9])]), seen);
    engine.take("r#1").finished(end(FinishReason::Length, 5));
    let Some(RequestEvent::Finished(finished)) = in_time(stream.next()).await else { panic!("expected an end") };
    assert_eq!(FinishReason::Stop, finished.reason());
    assert_eq!(vec![FinishReason::Length; 2], finished.choice_reasons().collect::<Vec<_>>());
    let receipt = finished.receipt.unwrap();
    assert_eq!((2, 1, 7), (receipt.prompt_tokens, receipt.cached_tokens, receipt.completion_tokens));
    assert!(engine.aborted.lock().is_empty());
    in_time(server.stop()).await;
}

/// F-63.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_fails_ends_all_of_them() {
    for is_dropped in [false, true] {
        let (engine, server, mut stream) = ask(3).await;
        engine.say("r#0", 7, 0);
        engine.take("r#2").finished(end(FinishReason::Stop, 1));
        let failing = engine.take("r#1");
        if is_dropped {
            drop(failing);
        } else {
            failing.failed(&KvistError::new(Code::EngineFailed, "one").before_start());
        }
        let Some(RequestEvent::Delta(_)) = in_time(stream.next()).await else { panic!("expected tokens") };
        let Some(RequestEvent::Failed(error)) = in_time(stream.next()).await else { panic!("expected a failure") };
        // Another choice has begun, so nobody may start the request again.
        assert_eq!((Code::EngineFailed, false), (error.code, error.not_started));
        assert!(in_time(stream.next()).await.is_none());
        until(|| engine.sinks.lock().is_empty()).await;
        assert!(engine.aborted.lock().contains(&"r#0".to_owned()));
        in_time(server.stop()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_leaves_ends_all_of_them() {
    let (engine, server, stream) = ask(4).await;
    drop(stream);
    until(|| engine.sinks.lock().is_empty()).await;
    assert_eq!(4, engine.aborted.lock().len());
    in_time(server.stop()).await;
}
