//! `EngineService` over any engine.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_link::{Acceptor, LoadListener, StreamSink};
use kvist_proto::{
    engine::v1::{
        engine_request::Prompt, engine_service_server::EngineService, get_tokenizer_response,
        watch_kv_events_response::Part, *,
    },
    events::v1::{LoadReport, SourceId},
};
use parking_lot::Mutex;
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    Engine, EngineHost, RequestSink, TokenizerFile, convert,
    host::{History, now_unix_nanos},
};

const TOKENIZER_CHUNK_BYTES: usize = 256 * 1024;
/// How long a prompt sent ahead is kept.
const PROMPT_LIFETIME: Duration = Duration::from_secs(60);
/// Tokens of prompts sent ahead, in all.
const MOST_PENDING_PROMPT_TOKENS: usize = 64 * 1024 * 1024;
const MOST_WAITING_EVENTS: usize = 64;

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What all calls share.
pub(crate) struct Shared {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) host: EngineHost,
    pub(crate) description: WorkerDescription,
    pub(crate) tokenizer: Option<TokenizerFile>,
    pub(crate) digest_interval: Duration,
    pub(crate) drain_time_limit: Duration,
    pub(crate) running: Arc<Mutex<HashSet<String>>>,
    pub(crate) prompts: Mutex<HashMap<String, (Vec<u32>, Instant)>>,
}

impl Shared {
    fn source(&self) -> SourceId {
        SourceId { worker_uid: self.description.worker_uid.clone(), rank: 0, incarnation: self.host.incarnation().0 }
    }

    fn described(&self) -> WorkerDescription {
        WorkerDescription { draining: self.host.is_draining(), ..self.description.clone() }
    }

    /// Checks a request and hands it to the engine.
    fn submit(
        self: &Arc<Self>,
        mut request: EngineRequest,
        make_sink: impl FnOnce(Box<dyn FnOnce() + Send>) -> RequestSink,
    ) {
        let admitted = self.admit(&mut request);
        let (running, request_id) = (Arc::clone(&self.running), request.request_id.clone());
        let counted = admitted.is_ok();
        let sink = make_sink(Box::new(move || {
            if counted {
                running.lock().remove(&request_id);
            }
        }));
        if let Err(error) = admitted {
            return sink.failed(&error);
        }
        if let Some(time_left) = request.time_left.and_then(|left| Duration::try_from(left).ok()) {
            let (shared, request_id) = (Arc::clone(self), request.request_id.clone());
            tokio::spawn(async move {
                tokio::time::sleep(time_left).await;
                if shared.running.lock().contains(&request_id) {
                    shared.engine.abort(&request_id, AbortReason::Deadline);
                }
            });
        }
        self.engine.submit(request, sink);
    }

    fn admit(&self, request: &mut EngineRequest) -> Result<(), KvistError> {
        let refuse = |code, message: &str| Err(KvistError::new(code, message).before_start());
        if self.host.is_draining() {
            return refuse(Code::Draining, "the worker takes nothing new");
        }
        let own = &self.description.pool_revision;
        if !own.is_empty() && !request.pool_revision.is_empty() && *own != request.pool_revision {
            return refuse(Code::PoolRevisionMismatch, "the worker belongs to another pool revision");
        }
        if let Some(Prompt::PromptReference(reference)) = &request.prompt {
            let mut prompts = self.prompts.lock();
            let Some((ids, _)) = prompts.remove(reference) else {
                return refuse(Code::NotFound, "the prompt that the request refers to is not here");
            };
            request.prompt = Some(Prompt::Tokens(TokenIds { ids }));
        }
        if request.rank != 0 {
            return refuse(Code::InvalidArgument, "the engine has no such rank");
        }
        if !matches!(&request.prompt, Some(Prompt::Tokens(tokens)) if !tokens.ids.is_empty()) {
            return Err(
                KvistError::field(Code::InvalidArgument, "request.tokens.ids", "must not be empty").before_start()
            );
        }
        if request.engine_extras.as_ref().is_some_and(|extras| !extras.fields.is_empty()) {
            let extras = request.engine_extras.take().unwrap_or_default();
            let name = extras.fields.into_keys().next().unwrap_or_default();
            return Err(KvistError::field(Code::UnsupportedField, name, "the engine does not know it").before_start());
        }
        if request.request_id.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "request.request_id", "is missing").before_start());
        }
        if !self.running.lock().insert(request.request_id.clone()) {
            return refuse(Code::DuplicateRequest, "a request of this id is running");
        }
        Ok(())
    }
}

/// The acceptor of routers' connections.
struct LinkAcceptor(Arc<Shared>);

impl Acceptor for LinkAcceptor {
    fn describe(&self) -> WorkerDescription {
        self.0.described()
    }

    fn start(&self, request: EngineRequest, sink: StreamSink) {
        self.0.submit(request, |on_end| RequestSink::link(sink, on_end));
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        self.0.engine.abort(request_id, reason);
    }

    fn loads(&self) -> Vec<LoadReport> {
        vec![self.0.host.load()]
    }

    fn on_load(&self, report: LoadListener) {
        self.0.host.add_listener(report);
    }
}

/// Aborts a request of `Generate` when its caller has gone.
struct AbortOnDrop(Arc<Shared>, String);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.engine.abort(&self.1, AbortReason::Cancelled);
    }
}

/// The service.
pub(crate) struct Service(pub(crate) Arc<Shared>);

fn not_implemented(what: &str) -> Status {
    KvistError::new(Code::NotImplemented, format!("this engine does not support {what}")).into()
}

#[tonic::async_trait]
impl EngineService for Service {
    type GetTokenizerStream = BoxStream<GetTokenizerResponse>;
    type ConnectStream = BoxStream<ConnectResponse>;
    type GetResultStream = BoxStream<GetResultResponse>;
    type GenerateStream = BoxStream<GenerateResponse>;
    type WatchKvEventsStream = BoxStream<WatchKvEventsResponse>;
    type WatchLoadStream = BoxStream<WatchLoadResponse>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(DescribeResponse { worker: Some(self.0.described()) }))
    }

    async fn get_tokenizer(
        &self,
        request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let Some(tokenizer) = &self.0.tokenizer else {
            return Err(KvistError::new(Code::NotFound, "the engine has no tokenizer").into());
        };
        let digest = self.0.description.tokenizer_digest.clone();
        let known = request.into_inner().known_digest == digest;
        let header = TokenizerHeader {
            digest,
            size_bytes: tokenizer.json.len() as u64,
            chat_template: tokenizer.chat_template.clone(),
            bos_token: tokenizer.bos_token.clone(),
            eos_token: tokenizer.eos_token.clone(),
            add_bos: tokenizer.add_bos,
            eos_token_ids: tokenizer.eos_token_ids.clone(),
        };
        let json: Bytes = if known { Bytes::new() } else { tokenizer.json.clone() };
        let mut parts = vec![get_tokenizer_response::Part::Header(header)];
        parts.extend((0..json.len()).step_by(TOKENIZER_CHUNK_BYTES).map(|start| {
            get_tokenizer_response::Part::Data(json.slice(start..json.len().min(start + TOKENIZER_CHUNK_BYTES)))
        }));
        let messages = parts.into_iter().map(|part| Ok(GetTokenizerResponse { part: Some(part) }));
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }

    async fn connect(
        &self,
        request: Request<Streaming<ConnectRequest>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let acceptor = Arc::new(LinkAcceptor(Arc::clone(&self.0)));
        Ok(Response::new(kvist_link::serve(acceptor, request.into_inner()).await?))
    }

    async fn put_prompt(
        &self,
        request: Request<Streaming<PutPromptRequest>>,
    ) -> Result<Response<PutPromptResponse>, Status> {
        let mut stream = request.into_inner();
        let (mut reference, mut ids) = (String::new(), Vec::new());
        while let Some(part) = stream.message().await? {
            if !part.prompt_reference.is_empty() {
                reference = part.prompt_reference;
            }
            ids.extend(part.token_ids);
            if ids.len() > MOST_PENDING_PROMPT_TOKENS {
                return Err(KvistError::new(Code::RequestTooLarge, "the prompt is too large").into());
            }
        }
        if reference.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "prompt_reference", "is missing").into());
        }
        let tokens = ids.len() as u64;
        let mut prompts = self.0.prompts.lock();
        prompts.retain(|_, (_, at)| at.elapsed() < PROMPT_LIFETIME);
        let pending: usize = prompts.values().map(|(ids, _)| ids.len()).sum();
        if pending + ids.len() > MOST_PENDING_PROMPT_TOKENS {
            return Err(KvistError::new(Code::Overloaded, "too many prompts wait for their requests").into());
        }
        prompts.insert(reference, (ids, Instant::now()));
        Ok(Response::new(PutPromptResponse { tokens }))
    }

    async fn get_result(&self, _: Request<GetResultRequest>) -> Result<Response<Self::GetResultStream>, Status> {
        Err(KvistError::new(Code::NotFound, "there is no large result of this request").into())
    }

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let mut request = request.into_inner().request.unwrap_or_default();
        if request.request_id.is_empty() {
            request.request_id = format!("direct-{:x}", now_unix_nanos());
        }
        let guard = AbortOnDrop(Arc::clone(&self.0), request.request_id.clone());
        let (sender, receiver) = mpsc::unbounded_channel();
        self.0.submit(request, |on_end| RequestSink::call(sender, on_end));
        let events = UnboundedReceiverStream::new(receiver).map(move |event| {
            let _ = &guard;
            event
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn embed(&self, _: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        Err(not_implemented("embeddings"))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let request = request.into_inner();
        let was_running = self.0.running.lock().contains(&request.request_id);
        self.0.engine.abort(&request.request_id, request.reason());
        Ok(Response::new(AbortResponse { was_running }))
    }

    async fn watch_kv_events(
        &self,
        request: Request<WatchKvEventsRequest>,
    ) -> Result<Response<Self::WatchKvEventsStream>, Status> {
        let request = request.into_inner();
        let (sender, receiver) = mpsc::channel(MOST_WAITING_EVENTS);
        tokio::spawn(send_events(Arc::clone(&self.0), request, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        let interval = request.into_inner().interval.and_then(|interval| Duration::try_from(interval).ok());
        let mut ticks =
            tokio::time::interval(interval.unwrap_or(Duration::from_secs(1)).max(Duration::from_millis(10)));
        let (sender, receiver) = mpsc::channel(1);
        let host = self.0.host.clone();
        tokio::spawn(async move {
            loop {
                ticks.tick().await;
                if sender.send(Ok(WatchLoadResponse { loads: vec![host.load()] })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let limit = request.into_inner().time_limit.and_then(|limit| Duration::try_from(limit).ok());
        let (finished, aborted) = drain(&self.0, limit.unwrap_or(self.0.drain_time_limit)).await;
        Ok(Response::new(DrainResponse {
            finished_requests: finished,
            aborted_requests: aborted,
            drained_at: Some(convert::timestamp(now_unix_nanos())),
        }))
    }

    async fn reset_cache(&self, _: Request<ResetCacheRequest>) -> Result<Response<ResetCacheResponse>, Status> {
        let removed_blocks = self.0.engine.reset_cache().map_err(Status::from)?;
        Ok(Response::new(ResetCacheResponse { removed_blocks }))
    }

    async fn load_adapter(&self, _: Request<LoadAdapterRequest>) -> Result<Response<LoadAdapterResponse>, Status> {
        Err(not_implemented("adapters"))
    }

    async fn unload_adapter(
        &self,
        _: Request<UnloadAdapterRequest>,
    ) -> Result<Response<UnloadAdapterResponse>, Status> {
        Err(not_implemented("adapters"))
    }

    async fn start_profile(&self, _: Request<StartProfileRequest>) -> Result<Response<StartProfileResponse>, Status> {
        Err(not_implemented("profiling"))
    }

    async fn stop_profile(&self, _: Request<StopProfileRequest>) -> Result<Response<StopProfileResponse>, Status> {
        Err(not_implemented("profiling"))
    }
}

/// Takes nothing new, waits for what runs until the limit, aborts the rest. Returns how many ended by themselves and
/// how many were aborted.
pub(crate) async fn drain(shared: &Arc<Shared>, limit: Duration) -> (u32, u32) {
    let count = || u32::try_from(shared.running.lock().len()).unwrap_or(u32::MAX);
    shared.host.set_draining();
    let before = count();
    let poll = Duration::from_millis(10);
    let wait = |limit: Duration| async move {
        let deadline = Instant::now() + limit;
        while count() > 0 && Instant::now() < deadline {
            tokio::time::sleep(poll).await;
        }
    };
    wait(limit).await;
    let rest: Vec<String> = shared.running.lock().iter().cloned().collect();
    for request_id in &rest {
        shared.engine.abort(request_id, AbortReason::Cancelled);
    }
    wait(Duration::from_secs(2)).await;
    let aborted = u32::try_from(rest.len()).unwrap_or(u32::MAX);
    (before.saturating_sub(aborted), aborted)
}

/// Sends history, and with `follow` what comes after it, to one reader.
async fn send_events(
    shared: Arc<Shared>,
    request: WatchKvEventsRequest,
    sender: mpsc::Sender<Result<WatchKvEventsResponse, Status>>,
) {
    let source = shared.source();
    let resume = request.resume_after.iter().find(|position| position.rank == 0);
    let mut same = resume.is_some_and(|position| position.incarnation == source.incarnation);
    let mut applied = resume.and_then(|position| position.sequence);
    loop {
        let mut following = shared.host.follow(applied, same);
        let mut parts: Vec<Part> = match &following.history {
            History::Range(batches) => {
                batches.iter().map(|batch| Part::Batch(convert::batch(&source, batch))).collect()
            }
            History::Snapshot(snapshot) => {
                convert::snapshot(&source, snapshot).into_iter().map(Part::Snapshot).collect()
            }
        };
        let next_sequence = following.digest.next_sequence;
        parts.push(Part::Digest(convert::digest(&source, &following.digest, now_unix_nanos())));
        parts.push(Part::CaughtUp(CaughtUp { source: Some(source.clone()), next_sequence }));
        for part in parts {
            if sender.send(Ok(WatchKvEventsResponse { part: Some(part) })).await.is_err() {
                return;
            }
        }
        if !request.follow {
            return;
        }
        (same, applied) = (true, next_sequence.checked_sub(1));
        let mut ticks = tokio::time::interval(shared.digest_interval);
        ticks.tick().await;
        loop {
            let part = tokio::select! {
                batch = following.live.recv() => match batch {
                    Ok(batch) => {
                        applied = Some(batch.sequence);
                        Part::Batch(convert::batch(&source, &batch))
                    }
                    // The reader was too slow: it goes on from the ring, or from a snapshot.
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return,
                },
                _ = ticks.tick() => {
                    let digest = shared.host.digest();
                    // Only a digest that covers exactly what was sent says anything.
                    if digest.next_sequence != applied.map_or(0, |applied| applied + 1) {
                        continue;
                    }
                    Part::Digest(convert::digest(&source, &digest, now_unix_nanos()))
                }
                () = sender.closed() => return,
            };
            if sender.send(Ok(WatchKvEventsResponse { part: Some(part) })).await.is_err() {
                return;
            }
        }
    }
}
