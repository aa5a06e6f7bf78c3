//! A worker with the simulated engine, over loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_blocks::{BlockHash, HashSeed, Namespace, block_hashes};
use kvist_errors::{Code, from_status};
use kvist_link::{LinkSettings, LinkState, RequestEvent, RequestStream, WorkerLink};
use kvist_proto::{
    engine::v1::{
        engine_request::Prompt, engine_service_client::EngineServiceClient, generate_response,
        watch_kv_events_response::Part, *,
    },
    events::v1::{KvEventBatch, kv_event},
};
use kvist_worker::{SimWorkerEngine, WorkerServer, WorkerSettings};
use tonic::{Streaming, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

const PATIENCE: Duration = Duration::from_secs(20);

fn settings(sim: serde_json::Value) -> WorkerSettings {
    let json = serde_json::json!({
        "worker_uid": "w-1", "model": "m", "pool_revision": "r1", "hash_seed": 9, "digest_interval_ms": 50, "sim": sim,
    });
    WorkerSettings::from_json(&json.to_string()).unwrap()
}

fn quick() -> serde_json::Value {
    serde_json::json!({
        "block_size_tokens": 4, "blocks": 40_000, "prefill_tokens_per_second": 1e9, "decode_step_ms": 0.1,
        "decode_step_per_request_ms": 0.0,
    })
}

async fn start(settings: WorkerSettings) -> (WorkerServer, WorkerLink) {
    let engine = Arc::new(SimWorkerEngine::new(settings.sim.clone()));
    let server = WorkerServer::start(settings, engine).await.unwrap();
    let link = WorkerLink::connect(&server.addresses().grpc_address, LinkSettings::new("r")).unwrap();
    let mut states = link.watch_state();
    in_time(states.wait_for(|state| *state == LinkState::Connected)).await.unwrap();
    (server, link)
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("not in time")
}

fn request(request_id: &str, prompt: &[u32], max_tokens: u32) -> EngineRequest {
    EngineRequest {
        request_id: request_id.to_owned(),
        prompt: Some(Prompt::Tokens(TokenIds { ids: prompt.to_vec() })),
        stop: Some(StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() }),
        ..EngineRequest::default()
    }
}

async fn read(stream: &mut RequestStream) -> (Vec<u32>, RequestEvent) {
    let mut tokens = Vec::new();
    loop {
        match in_time(stream.next()).await.expect("a terminal event") {
            RequestEvent::Delta(delta) => tokens.extend(delta.token_ids),
            terminal => return (tokens, terminal),
        }
    }
}

async fn finished(stream: &mut RequestStream) -> (Vec<u32>, Finished) {
    match read(stream).await {
        (tokens, RequestEvent::Finished(finished)) => (tokens, finished),
        (_, other) => panic!("expected an end, got {other:?}"),
    }
}

async fn failure(stream: &mut RequestStream) -> kvist_errors::KvistError {
    match read(stream).await {
        (_, RequestEvent::Failed(error)) => error,
        (_, other) => panic!("expected a failure, got {other:?}"),
    }
}

async fn channel(server: &WorkerServer) -> Channel {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", server.addresses().grpc_address));
    endpoint.unwrap().connect().await.unwrap()
}

/// The error that ends a stream.
async fn end_of<T>(stream: &mut Streaming<T>) -> Code {
    loop {
        match in_time(stream.message()).await {
            Ok(part) => assert!(part.is_some(), "the stream ended as if it were complete"),
            Err(status) => return from_status(&status).code,
        }
    }
}

async fn metrics(server: &WorkerServer) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(&server.addresses().admin_address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    in_time(stream.read_to_string(&mut text)).await.unwrap();
    text
}

/// What a reader of events knows: the same rules as an index has.
#[derive(Default)]
struct Reader {
    held: BTreeSet<u64>,
    next_sequence: Option<u64>,
    snapshots: usize,
    digests: usize,
}

impl Reader {
    fn apply(&mut self, batch: &KvEventBatch) {
        assert_eq!(self.next_sequence.unwrap_or(0), batch.sequence, "no gap and no repetition");
        self.next_sequence = Some(batch.sequence + 1);
        for event in &batch.events {
            match event.event.as_ref().unwrap() {
                kv_event::Event::Stored(stored) => self.held.extend(&stored.block_hashes),
                kv_event::Event::Removed(removed) => {
                    removed.block_hashes.iter().for_each(|hash| assert!(self.held.remove(hash)));
                }
                kv_event::Event::Cleared(_) => self.held.clear(),
            }
        }
    }

    /// Takes a part; true when the part is `caught_up`.
    fn take(&mut self, part: Part) -> bool {
        match part {
            Part::Batch(batch) => self.apply(&batch),
            Part::Snapshot(chunk) => {
                if chunk.first {
                    self.held.clear();
                    self.snapshots += 1;
                }
                self.held.extend(chunk.blocks.iter().flat_map(|blocks| &blocks.block_hashes));
                self.next_sequence = Some(chunk.next_sequence);
            }
            Part::Digest(digest) => {
                self.digests += 1;
                assert_eq!(self.next_sequence.unwrap_or(0), digest.next_sequence);
                let mut own = kvist_blocks::Digest::default();
                self.held.iter().for_each(|hash| own.add(BlockHash(*hash)));
                let told: Vec<_> = digest.tiers.iter().map(|tier| (tier.block_count, tier.digest.to_vec())).collect();
                if !told.is_empty() {
                    assert_eq!(vec![(self.held.len() as u64, own.to_be_bytes().to_vec())], told);
                }
            }
            Part::CaughtUp(caught_up) => {
                assert_eq!(self.next_sequence.unwrap_or(0), caught_up.next_sequence);
                return true;
            }
        }
        false
    }

    async fn read_until(
        &mut self,
        parts: &mut Streaming<WatchKvEventsResponse>,
        mut enough: impl FnMut(&Self, bool) -> bool,
    ) {
        loop {
            let part = in_time(parts.message()).await.unwrap().expect("the stream goes on").part.unwrap();
            let caught_up = self.take(part);
            if enough(self, caught_up) {
                return;
            }
        }
    }
}

fn watch(resume: Option<(u64, Option<u64>)>, follow: bool) -> WatchKvEventsRequest {
    let resume = resume.map(|(incarnation, sequence)| ResumePosition { rank: 0, incarnation, sequence });
    WatchKvEventsRequest { resume_after: resume.into_iter().collect(), follow, ranks: vec![] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_run_and_reuse_what_the_ledger_claims() {
    let (server, link) = start(settings(quick())).await;
    let prompt: Vec<u32> = (0..41).collect();
    let (tokens, first) = finished(&mut link.start(request("r-1", &prompt, 6))).await;
    assert_eq!(6, tokens.len());
    assert_eq!(FinishReason::Length, first.reason());
    let receipt = first.receipt.unwrap();
    assert_eq!(
        (41, 0, 6, Some(0), 4),
        (
            receipt.prompt_tokens,
            receipt.cached_tokens,
            receipt.completion_tokens,
            receipt.claimed_blocks,
            receipt.block_size_tokens
        )
    );
    let mut stream = link.start(request("r-2", &prompt, 6));
    let RequestEvent::Delta(delta) = in_time(stream.next()).await.unwrap() else { panic!("expected tokens") };
    assert_eq!(Some(40), delta.cached_tokens);
    let (_, second) = finished(&mut stream).await;
    let receipt = second.receipt.unwrap();
    assert_eq!((40, Some(10)), (receipt.cached_tokens, receipt.claimed_blocks));
    // Without a budget a text ends by itself.
    let (tokens, end) = finished(&mut link.start(EngineRequest { stop: None, ..request("r-4", &prompt, 1) })).await;
    assert_eq!((64, FinishReason::Stop), (tokens.len(), end.reason()));
    assert!(end.stop_token_id.is_some());
    // Another salt shares nothing.
    let salted = EngineRequest { cache_salt: "s".to_owned(), ..request("r-3", &prompt, 1) };
    assert_eq!(0, finished(&mut link.start(salted)).await.1.receipt.unwrap().cached_tokens);
    // The description says how a router finds the same hashes.
    let worker = link.description().unwrap();
    assert_eq!(
        ("w-1", "m", "m", 9, 4),
        (
            worker.worker_uid.as_str(),
            worker.model.as_str(),
            worker.namespace.as_str(),
            worker.hash_seed,
            worker.block_size_tokens
        )
    );
    assert_eq!(server.addresses().incarnation, worker.incarnation);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_load_never_breaks_the_ledgers_promise_and_readers_agree_with_it() {
    let mut sim = quick();
    sim["blocks"] = 60.into();
    sim["max_running"] = 4.into();
    let mut settings = settings(sim);
    settings.ring_batches = 8;
    let (server, link) = start(settings).await;
    let mut follower = Reader::default();
    let mut parts = link.client().watch_kv_events(watch(None, true)).await.unwrap().into_inner();
    follower.read_until(&mut parts, |_, caught_up| caught_up).await;
    assert_eq!((1, 1), (follower.snapshots, follower.digests));
    let mut streams = Vec::new();
    let mut random = 1u64;
    let mut next = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % bound
    };
    for id in 0..200 {
        // Few beginnings, so that prompts share them; long ones, so that blocks are evicted.
        let seed = u32::try_from(next(6)).unwrap();
        let length = u32::try_from(5 + next(60)).unwrap();
        let prompt: Vec<u32> = (0..length).map(|at| seed * 100 + at).collect();
        streams.push(link.start(request(&format!("r-{id}"), &prompt, u32::try_from(1 + next(12)).unwrap())));
        if next(10) == 0 {
            drop(streams.swap_remove(0));
        }
    }
    for stream in &mut streams {
        let (_, finished) = finished(stream).await;
        let receipt = finished.receipt.unwrap();
        assert_eq!(receipt.claimed_blocks.unwrap() * 4, receipt.cached_tokens);
    }
    assert!(metrics(&server).await.contains("kvist_ledger_soundness_violations_total 0"));
    // Digests are checked as they come. What was given up may still be ending, so both readers look until they agree.
    let digests = follower.digests;
    in_time(async {
        loop {
            // One that catches up without following gets everything and then the end.
            let mut other = Reader::default();
            let mut once = link.client().watch_kv_events(watch(None, false)).await.unwrap().into_inner();
            other.read_until(&mut once, |_, caught_up| caught_up).await;
            assert!(once.message().await.unwrap().is_none());
            follower.read_until(&mut parts, |reader, _| reader.next_sequence >= other.next_sequence).await;
            if follower.next_sequence == other.next_sequence {
                assert_eq!(follower.held, other.held);
                break;
            }
        }
    })
    .await;
    follower.read_until(&mut parts, |reader, _| reader.digests > digests).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_resumes_from_the_ring_or_with_a_snapshot() {
    let (server, link) = start(settings(quick())).await;
    let incarnation = server.addresses().incarnation;
    finished(&mut link.start(request("r-1", &(0..20).collect::<Vec<_>>(), 4))).await;
    let catch_up = async |resume| {
        let mut reader = Reader::default();
        if let Some((_, Some(sequence))) = resume {
            reader.next_sequence = Some(sequence + 1);
        }
        let mut parts = link.client().watch_kv_events(watch(resume, false)).await.unwrap().into_inner();
        while let Some(part) = in_time(parts.message()).await.unwrap() {
            let part = part.part.unwrap();
            // Without the history before, digests cannot be checked.
            if reader.next_sequence == Some(1) && matches!(part, Part::Digest(_)) {
                continue;
            }
            reader.take(part);
        }
        (reader.snapshots, reader.held)
    };
    let expected: BTreeSet<u64> = {
        let root = Namespace::new("m", "", "").root(HashSeed(9));
        let (tokens, _) = finished(&mut link.start(request("r-2", &(0..20).collect::<Vec<_>>(), 4))).await;
        let all: Vec<u32> = (0..20).chain(tokens).take(23).collect();
        block_hashes(root, &all, 4).into_iter().map(|hash| hash.0).collect()
    };
    assert_eq!((1, expected.clone()), catch_up(None).await);
    assert_eq!((0, expected.clone()), catch_up(Some((incarnation, None))).await);
    assert_eq!((1, expected), catch_up(Some((incarnation - 1, Some(0)))).await);
    let wrong = WatchKvEventsRequest { ranks: vec![1], ..WatchKvEventsRequest::default() };
    let status = link.client().watch_kv_events(wrong).await.unwrap_err();
    assert_eq!(Code::InvalidArgument, from_status(&status).code);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_run_is_refused_before_it_starts() {
    let mut sim = quick();
    sim["max_running"] = 1.into();
    sim["max_waiting"] = 1.into();
    sim["decode_step_ms"] = 20.0.into();
    sim["context_tokens"] = 100.into();
    let (server, link) = start(settings(sim)).await;
    let _long = link.start(request("long", &[1], 50));
    let again = failure(&mut link.start(request("long", &[1], 1))).await;
    assert_eq!((Code::DuplicateRequest, true), (again.code, again.not_started));
    let other = EngineRequest { pool_revision: "r2".to_owned(), ..request("a", &[1], 1) };
    assert_eq!(Code::PoolRevisionMismatch, failure(&mut link.start(other)).await.code);
    let same = EngineRequest { pool_revision: "r1".to_owned(), ..request("b", &[1], 1) };
    let _waits = link.start(same);
    let full = failure(&mut link.start(request("c", &[1], 1))).await;
    assert_eq!((Code::QueueFull, true, true), (full.code, full.not_started, full.retry_after.is_some()));
    for (code, wrong) in [
        (Code::InvalidArgument, request("d", &[], 1)),
        (Code::InvalidArgument, request("", &[1], 1)),
        (Code::InvalidArgument, EngineRequest { rank: 1, ..request("d", &[1], 1) }),
        (Code::ContextLengthExceeded, request("d", &[1; 100], 1)),
        (Code::UnsupportedField, EngineRequest { adapter: "x".to_owned(), ..request("d", &[1], 1) }),
        (
            Code::InvalidArgument,
            EngineRequest { prompt: Some(Prompt::PromptReference("nowhere".to_owned())), ..request("d", &[1], 1) },
        ),
    ] {
        let error = failure(&mut link.start(wrong)).await;
        assert_eq!((code, true), (error.code, error.not_started), "{error}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_requests_at_once_the_second_is_held_against_the_first() {
    let mut sim = quick();
    sim["prefill_tokens_per_second"] = 10.0.into();
    let (server, link) = start(settings(sim)).await;
    let other = WorkerLink::connect(&server.addresses().grpc_address, LinkSettings::new("other")).unwrap();
    in_time(other.watch_state().wait_for(|state| *state == LinkState::Connected)).await.unwrap();
    let at_most = |id: &str, most| EngineRequest { most_waiting_tokens: Some(most), ..request(id, &[1; 1000], 1) };
    let first = link.start(at_most("first", 0));
    in_time(async {
        while other.load(0).is_none_or(|load| load.report.outstanding_prefill_tokens < 1000) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    let refused = failure(&mut other.start(at_most("second", 999))).await;
    assert_eq!(
        (Code::BusierThanExpected, true, true),
        (refused.code, refused.not_started, refused.code.is_retryable())
    );
    // The load that it was refused for comes with the refusal.
    assert!(other.load(0).is_some_and(|load| load.report.outstanding_prefill_tokens == 1000));
    // Both of these are at the door at once; either one is let in.
    let mut both = [(&link, "third"), (&other, "fourth")].map(|(link, id)| link.start(at_most(id, 1000)));
    let [left, right] = &mut both;
    let loser = in_time(async {
        tokio::select! {
            event = left.next() => event,
            event = right.next() => event,
        }
    })
    .await;
    assert!(matches!(loser, Some(RequestEvent::Failed(error)) if error.code == Code::BusierThanExpected));
    drop((first, both));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_aborts_and_stop_tokens_end_requests() {
    let mut sim = quick();
    sim["decode_step_ms"] = 5.0.into();
    let (server, link) = start(settings(sim)).await;
    let time_left = Some(prost_types::Duration { seconds: 0, nanos: 60_000_000 });
    let (tokens, end) = finished(&mut link.start(EngineRequest { time_left, ..request("r-1", &[1, 2], 10_000) })).await;
    assert_eq!(FinishReason::Aborted, end.reason());
    assert!(tokens.len() < 100);
    let mut stream = link.start(request("r-2", &[1, 2], 10_000));
    let RequestEvent::Delta(first) = in_time(stream.next()).await.unwrap() else { panic!("expected tokens") };
    stream.abort(AbortReason::StopString);
    assert_eq!(FinishReason::Stop, finished(&mut stream).await.1.reason());
    let mut stopped = request("r-3", &[1, 2], 100);
    stopped.stop.as_mut().unwrap().stop_token_ids = vec![first.token_ids[0]];
    let (tokens, end) = finished(&mut link.start(stopped)).await;
    assert_eq!((0, FinishReason::Stop, Some(first.token_ids[0])), (tokens.len(), end.reason(), end.stop_token_id));
    let abort = |id: &str| AbortRequest { request_id: id.to_owned(), reason: AbortReason::Cancelled.into() };
    let mut stream = link.start(request("r-4", &[1, 2], 10_000));
    in_time(stream.next()).await;
    assert!(link.client().abort(abort("r-4")).await.unwrap().into_inner().was_running);
    assert_eq!(FinishReason::Aborted, finished(&mut stream).await.1.reason());
    assert!(!link.client().abort(abort("r-4")).await.unwrap().into_inner().was_running);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generate_serves_people_and_dropping_it_aborts() {
    let (server, link) = start(settings(quick())).await;
    let mut client = EngineServiceClient::new(channel(&server).await);
    let call = |request: EngineRequest| GenerateRequest { request: Some(request) };
    let mut events = client.generate(call(request("", &[1, 2, 3], 3))).await.unwrap().into_inner();
    let (mut tokens, mut end) = (0, None);
    while let Some(event) = in_time(events.message()).await.unwrap() {
        match event.event.unwrap() {
            generate_response::Event::Delta(delta) => tokens += delta.token_ids.len(),
            generate_response::Event::Finished(finished) => end = Some(finished.reason()),
        }
    }
    assert_eq!((3, Some(FinishReason::Length)), (tokens, end));
    let mut endless = client.generate(call(request("endless", &[1], 60_000))).await.unwrap().into_inner();
    in_time(endless.message()).await.unwrap();
    let error = failure(&mut link.start(request("endless", &[1], 1))).await;
    assert_eq!(Code::DuplicateRequest, error.code);
    drop(endless);
    let started = Instant::now();
    loop {
        // Free again as soon as the abort has arrived.
        match read(&mut link.start(request("endless", &[1], 1))).await.1 {
            RequestEvent::Finished(_) => break,
            _ => assert!(started.elapsed() < PATIENCE),
        }
    }
    let status = in_time(client.generate(call(request("x", &[], 1))).await.unwrap().into_inner().message()).await;
    assert_eq!(Code::InvalidArgument, from_status(&status.unwrap_err()).code);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_lets_requests_end_and_refuses_new_ones() {
    let mut sim = quick();
    sim["decode_step_ms"] = 5.0.into();
    let (server, link) = start(settings(sim)).await;
    let mut health = HealthClient::new(channel(&server).await);
    let mut status = async |service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        health.check(request).await.unwrap().into_inner().status().as_str_name()
    };
    for service in ["", "liveness", "readiness", "kvist.engine.v1.EngineService"] {
        assert_eq!("SERVING", status(service).await, "{service}");
    }
    let (mut short, mut endless) = (link.start(request("short", &[1], 3)), link.start(request("long", &[1], 60_000)));
    in_time(short.next()).await;
    in_time(endless.next()).await;
    let drain =
        |fence| DrainRequest { time_limit: Some(prost_types::Duration { seconds: 0, nanos: 200_000_000 }), fence };
    let mut client = link.client();
    let draining = tokio::spawn(async move { client.drain(drain(5)).await.unwrap().into_inner() });
    assert_eq!(FinishReason::Length, finished(&mut short).await.1.reason());
    let refused = failure(&mut link.start(request("new", &[1], 1))).await;
    assert_eq!((Code::Draining, true), (refused.code, refused.not_started));
    assert_eq!(FinishReason::Aborted, finished(&mut endless).await.1.reason());
    let drained = in_time(draining).await.unwrap();
    assert_eq!((1, 1), (drained.finished_requests, drained.aborted_requests));
    assert!(link.is_draining());
    let stale = link.client().drain(drain(4)).await.unwrap_err();
    assert_eq!(Code::StaleFence, from_status(&stale).code);
    assert_eq!((0, 0), server.drain(Duration::ZERO).await);
    assert_eq!("NOT_SERVING", status("").await);
    assert_eq!("SERVING", status("liveness").await);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_ends_streams_with_an_error() {
    let mut sim = quick();
    sim["decode_step_ms"] = 5.0.into();
    let (server, link) = start(settings(sim)).await;
    let mut stream = link.start(request("r-1", &[1], 60_000));
    in_time(stream.next()).await;
    in_time(server.stop()).await;
    assert_eq!(Code::EngineLost, failure(&mut stream).await.code);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_worker_ends_at_once_whoever_follows_it() {
    let (server, link) = start(settings(quick())).await;
    let mut events = link.client().watch_kv_events(watch(None, true)).await.unwrap().into_inner();
    let mut loads = link.client().watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    let mut health = HealthClient::new(channel(&server).await);
    let mut health = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!("SERVING", in_time(health.message()).await.unwrap().unwrap().status().as_str_name());
    in_time(events.message()).await.unwrap().unwrap();
    in_time(loads.message()).await.unwrap().unwrap();
    let begun = Instant::now();
    server.stop().await;
    // Far below the limit for clients that do not read.
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(Code::Draining, end_of(&mut events).await);
    assert_eq!(Code::Draining, end_of(&mut loads).await);
    assert_eq!("NOT_SERVING", in_time(health.message()).await.unwrap().unwrap().status().as_str_name());
    assert!(in_time(health.message()).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_calls_answer() {
    let (server, link) = start(settings(quick())).await;
    let (header, file) = link.fetch_tokenizer("").await.unwrap();
    assert_eq!(link.description().unwrap().tokenizer_digest, header.digest);
    assert_eq!(header.size_bytes, file.len() as u64);
    assert!(link.fetch_tokenizer(&header.digest).await.unwrap().1.is_empty());
    let mut client = link.client();
    let status = client.embed(EmbedRequest::default()).await.unwrap_err();
    assert_eq!((tonic::Code::Unimplemented, Code::NotImplemented), (status.code(), from_status(&status).code));
    finished(&mut link.start(request("r-1", &(0..20).collect::<Vec<_>>(), 4))).await;
    let mut loads = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    let report = in_time(loads.message()).await.unwrap().unwrap().loads[0];
    assert_eq!(40_000, report.total_blocks);
    let mut reader = Reader::default();
    let mut parts = client.watch_kv_events(watch(None, true)).await.unwrap().into_inner();
    reader.read_until(&mut parts, |_, caught_up| caught_up).await;
    assert_eq!(5, reader.held.len());
    assert_eq!(5, client.reset_cache(ResetCacheRequest {}).await.unwrap().into_inner().removed_blocks);
    reader.read_until(&mut parts, |reader, _| reader.held.is_empty()).await;
    let all: HashMap<&str, bool> = ["kvist_worker_requests_total{outcome=\"length\"} 1", "kvist_ledger_batches_total"]
        .map(|name| (name, true))
        .into();
    let text = metrics(&server).await;
    all.keys().for_each(|name| assert!(text.contains(name), "{name} in\n{text}"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_engine_cannot_start_says_why() {
    let mut sim = quick();
    sim["max_running"] = 0.into();
    let settings = settings(sim);
    let engine = Arc::new(SimWorkerEngine::new(settings.sim.clone()));
    let error = in_time(WorkerServer::start(settings, engine)).await.unwrap_err();
    assert_eq!(Code::InvalidArgument, error.code);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_writes_down_what_it_took_and_how_it_ended() {
    let folder = std::env::temp_dir().join(format!("kvist-sim-record-{}", std::process::id()));
    let mut sim = quick();
    sim["decode_step_ms"] = 5.0.into();
    sim["record_folder"] = folder.to_str().unwrap().into();
    let (server, link) = start(settings(sim)).await;
    let file = folder.join(format!("w-1.{}.jsonl", server.addresses().incarnation));
    let mut whole = link.start(request("whole", &[1, 2, 3], 4));
    finished(&mut whole).await;
    let mut long = link.start(request("long", &[1, 2, 3], 10_000));
    let mut cut = link.start(request("cut", &[1, 2, 3], 10_000));
    // Both run.
    in_time(long.next()).await.unwrap();
    in_time(cut.next()).await.unwrap();
    drop(cut);
    let lines = || -> Vec<serde_json::Value> {
        std::fs::read_to_string(&file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let end_of = |id: &str| lines().into_iter().find(|line| line["request_id"] == id && line["event"] == "ended");
    in_time(async {
        while end_of("cut").is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    server.stop().await;
    let taken: Vec<_> =
        lines().iter().filter(|line| line["event"] == "accepted").map(|line| line["request_id"].clone()).collect();
    assert_eq!(serde_json::json!(["whole", "long", "cut"]), serde_json::json!(taken));
    assert_eq!(serde_json::json!(4), end_of("whole").unwrap()["completion_tokens"]);
    let [whole, long, cut] = ["whole", "long", "cut"].map(|id| end_of(id).unwrap()["reason"].clone());
    assert_eq!(["length", "aborted"].map(serde_json::Value::from), [whole, cut]);
    // The end of the link and that of the engine come at once.
    assert!(long == "DRAINING" || long == "aborted", "{long}");
    assert_eq!(6, lines().len());
    std::fs::remove_dir_all(&folder).unwrap();
}
