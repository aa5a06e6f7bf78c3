//! The worker's end.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError, from_status};
use kvist_proto::{
    engine::v1::{
        AbortReason, ConnectRequest, EngineRequest, Finished, GetResultResponse, Hello, PutPromptRequest,
        PutPromptResponse, RouterMessage, StartRequest, TokenDelta, TokenLogprobs, Welcome, WorkerDescription,
        engine_request, router_message, stream_event,
    },
    events::v1::LoadReport,
};
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use tonic::{Status, Streaming};

use crate::{PromptStore, ResultStore, failed_from_error, frame::DELTA_LIMIT_TOKENS};

mod connection;

pub use connection::ConnectFrames;
use connection::Connection;

/// What a worker does with the requests of its routers. Nothing here may block.
pub trait RequestAcceptor: Send + Sync + 'static {
    /// What the worker is.
    ///
    /// # Errors
    /// `NOT_READY` while the engine is loading.
    fn description(&self) -> Result<WorkerDescription, KvistError>;

    /// The load of each rank.
    fn loads(&self) -> Vec<LoadReport>;

    /// Takes a request whose prompt is in it. It is ended through `output`, exactly once.
    fn accept(&self, request: EngineRequest, output: RequestOutput);

    /// Ends a request; its terminal event still goes to its output. An unknown id is ignored.
    fn abort(&self, request_id: &str, reason: AbortReason);

    /// Frees what is kept under a lease; an unknown one is ignored.
    fn release(&self, _lease_id: &str) {}
}

/// How the worker's end behaves.
#[derive(Clone, Copy, Debug)]
pub struct LinkServerSettings {
    /// Bytes of prompts that may wait for their request.
    pub prompt_store_bytes: usize,
    /// Bytes of large results that may wait to be fetched.
    pub result_store_bytes: usize,
    /// Time for the first message of a stream.
    pub handshake_timeout: Duration,
    /// Least time between two load reports when a prompt was accepted.
    pub accept_load_gap: Duration,
    /// Least time between two load reports when only the engine moved on.
    pub step_load_gap: Duration,
}

impl Default for LinkServerSettings {
    fn default() -> Self {
        Self {
            prompt_store_bytes: 256 * 1024 * 1024,
            result_store_bytes: 256 * 1024 * 1024,
            handshake_timeout: Duration::from_secs(5),
            accept_load_gap: Duration::from_millis(2),
            step_load_gap: Duration::from_millis(20),
        }
    }
}

/// Serves `Connect`, `PutPrompt` and `GetResult`.
#[derive(Debug)]
pub struct LinkServer {
    settings: LinkServerSettings,
    routers: Mutex<HashMap<String, RouterEntry>>,
    prompts: PromptStore,
    results: ResultStore,
    readers: TaskTracker,
}

#[derive(Debug)]
struct RouterEntry {
    session: u64,
    connection: Option<Arc<Connection>>,
}

impl LinkServer {
    /// A server without routers.
    #[must_use]
    pub fn new(settings: LinkServerSettings) -> Self {
        Self {
            settings,
            routers: Mutex::default(),
            prompts: PromptStore::new(settings.prompt_store_bytes),
            results: ResultStore::new(settings.result_store_bytes),
            readers: TaskTracker::new(),
        }
    }

    /// Serves one stream. Answers when the router has said hello.
    ///
    /// # Errors
    /// `NOT_READY` while the engine is loading, `INVALID_ARGUMENT` for a stream that does not begin with `Hello`,
    /// `CONFLICT` when a newer stream of the router is there.
    pub async fn connect(
        self: &Arc<Self>,
        acceptor: Arc<dyn RequestAcceptor>,
        mut messages: Streaming<ConnectRequest>,
    ) -> Result<ConnectFrames, Status> {
        let first = tokio::time::timeout(self.settings.handshake_timeout, messages.message()).await;
        let first = first.map_err(|_| Status::from(protocol_error("the stream must begin with `hello` in time")))??;
        let mut first = first.unwrap_or_default().messages.into_iter();
        let Some(RouterMessage { message: Some(router_message::Message::Hello(hello)) }) = first.next() else {
            return Err(protocol_error("the stream must begin with `hello`").into());
        };
        let worker = acceptor.description()?;
        let connection =
            Arc::new(Connection::new(acceptor, Welcome { worker: Some(worker) }, load_interval(&hello), self.settings));
        self.register(&hello, &connection)?;
        tracing::info!(router = %hello.router_name, session = hello.session, "router_connected");
        let (server, reading) = (Arc::clone(self), Arc::clone(&connection));
        self.readers.spawn(async move {
            let error = server.read(&reading, first, messages).await;
            tracing::info!(router = %hello.router_name, session = hello.session, "router_gone");
            reading.close(error);
            server.forget(&hello, &reading);
        });
        Ok(ConnectFrames::new(connection))
    }

    /// Keeps an uploaded prompt.
    ///
    /// # Errors
    /// `OVERLOADED` when too many bytes wait; `INVALID_ARGUMENT` without a name.
    pub async fn put_prompt(&self, mut parts: Streaming<PutPromptRequest>) -> Result<PutPromptResponse, Status> {
        let (mut reference, mut tokens) = (String::new(), Vec::new());
        while let Some(part) = parts.message().await? {
            if reference.is_empty() {
                reference = part.prompt_reference;
            }
            tokens.extend_from_slice(&part.token_ids);
            if 4 * tokens.len() > self.settings.prompt_store_bytes {
                return Err(KvistError::new(Code::Overloaded, "the prompt is too large").before_start().into());
            }
        }
        if reference.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "prompt_reference", "must not be empty").into());
        }
        let count = tokens.len() as u64;
        self.prompts.put(Instant::now(), reference, tokens)?;
        Ok(PutPromptResponse { tokens: count })
    }

    /// Keeps the log-probabilities of a prompt until they are fetched.
    ///
    /// # Errors
    /// `OVERLOADED` when too many bytes wait.
    pub fn put_result(&self, request_id: &str, result: Vec<TokenLogprobs>) -> Result<(), KvistError> {
        self.results.put(Instant::now(), request_id.to_owned(), result)
    }

    /// Hands a large result out, in parts of about a frame.
    ///
    /// # Errors
    /// `NOT_FOUND` when it was fetched before or is too old.
    pub fn get_result(&self, request_id: &str) -> Result<Vec<GetResultResponse>, KvistError> {
        let result = self.results.take(Instant::now(), request_id);
        let result = result.ok_or_else(|| KvistError::new(Code::NotFound, "no result waits for this request"))?;
        let (mut parts, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
        for one in result {
            bytes += 16 + 16 * one.top.len();
            part.push(one);
            if bytes > crate::FRAME_LIMIT_BYTES / 2 {
                parts.push(GetResultResponse { prompt_logprobs: std::mem::take(&mut part) });
                bytes = 0;
            }
        }
        if !part.is_empty() {
            parts.push(GetResultResponse { prompt_logprobs: part });
        }
        Ok(parts)
    }

    /// Uses an uploaded prompt; requests that do not come over Connect may name one too.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when the request names a prompt that does not wait here.
    pub fn resolve_prompt(&self, request: &mut EngineRequest) -> Result<(), KvistError> {
        let Some(engine_request::Prompt::PromptReference(reference)) = &request.prompt else { return Ok(()) };
        let ids = self.prompts.take(Instant::now(), reference).ok_or_else(|| {
            KvistError::field(Code::InvalidArgument, "prompt_reference", "names no prompt that waits").before_start()
        })?;
        request.prompt = Some(engine_request::Prompt::Tokens(kvist_proto::engine::v1::TokenIds { ids }));
        Ok(())
    }

    /// The load has changed. `accepted` says that a prompt was accepted, which routers hear sooner.
    pub fn load_changed(&self, accepted: bool) {
        for entry in self.routers.lock().values() {
            if let Some(connection) = &entry.connection {
                connection.load_changed(accepted);
            }
        }
    }

    /// Tells all routers to send nothing new.
    pub fn announce_draining(&self) {
        for entry in self.routers.lock().values() {
            if let Some(connection) = &entry.connection {
                connection.announce_draining();
            }
        }
    }

    /// Routers that are connected.
    #[must_use]
    pub fn connected_routers(&self) -> usize {
        self.routers.lock().values().filter(|entry| entry.connection.is_some()).count()
    }

    /// Drops what waited too long. To be called now and then.
    pub fn expire(&self) {
        let now = Instant::now();
        self.prompts.expire(now);
        self.results.expire(now);
    }

    /// Ends all streams, truthfully: with an error.
    pub fn close(&self) {
        let connections: Vec<_> =
            self.routers.lock().values_mut().filter_map(|entry| entry.connection.take()).collect();
        for connection in connections {
            connection.close(Some(KvistError::new(Code::Draining, "the worker is being stopped")));
        }
    }

    fn register(&self, hello: &Hello, connection: &Arc<Connection>) -> Result<(), KvistError> {
        let replaced = {
            let mut routers = self.routers.lock();
            let entry =
                routers.entry(hello.router_name.clone()).or_insert(RouterEntry { session: 0, connection: None });
            if hello.session <= entry.session {
                return Err(KvistError::new(Code::Conflict, "a newer stream of this router was seen"));
            }
            entry.session = hello.session;
            entry.connection.replace(Arc::clone(connection))
        };
        if let Some(replaced) = replaced {
            replaced.close(Some(KvistError::new(Code::Conflict, "a newer stream of this router has begun")));
        }
        Ok(())
    }

    fn forget(&self, hello: &Hello, connection: &Arc<Connection>) {
        if let Some(entry) = self.routers.lock().get_mut(&hello.router_name)
            && entry.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection))
        {
            // The session stays, so that an older stream that arrives late is refused.
            entry.connection = None;
        }
    }

    /// Reads until the stream ends; says why, when the worker is to tell the router.
    async fn read(
        &self,
        connection: &Arc<Connection>,
        first: impl Iterator<Item = RouterMessage>,
        mut messages: Streaming<ConnectRequest>,
    ) -> Option<KvistError> {
        for message in first {
            if let Err(error) = self.take(connection, message) {
                return Some(error);
            }
        }
        loop {
            let frame = tokio::select! {
                () = connection.closed() => return None,
                frame = messages.message() => frame,
            };
            match frame {
                Ok(Some(frame)) => {
                    for message in frame.messages {
                        if let Err(error) = self.take(connection, message) {
                            return Some(error);
                        }
                    }
                }
                Ok(None) => return None,
                Err(status) => return Some(from_status(&status)),
            }
        }
    }

    fn take(&self, connection: &Arc<Connection>, message: RouterMessage) -> Result<(), KvistError> {
        match message.message {
            Some(router_message::Message::Start(StartRequest { stream_id, request })) => {
                let Some(mut request) = request else { return Err(protocol_error("`start` needs a request")) };
                connection.open(stream_id, &request.request_id)?;
                let output = RequestOutput::new(Arc::clone(connection), stream_id);
                if let Err(error) = self.resolve_prompt(&mut request) {
                    output.failed(&error);
                    return Ok(());
                }
                let request_id = request.request_id.clone();
                connection.acceptor.accept(request, output);
                // Whoever closed the stream meanwhile may have come before the request was known.
                if connection.is_closed() {
                    connection.acceptor.abort(&request_id, AbortReason::Cancelled);
                }
            }
            Some(router_message::Message::Abort(abort)) => {
                if let Some(request_id) = connection.request_id(abort.stream_id) {
                    let reason = AbortReason::try_from(abort.reason).unwrap_or(AbortReason::Unspecified);
                    connection.acceptor.abort(&request_id, reason);
                }
            }
            Some(router_message::Message::Release(release)) => connection.acceptor.release(&release.lease_id),
            Some(router_message::Message::Hello(_)) => return Err(protocol_error("`hello` comes first and once")),
            None => {}
        }
        Ok(())
    }
}

/// Where the events of one request go. Dropping it before the end fails the request with `ENGINE_FAILED`. Never waits: the
/// router always reads.
#[derive(Debug)]
pub struct RequestOutput {
    connection: Arc<Connection>,
    stream_id: u32,
    /// Where this request's last delta waits; read and written under the connection's lock only.
    waiting_delta: AtomicU64,
    has_ended: bool,
}

impl RequestOutput {
    fn new(connection: Arc<Connection>, stream_id: u32) -> Self {
        Self { connection, stream_id, waiting_delta: AtomicU64::new(u64::MAX), has_ended: false }
    }

    /// New tokens.
    pub fn delta(&self, delta: TokenDelta) {
        if delta.token_ids.len() <= DELTA_LIMIT_TOKENS && delta.logprobs.len() <= 64 {
            self.connection.push_delta(self.stream_id, delta, &self.waiting_delta);
            return;
        }
        // An engine may hand over many tokens at once; a frame holds some.
        let step = if delta.logprobs.is_empty() { DELTA_LIMIT_TOKENS } else { 64 };
        let mut cached_tokens = delta.cached_tokens;
        for (position, ids) in delta.token_ids.chunks(step).enumerate() {
            let first = (position * step).min(delta.logprobs.len());
            let last = (first + ids.len()).min(delta.logprobs.len());
            let part = TokenDelta {
                index: delta.index,
                token_ids: ids.to_vec(),
                logprobs: delta.logprobs[first..last].to_vec(),
                cached_tokens: cached_tokens.take(),
            };
            self.connection.push_delta(self.stream_id, part, &self.waiting_delta);
        }
    }

    /// The engine ended the request.
    pub fn finished(mut self, finished: Finished) {
        self.end(stream_event::Event::Finished(finished));
    }

    /// The request failed.
    pub fn failed(mut self, error: &KvistError) {
        self.end(stream_event::Event::Failed(failed_from_error(error)));
    }

    fn end(&mut self, event: stream_event::Event) {
        self.has_ended = true;
        self.waiting_delta.store(u64::MAX, Ordering::Relaxed);
        self.connection.push_end(self.stream_id, event);
    }
}

impl Drop for RequestOutput {
    fn drop(&mut self) {
        if !self.has_ended {
            let error = KvistError::new(Code::EngineFailed, "the engine gave the request up");
            self.end(stream_event::Event::Failed(failed_from_error(&error)));
        }
    }
}

fn protocol_error(message: &str) -> KvistError {
    KvistError::new(Code::InvalidArgument, message)
}

fn load_interval(hello: &Hello) -> Duration {
    let asked = hello.load_interval.and_then(|interval| Duration::try_from(interval).ok());
    asked.unwrap_or(Duration::from_secs(1)).max(Duration::from_millis(10))
}
