//! What becomes of requests whose clients go away or do not read, over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use kvist_proto::engine::v1::AbortReason;
use kvist_router::RouterSettings;
use kvist_worker::SimWorkerSettings;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use support::*;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

const DISCONNECTS: usize = 10_000;
const AT_ONCE: usize = 64;

fn request(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

async fn ask(address: SocketAddr, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&request("/v1/chat/completions", body)).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_noticed_within_a_tenth_of_a_second_while_no_token_flows() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    for (script, is_stream) in [(Script::Hold(""), true), (Script::Hold("begun"), true), (Script::Hold("begun"), false)]
    {
        worker.engine.script(script.clone());
        // Other processes may hold one try up, and not all of them.
        let mut least = Duration::MAX;
        for _ in 0..10 {
            let mut client = ask(address, &chat(json!({"stream": is_stream}))).await;
            assert!(matches!(worker.next().await, Seen::Submitted(_)));
            if let (Script::Hold("begun"), true) = (&script, is_stream) {
                let mut head = [0; 16];
                limited(client.read_exact(&mut head)).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            let left = Instant::now();
            drop(client);
            assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::Cancelled)));
            least = least.min(left.elapsed());
        }
        assert!(least < Duration::from_millis(100), "{script:?} {is_stream}: {least:?}");
    }
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_clients_that_leave_at_random_leave_nothing_behind() {
    let sim = SimWorkerSettings { decode_step_ms: 1.0, prefill_tokens_per_second: 1e6, ..SimWorkerSettings::default() };
    let workers = [TestWorker::start_sim(0, sim.clone()).await, TestWorker::start_sim(1, sim).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let address = router.addresses().http_address;
    let mut asking = tokio::task::JoinSet::new();
    for seed in 0..AT_ONCE {
        asking.spawn(async move {
            let mut chance = StdRng::seed_from_u64(seed as u64);
            for _ in 0..DISCONNECTS / AT_ONCE {
                let is_stream: bool = chance.random();
                let whole = request("/v1/chat/completions", &chat(json!({"stream": is_stream, "max_tokens": 50})));
                let mut client = TcpStream::connect(address).await.unwrap();
                // In the middle of the request, before the answer, or in the middle of it.
                let sent = if chance.random_bool(0.2) { chance.random_range(0..whole.len()) } else { whole.len() };
                client.write_all(&whole[..sent]).await.unwrap();
                let patience = Duration::from_micros(chance.random_range(0..60_000));
                let mut taken = vec![0; chance.random_range(1..4_000)];
                let _ = tokio::time::timeout(patience, client.read_exact(&mut taken)).await;
            }
        });
    }
    let all = async { while asking.join_next().await.is_some_and(|asked| asked.map(|()| true).unwrap()) {} };
    tokio::time::timeout(Duration::from_secs(240), all).await.expect("the clients took too long");
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
    assert!(metrics.contains("kvist_router_active_requests 0\n"), "{metrics}");
    assert!(metrics.contains("outcome=\"cancelled\""), "some left before the end: {metrics}");
    // And it still answers.
    let answer = read(send(address, post("/v1/chat/completions", &chat(json!({"max_tokens": 2})))).await).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_ended_and_slows_nobody() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let limits = RouterSettings { write_timeout_ms: 300, ..settings() };
    let router = router(limits, &[&worker]).await;
    let address = router.addresses().http_address;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut client = socket.connect(address).await.unwrap();
    client.write_all(&request("/v1/chat/completions", &chat(json!({"stream": true})))).await.unwrap();
    assert!(matches!(worker.next().await, Seen::Submitted(_)));
    let engine = std::sync::Arc::clone(&worker.engine);
    let speaking = async {
        // Megabytes, since the kernel keeps that much for a socket: JSON makes six bytes of each of these.
        let text = "\u{1}".repeat(4_000);
        while engine.say(&text) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    limited(speaking).await;
    // Either the buffer was full first, or the patience over.
    let Seen::Aborted(_, reason) = worker.next().await else { panic!("it was not ended") };
    assert!(matches!(reason, AbortReason::SlowClient | AbortReason::Cancelled), "{reason:?}");
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    worker.engine.script(Script::Answer("quick"));
    let answer = read(send(address, post("/v1/chat/completions", &chat(json!({})))).await).await;
    assert_eq!("quick", answer.json()["choices"][0]["message"]["content"]);
    if reason == AbortReason::SlowClient {
        let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
        assert!(metrics.contains("outcome=\"SLOW_CLIENT\",surface=\"http\"} 1\n"), "{metrics}");
    }
    drop(client);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_stage_of_a_request_to_a_worker_has_a_limit_and_a_code_of_its_own() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let limits = RouterSettings { first_token_timeout_ms: 200, token_timeout_ms: 100, ..settings() };
    let router = router(limits, &[&worker]).await;
    let address = router.addresses().http_address;
    for (script, status, code) in [
        (Script::Hold(""), 504, "first_token_timeout"),
        // An answer that has begun is a stream with an error at its end.
        (Script::Hold("begun"), 200, "token_timeout"),
    ] {
        worker.engine.script(script);
        let answer = read(send(address, post("/v1/chat/completions", &chat(json!({"stream": true})))).await).await;
        assert_eq!(status, answer.status, "{}", answer.body);
        assert!(answer.body.contains(&format!("\"code\":\"{code}\"")), "{}", answer.body);
        assert!(!answer.body.contains("[DONE]"));
        assert!(matches!(worker.next().await, Seen::Submitted(_)));
        assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::Deadline)));
    }
    until("nothing is left", || router.core().active_requests() == 0 && router.core().open_reservations() == 0).await;
    router.stop().await;
}
