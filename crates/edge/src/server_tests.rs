//! Connections over a transport in memory that counts writes and can be cut anywhere, before a router that plays a
//! script.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use futures::{future::BoxFuture, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::{engine::v1::FinishReason, router::v1::ModelSummary};
use kvist_router::{
    ChoiceEnd, EmbedInput, EmbedOutput, EventStream, GenerateEnd, GenerateEvent, GenerateInput, Prompt, RequestContext,
    RouterSettings, TextDelta, Tokens, Usage,
};
use kvist_telemetry::Metrics;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf},
    sync::mpsc,
};

use super::*;

const TIME_LIMIT: Duration = Duration::from_secs(20);
const CHUNK_END: &[u8] = b"0\r\n\r\n";

type Batches = mpsc::UnboundedReceiver<Vec<GenerateEvent>>;

/// A router that plays what a test sends it. Without a script it refuses.
#[derive(Default)]
struct Scripted {
    next: Mutex<Option<Batches>>,
    running: Arc<AtomicUsize>,
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Scripted {
    fn play(&self) -> mpsc::UnboundedSender<Vec<GenerateEvent>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.next.lock() = Some(receiver);
        sender
    }
}

impl Generate for Scripted {
    fn generate(&self, _: RequestContext, _: GenerateInput) -> BoxFuture<'_, Result<EventStream, KvistError>> {
        Box::pin(async {
            let batches = self.next.lock().take().ok_or_else(|| KvistError::new(Code::NoReadyTarget, "no script"))?;
            self.running.fetch_add(1, Ordering::AcqRel);
            let running = Running(Arc::clone(&self.running));
            let events = stream::unfold((batches, running), |(mut batches, running)| async {
                batches.recv().await.map(|batch| (batch, (batches, running)))
            });
            Ok(EventStream::new("test-1".into(), 1, events))
        })
    }

    fn embed(&self, _: RequestContext, _: EmbedInput) -> BoxFuture<'_, Result<EmbedOutput, KvistError>> {
        Box::pin(async { Err(KvistError::new(Code::NotImplemented, "no script")) })
    }

    fn detokenize<'a>(&'a self, _: &'a str, _: &'a [u32]) -> BoxFuture<'a, Result<String, KvistError>> {
        Box::pin(async { Ok(String::new()) })
    }

    fn tokenize<'a>(&'a self, _: &'a str, _: Prompt) -> BoxFuture<'a, Result<Tokens, KvistError>> {
        Box::pin(async { Ok(Tokens { ids: vec![1], context_tokens: 9 }) })
    }

    fn models(&self) -> BoxFuture<'_, Result<Vec<ModelSummary>, KvistError>> {
        Box::pin(async { Ok(vec![ModelSummary { name: "m".to_owned(), ..ModelSummary::default() }]) })
    }
}

/// A transport that counts the writes to the client.
struct Counted {
    inner: DuplexStream,
    writes: Arc<AtomicUsize>,
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, into)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.writes.fetch_add(1, Ordering::AcqRel);
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

struct Edge {
    scripted: Arc<Scripted>,
    routes: Arc<Routes>,
    times: ConnectionTimes,
}

impl Edge {
    fn new(body_bytes: usize) -> Self {
        let scripted = Arc::new(Scripted::default());
        let upstreams = Arc::new(Upstreams::new(&RouterSettings::default(), &Metrics::new()).unwrap());
        let answerer = Answerer::new(Arc::clone(&scripted) as Arc<dyn Generate>, upstreams, Duration::from_secs(10));
        let keys = Arc::new(ApiKeys::load(None).unwrap());
        let limits = BodyLimits { bytes: body_bytes, time: Duration::from_secs(5) };
        let routes = Arc::new(Routes::new(answerer, keys, ReadyFlag::new("testing"), limits, Cors::default()));
        let times = ConnectionTimes { head: Duration::from_secs(3), write: Duration::from_secs(30) };
        Self { scripted, routes, times }
    }

    /// A client's end, and how often the server has written to it.
    fn connect(&self) -> (DuplexStream, Arc<AtomicUsize>) {
        let (near, far) = tokio::io::duplex(1024 * 1024);
        let writes = Arc::new(AtomicUsize::new(0));
        let counted = Counted { inner: near, writes: Arc::clone(&writes) };
        tokio::spawn(serve(
            counted,
            Arc::clone(&self.routes),
            self.times,
            CancellationToken::new(),
            CancellationToken::new(),
        ));
        (far, writes)
    }

    async fn nothing_runs(&self) {
        let ended = async {
            while self.scripted.running.load(Ordering::Acquire) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TIME_LIMIT, ended).await.expect("a request is left");
    }

    /// Sends bytes and returns the whole answer; the connection is asked to close.
    async fn ask(&self, request: &[u8]) -> String {
        let (mut client, _) = self.connect();
        client.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        tokio::time::timeout(TIME_LIMIT, client.read_to_end(&mut answer)).await.unwrap().unwrap();
        String::from_utf8(answer).unwrap()
    }
}

fn post(path: &str, body: impl AsRef<[u8]>, more_headers: &str) -> Vec<u8> {
    let body = body.as_ref();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {length}\r\n{more_headers}\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn delta(index: u32, text: &str) -> GenerateEvent {
    GenerateEvent::Delta(TextDelta { index, text: text.to_owned(), ..TextDelta::default() })
}

fn finished(choices: u32) -> GenerateEvent {
    let end = |index| ChoiceEnd {
        index,
        reason: FinishReason::Stop,
        stop_string: String::new(),
        stop_token_id: None,
        complete_calls: 0,
    };
    let usage = Usage { prompt_tokens: 1, completion_tokens: 3, cached_tokens: 0, reasoning_tokens: 0 };
    GenerateEvent::Finished(GenerateEnd { choices: (0..choices).map(end).collect(), usage, receipt: None })
}

/// A streaming request of each API, what ends a good stream, and what tells of an error.
fn dialects() -> [(Vec<u8>, &'static str, &'static str); 4] {
    let messages = "\"model\":\"m\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]";
    [
        (post("/v1/chat/completions", format!("{{{messages}}}"), ""), "data: [DONE]\n\n", "data: {\"error\":{"),
        (
            post("/v1/completions", "{\"model\":\"m\",\"stream\":true,\"prompt\":\"hi\"}", ""),
            "data: [DONE]\n\n",
            "data: {\"error\":{",
        ),
        (
            post("/v1/messages", format!("{{\"max_tokens\":9,{messages}}}"), ""),
            "event: message_stop\n",
            "event: error\n",
        ),
        (
            post("/v1/responses", "{\"model\":\"m\",\"stream\":true,\"store\":false,\"input\":\"hi\"}", ""),
            "event: response.completed\n",
            "event: response.failed\n",
        ),
    ]
}

#[tokio::test]
async fn a_burst_leaves_in_one_write_and_a_lone_event_at_once() {
    let edge = Edge::new(10_000);
    let engine = edge.scripted.play();
    let (mut client, writes) = edge.connect();
    let body = "{\"model\":\"m\",\"n\":10,\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";
    client.write_all(&post("/v1/chat/completions", body, "")).await.unwrap();
    let mut text = String::new();
    engine.send(vec![delta(0, "first")]).unwrap();
    read_until(&mut client, &mut text, "first").await;

    let before = writes.load(Ordering::Acquire);
    engine.send((0..10).map(|index| delta(index, &format!("burst-{index}"))).collect()).unwrap();
    read_until(&mut client, &mut text, "burst-9").await;
    assert_eq!(1, writes.load(Ordering::Acquire) - before, "ten events in one segment are one write");

    // Nothing follows, and it is here all the same: nothing waits for a later event.
    let before = writes.load(Ordering::Acquire);
    engine.send(vec![delta(3, "alone")]).unwrap();
    read_until(&mut client, &mut text, "alone").await;
    assert_eq!(1, writes.load(Ordering::Acquire) - before);

    engine.send(vec![finished(10)]).unwrap();
    read_until(&mut client, &mut text, "[DONE]").await;
    for index in 0..10 {
        assert_eq!(1, text.matches(&format!("burst-{index}")).count());
    }
    edge.nothing_runs().await;
}

async fn read_until(client: &mut DuplexStream, text: &mut String, mark: &str) {
    let reading = async {
        while !text.contains(mark) {
            let mut bytes = [0; 4096];
            let count = client.read(&mut bytes).await.unwrap();
            assert!(count > 0, "closed before {mark}: {text}");
            text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        }
    };
    tokio::time::timeout(TIME_LIMIT, reading).await.expect("it took too long");
}

/// What an engine says, frame by frame; the last one ends it.
fn frames() -> Vec<Vec<GenerateEvent>> {
    vec![vec![delta(0, "a")], vec![], vec![delta(0, "\u{e9}"), delta(0, "\"\n")], vec![delta(0, "d"), finished(1)]]
}

#[tokio::test]
async fn a_stream_that_is_cut_at_any_frame_never_looks_finished() {
    for (request, end_mark, error_mark) in dialects() {
        for kept in 0..=frames().len() {
            for failure in [None, Some(Code::EngineLost)] {
                let edge = Edge::new(10_000);
                let engine = edge.scripted.play();
                let is_whole = kept == frames().len();
                for frame in frames().into_iter().take(kept) {
                    engine.send(frame).unwrap();
                }
                if let Some(code) = failure {
                    engine.send(vec![GenerateEvent::Failed(KvistError::new(code, "cut"))]).unwrap();
                }
                drop(engine);
                let answer = edge.ask(&request).await;
                let has_begun = answer.starts_with("HTTP/1.1 200 ");
                assert_eq!(is_whole, answer.contains(end_mark), "{kept} {failure:?} {answer}");
                if has_begun {
                    assert_eq!(!is_whole, answer.contains(error_mark), "{kept} {failure:?} {answer}");
                    let (last, _) = answer.rsplit_once(if is_whole { end_mark } else { error_mark }).unwrap();
                    assert!(!last.contains("[DONE]"), "an end mark stands last: {answer}");
                    assert!(answer.as_bytes().ends_with(CHUNK_END), "{answer}");
                } else {
                    // A failure before anything was written is an ordinary answer.
                    assert!(kept <= 1 && answer.starts_with("HTTP/1.1 5"), "{kept} {failure:?} {answer}");
                }
                edge.nothing_runs().await;
            }
        }
    }
}

/// Bytes of an answer whose engine has said all but its last frame.
async fn begun_bytes(request: &[u8]) -> usize {
    let edge = Edge::new(10_000);
    let engine = edge.scripted.play();
    frames().into_iter().take(3).for_each(|frame| engine.send(frame).unwrap());
    let (mut client, _) = edge.connect();
    client.write_all(request).await.unwrap();
    let mut text = String::new();
    // The last text of the third frame, as every API writes it.
    read_until(&mut client, &mut text, "\\n\"").await;
    text.len()
}

#[tokio::test]
async fn a_client_that_is_cut_at_any_byte_leaves_nothing_behind() {
    for (request, _, _) in dialects() {
        // Of the request: it may never have been understood.
        for sent in 0..request.len() {
            let edge = Edge::new(10_000);
            let _engine = edge.scripted.play();
            let (mut client, _) = edge.connect();
            client.write_all(&request[..sent]).await.unwrap();
            drop(client);
            edge.nothing_runs().await;
        }
        // Of the answer, while the engine says nothing more.
        for read in 0..=begun_bytes(&request).await {
            let edge = Edge::new(10_000);
            let engine = edge.scripted.play();
            frames().into_iter().take(3).for_each(|frame| engine.send(frame).unwrap());
            let (mut client, _) = edge.connect();
            client.write_all(&request).await.unwrap();
            let mut taken = vec![0; read];
            tokio::time::timeout(TIME_LIMIT, client.read_exact(&mut taken)).await.unwrap().unwrap();
            drop(client);
            edge.nothing_runs().await;
            // On a machine that is busy the client may have left before its request was read.
            let was_asked = edge.scripted.next.lock().is_none();
            assert!(!was_asked || engine.send(vec![delta(0, "late")]).is_err(), "somebody listens after the end");
        }
    }
}

/// What is wrong, body, headers, and what the answer says: status, code, words.
type Refused<'a> = (&'a str, Vec<u8>, &'a str, u16, &'a str, &'a str);

#[tokio::test]
async fn what_is_too_much_or_malformed_is_refused_in_the_form_of_the_api() {
    let edge = Edge::new(200_000);
    let deep = format!("{{\"model\":\"m\",\"messages\":{}{}}}", "[".repeat(300), "]".repeat(300));
    let many = |name: &str, count: usize| {
        let items = vec!["{\"role\":\"user\",\"content\":\"\"}"; count].join(",");
        let chat = "\"messages\":[{\"role\":\"user\",\"content\":\"\"}],";
        format!("{{\"model\":\"m\",{}\"{name}\":[{items}]}}", if name == "messages" { "" } else { chat })
    };
    let stops = format!(
        "{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"\"}}],\"stop\":[{}]}}",
        vec!["\"x\""; 17].join(",")
    );
    let cookie = format!("cookie: {}\r\n", "c".repeat(40_000));
    let invalid_text = b"{\"model\":\"m\",\n\"messages\":\"\xff\"}".to_vec();
    let table: [Refused<'_>; 9] = [
        ("size", vec![b' '; 200_001], "", 413, "request_too_large", "larger than 200000 bytes"),
        ("headers", b"{}".to_vec(), &cookie, 431, "headers_too_large", "larger than 32768 bytes"),
        ("depth", deep.into_bytes(), "", 400, "invalid_argument", "recursion limit"),
        ("syntax", b"{\"model\":\n  oops}".to_vec(), "", 400, "invalid_argument", "line 2, column 3"),
        ("cut off", b"{\"model\":".to_vec(), "", 400, "invalid_argument", "line 1, column 9"),
        ("UTF-8", invalid_text, "", 400, "invalid_argument", "line 2, column 13: invalid unicode"),
        ("messages", many("messages", 10_001).into_bytes(), "", 413, "request_too_large", "200000"),
        ("tools", many("tools", 1_025).into_bytes(), "", 400, "invalid_argument", "at most 1024 items"),
        ("stop", stops.into_bytes(), "", 400, "invalid_argument", "at most 16 strings"),
    ];
    for (what, body, headers, status, code, words) in &table {
        for path in ["/v1/chat/completions", "/v1/messages"] {
            // What the Anthropic API calls otherwise is tested where it is read.
            if *what == "stop" && path == "/v1/messages" {
                continue;
            }
            let answer = edge.ask(&post(path, body, headers)).await;
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            let json: serde_json::Value = serde_json::from_str(body).unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {answer}");
            assert!(head.contains("x-request-id: edge-"), "{what}: {answer}");
            assert!(json["error"]["message"].as_str().unwrap().contains(words), "{what}: {answer}");
            if path == "/v1/messages" {
                assert_eq!("error", json["type"], "{what}");
                assert!(head.contains("request-id: edge-") && json["request_id"].is_string(), "{what}: {answer}");
            } else {
                assert_eq!(*code, json["error"]["code"], "{what}: {answer}");
            }
        }
    }
}

#[tokio::test]
async fn too_many_messages_are_refused_by_number() {
    let edge = Edge::new(1_000_000);
    let items = vec!["{\"role\":\"user\",\"content\":\"\"}"; 10_001].join(",");
    let answer =
        edge.ask(&post("/v1/chat/completions", format!("{{\"model\":\"m\",\"messages\":[{items}]}}"), "")).await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("at most 10000 items"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn who_sends_too_slowly_does_not_hold_a_connection() {
    let edge = Edge::new(10_000);
    // A byte of the head now and then.
    let (mut client, _) = edge.connect();
    client.write_all(b"POST /v1/chat/completions HTTP/1.1\r\n").await.unwrap();
    let dripping = async {
        while client.write_all(b"a").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(900)).await;
        }
    };
    tokio::time::timeout(TIME_LIMIT, dripping).await.expect("the connection is still open");
    // A byte of the body now and then.
    let (mut client, _) = edge.connect();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\nx-request-id: mine\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = tokio::io::split(client);
    let dripping = tokio::spawn(async move {
        while writing.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(900)).await;
        }
    });
    let mut answer = String::new();
    tokio::time::timeout(TIME_LIMIT, reading.read_to_string(&mut answer)).await.unwrap().unwrap();
    dripping.abort();
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("\"code\":\"body_timeout\""), "{answer}");
    assert!(answer.contains("x-request-id: mine\r\n"), "{answer}");
}

#[tokio::test]
async fn every_answer_has_an_id_and_none_lets_other_sites_in() {
    let edge = Edge::new(10_000);
    let origin = "origin: https://example.com\r\n";
    for (request, status) in [
        ("GET /v1/models", 200),
        ("GET /v1/models/m", 200),
        ("GET /v1/models/none", 404),
        ("GET /health", 503),
        ("GET /livez", 200),
        ("GET /version", 200),
        ("GET /nothing", 404),
        ("OPTIONS /v1/chat/completions", 404),
    ] {
        let request = format!("{request} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{origin}\r\n");
        let answer = edge.ask(request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        assert!(answer.contains("x-request-id: edge-"), "{request}: {answer}");
        assert!(!answer.contains("access-control-"), "{request}: {answer}");
    }
}
