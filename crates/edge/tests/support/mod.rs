//! Routers over workers with a scripted engine, all in this process, over real sockets.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use kvist_edge::RouterProcess;
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    controller::v1::{ClusterState, ClusterVersion, Model, Pool, WorkerEntry},
    engine::v1::{
        AbortReason, Capabilities, EngineRequest, FinishReason, Finished, KvLayout, KvTransferParameters, Role,
        engine_request::Prompt,
    },
    events::v1::Receipt,
    router::v1::{Target, Transport},
};
use kvist_router::RouterSettings;
use kvist_worker::{
    Engine, EngineDescription, EngineHost, HandOverSettings, RequestSink, SimWorkerEngine, SimWorkerSettings,
    TokenizerFile, WorkerServer, WorkerSettings, sim_tokenizer,
};
use parking_lot::Mutex;
use prost::Message as _;
use prost_types::value::Kind;
use serde_json::Value;
use tokio::sync::mpsc;

pub const MODEL: &str = "test/model";
pub const TIME_LIMIT: Duration = Duration::from_secs(20);

/// What an engine does with a request.
#[derive(Clone, Debug)]
pub enum Script {
    /// This text, one token a byte, and an end.
    Answer(&'static str),
    /// The same, and an end because the budget is used up.
    Cut(&'static str),
    /// This text as the first of two choices, and an end of the second without a reason.
    HalfFail(&'static str),
    /// This text, and then nothing until somebody asks for an end.
    Hold(&'static str),
    /// An end as a prefill engine's that keeps KV where nobody is at home.
    Keep,
    /// A failure, said to be before anything was started or not.
    Fail(Code, bool),
    /// A field that cannot be honored.
    Refuse(&'static str),
}

/// What a test sees of an engine.
#[derive(Debug, PartialEq)]
pub enum Seen {
    Submitted(String),
    Aborted(String, AbortReason),
    Released(String),
}

/// An engine that does what it is told. Tokens of its model are bytes.
pub struct ScriptedEngine {
    script: Mutex<Script>,
    running: Mutex<HashMap<String, (RequestSink, u32)>>,
    seen: mpsc::UnboundedSender<Seen>,
    /// Of a model that knows tools; with it the engine keeps to schemas.
    template: Option<&'static str>,
    /// As a prefill or decode engine.
    hands_over: bool,
    pub requests: Mutex<Vec<EngineRequest>>,
}

impl ScriptedEngine {
    pub fn script(&self, script: Script) {
        *self.script.lock() = script;
    }

    /// More text for what is held. False when nothing is.
    pub fn say(&self, text: &str) -> bool {
        let running = self.running.lock();
        running.values().for_each(|(sink, _)| say(sink, text));
        !running.is_empty()
    }

    /// How many are held.
    pub fn running_requests(&self) -> usize {
        self.running.lock().len()
    }

    /// Ends one that is held with a failure.
    pub fn fail_one(&self, code: Code) {
        let mut running = self.running.lock();
        let id = running.keys().next().cloned().expect("something is held");
        let (sink, _) = running.remove(&id).expect("it is held");
        sink.failed(&KvistError::new(code, "as the test says"));
    }

    /// More text for what is held, and its end.
    pub fn release(&self, text: &str) {
        for (_, (sink, prompt)) in self.running.lock().drain() {
            say(&sink, text);
            sink.finished(finished(FinishReason::Stop, prompt, text.len()));
        }
    }
}

fn say(sink: &RequestSink, text: &str) {
    for byte in text.bytes() {
        sink.tokens(vec![u32::from(byte)], Vec::new(), None);
    }
}

fn finished(reason: FinishReason, prompt_tokens: u32, completion: usize) -> Finished {
    let completion_tokens = u32::try_from(completion).unwrap();
    let receipt = Receipt { prompt_tokens, cached_tokens: 1, completion_tokens, ..Receipt::default() };
    Finished { reason: reason.into(), receipt: Some(receipt), ..Finished::default() }
}

impl Engine for ScriptedEngine {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        Ok(EngineDescription {
            engine: "scripted".to_owned(),
            version: "1".to_owned(),
            context_tokens: 4096,
            max_running_requests: 64,
            max_waiting_requests: 64,
            max_top_logprobs: 0,
            kv_blocks: 64,
            block_size_tokens: 16,
            hash_algorithm: String::new(),
            ranks: 1,
            claims_hold_for_all: false,
            makes_choices: true,
            capabilities: Capabilities {
                json_schema: self.template.is_some(),
                structural_tag: self.template.is_some(),
                ..Capabilities::default()
            },
            tokenizer: Some(match self.template {
                Some(template) => TokenizerFile { chat_template: template.to_owned(), ..sim_tokenizer() },
                None => sim_tokenizer(),
            }),
            kv_layout: self.hands_over.then(|| KvLayout {
                connector: "sim".to_owned(),
                tensor_parallel_size: 1,
                prefill_context_parallel_size: 1,
                decode_context_parallel_size: 1,
            }),
        })
    }

    fn start(&self, _host: EngineHost) -> Result<(), KvistError> {
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let id = request.request_id.clone();
        let prompt = match &request.prompt {
            Some(Prompt::Tokens(tokens)) => u32::try_from(tokens.ids.len()).unwrap(),
            _ => 0,
        };
        let kv_transfer = request.kv_transfer.clone();
        self.requests.lock().push(request);
        match self.script.lock().clone() {
            Script::Answer(text) => {
                say(&sink, text);
                sink.finished(finished(FinishReason::Stop, prompt, text.len()));
            }
            Script::Cut(text) => {
                say(&sink, text);
                sink.finished(finished(FinishReason::Length, prompt, text.len()));
            }
            Script::HalfFail(text) => {
                say(&sink, text);
                let choice_reasons = vec![FinishReason::Unspecified.into()];
                sink.finished(Finished { choice_reasons, ..finished(FinishReason::Stop, prompt, text.len()) });
            }
            Script::Hold(text) => {
                say(&sink, text);
                self.running.lock().insert(id.clone(), (sink, prompt));
            }
            Script::Refuse(field) => {
                sink.failed(&KvistError::field(Code::UnsupportedField, field, "cannot be honored").before_start());
            }
            Script::Keep => {
                let lease_id = kv_transfer.map(|asked| asked.lease_id).unwrap_or_default();
                let kv_transfer = Some(kept_where_nobody_is(lease_id));
                sink.finished(Finished { kv_transfer, ..finished(FinishReason::Length, prompt, 1) });
            }
            Script::Fail(code, not_started) => {
                let mut error = KvistError::new(code, "as the script says");
                error.not_started = not_started;
                sink.failed(&error);
            }
        }
        let _ = self.seen.send(Seen::Submitted(id));
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        let running = self.running.lock().remove(request_id);
        if let Some((sink, prompt)) = running {
            let end = if reason == AbortReason::StopString { FinishReason::Stop } else { FinishReason::Aborted };
            sink.finished(finished(end, prompt, 9));
            let _ = self.seen.send(Seen::Aborted(request_id.to_owned(), reason));
        }
    }

    fn release_lease(&self, lease_id: &str) {
        let _ = self.seen.send(Seen::Released(lease_id.to_owned()));
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        Ok(0)
    }

    fn close(&self) {}
}

/// What a prefill engine says that is gone when somebody comes.
fn kept_where_nobody_is(lease_id: String) -> KvTransferParameters {
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let fields = [
        ("do_remote_prefill", Kind::BoolValue(true)),
        ("remote_engine_id", text("gone")),
        ("remote_request_id", text(&lease_id)),
        ("remote_host", text("127.0.0.1")),
        // Of a system's own services, and of none on a machine for tests.
        ("remote_port", Kind::NumberValue(1.0)),
    ];
    let fields = fields.map(|(name, kind)| (name.to_owned(), prost_types::Value { kind: Some(kind) }));
    let parameters = Some(prost_types::Struct { fields: fields.into_iter().collect() });
    KvTransferParameters { connector: "sim".to_owned(), lease_id, parameters }
}

/// A worker on a runtime of its own, so that it can be killed as a process is.
pub struct TestWorker {
    pub engine: Arc<ScriptedEngine>,
    seen: mpsc::UnboundedReceiver<Seen>,
    server: Option<WorkerServer>,
    runtime: Option<tokio::runtime::Runtime>,
    pub uid: String,
    role: Role,
    pub group: String,
    address: String,
    pub incarnation: u64,
    model: String,
}

impl TestWorker {
    pub async fn start(number: usize, script: Script) -> Self {
        Self::start_scripted(number, script, None, Role::Aggregate).await
    }

    /// A worker that computes prompts or answers.
    pub async fn start_half(number: usize, script: Script, role: Role) -> Self {
        Self::start_scripted(number, script, None, role).await
    }

    /// The same with the simulated engine.
    pub async fn start_sim_half(
        number: usize,
        sim: SimWorkerSettings,
        role: Role,
        hand_over: HandOverSettings,
    ) -> Self {
        let settings = WorkerSettings { sim, role, hand_over: Some(hand_over), ..Self::settings(number) };
        let engine = Arc::new(SimWorkerEngine::of(&settings));
        let (seen, receiver) = mpsc::unbounded_channel();
        let unused = Self::scripted(Script::Hold(""), seen, None, false);
        Self::start_settings(settings, engine, unused, receiver).await
    }

    /// A worker whose model has this chat template.
    pub async fn start_with_template(script: Script, template: &'static str) -> Self {
        Self::start_scripted(0, script, Some(template), Role::Aggregate).await
    }

    async fn start_scripted(number: usize, script: Script, template: Option<&'static str>, role: Role) -> Self {
        let (seen, receiver) = mpsc::unbounded_channel();
        let engine = Self::scripted(script, seen, template, role != Role::Aggregate);
        let settings = WorkerSettings { role, ..Self::settings(number) };
        Self::start_settings(settings, Arc::clone(&engine) as Arc<dyn Engine>, engine, receiver).await
    }

    fn scripted(
        script: Script,
        seen: mpsc::UnboundedSender<Seen>,
        template: Option<&'static str>,
        hands_over: bool,
    ) -> Arc<ScriptedEngine> {
        Arc::new(ScriptedEngine {
            script: Mutex::new(script),
            running: Mutex::default(),
            seen,
            template,
            hands_over,
            requests: Mutex::default(),
        })
    }

    fn settings(number: usize) -> WorkerSettings {
        WorkerSettings {
            worker_uid: format!("worker-{number}"),
            model: MODEL.to_owned(),
            hash_seed: 7,
            ..WorkerSettings::default()
        }
    }

    /// A worker with the simulated engine.
    pub async fn start_sim(number: usize, sim: SimWorkerSettings) -> Self {
        let (seen, receiver) = mpsc::unbounded_channel();
        let unused = Self::scripted(Script::Hold(""), seen, None, false);
        Self::start_settings(Self::settings(number), Arc::new(SimWorkerEngine::new(sim)), unused, receiver).await
    }

    async fn start_settings(
        settings: WorkerSettings,
        engine: Arc<dyn Engine>,
        scripted: Arc<ScriptedEngine>,
        seen: mpsc::UnboundedReceiver<Seen>,
    ) -> Self {
        let (uid, role) = (settings.worker_uid.clone(), settings.role);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let server = runtime.spawn(WorkerServer::start(settings, engine)).await.unwrap().unwrap();
        let (address, incarnation) = {
            let addresses = server.addresses();
            (addresses.grpc_address.clone(), addresses.incarnation)
        };
        Self {
            engine: scripted,
            seen,
            server: Some(server),
            runtime: Some(runtime),
            uid,
            role,
            group: String::new(),
            address,
            incarnation,
            model: MODEL.to_owned(),
        }
    }

    /// What the engine sees next.
    pub async fn next(&mut self) -> Seen {
        limited(self.seen.recv()).await.unwrap()
    }

    /// Ends it without a word, sockets and all.
    pub fn kill(&mut self) {
        std::mem::forget(self.server.take());
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    fn entry(&self) -> WorkerEntry {
        WorkerEntry {
            target: Some(Target {
                worker_uid: self.uid.clone(),
                address: self.address.clone(),
                transport: Transport::Grpc.into(),
                role: self.role.into(),
                group: self.group.clone(),
                ..Target::default()
            }),
            model: self.model.clone(),
            incarnation: self.incarnation,
            ranks: 1,
            block_size_tokens: 16,
            namespace: MODEL.to_owned(),
            ..WorkerEntry::default()
        }
    }
}

impl Drop for TestWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

pub async fn limited<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIME_LIMIT, future).await.expect("it took too long")
}

/// Waits until something holds.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + TIME_LIMIT;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not come true");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub fn cluster_state(revision: u64, workers: &[&TestWorker]) -> Vec<u8> {
    cluster_state_with(revision, workers, Model::default())
}

/// A state whose model has further fields.
pub fn cluster_state_with(revision: u64, workers: &[&TestWorker], model: Model) -> Vec<u8> {
    ClusterState {
        version: Some(ClusterVersion { store_epoch: 1, revision }),
        cluster: "test".to_owned(),
        hash_seed: 7,
        models: vec![Model {
            name: MODEL.to_owned(),
            uid: "model-uid".to_owned(),
            aliases: vec!["alias".to_owned()],
            pools: vec![Pool::default()],
            ..model
        }],
        workers: workers.iter().map(|worker| worker.entry()).collect(),
        ..ClusterState::default()
    }
    .encode_to_vec()
}

/// A router over workers, all of them connected.
pub async fn router(settings: RouterSettings, workers: &[&TestWorker]) -> RouterProcess {
    let router = RouterProcess::start(settings).await.unwrap();
    assert!(router.apply_cluster_state(&cluster_state(1, workers)).unwrap());
    let count = u32::try_from(workers.len()).unwrap();
    until("all targets are ready", || router.status().ready_targets == count).await;
    router
}

pub fn settings() -> RouterSettings {
    // What is not there is refused at once, so that tests need not wait.
    RouterSettings { name: "r1".to_owned(), startup_wait_ms: 0, ..RouterSettings::default() }
}

/// An answer with its body read.
pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// Sends a request and returns as soon as the head of the answer is there. The connection lives as long as the body.
pub async fn send(address: SocketAddr, request: http::Request<Full<Bytes>>) -> http::Response<Incoming> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    limited(sender.send_request(request)).await.unwrap()
}

pub async fn read(response: http::Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = limited(body.collect()).await.unwrap().to_bytes();
    Answer { status: parts.status.as_u16(), headers: parts.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

pub fn post(path: &str, body: &Value) -> http::Request<Full<Bytes>> {
    http::Request::post(path)
        .header("host", "test")
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .unwrap()
}

pub fn get(path: &str) -> http::Request<Full<Bytes>> {
    http::Request::get(path).header("host", "test").body(Full::default()).unwrap()
}

pub fn chat(extra: Value) -> Value {
    let mut body = serde_json::json!({"model": MODEL, "messages": [{"role": "user", "content": "Say it"}]});
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The data of server-sent events.
pub fn events(body: &str) -> Vec<&str> {
    body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
}

/// The text of a chat stream.
pub fn content(body: &str) -> String {
    let texts = events(body).into_iter().filter(|event| *event != "[DONE]").map(|event| {
        let event: Value = serde_json::from_str(event).unwrap();
        event.pointer("/choices/0/delta/content").and_then(Value::as_str).unwrap_or_default().to_owned()
    });
    texts.collect()
}
