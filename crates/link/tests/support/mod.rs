//! A worker with a scripted engine, and a way to cut its connections.

use std::{collections::HashMap, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _};
use kvist_errors::KvistError;
use kvist_link::{
    ConnectFrames, LinkServer, LinkServerSettings, LinkSettings, LinkState, RequestAcceptor, RequestOutput, WorkerLink,
};
use kvist_proto::{
    engine::v1::{
        engine_service_server::{EngineService, EngineServiceServer},
        *,
    },
    events::v1::LoadReport,
};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

pub const PATIENCE: Duration = Duration::from_secs(10);

/// Holds requests and aborts until the test acts on them.
#[derive(Default)]
pub struct Script {
    pub requests: Mutex<HashMap<String, (EngineRequest, Option<RequestOutput>)>>,
    pub aborts: Mutex<Vec<(String, AbortReason)>>,
    pub loads: Mutex<Vec<LoadReport>>,
    /// The order of what arrived: `+id` and `-id`.
    pub arrivals: Mutex<Vec<String>>,
    changed: Notify,
}

impl RequestAcceptor for Script {
    fn description(&self) -> Result<WorkerDescription, KvistError> {
        Ok(WorkerDescription { worker_uid: "w".to_owned(), incarnation: 7, ..WorkerDescription::default() })
    }

    fn loads(&self) -> Vec<LoadReport> {
        self.loads.lock().clone()
    }

    fn accept(&self, request: EngineRequest, output: RequestOutput) {
        self.arrivals.lock().push(format!("+{}", request.request_id));
        self.requests.lock().insert(request.request_id.clone(), (request, Some(output)));
        self.changed.notify_waiters();
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        self.arrivals.lock().push(format!("-{request_id}"));
        self.aborts.lock().push((request_id.to_owned(), reason));
        self.changed.notify_waiters();
    }
}

impl Script {
    /// Waits until `look` finds something.
    pub async fn wait<T>(&self, look: impl Fn(&Self) -> Option<T>) -> T {
        tokio::time::timeout(PATIENCE, async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if let Some(found) = look(self) {
                    return found;
                }
                changed.await;
            }
        })
        .await
        .expect("the worker did not see it in time")
    }

    /// Waits for a request and takes its output.
    pub async fn output(&self, request_id: &str) -> RequestOutput {
        self.wait(|script| script.requests.lock().get_mut(request_id).and_then(|(_, output)| output.take())).await
    }

    pub async fn aborted(&self, request_id: &str) -> AbortReason {
        self.wait(|script| script.aborts.lock().iter().find(|(id, _)| id == request_id).map(|(_, reason)| *reason))
            .await
    }
}

pub struct Worker {
    pub script: Arc<Script>,
    pub server: Arc<LinkServer>,
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Worker {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub async fn start_at(address: SocketAddr) -> Self {
        let script = Arc::new(Script::default());
        let server = Arc::new(LinkServer::new(LinkServerSettings::default()));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = EngineServiceServer::new(Service { script: Arc::clone(&script), server: Arc::clone(&server) });
        let router = tonic::transport::Server::builder().add_service(service);
        let task = tokio::spawn(async move {
            router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self { script, server, address, task }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn settings() -> LinkSettings {
    LinkSettings { reconnect_at_first: Duration::from_millis(5), ..LinkSettings::new("r") }
}

pub async fn link(address: SocketAddr, settings: LinkSettings) -> WorkerLink {
    let link = WorkerLink::connect(&address.to_string(), settings).unwrap();
    until(&link, LinkState::Connected).await;
    link
}

pub async fn until(link: &WorkerLink, state: LinkState) {
    let mut states = link.watch_state();
    tokio::time::timeout(PATIENCE, states.wait_for(|now| *now == state)).await.expect("no such state in time").unwrap();
}

pub fn request(request_id: &str, tokens: usize) -> EngineRequest {
    let ids = (0..u32::try_from(tokens).unwrap()).collect();
    EngineRequest {
        request_id: request_id.to_owned(),
        prompt: Some(engine_request::Prompt::Tokens(TokenIds { ids })),
        ..EngineRequest::default()
    }
}

pub fn delta(token_ids: &[u32]) -> TokenDelta {
    TokenDelta { token_ids: token_ids.to_vec(), ..TokenDelta::default() }
}

/// A TCP proxy whose connections can be cut, or frozen without being closed.
pub struct Proxy {
    pub address: SocketAddr,
    cut: watch::Sender<u64>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cut = watch::Sender::new(0);
        let watching = cut.clone();
        let task = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut cut = watching.subscribe();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(to).await else { return };
                    tokio::select! {
                        _ = cut.changed() => {}
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    }
                });
            }
        });
        Self { address, cut, task }
    }

    pub fn cut(&self) {
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Service {
    script: Arc<Script>,
    server: Arc<LinkServer>,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not part of this test"))
}

#[tonic::async_trait]
impl EngineService for Service {
    type ConnectStream = ConnectFrames;
    type GetTokenizerStream = Boxed<GetTokenizerResponse>;
    type GetResultStream = Boxed<GetResultResponse>;
    type GenerateStream = Boxed<GenerateResponse>;
    type WatchKvEventsStream = Boxed<WatchKvEventsResponse>;
    type WatchLoadStream = Boxed<WatchLoadResponse>;

    async fn connect(&self, request: Request<Streaming<ConnectRequest>>) -> Result<Response<ConnectFrames>, Status> {
        let acceptor = Arc::clone(&self.script) as Arc<dyn RequestAcceptor>;
        Ok(Response::new(self.server.connect(acceptor, request.into_inner()).await?))
    }
    async fn put_prompt(
        &self,
        request: Request<Streaming<PutPromptRequest>>,
    ) -> Result<Response<PutPromptResponse>, Status> {
        Ok(Response::new(self.server.put_prompt(request.into_inner()).await?))
    }
    async fn get_result(&self, request: Request<GetResultRequest>) -> Result<Response<Self::GetResultStream>, Status> {
        let parts = self.server.get_result(&request.into_inner().request_id)?;
        Ok(Response::new(futures::stream::iter(parts).map(Ok).boxed()))
    }
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        unused()
    }
    async fn get_tokenizer(
        &self,
        _: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let header = TokenizerHeader { digest: "d".to_owned(), size_bytes: 3, ..TokenizerHeader::default() };
        let parts = [
            get_tokenizer_response::Part::Header(header),
            get_tokenizer_response::Part::Data(vec![1, 2].into()),
            get_tokenizer_response::Part::Data(vec![3].into()),
        ];
        Ok(Response::new(
            futures::stream::iter(parts).map(|part| Ok(GetTokenizerResponse { part: Some(part) })).boxed(),
        ))
    }
    async fn generate(&self, _: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        unused()
    }
    async fn embed(&self, _: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        unused()
    }
    async fn abort(&self, _: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        unused()
    }
    async fn watch_kv_events(
        &self,
        _: Request<WatchKvEventsRequest>,
    ) -> Result<Response<Self::WatchKvEventsStream>, Status> {
        unused()
    }
    async fn watch_load(&self, _: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        unused()
    }
    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        unused()
    }
    async fn reset_cache(&self, _: Request<ResetCacheRequest>) -> Result<Response<ResetCacheResponse>, Status> {
        unused()
    }
    async fn load_adapter(&self, _: Request<LoadAdapterRequest>) -> Result<Response<LoadAdapterResponse>, Status> {
        unused()
    }
    async fn unload_adapter(
        &self,
        _: Request<UnloadAdapterRequest>,
    ) -> Result<Response<UnloadAdapterResponse>, Status> {
        unused()
    }
    async fn start_profile(&self, _: Request<StartProfileRequest>) -> Result<Response<StartProfileResponse>, Status> {
        unused()
    }
    async fn stop_profile(&self, _: Request<StopProfileRequest>) -> Result<Response<StopProfileResponse>, Status> {
        unused()
    }
}
