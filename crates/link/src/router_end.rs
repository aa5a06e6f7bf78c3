//! The router's end: one connection to one worker, kept up for ever.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures::{StreamExt as _, stream};
use kvist_errors::{Code, KvistError, from_status};
use kvist_proto::{
    engine::v1::{
        AbortReason, AbortStream, ConnectRequest, EngineRequest, Hello, PutPromptRequest, RouterMessage, StartRequest,
        WorkerDescription, engine_request::Prompt, engine_service_client::EngineServiceClient, router_message::Message,
    },
    events::v1::LoadReport,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use crate::{
    FRAME_BYTES, INLINE_PROMPT_TOKENS, PROMPT_CHUNK_TOKENS,
    outbox::{Outbox, frames},
    request::{LinkEvent, Mailbox, RequestStream},
};

const FIRST_BACK_OFF: Duration = Duration::from_millis(50);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(2);
const MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// How a link is kept.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Name of this router.
    pub router_name: String,
    /// Events that wait for a slow consumer at most.
    pub request_buffer_events: usize,
    /// How often the worker is asked whether it lives.
    pub keep_alive_interval: Duration,
    /// How long it may take to answer.
    pub keep_alive_timeout: Duration,
}

impl LinkSettings {
    /// The usual settings.
    #[must_use]
    pub fn new(router_name: impl Into<String>) -> Self {
        Self {
            router_name: router_name.into(),
            request_buffer_events: 4096,
            keep_alive_interval: Duration::from_secs(2),
            keep_alive_timeout: Duration::from_secs(3),
        }
    }
}

/// Whether the worker can be reached.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkState {
    /// Not yet, or no longer; the link keeps trying.
    Lost,
    /// It can, and it has described itself.
    Connected(Arc<WorkerDescription>),
}

/// One stream's life. A new connection is a new session; the old one's requests have failed.
#[derive(Debug)]
pub(crate) struct Session {
    outbox: Arc<Outbox<RouterMessage>>,
    requests: Mutex<Requests>,
    next_stream_id: AtomicU32,
}

#[derive(Debug, Default)]
struct Requests {
    mailboxes: HashMap<u32, Arc<Mailbox>>,
    closed: bool,
}

impl Session {
    fn new() -> Arc<Self> {
        Arc::new(Self { outbox: Outbox::new(), requests: Mutex::default(), next_stream_id: AtomicU32::new(1) })
    }

    pub(crate) fn abort(&self, stream_id: u32, reason: AbortReason) {
        let abort = AbortStream { stream_id, reason: reason.into() };
        self.outbox.push(RouterMessage { message: Some(Message::Abort(abort)) });
    }

    pub(crate) fn forget(&self, stream_id: u32) {
        self.requests.lock().mailboxes.remove(&stream_id);
    }

    /// Ends all requests: nothing more will come.
    fn close(&self) {
        self.outbox.close();
        let mailboxes = {
            let mut requests = self.requests.lock();
            requests.closed = true;
            std::mem::take(&mut requests.mailboxes)
        };
        for mailbox in mailboxes.into_values() {
            let error = KvistError::new(Code::EngineLost, "the connection to the engine was lost");
            mailbox.deliver(LinkEvent::Failed(error));
        }
    }
}

#[derive(Debug)]
struct Shared {
    settings: LinkSettings,
    channel: Channel,
    session: Mutex<Option<Arc<Session>>>,
    loads: Mutex<HashMap<u32, (LoadReport, Instant)>>,
    state: watch::Sender<LinkState>,
    draining: std::sync::atomic::AtomicBool,
    session_number: AtomicU64,
}

/// A connection to one worker.
#[derive(Debug)]
pub struct WorkerLink {
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

impl WorkerLink {
    /// Begins to connect to `host:port`, and does so again whenever the connection is lost, until it is dropped.
    ///
    /// # Errors
    /// The address cannot be one.
    pub fn connect(address: &str, settings: LinkSettings) -> Result<Self, KvistError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| KvistError::new(Code::InvalidArgument, "the worker's address is not host:port"))?
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(settings.keep_alive_interval)
            .keep_alive_timeout(settings.keep_alive_timeout)
            .keep_alive_while_idle(true);
        // Sessions of a restarted router must be above those of its earlier life.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shared = Arc::new(Shared {
            settings,
            channel: endpoint.connect_lazy(),
            session: Mutex::new(None),
            loads: Mutex::default(),
            state: watch::Sender::new(LinkState::Lost),
            draining: false.into(),
            session_number: AtomicU64::new(u64::try_from(now.as_micros()).unwrap_or(0)),
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Ok(Self { shared, task })
    }

    /// Whether the worker can be reached now.
    #[must_use]
    pub fn state(&self) -> LinkState {
        self.shared.state.borrow().clone()
    }

    /// Follows the state.
    #[must_use]
    pub fn watch_state(&self) -> watch::Receiver<LinkState> {
        self.shared.state.subscribe()
    }

    /// Whether the worker takes nothing new.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// The last report of a rank and its age.
    #[must_use]
    pub fn load(&self, rank: u32) -> Option<(LoadReport, Duration)> {
        self.shared.loads.lock().get(&rank).map(|(report, at)| (*report, at.elapsed()))
    }

    /// The channel under the link, for the other calls of the service.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.shared.channel.clone()
    }

    /// Starts a request. A prompt too large for a frame goes ahead by `PutPrompt`.
    ///
    /// # Errors
    /// The worker cannot be reached; nothing was started.
    pub async fn start(&self, mut request: EngineRequest) -> Result<RequestStream, KvistError> {
        let lost = || KvistError::new(Code::EngineUnavailable, "the engine cannot be reached").before_start();
        if let Some(Prompt::Tokens(tokens)) = &request.prompt
            && tokens.ids.len() > INLINE_PROMPT_TOKENS
        {
            let reference = request.request_id.clone();
            let chunks: Vec<PutPromptRequest> = tokens
                .ids
                .chunks(PROMPT_CHUNK_TOKENS)
                .map(|chunk| PutPromptRequest { prompt_reference: reference.clone(), token_ids: chunk.to_vec() })
                .collect();
            self.shared
                .client()
                .put_prompt(stream::iter(chunks))
                .await
                .map_err(|status| from_status(&status).before_start())?;
            request.prompt = Some(Prompt::PromptReference(reference));
        }
        let session = self.shared.session.lock().clone().ok_or_else(lost)?;
        let stream_id = session.next_stream_id.fetch_add(1, Ordering::Relaxed);
        let mailbox = Mailbox::new(self.shared.settings.request_buffer_events);
        {
            let mut requests = session.requests.lock();
            if requests.closed {
                return Err(lost());
            }
            requests.mailboxes.insert(stream_id, Arc::clone(&mailbox));
        }
        let start = StartRequest { stream_id, request: Some(request) };
        session.outbox.push(RouterMessage { message: Some(Message::Start(start)) });
        Ok(RequestStream { mailbox, session, stream_id, ended: false })
    }
}

impl Drop for WorkerLink {
    fn drop(&mut self) {
        self.task.abort();
        if let Some(session) = self.shared.session.lock().take() {
            session.close();
        }
    }
}

impl Shared {
    fn client(&self) -> EngineServiceClient<Channel> {
        EngineServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES)
    }

    async fn run(self: Arc<Self>) {
        let mut back_off = FIRST_BACK_OFF;
        loop {
            let was_connected = self.run_session().await;
            if was_connected {
                back_off = FIRST_BACK_OFF;
            }
            tokio::time::sleep(back_off).await;
            back_off = (back_off * 2).min(LONGEST_BACK_OFF);
        }
    }

    /// One session from `Hello` to its loss; true when the worker had answered.
    async fn run_session(&self) -> bool {
        let session = Session::new();
        let hello = Hello {
            router_name: self.settings.router_name.clone(),
            session: self.session_number.fetch_add(1, Ordering::Relaxed) + 1,
            load_interval: None,
        };
        session.outbox.push(RouterMessage { message: Some(Message::Hello(hello)) });
        let outgoing = stream::unfold(Arc::clone(&session.outbox), |outbox| async move {
            let messages = outbox.take().await?;
            Some((stream::iter(to_frames(messages)), outbox))
        })
        .flatten();
        let Ok(response) = self.client().connect(outgoing).await else { return false };
        let mut incoming = response.into_inner();
        let mut was_connected = false;
        while let Some(Ok(frame)) = incoming.next().await {
            if let Some(worker) = frame.welcome.and_then(|welcome| welcome.worker) {
                was_connected = true;
                self.draining.store(worker.draining, Ordering::Relaxed);
                *self.session.lock() = Some(Arc::clone(&session));
                self.state.send_replace(LinkState::Connected(Arc::new(worker)));
            }
            if frame.draining {
                self.draining.store(true, Ordering::Relaxed);
            }
            if !frame.loads.is_empty() {
                let now = Instant::now();
                let mut loads = self.loads.lock();
                for load in frame.loads {
                    loads.insert(load.rank, (load, now));
                }
            }
            for event in frame.events {
                let Some(wire) = event.event else { continue };
                let event_for_consumer = LinkEvent::from_wire(wire);
                let terminal = event_for_consumer.is_terminal();
                let mailbox = {
                    let mut requests = session.requests.lock();
                    if terminal {
                        requests.mailboxes.remove(&event.stream_id)
                    } else {
                        requests.mailboxes.get(&event.stream_id).cloned()
                    }
                };
                if let Some(mailbox) = mailbox
                    && !mailbox.deliver(event_for_consumer)
                {
                    session.abort(event.stream_id, AbortReason::SlowClient);
                    session.forget(event.stream_id);
                }
            }
        }
        *self.session.lock() = None;
        self.state.send_replace(LinkState::Lost);
        self.loads.lock().clear();
        session.close();
        was_connected
    }
}

/// Frames with the aborts first: they overtake what waits.
fn to_frames(messages: Vec<RouterMessage>) -> Vec<ConnectRequest> {
    let rank = |message: &RouterMessage| match message.message {
        Some(Message::Hello(_)) => 0,
        Some(Message::Abort(_)) => 1,
        _ => 2,
    };
    // An abort must not overtake the start of its own request.
    let started: std::collections::HashSet<u32> = messages
        .iter()
        .filter_map(|message| match &message.message {
            Some(Message::Start(start)) => Some(start.stream_id),
            _ => None,
        })
        .collect();
    let mut ordered = messages;
    ordered.sort_by_key(|message| match &message.message {
        Some(Message::Abort(abort)) if started.contains(&abort.stream_id) => 3,
        _ => rank(message),
    });
    frames(ordered, FRAME_BYTES).into_iter().map(|messages| ConnectRequest { messages }).collect()
}
