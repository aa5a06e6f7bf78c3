//! Servers outside the mesh as targets of a model, over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http_body_util::BodyExt as _;
use kvist_edge::RouterProcess;
use kvist_router::{RouterSettings, UpstreamSettings};
use parking_lot::Mutex;
use serde_json::{Value, json};
use support::*;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const CHUNK: &str =
    "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"h\u{e9}\"},\"finish_reason\":null}]}\n\n";
const REASON: &str = "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\
                     \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// What a provider answers: status, headers, pieces of the body, each sent by itself.
#[derive(Clone)]
struct Play {
    head: String,
    pieces: Vec<String>,
    /// Leaves the connection open and silent instead of closing it.
    hangs: bool,
}

impl Play {
    fn stream(pieces: &[&str]) -> Self {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".to_owned();
        Self { head, pieces: pieces.iter().map(|piece| (*piece).to_owned()).collect(), hangs: false }
    }

    fn whole(status: &str, headers: &str, body: &str) -> Self {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n");
        Self { head, pieces: vec![body.to_owned()], hangs: false }
    }
}

/// A provider that plays what it is told.
struct Provider {
    address: SocketAddr,
    play: Arc<Mutex<Play>>,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
    open: Arc<AtomicUsize>,
    _accepting: tokio_util::task::AbortOnDropHandle<()>,
}

impl Provider {
    async fn start(play: Play) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (play, seen, open) =
            (Arc::new(Mutex::new(play)), Arc::new(Mutex::default()), Arc::new(AtomicUsize::new(0)));
        let (playing, seeing, counting) = (Arc::clone(&play), Arc::clone(&seen), Arc::clone(&open));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (play, seen, open) = (Arc::clone(&playing), Arc::clone(&seeing), Arc::clone(&counting));
                tokio::spawn(async move {
                    open.fetch_add(1, Ordering::AcqRel);
                    let _ = answer(stream, &play, &seen).await;
                    open.fetch_sub(1, Ordering::AcqRel);
                });
            }
        });
        let _accepting = tokio_util::task::AbortOnDropHandle::new(accepting);
        Self { address, play, seen, open, _accepting }
    }

    fn settings(&self, name: &str, models: &[(&str, &str)]) -> UpstreamSettings {
        UpstreamSettings {
            name: name.to_owned(),
            url: format!("http://{}/v1", self.address),
            models: models.iter().map(|(name, known)| ((*name).to_owned(), (*known).to_owned())).collect(),
            api_key_file: None,
            tls_ca_file: None,
            connect_timeout_ms: 5_000,
        }
    }
}

async fn answer(mut stream: TcpStream, play: &Mutex<Play>, seen: &Mutex<Vec<(String, Value)>>) -> std::io::Result<()> {
    let mut request = Vec::new();
    let (head, body) = loop {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await?;
        if count == 0 {
            return Ok(());
        }
        request.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&request).to_lowercase();
        let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()).unwrap_or("0");
        let length: usize = length.trim().parse().unwrap();
        if request.len() >= head.len() + 4 + length {
            break (head.to_owned(), request[head.len() + 4..].to_vec());
        }
    };
    seen.lock().push((head, serde_json::from_slice(&body).unwrap_or_default()));
    let play = play.lock().clone();
    stream.write_all(play.head.as_bytes()).await?;
    for piece in &play.pieces {
        stream.write_all(piece.as_bytes()).await?;
        stream.flush().await?;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    if play.hangs {
        // Until the router closes it.
        while stream.read(&mut [0; 64]).await? > 0 {}
    }
    Ok(())
}

async fn mesh(settings: RouterSettings) -> RouterProcess {
    let router = RouterProcess::start(settings).await.unwrap();
    assert!(router.apply_cluster_state(&cluster_state(1, &[])).unwrap());
    router
}

async fn with(provider: &Provider) -> RouterProcess {
    mesh(RouterSettings { upstreams: vec![provider.settings("p", &[("out", "remote")])], ..settings() }).await
}

fn ask(path: &str, extra: Value) -> http::Request<http_body_util::Full<bytes::Bytes>> {
    let mut body = json!({"model": "out", "max_tokens": 9, "stream": true});
    match path {
        "/v1/responses" => {
            body = json!({"model": "out", "stream": true, "store": false, "input": "hi"});
        }
        "/v1/completions" => body["prompt"] = json!("hi"),
        _ => body["messages"] = json!([{"role": "user", "content": "hi"}]),
    }
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    post(path, &body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_are_relayed_where_the_apis_match() {
    let folder = std::env::temp_dir().join(format!("kvist-upstream-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let key = folder.join("key");
    std::fs::write(&key, "sk-first\n").unwrap();
    let provider = Provider::start(Play::stream(&[": hello\n\n", CHUNK, REASON, USAGE, DONE])).await;
    let mut upstream = provider.settings("p", &[("out", "remote")]);
    upstream.api_key_file = Some(key.clone());
    let router = mesh(RouterSettings { upstreams: vec![upstream], ..settings() }).await;
    let address = router.addresses().http_address;
    let mut request = ask("/v1/chat/completions", json!({"a_field_of_the_provider": [1, {"b": 2}]}));
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    request.headers_mut().insert("authorization", "Bearer the-clients-own".parse().unwrap());
    let answer = read(send(address, request).await).await;
    assert_eq!(200, answer.status);
    assert_eq!(format!(": hello\n\n{CHUNK}{REASON}{USAGE}{DONE}"), answer.body);
    assert_eq!(
        ("text/event-stream; charset=utf-8", "mine"),
        (answer.headers["content-type"].to_str().unwrap(), answer.headers["x-request-id"].to_str().unwrap())
    );
    // A new key is taken up without a restart.
    std::fs::write(&key, "sk-second\n").unwrap();
    assert_eq!(200, read(send(address, ask("/v1/completions", json!({}))).await).await.status);
    let seen = provider.seen.lock().clone();
    let (head, body) = &seen[0];
    assert!(head.starts_with("post /v1/chat/completions ") && head.contains("authorization: bearer sk-first\r\n"));
    assert!(head.contains("x-request-id: mine\r\n") && !head.contains("the-clients-own"), "{head}");
    assert_eq!(
        ("remote", json!([1, {"b": 2}])),
        (body["model"].as_str().unwrap(), body["a_field_of_the_provider"].clone())
    );
    assert!(seen[1].0.starts_with("post /v1/completions ") && seen[1].0.contains("bearer sk-second\r\n"));
    let models = read(send(address, get("/v1/models")).await).await.json();
    assert!(models["data"].as_array().unwrap().iter().any(|model| model["id"] == "out"), "{models}");
    let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
    assert!(metrics.contains("kvist_upstream_requests_total{upstream=\"p\",outcome=\"finished\"} 2\n"), "{metrics}");
    assert!(metrics.contains("kvist_upstream_active_requests 0\n"), "{metrics}");
    router.stop().await;
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_apis_are_translated() {
    let provider = Provider::start(Play::stream(&[CHUNK, CHUNK, REASON, USAGE, DONE])).await;
    let router = with(&provider).await;
    let address = router.addresses().http_address;
    let extra = json!({"system": "Be brief.", "temperature": 0.7, "stop_sequences": ["x"], "stream": false});
    let answer = read(send(address, ask("/v1/messages", extra)).await).await;
    let message = answer.json();
    assert_eq!(
        ("h\u{e9}h\u{e9}", "end_turn"),
        (message["content"][0]["text"].as_str().unwrap(), message["stop_reason"].as_str().unwrap())
    );
    // Anthropic counts cached tokens apart.
    assert_eq!(
        (3, 4, 2),
        (
            message["usage"]["input_tokens"].as_u64().unwrap(),
            message["usage"]["cache_read_input_tokens"].as_u64().unwrap(),
            message["usage"]["output_tokens"].as_u64().unwrap()
        )
    );
    let (head, body) = provider.seen.lock()[0].clone();
    assert!(head.starts_with("post /v1/chat/completions "));
    assert_eq!(
        json!({
            "model": "remote", "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.7,
            "max_tokens": 9, "stop": ["x"],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        }),
        body
    );
    let answer = read(send(address, ask("/v1/responses", json!({}))).await).await;
    assert!(answer.body.contains("event: response.completed\n"), "{}", answer.body);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_only_as_the_provider_ended_it() {
    let provider = Provider::start(Play::stream(&[])).await;
    let router = with(&provider).await;
    let address = router.addresses().http_address;
    let half = &CHUNK[..30];
    let own_error = "data: {\"error\":{\"message\":\"theirs\",\"type\":\"t\",\"param\":null,\"code\":null}}\n\n";
    let table: [(&[&str], &str); 8] = [
        // Broken off: at the start, between events, within one, after the reason.
        (&[], "engine_lost"),
        (&[CHUNK], "engine_lost"),
        (&[CHUNK, half], "engine_lost"),
        (&[CHUNK, REASON], "engine_lost"),
        // Ended in form and without a reason.
        (&[DONE], "engine_failed"),
        (&[CHUNK, DONE], "engine_failed"),
        (&[CHUNK, "data: this is not json\n\n", DONE], "engine_failed"),
        // The provider's own error is told once, whatever follows it.
        (&[CHUNK, own_error, DONE], "theirs"),
    ];
    for (pieces, words) in table {
        *provider.play.lock() = Play::stream(pieces);
        let end_marks = [
            ("/v1/chat/completions", "[DONE]"),
            ("/v1/messages", "event: message_stop"),
            ("/v1/responses", "event: response.completed"),
        ];
        for (path, end_mark) in end_marks {
            let answer = read(send(address, ask(path, json!({}))).await).await;
            assert!(!answer.body.contains(end_mark), "{path} {pieces:?}: {}", answer.body);
            assert!(
                answer.body.contains("error") || answer.body.contains("failed"),
                "{path} {pieces:?}: {}",
                answer.body
            );
            if path == "/v1/chat/completions" {
                assert_eq!(200, answer.status);
                assert!(answer.body.contains(words), "{pieces:?}: {}", answer.body);
                let errors = answer.body.matches("\"error\":").count();
                assert_eq!(1, errors, "{pieces:?}: {}", answer.body);
                // Whatever was cut, each event is one that a client can read.
                for event in events(&answer.body).iter().filter(|event| !event.contains("this is not json")) {
                    serde_json::from_str::<Value>(event).unwrap();
                }
            }
        }
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_before_the_first_byte_are_ordinary_errors() {
    let provider = Provider::start(Play::stream(&[])).await;
    let router = with(&provider).await;
    let address = router.addresses().http_address;
    let theirs = "{\"error\":{\"message\":\"no such parameter\",\"type\":\"t\",\"param\":\"x\",\"code\":\"c\"}}";
    for (status, headers, expected, code) in [
        ("429 Too Many Requests", "", 429, "server_overloaded"),
        ("401 Unauthorized", "", 500, "engine_failed"),
        ("500 Oops", "", 500, "engine_failed"),
        ("302 Found", "location: http://example.com/\r\n", 500, "engine_failed"),
        // What the client did wrong comes back in the provider's words.
        ("400 Bad Request", "", 400, "c"),
        ("404 Not Found", "", 404, "c"),
    ] {
        // A rest that was asked for is over.
        let asked_to_rest = async {
            loop {
                *provider.play.lock() = Play::whole(status, headers, theirs);
                let before = provider.seen.lock().len();
                let answer = read(send(address, ask("/v1/chat/completions", json!({}))).await).await;
                if provider.seen.lock().len() > before {
                    return answer;
                }
                assert_eq!(429, answer.status, "who rests says so");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let answer = limited(asked_to_rest).await;
        assert_eq!(
            (expected, code),
            (answer.status, answer.json()["error"]["code"].as_str().unwrap()),
            "{status}: {}",
            answer.body
        );
        if expected == 429 {
            assert_eq!("1", answer.headers["retry-after"]);
        }
    }
    *provider.play.lock() = Play::whole("400 Bad Request", "", theirs);
    let answer = read(send(address, ask("/v1/messages", json!({}))).await).await;
    assert_eq!((400, "no such parameter"), (answer.status, answer.json()["error"]["message"].as_str().unwrap()));
    for (path, field) in [("/v1/chat/completions", "kv_transfer_params"), ("/v1/messages", "vllm_xargs")] {
        let answer = read(send(address, ask(path, json!({field: {}}))).await).await;
        assert_eq!(400, answer.status, "only the mesh sets {field}: {}", answer.body);
    }
    // Nobody listens there.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut upstream = provider.settings("gone", &[("out", "out")]);
    upstream.url = format!("http://{gone}/v1");
    let lonely = mesh(RouterSettings { upstreams: vec![upstream], ..settings() }).await;
    let answer = read(send(lonely.addresses().http_address, ask("/v1/chat/completions", json!({}))).await).await;
    assert_eq!((503, "engine_unavailable"), (answer.status, answer.json()["error"]["code"].as_str().unwrap()));
    lonely.stop().await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_stage_has_its_own_time_limit() {
    let provider = Provider::start(Play::stream(&[])).await;
    let limits = RouterSettings {
        first_token_timeout_ms: 300,
        token_timeout_ms: 200,
        upstreams: vec![provider.settings("p", &[("out", "out")])],
        ..settings()
    };
    let router = mesh(limits).await;
    let address = router.addresses().http_address;
    let silent = Play { head: String::new(), pieces: Vec::new(), hangs: true };
    let begun = Play { hangs: true, ..Play::stream(&[CHUNK]) };
    for (play, timeout_ms, code) in
        [(silent, "", "first_token_timeout"), (begun.clone(), "", "token_timeout"), (begun, "100", "deadline_exceeded")]
    {
        *provider.play.lock() = play;
        let mut request = ask("/v1/chat/completions", json!({}));
        if !timeout_ms.is_empty() {
            request.headers_mut().insert("x-request-timeout-ms", timeout_ms.parse().unwrap());
        }
        let answer = read(send(address, request).await).await;
        assert!(answer.body.contains(&format!("\"code\":\"{code}\"")), "{code}: {}", answer.body);
        assert!(!answer.body.contains("[DONE]"));
        until("the provider's connection is closed", || provider.open.load(Ordering::Acquire) == 0).await;
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_the_request_at_the_provider() {
    let provider = Provider::start(Play { hangs: true, ..Play::stream(&[CHUNK]) }).await;
    let router = with(&provider).await;
    let response = send(router.addresses().http_address, ask("/v1/chat/completions", json!({}))).await;
    let mut body = response.into_body();
    limited(body.frame()).await.unwrap().unwrap();
    assert_eq!(1, provider.open.load(Ordering::Acquire));
    drop(body);
    until("the provider's connection is closed", || provider.open.load(Ordering::Acquire) == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_the_mesh_holds_requests_to_a_provider_back() {
    // As L-44 has it: fifty at once all start, however few the mesh would take.
    let provider = Provider::start(Play { hangs: true, ..Play::stream(&[CHUNK]) }).await;
    let router = with(&provider).await;
    let address = router.addresses().http_address;
    let mut bodies = Vec::new();
    for _ in 0..50 {
        let mut body = send(address, ask("/v1/chat/completions", json!({}))).await.into_body();
        limited(body.frame()).await.unwrap().unwrap();
        bodies.push(body);
    }
    assert_eq!(50, provider.open.load(Ordering::Acquire));
    assert_eq!(0, router.core().open_reservations());
    drop(bodies);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_for_a_pause_gets_one_while_another_has_the_model() {
    let busy = Provider::start(Play::whole("429 Too Many Requests", "retry-after: 60\r\n", "{}")).await;
    let free = Provider::start(Play::stream(&[CHUNK, REASON, DONE])).await;
    let upstreams = vec![busy.settings("busy", &[("out", "out")]), free.settings("free", &[("out", "out")])];
    let router = mesh(RouterSettings { upstreams, ..settings() }).await;
    let address = router.addresses().http_address;
    let statuses: BTreeMap<u16, usize> = {
        let mut statuses = BTreeMap::new();
        for _ in 0..5 {
            let answer = read(send(address, ask("/v1/chat/completions", json!({}))).await).await;
            *statuses.entry(answer.status).or_default() += 1;
        }
        statuses
    };
    assert_eq!(BTreeMap::from([(200, 4), (429, 1)]), statuses);
    assert_eq!((1, 4), (busy.seen.lock().len(), free.seen.lock().len()));
    router.stop().await;
}
