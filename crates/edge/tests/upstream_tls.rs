//! A server outside the mesh behind TLS: another router, since that is an OpenAI-compatible server too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod support;

use std::{fs, net::SocketAddr, path::PathBuf};

use kvist_doors::DoorSettings;
use kvist_edge::RouterProcess;
use kvist_router::{RouterSettings, UpstreamSettings};
use kvist_worker::SimWorkerSettings;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use support::{MODEL, Script, TestWorker, cluster_state, content, events, post, read, router, send, settings};

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvist-upstream-tls-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// An authority's certificate, and certificate and key of a server that it vouches for.
    fn certificates(&self) -> (PathBuf, DoorSettings) {
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let ca = self.write("ca.pem", &authority.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(authority, key);
        let key = KeyPair::generate().unwrap();
        let server = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        let door = DoorSettings {
            tls_certificate_file: Some(self.write("server.pem", &server.pem())),
            tls_key_file: Some(self.write("server.key", &key.serialize_pem())),
            ..DoorSettings::default()
        };
        (ca, door)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A router without workers that passes the model `out` on.
async fn passing_on(provider: SocketAddr, ca: Option<PathBuf>) -> RouterProcess {
    let upstream = UpstreamSettings {
        name: "p".to_owned(),
        url: format!("https://localhost:{}/v1", provider.port()),
        models: [("out".to_owned(), MODEL.to_owned())].into(),
        api_key_file: None,
        tls_ca_file: ca,
        connect_timeout_ms: 5_000,
    };
    let router = RouterProcess::start(RouterSettings { upstreams: vec![upstream], ..settings() }).await.unwrap();
    assert!(router.apply_cluster_state(&cluster_state(1, &[])).unwrap());
    router
}

async fn ask(router: &RouterProcess, path: &str, body: Value) -> support::Answer {
    read(send(router.addresses().http_address, post(path, &body)).await).await
}

fn chat(stream: bool) -> Value {
    json!({"model": "out", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_with_a_certificate_of_a_known_authority_is_asked_and_another_is_not() {
    let folder = Folder::new("chat");
    let (ca, door) = folder.certificates();
    let worker = TestWorker::start(0, Script::Answer("well met")).await;
    let provider = router(RouterSettings { http_door: door, ..settings() }, &[&worker]).await;
    let edge = passing_on(provider.addresses().http_address, Some(ca)).await;
    let whole = ask(&edge, "/v1/chat/completions", chat(false)).await;
    assert_eq!(200, whole.status, "{}", whole.body);
    assert_eq!("well met", whole.json()["choices"][0]["message"]["content"]);
    let streamed = ask(&edge, "/v1/chat/completions", chat(true)).await.body;
    assert_eq!(("well met", Some(&"[DONE]")), (content(&streamed).as_str(), events(&streamed).last()));
    edge.stop().await;

    let other = Folder::new("other");
    let wary = passing_on(provider.addresses().http_address, Some(other.certificates().0)).await;
    let refused = ask(&wary, "/v1/chat/completions", chat(false)).await;
    assert_eq!((503, json!("engine_unavailable")), (refused.status, refused.json()["error"]["code"].clone()));
    assert_eq!(2, worker.engine.requests.lock().len(), "nothing is said to whom nobody vouches for");
    wary.stop().await;
    provider.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_of_a_provider_are_passed_on() {
    let folder = Folder::new("embeddings");
    let (ca, door) = folder.certificates();
    let sim = SimWorkerSettings { embedding_dimensions: 4, ..SimWorkerSettings::default() };
    let worker = TestWorker::start_sim(0, sim).await;
    let provider = router(RouterSettings { http_door: door, ..settings() }, &[&worker]).await;
    let edge = passing_on(provider.addresses().http_address, Some(ca)).await;
    let answer = ask(&edge, "/v1/embeddings", json!({"model": "out", "input": ["1", "2"]})).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    assert_eq!(2, answer.json()["data"].as_array().unwrap().len());
    let refused = ask(&edge, "/v1/embeddings", json!({"model": "out", "input": "1", "dimensions": 2})).await;
    assert_eq!((400, json!("dimensions")), (refused.status, refused.json()["error"]["param"].clone()));
    edge.stop().await;
    provider.stop().await;
}
