//! The router's end.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures::Stream;
use kvist_doors::{ClientTls, PeerRole};
use kvist_errors::{Code, KvistError, from_status};
use kvist_proto::{
    engine::v1::{
        AbortReason, AbortStream, ConnectRequest, ConnectResponse, EmbedRequest, Embedding, EngineRequest,
        GetResultRequest, GetTokenizerRequest, Hello, PutPromptRequest, ReleaseLease, RouterMessage, StartRequest,
        StreamEvent, TokenLogprobs, TokenizerHeader, WorkerDescription, engine_request,
        engine_service_client::EngineServiceClient, get_tokenizer_response, router_message, stream_event,
    },
    events::v1::LoadReport,
};
use parking_lot::{Mutex, RwLock};
use prost::Message as _;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use crate::{
    FRAME_LIMIT_BYTES, MESSAGE_LIMIT_BYTES, error_from_failed,
    frame::EMBEDDING_BYTES,
    slot::{Overflow, RequestEvent, Slot},
};

/// Token ids in one message of an upload: at most 5 bytes each, so below 1 MiB.
const UPLOAD_CHUNK_TOKENS: usize = 200_000;

/// How a link behaves.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Name of the router; unique in the cluster.
    pub router_name: String,
    /// For a worker behind TLS.
    pub tls: Option<ClientTls>,
    /// Tokens that a request may have waiting for its reader before it is ended with `SLOW_CLIENT`.
    pub request_buffer_tokens: usize,
    /// A prompt with more tokens is uploaded ahead of its request.
    pub large_prompt_tokens: usize,
    /// How often the worker sends load at least.
    pub load_interval: Duration,
    /// Time between pings of the connection.
    pub keep_alive_interval: Duration,
    /// An unanswered ping ends the connection after this time.
    pub keep_alive_timeout: Duration,
    /// Time for connecting and for the handshake, each.
    pub connect_timeout: Duration,
    /// First wait before connecting again; doubles up to `reconnect_at_most`.
    pub reconnect_at_first: Duration,
    /// Longest wait before connecting again.
    pub reconnect_at_most: Duration,
}

impl LinkSettings {
    /// The usual settings.
    #[must_use]
    pub fn new(router_name: impl Into<String>) -> Self {
        Self {
            router_name: router_name.into(),
            tls: None,
            request_buffer_tokens: 16_384,
            large_prompt_tokens: 12_000,
            load_interval: Duration::from_secs(1),
            keep_alive_interval: Duration::from_secs(2),
            keep_alive_timeout: Duration::from_secs(3),
            connect_timeout: Duration::from_secs(5),
            reconnect_at_first: Duration::from_millis(50),
            reconnect_at_most: Duration::from_secs(2),
        }
    }
}

/// Whether requests can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Not connected yet.
    Connecting,
    /// The worker has introduced itself.
    Connected,
    /// It was connected; all its requests have ended with `ENGINE_LOST`.
    Lost,
}

/// A load report and when it arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedLoad {
    /// What the worker said.
    pub report: LoadReport,
    /// When this router heard it.
    pub received_at: Instant,
}

/// One worker, as a router holds it. Cheap to clone. It connects, and connects again, until the last clone and the last
/// [`RequestStream`] are dropped, or until [`WorkerLink::close`].
#[derive(Clone, Debug)]
pub struct WorkerLink {
    handle: Arc<Handle>,
}

/// Ends the link's tasks when nobody needs it any more. The tasks themselves hold `Shared` only.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    closing: CancellationToken,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

#[derive(Debug)]
struct Shared {
    settings: LinkSettings,
    channel: Channel,
    session: RwLock<Option<Arc<Session>>>,
    description: RwLock<Option<Arc<WorkerDescription>>>,
    loads: RwLock<Vec<Option<TimedLoad>>>,
    is_draining: AtomicBool,
    session_number: AtomicU64,
    state: watch::Sender<LinkState>,
    last_error: Mutex<Option<KvistError>>,
    uploads: TaskTracker,
}

/// One stream to the worker.
#[derive(Debug, Default)]
struct Session {
    state: Mutex<SessionState>,
}

#[derive(Debug, Default)]
struct SessionState {
    slots: HashMap<u32, SlotEntry>,
    last_stream_id: u32,
    hello: Option<Hello>,
    aborts: Vec<AbortStream>,
    releases: Vec<ReleaseLease>,
    starts: VecDeque<StartRequest>,
    waker: Option<Waker>,
    is_closed: bool,
}

#[derive(Debug)]
struct SlotEntry {
    slot: Arc<Slot>,
    /// The writer has taken the request, so the worker may have seen it.
    is_sent: bool,
}

impl WorkerLink {
    /// A link to the worker at `address` (`host:port`, or a URI). Returns at once and connects in the background; must be
    /// called inside a tokio runtime.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when the address cannot be one.
    pub fn connect(address: &str, settings: LinkSettings) -> Result<Self, KvistError> {
        let adjust = |endpoint| adjust(endpoint, &settings);
        let channel = ClientTls::channel(settings.tls.as_ref(), address, PeerRole::Worker, adjust)?;
        let shared = Arc::new(Shared {
            session_number: AtomicU64::new(unix_micros()),
            settings,
            channel,
            session: RwLock::new(None),
            description: RwLock::new(None),
            loads: RwLock::new(Vec::new()),
            is_draining: AtomicBool::new(false),
            state: watch::Sender::new(LinkState::Connecting),
            last_error: Mutex::new(None),
            uploads: TaskTracker::new(),
        });
        let closing = CancellationToken::new();
        // Owned by the handle: the token ends it, and it holds nothing that would keep the handle alive.
        tokio::spawn(keep_connected(Arc::clone(&shared), closing.clone()));
        Ok(Self { handle: Arc::new(Handle { shared, closing }) })
    }

    /// Whether requests can be started.
    #[must_use]
    pub fn state(&self) -> LinkState {
        *self.shared().state.borrow()
    }

    /// Changes of the state.
    #[must_use]
    pub fn watch_state(&self) -> watch::Receiver<LinkState> {
        self.shared().state.subscribe()
    }

    /// What the worker said of itself when it was last connected; none before the first time.
    #[must_use]
    pub fn description(&self) -> Option<Arc<WorkerDescription>> {
        self.shared().description.read().clone()
    }

    /// The last load report of a rank; none before the first of this incarnation.
    #[must_use]
    pub fn load(&self, rank: u32) -> Option<TimedLoad> {
        self.shared().loads.read().get(rank as usize).copied().flatten()
    }

    /// The worker wants nothing new.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared().is_draining.load(Ordering::Relaxed)
    }

    /// Why the link is not connected; none while it is.
    #[must_use]
    pub fn last_error(&self) -> Option<KvistError> {
        self.shared().last_error.lock().clone()
    }

    /// The connection, for the other RPCs of the worker.
    #[must_use]
    pub fn client(&self) -> EngineServiceClient<Channel> {
        self.shared().client()
    }

    /// Ends the link and all its requests.
    pub fn close(&self) {
        self.handle.closing.cancel();
    }

    /// Starts a request. What cannot be started fails through the stream, with `not_started`.
    #[must_use]
    pub fn start(&self, request: EngineRequest) -> RequestStream {
        let shared = self.shared();
        let mut stream = RequestStream {
            link: self.clone(),
            session: shared.session.read().clone(),
            slot: Arc::new(Slot::new(shared.settings.request_buffer_tokens)),
            stream_id: 0,
            has_ended: false,
        };
        let stream_id = stream.session.as_ref().and_then(|session| session.open(&stream.slot));
        let (Some(session), Some(stream_id)) = (&stream.session, stream_id) else {
            let error = KvistError::new(Code::EngineUnavailable, "the engine is not connected").before_start();
            stream.slot = Arc::new(Slot::failed(error));
            stream.session = None;
            return stream;
        };
        stream.stream_id = stream_id;
        let prompt_tokens = match &request.prompt {
            Some(engine_request::Prompt::Tokens(tokens)) => tokens.ids.len(),
            _ => 0,
        };
        let start = StartRequest { stream_id, request: Some(request) };
        // Ids may take five bytes, and other fields may be large too: the size decides where the count does not.
        let is_large = prompt_tokens > shared.settings.large_prompt_tokens
            || (prompt_tokens > 2_000 && start.encoded_len() + 2 * EMBEDDING_BYTES > FRAME_LIMIT_BYTES);
        if is_large {
            shared.uploads.spawn(upload(shared.client(), Arc::clone(session), start));
        } else {
            session.send(start);
        }
        stream
    }

    /// Frees what the engine keeps under a lease for another engine, or would keep of a request that still runs. Nothing is
    /// sent when the worker is not connected: then the lease ends by itself.
    pub fn release(&self, lease_id: String) {
        let session = self.shared().session.read().clone();
        if let Some(session) = session {
            session.release(lease_id);
        }
    }

    /// Fetches what was too large for a frame, after `Finished.large_result`.
    ///
    /// # Errors
    /// `NOT_FOUND` when it was fetched before or is too old; what the connection says else.
    pub async fn fetch_result(&self, request_id: &str) -> Result<Vec<TokenLogprobs>, KvistError> {
        let request = GetResultRequest { request_id: request_id.to_owned() };
        let mut parts = self.client().get_result(request).await.map_err(|status| from_status(&status))?.into_inner();
        let mut result = Vec::new();
        while let Some(part) = parts.message().await.map_err(|status| from_status(&status))? {
            result.extend(part.prompt_logprobs);
        }
        Ok(result)
    }

    /// Fetches the engine's tokenizer: header and file. The file is empty when the worker's digest is `known_digest`.
    ///
    /// # Errors
    /// `NOT_FOUND` when the engine has none; `INTERNAL` when what came is not what was announced.
    pub async fn fetch_tokenizer(&self, known_digest: &str) -> Result<(TokenizerHeader, Vec<u8>), KvistError> {
        let request = GetTokenizerRequest { known_digest: known_digest.to_owned() };
        let mut parts = self.client().get_tokenizer(request).await.map_err(|status| from_status(&status))?.into_inner();
        let (mut header, mut file) = (None, Vec::new());
        while let Some(part) = parts.message().await.map_err(|status| from_status(&status))? {
            match part.part {
                Some(get_tokenizer_response::Part::Header(first)) => header = Some(first),
                Some(get_tokenizer_response::Part::Data(data)) => file.extend_from_slice(&data),
                None => {}
            }
        }
        let header: TokenizerHeader =
            header.ok_or_else(|| KvistError::new(Code::Internal, "the tokenizer came without a header"))?;
        let is_known = !known_digest.is_empty() && header.digest == known_digest && file.is_empty();
        if !is_known && header.size_bytes != file.len() as u64 {
            return Err(KvistError::new(Code::Internal, "the tokenizer came incomplete"));
        }
        Ok((header, file))
    }

    /// Asks for embeddings. Dropping the future tells the worker that nobody waits.
    ///
    /// # Errors
    /// `ENGINE_LOST` when the connection broke; what the worker says else.
    pub async fn embed(&self, request: EmbedRequest, time_left: Duration) -> Result<Vec<Embedding>, KvistError> {
        let began = Instant::now();
        let mut request = tonic::Request::new(request);
        request.set_timeout(time_left);
        match self.client().embed(request).await {
            Ok(response) => Ok(response.into_inner().embeddings),
            Err(_) if began.elapsed() >= time_left => {
                Err(KvistError::new(Code::DeadlineExceeded, "the request took too long"))
            }
            // The worker's own errors have details; this is the connection's.
            Err(status) if status.details().is_empty() => {
                Err(KvistError::new(Code::EngineLost, "the connection to the engine broke before it answered"))
            }
            Err(status) => Err(from_status(&status)),
        }
    }

    fn shared(&self) -> &Shared {
        &self.handle.shared
    }
}

/// The events of one request. Dropping it before the end aborts the request.
#[derive(Debug)]
pub struct RequestStream {
    /// Keeps the link alive as long as the request.
    link: WorkerLink,
    session: Option<Arc<Session>>,
    slot: Arc<Slot>,
    stream_id: u32,
    has_ended: bool,
}

impl RequestStream {
    /// The next event; none after the terminal one. What arrived since the last call comes as one delta where it can.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// The next event that is at hand.
    pub fn try_next(&mut self) -> Option<RequestEvent> {
        if self.has_ended {
            return None;
        }
        let event = self.slot.try_next()?;
        self.has_ended = event.is_terminal();
        Some(event)
    }

    /// Ends the request; the terminal event still comes.
    pub fn abort(&self, reason: AbortReason) {
        if let Some(session) = &self.session {
            session.abort(self.stream_id, reason);
        }
    }

    /// The link that the request runs over.
    #[must_use]
    pub fn link(&self) -> &WorkerLink {
        &self.link
    }

    fn poll_event(&mut self, context: &Context<'_>) -> Poll<Option<RequestEvent>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        self.slot.poll_next(context).map(|event| {
            self.has_ended = event.is_terminal();
            Some(event)
        })
    }
}

impl Stream for RequestStream {
    type Item = RequestEvent;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<RequestEvent>> {
        self.get_mut().poll_event(context)
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.has_ended {
            self.abort(AbortReason::Cancelled);
        }
    }
}

impl Session {
    fn new(hello: Hello) -> Self {
        Self { state: Mutex::new(SessionState { hello: Some(hello), ..SessionState::default() }) }
    }

    /// A stream id for a request; none when the stream is closed.
    fn open(&self, slot: &Arc<Slot>) -> Option<u32> {
        let mut state = self.state.lock();
        if state.is_closed {
            return None;
        }
        // Ids are not used again before they wrap, so that what still travels for an ended request finds nobody.
        let mut stream_id = state.last_stream_id.wrapping_add(1);
        while state.slots.contains_key(&stream_id) {
            stream_id = stream_id.wrapping_add(1);
        }
        state.last_stream_id = stream_id;
        state.slots.insert(stream_id, SlotEntry { slot: Arc::clone(slot), is_sent: false });
        Some(stream_id)
    }

    fn send(&self, start: StartRequest) {
        let mut state = self.state.lock();
        // It may have been aborted, or the stream may be lost, while its prompt was uploaded.
        if state.slots.contains_key(&start.stream_id) {
            state.starts.push_back(start);
            state.wake();
        }
    }

    fn abort(&self, stream_id: u32, reason: AbortReason) {
        let mut wakers = Vec::new();
        {
            let mut state = self.state.lock();
            let Some(entry) = state.slots.get(&stream_id) else { return };
            if entry.is_sent {
                state.aborts.push(AbortStream { stream_id, reason: reason.into() });
                state.wake();
            } else if let Some(entry) = state.slots.remove(&stream_id) {
                state.starts.retain(|start| start.stream_id != stream_id);
                let error = aborted_before_start(reason);
                // A slot overflows on deltas only.
                let _ = entry.slot.push(RequestEvent::Failed(error), &mut wakers);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn release(&self, lease_id: String) {
        let mut state = self.state.lock();
        if !state.is_closed {
            state.releases.push(ReleaseLease { lease_id });
            state.wake();
        }
    }

    fn fail(&self, stream_id: u32, error: KvistError) {
        let mut wakers = Vec::new();
        if let Some(entry) = self.state.lock().slots.remove(&stream_id) {
            let _ = entry.slot.push(RequestEvent::Failed(error), &mut wakers);
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Gives the events of a frame to their requests.
    fn deliver(&self, events: Vec<StreamEvent>) {
        let mut wakers = Vec::with_capacity(events.len());
        {
            let mut state = self.state.lock();
            let mut has_slow = false;
            for StreamEvent { stream_id, event } in events {
                let event = match event {
                    Some(stream_event::Event::Delta(delta)) => RequestEvent::Delta(delta),
                    Some(stream_event::Event::Finished(finished)) => RequestEvent::Finished(finished),
                    Some(stream_event::Event::Failed(failed)) => RequestEvent::Failed(error_from_failed(&failed)),
                    None => continue,
                };
                let is_terminal = event.is_terminal();
                // Nobody: the request was given up, and this was under way.
                let Some(entry) = state.slots.get(&stream_id) else { continue };
                let is_slow = entry.slot.push(event, &mut wakers) == Err(Overflow);
                if is_terminal || is_slow {
                    state.slots.remove(&stream_id);
                }
                if is_slow {
                    has_slow = true;
                    state.aborts.push(AbortStream { stream_id, reason: AbortReason::SlowClient.into() });
                }
            }
            if has_slow {
                state.wake();
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends the stream and all its requests.
    fn close(&self) {
        let mut wakers = Vec::new();
        {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.starts.clear();
            state.aborts.clear();
            state.releases.clear();
            for (_, entry) in state.slots.drain() {
                let mut error = KvistError::new(Code::EngineLost, "the connection to the engine was lost");
                error.not_started = !entry.is_sent;
                let _ = entry.slot.push(RequestEvent::Failed(error), &mut wakers);
            }
            wakers.extend(state.waker.take());
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn poll_frame(&self, context: &Context<'_>) -> Poll<Option<ConnectRequest>> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Poll::Ready(None);
        }
        let mut messages = Vec::new();
        if let Some(hello) = state.hello.take() {
            messages.push(RouterMessage { message: Some(router_message::Message::Hello(hello)) });
            return Poll::Ready(Some(ConnectRequest { messages }));
        }
        let aborts = std::mem::take(&mut state.aborts);
        let mut bytes = aborts.len() * (16 + EMBEDDING_BYTES);
        messages.extend(
            aborts.into_iter().map(|abort| RouterMessage { message: Some(router_message::Message::Abort(abort)) }),
        );
        // After the aborts: a request that is given up must not get the lease again.
        let releases = std::mem::take(&mut state.releases);
        bytes += releases.iter().map(|release| release.encoded_len() + 2 * EMBEDDING_BYTES).sum::<usize>();
        messages.extend(
            releases.into_iter().map(|one| RouterMessage { message: Some(router_message::Message::Release(one)) }),
        );
        while let Some(start) = state.starts.front() {
            bytes += start.encoded_len() + 3 * EMBEDDING_BYTES;
            if bytes > FRAME_LIMIT_BYTES && !messages.is_empty() {
                break;
            }
            let Some(start) = state.starts.pop_front() else { break };
            if let Some(entry) = state.slots.get_mut(&start.stream_id) {
                entry.is_sent = true;
            }
            messages.push(RouterMessage { message: Some(router_message::Message::Start(start)) });
        }
        if !messages.is_empty() {
            return Poll::Ready(Some(ConnectRequest { messages }));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            empty => *empty = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl SessionState {
    /// Wakes the writer. Under the lock: waking only schedules.
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            crate::wake::wake(waker);
        }
    }
}

/// Everything at hand, in frames.
struct Frames(Arc<Session>);

impl Stream for Frames {
    type Item = ConnectRequest;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<ConnectRequest>> {
        self.0.poll_frame(context)
    }
}

impl Shared {
    fn client(&self) -> EngineServiceClient<Channel> {
        EngineServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES)
    }

    /// Connects and shakes hands.
    async fn open(&self) -> Result<(Arc<Session>, Streaming<ConnectResponse>), KvistError> {
        let number = self.session_number.fetch_max(unix_micros(), Ordering::Relaxed);
        let number = self.session_number.fetch_add(1, Ordering::Relaxed).max(number) + 1;
        let hello = Hello {
            router_name: self.settings.router_name.clone(),
            session: number,
            load_interval: prost_types::Duration::try_from(self.settings.load_interval).ok(),
        };
        let session = Arc::new(Session::new(hello));
        let mut client = self.client();
        let handshake = async {
            let mut frames = client.connect(Frames(Arc::clone(&session))).await?.into_inner();
            let first = frames.message().await?;
            Ok::<_, tonic::Status>((frames, first))
        };
        let timeout = || KvistError::new(Code::EngineUnavailable, "the engine did not answer in time");
        let result = match tokio::time::timeout(self.settings.connect_timeout, handshake).await {
            Ok(result) => result.map_err(|status| from_status(&status)),
            Err(_) => Err(timeout()),
        };
        let welcomed = result.and_then(|(frames, first)| {
            let mut first = first.ok_or_else(|| KvistError::new(Code::EngineUnavailable, "the stream ended early"))?;
            let worker = first.welcome.take().and_then(|welcome| welcome.worker);
            let worker =
                worker.ok_or_else(|| KvistError::new(Code::Internal, "the worker did not introduce itself"))?;
            self.welcome(worker);
            self.take(&session, first);
            Ok(frames)
        });
        match welcomed {
            Ok(frames) => Ok((session, frames)),
            Err(error) => {
                session.close();
                Err(error)
            }
        }
    }

    fn welcome(&self, worker: WorkerDescription) {
        self.is_draining.store(worker.draining, Ordering::Relaxed);
        let mut description = self.description.write();
        if description.as_ref().is_none_or(|known| known.incarnation != worker.incarnation) {
            self.loads.write().clear();
        }
        *description = Some(Arc::new(worker));
    }

    /// Takes a frame.
    fn take(&self, session: &Session, frame: ConnectResponse) {
        if !frame.loads.is_empty() {
            let received_at = Instant::now();
            let mut loads = self.loads.write();
            for report in frame.loads {
                let rank = report.rank as usize;
                // A rank is a small number; anything else is a fault of the worker.
                if rank >= 4096 {
                    continue;
                }
                if loads.len() <= rank {
                    loads.resize(rank + 1, None);
                }
                if loads[rank].is_none_or(|known| known.report.report_number <= report.report_number) {
                    loads[rank] = Some(TimedLoad { report, received_at });
                }
            }
        }
        if frame.draining {
            self.is_draining.store(true, Ordering::Relaxed);
        }
        if !frame.events.is_empty() {
            session.deliver(frame.events);
        }
    }
}

async fn keep_connected(shared: Arc<Shared>, closing: CancellationToken) {
    let mut wait = shared.settings.reconnect_at_first;
    loop {
        let opened = tokio::select! {
            () = closing.cancelled() => break,
            opened = shared.open() => opened,
        };
        match opened {
            Ok((session, frames)) => {
                wait = shared.settings.reconnect_at_first;
                *shared.session.write() = Some(Arc::clone(&session));
                *shared.last_error.lock() = None;
                shared.state.send_replace(LinkState::Connected);
                tracing::info!(router = %shared.settings.router_name, "link_connected");
                let error = tokio::select! {
                    () = closing.cancelled() => KvistError::new(Code::EngineUnavailable, "the link was closed"),
                    error = read(&shared, &session, frames) => error,
                };
                tracing::warn!(code = error.code.name(), "link_lost");
                *shared.session.write() = None;
                *shared.last_error.lock() = Some(error);
                // First the state, so that whoever sees its request lost does not choose this link again.
                shared.state.send_replace(LinkState::Lost);
                session.close();
            }
            Err(error) => {
                tracing::debug!(%error, "link_connect_failed");
                *shared.last_error.lock() = Some(error);
            }
        }
        let jittered = wait.mul_f64(rand::random_range(0.5..1.0));
        wait = (wait * 2).min(shared.settings.reconnect_at_most);
        tokio::select! {
            () = closing.cancelled() => break,
            () = tokio::time::sleep(jittered) => {}
        }
    }
}

/// Reads until the stream ends, and says why. It never waits for a client.
async fn read(shared: &Shared, session: &Session, mut frames: Streaming<ConnectResponse>) -> KvistError {
    loop {
        match frames.message().await {
            Ok(Some(frame)) => shared.take(session, frame),
            Ok(None) => return KvistError::new(Code::EngineUnavailable, "the worker ended the stream"),
            Err(status) => return from_status(&status),
        }
    }
}

/// Uploads a prompt and then starts its request.
async fn upload(mut client: EngineServiceClient<Channel>, session: Arc<Session>, mut start: StartRequest) {
    let Some(request) = &mut start.request else { return };
    let reference = request.request_id.clone();
    let Some(engine_request::Prompt::Tokens(tokens)) =
        request.prompt.replace(engine_request::Prompt::PromptReference(reference.clone()))
    else {
        return;
    };
    let chunks = tokens.ids.len().div_ceil(UPLOAD_CHUNK_TOKENS);
    let messages = (0..chunks).map(move |chunk| {
        let first = chunk * UPLOAD_CHUNK_TOKENS;
        let last = (first + UPLOAD_CHUNK_TOKENS).min(tokens.ids.len());
        let prompt_reference = if chunk == 0 { reference.clone() } else { String::new() };
        PutPromptRequest { prompt_reference, token_ids: tokens.ids[first..last].to_vec() }
    });
    match client.put_prompt(futures::stream::iter(messages)).await {
        Ok(_) => session.send(start),
        Err(status) => session.fail(start.stream_id, from_status(&status).before_start()),
    }
}

fn aborted_before_start(reason: AbortReason) -> KvistError {
    match reason {
        AbortReason::Deadline => KvistError::new(Code::DeadlineExceeded, "the deadline passed before the start"),
        AbortReason::SlowClient => KvistError::new(Code::SlowClient, "the client reads too slowly"),
        _ => KvistError::new(Code::Cancelled, "the request was ended before its start"),
    }
    .before_start()
}

fn adjust(endpoint: Endpoint, settings: &LinkSettings) -> Endpoint {
    endpoint
        .connect_timeout(settings.connect_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(settings.keep_alive_interval)
        .keep_alive_timeout(settings.keep_alive_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(4 * 1024 * 1024)
        .initial_connection_window_size(16 * 1024 * 1024)
}

fn unix_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
