//! What the worker does about engines that misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_ledger::EngineHash;
use kvist_link::{LinkSettings, LinkState, RequestEvent, WorkerLink};
use kvist_proto::{
    engine::v1::{
        AbortReason, DescribeRequest, EngineRequest, FinishReason, Finished, TokenIds, engine_request::Prompt,
        engine_service_client::EngineServiceClient,
    },
    events::v1::Receipt,
};
use kvist_worker::{Engine, EngineDescription, EngineHost, RequestSink, WorkerServer, WorkerSettings};
use parking_lot::Mutex;
use tokio::sync::oneshot;

const PATIENCE: Duration = Duration::from_secs(20);

/// Does what a request's id says.
#[derive(Default)]
struct Scripted {
    host: Mutex<Option<EngineHost>>,
    held: Mutex<Vec<RequestSink>>,
    loading: Mutex<Option<oneshot::Receiver<()>>>,
}

impl Engine for Scripted {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        if let Some(loading) = self.loading.lock().take() {
            let _ = loading.blocking_recv();
        }
        Ok(EngineDescription {
            block_size_tokens: 4,
            ranks: 2,
            claims_hold_for_all: true,
            ..EngineDescription::default()
        })
    }

    fn start(&self, host: EngineHost) -> Result<(), KvistError> {
        *self.host.lock() = Some(host);
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let end = |reason: FinishReason, receipt| Finished { reason: reason.into(), receipt, ..Finished::default() };
        match request.request_id.as_str() {
            "liar" => {
                let receipt =
                    Receipt { cached_tokens: 3, claimed_blocks: Some(1), completion_tokens: 1, ..Receipt::default() };
                sink.finished(end(FinishReason::Length, Some(receipt)));
            }
            "forgetful" | "evicting" | "honest" => {
                let host = self.host.lock().clone().unwrap();
                if request.request_id == "evicting" {
                    host.removed(0, vec![EngineHash(2)]);
                }
                let cached_tokens = if request.request_id == "honest" { 8 } else { 0 };
                sink.tokens(vec![7], vec![], Some(cached_tokens));
                // What happens later says nothing about where the request began.
                host.removed(0, vec![EngineHash(1)]);
                let receipt = Receipt { cached_tokens, completion_tokens: 1, ..Receipt::default() };
                sink.finished(end(FinishReason::Length, Some(receipt)));
            }
            "twice" => {
                sink.finished(end(FinishReason::Length, None));
                sink.failed(&KvistError::new(Code::Internal, "again"));
                sink.tokens(vec![1], vec![], None);
            }
            "dropped" => {}
            _ => self.held.lock().push(sink),
        }
    }

    fn abort(&self, request_id: &str, _: AbortReason) {
        let mut held = self.held.lock();
        let Some(at) = held.iter().position(|sink| sink.request_id() == request_id) else { return };
        let sink = held.swap_remove(at);
        assert!(sink.is_aborted());
        sink.finished(Finished { reason: FinishReason::Aborted.into(), ..Finished::default() });
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        Err(KvistError::new(Code::NotImplemented, "no"))
    }

    fn close(&self) {}
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("not in time")
}

fn request(request_id: &str) -> EngineRequest {
    EngineRequest {
        request_id: request_id.to_owned(),
        prompt: Some(Prompt::Tokens(TokenIds { ids: vec![1] })),
        ..EngineRequest::default()
    }
}

async fn connected(server: &WorkerServer) -> WorkerLink {
    let link = WorkerLink::connect(&server.addresses().grpc_address, LinkSettings::new("r")).unwrap();
    in_time(link.watch_state().wait_for(|state| *state == LinkState::Connected)).await.unwrap();
    link
}

async fn end(link: &WorkerLink, request_id: &str) -> RequestEvent {
    let mut stream = link.start(request(request_id));
    let event = in_time(stream.next()).await.unwrap();
    assert!(event.is_terminal(), "{event:?}");
    assert!(in_time(stream.next()).await.is_none());
    event
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn false_claims_are_counted_and_exactly_one_end_gets_through() {
    let server = WorkerServer::start(WorkerSettings::default(), Arc::new(Scripted::default())).await.unwrap();
    let link = connected(&server).await;
    let RequestEvent::Finished(liar) = end(&link, "liar").await else { panic!("expected an end") };
    assert_eq!(4, liar.receipt.unwrap().block_size_tokens);
    assert!(matches!(end(&link, "twice").await, RequestEvent::Finished(_)));
    assert!(matches!(end(&link, "dropped").await, RequestEvent::Failed(error) if error.code == Code::EngineFailed));
    let text = admin(&server, "/metrics").await;
    assert!(text.contains("kvist_ledger_soundness_violations_total 1"), "{text}");
    assert!(text.contains("kvist_worker_requests_total{outcome=\"ENGINE_FAILED\"} 1"), "{text}");
    in_time(server.stop()).await;
}

/// R30.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_undisturbed_ledger_promised_is_held_against_the_receipt() {
    let engine = Arc::new(Scripted::default());
    let server = WorkerServer::start(WorkerSettings::default(), Arc::clone(&engine) as Arc<dyn Engine>).await.unwrap();
    let link = connected(&server).await;
    let host = engine.host.lock().clone().unwrap();
    // Two whole blocks, and a last token that every engine computes: eight tokens are promised.
    let prompt: Vec<u32> = (0..9).collect();
    for (request_id, violations) in [("honest", 0), ("evicting", 0), ("forgetful", 1)] {
        host.cleared(0);
        host.stored(0, vec![EngineHash(1), EngineHash(2)], None, prompt[..8].to_vec(), host.root("", ""));
        let tokens = Prompt::Tokens(TokenIds { ids: prompt.clone() });
        let mut stream = link.start(EngineRequest { prompt: Some(tokens), ..request(request_id) });
        while !in_time(stream.next()).await.unwrap().is_terminal() {}
        let text = admin(&server, "/metrics").await;
        let expected = format!("kvist_ledger_soundness_violations_total {violations}");
        assert!(text.contains(&expected), "{request_id}: {text}");
    }
    in_time(server.stop()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_engine_fails_its_requests_and_takes_no_more() {
    let engine = Arc::new(Scripted::default());
    let server = WorkerServer::start(WorkerSettings::default(), Arc::clone(&engine) as Arc<dyn Engine>).await.unwrap();
    let link = connected(&server).await;
    let mut stream = link.start(request("held"));
    while engine.held.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    let host = engine.host.lock().clone().unwrap();
    host.engine_failed("for the test");
    let event = in_time(stream.next()).await.unwrap();
    assert!(matches!(event, RequestEvent::Failed(error) if error.code == Code::EngineFailed));
    let event = end(&link, "more").await;
    assert!(matches!(event, RequestEvent::Failed(error) if error.code == Code::EngineUnavailable && error.not_started));
    in_time(async {
        while !admin(&server, "/readyz").await.contains("the engine has failed") {
            tokio::task::yield_now().await;
        }
    })
    .await;
    in_time(server.stop()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_router_ends_its_requests_at_the_engine() {
    let engine = Arc::new(Scripted::default());
    let server = WorkerServer::start(WorkerSettings::default(), Arc::clone(&engine) as Arc<dyn Engine>).await.unwrap();
    let link = connected(&server).await;
    let stream = link.start(request("held"));
    while engine.held.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    link.close();
    in_time(async {
        while !engine.held.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    drop(stream);
    in_time(server.stop()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_answered_while_the_engine_loads() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (loaded, loading) = oneshot::channel();
    let engine = Scripted { loading: Mutex::new(Some(loading)), ..Scripted::default() };
    let settings = WorkerSettings { grpc_listen: address.to_string(), ..WorkerSettings::default() };
    let starting = tokio::spawn(WorkerServer::start(settings, Arc::new(engine)));
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = in_time(async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => return channel,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    let status = EngineServiceClient::new(channel.clone()).describe(DescribeRequest {}).await.unwrap_err();
    assert_eq!(Code::NotReady, kvist_errors::from_status(&status).code);
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let mut status = async |service: &str| {
        let request = tonic_health::pb::HealthCheckRequest { service: service.to_owned() };
        health.check(request).await.unwrap().into_inner().status().as_str_name()
    };
    assert_eq!(("NOT_SERVING", "SERVING"), (status("readiness").await, status("liveness").await));
    loaded.send(()).unwrap();
    let server = in_time(starting).await.unwrap().unwrap();
    assert_eq!("SERVING", status("readiness").await);
    in_time(server.stop()).await;
}

async fn admin(server: &WorkerServer, path: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(&server.addresses().admin_address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    in_time(stream.read_to_string(&mut text)).await.unwrap();
    text
}
