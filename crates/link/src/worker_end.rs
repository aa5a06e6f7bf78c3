//! The worker's end: requests of one router, and one writer for all their events.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::{Stream, StreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{
        AbortReason, ConnectRequest, ConnectResponse, EngineRequest, Failed, Finished, StreamEvent, TokenDelta,
        Welcome, WorkerDescription, router_message::Message, stream_event::Event,
    },
    events::v1::LoadReport,
};
use parking_lot::Mutex;
use tonic::{Status, Streaming};

use crate::{
    FRAME_BYTES,
    outbox::{Outbox, frames},
};

/// Takes the load of all ranks and whether the worker drains; false when it wants no more.
pub type LoadListener = Box<dyn Fn(&[LoadReport], bool) -> bool + Send + Sync>;

/// What takes the requests of a connection.
pub trait Acceptor: Send + Sync + 'static {
    /// The description for the welcome.
    fn describe(&self) -> WorkerDescription;

    /// Takes a request. Never blocks; whatever happens, the sink gets exactly one terminal event.
    fn start(&self, request: EngineRequest, sink: StreamSink);

    /// Ends a request. Its sink still gets a terminal event.
    fn abort(&self, request_id: &str, reason: AbortReason);

    /// Load as of now, for the first frame.
    fn loads(&self) -> Vec<LoadReport>;

    /// Calls back whenever the load has changed or the worker begins to drain, until the call-back returns false.
    fn on_load(&self, report: LoadListener);
}

enum Outgoing {
    Welcome(WorkerDescription),
    Event(StreamEvent),
    Load(Vec<LoadReport>, bool),
}

/// Where the events of one request go. Dropped without a terminal event, it says that the engine failed.
pub struct StreamSink {
    outbox: Arc<Outbox<Outgoing>>,
    running: Arc<Mutex<HashMap<u32, String>>>,
    stream_id: u32,
    ended: AtomicBool,
}

impl StreamSink {
    /// New tokens.
    pub fn delta(&self, delta: TokenDelta) {
        if !self.ended.load(Ordering::Relaxed) {
            self.send(Event::Delta(delta));
        }
    }

    /// The engine ended the request.
    pub fn finished(&self, finished: Finished) {
        self.end(Event::Finished(finished));
    }

    /// The request failed.
    pub fn failed(&self, error: &KvistError) {
        self.end(Event::Failed(Failed {
            code: error.code.name().to_owned(),
            message: error.message.clone(),
            not_started: error.not_started,
            retry_after: error.retry_after.and_then(|wait| wait.try_into().ok()),
        }));
    }

    fn end(&self, event: Event) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            self.running.lock().remove(&self.stream_id);
            self.send(event);
        }
    }

    fn send(&self, event: Event) {
        self.outbox.push(Outgoing::Event(StreamEvent { stream_id: self.stream_id, event: Some(event) }));
    }
}

impl Drop for StreamSink {
    fn drop(&mut self) {
        if !self.ended.load(Ordering::Relaxed) {
            self.failed(&KvistError::new(Code::EngineFailed, "the engine gave the request up"));
        }
    }
}

/// Aborts whatever still runs when the connection is gone, however it went.
struct AbortOnLoss {
    acceptor: Arc<dyn Acceptor>,
    running: Arc<Mutex<HashMap<u32, String>>>,
    outbox: Arc<Outbox<Outgoing>>,
}

impl Drop for AbortOnLoss {
    fn drop(&mut self) {
        self.outbox.close();
        let running = std::mem::take(&mut *self.running.lock());
        for request_id in running.values() {
            self.acceptor.abort(request_id, AbortReason::Cancelled);
        }
    }
}

/// The answer stream of one `Connect` call.
pub type Outbound = Pin<Box<dyn Stream<Item = Result<ConnectResponse, Status>> + Send>>;

/// Serves one `Connect` call.
///
/// # Errors
/// The first message is no `Hello`.
pub async fn serve(acceptor: Arc<dyn Acceptor>, mut incoming: Streaming<ConnectRequest>) -> Result<Outbound, Status> {
    let outbox: Arc<Outbox<Outgoing>> = Outbox::new();
    let running: Arc<Mutex<HashMap<u32, String>>> = Arc::default();
    let first = incoming.message().await?.unwrap_or_default();
    let mut first = first.messages.into_iter();
    if !matches!(first.next().and_then(|message| message.message), Some(Message::Hello(_))) {
        return Err(KvistError::field(Code::InvalidArgument, "messages[0].hello", "must be the first message").into());
    }
    outbox.push(Outgoing::Welcome(acceptor.describe()));
    outbox.push(Outgoing::Load(acceptor.loads(), false));
    let weak = Arc::downgrade(&outbox);
    acceptor.on_load(Box::new(move |loads, draining| match weak.upgrade() {
        Some(outbox) => {
            outbox.push(Outgoing::Load(loads.to_vec(), draining));
            true
        }
        None => false,
    }));
    let guard =
        AbortOnLoss { acceptor: Arc::clone(&acceptor), running: Arc::clone(&running), outbox: Arc::clone(&outbox) };
    let pending: Vec<_> = first.collect();
    let reader_outbox = Arc::clone(&outbox);
    let reader = tokio::spawn(async move {
        let guard = guard;
        let take = |messages: Vec<kvist_proto::engine::v1::RouterMessage>| {
            for message in messages {
                match message.message {
                    Some(Message::Start(start)) => {
                        let request = start.request.unwrap_or_default();
                        running.lock().insert(start.stream_id, request.request_id.clone());
                        let sink = StreamSink {
                            outbox: Arc::clone(&reader_outbox),
                            running: Arc::clone(&running),
                            stream_id: start.stream_id,
                            ended: AtomicBool::new(false),
                        };
                        guard.acceptor.start(request, sink);
                    }
                    Some(Message::Abort(abort)) => {
                        let request_id = running.lock().get(&abort.stream_id).cloned();
                        if let Some(request_id) = request_id {
                            guard.acceptor.abort(&request_id, abort.reason());
                        }
                    }
                    Some(Message::Hello(_)) | None => {}
                }
            }
        };
        take(pending);
        while let Ok(Some(frame)) = incoming.message().await {
            take(frame.messages);
        }
    });
    // The reader ends with the writer: tonic drops the answer stream when the connection is lost.
    let reader = AbortTask(reader);
    let outgoing = stream::unfold((outbox, reader), |(outbox, reader)| async move {
        let items = outbox.take().await?;
        Some((stream::iter(to_frames(items).into_iter().map(Ok)), (outbox, reader)))
    });
    Ok(Box::pin(outgoing.flatten()))
}

struct AbortTask(tokio::task::JoinHandle<()>);

impl Drop for AbortTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Everything at hand as few frames: the welcome, then events, with the newest load on the last one.
fn to_frames(items: Vec<Outgoing>) -> Vec<ConnectResponse> {
    let (mut responses, mut events, mut load) = (Vec::new(), Vec::new(), None);
    let mut draining = false;
    for item in items {
        match item {
            Outgoing::Welcome(worker) => responses.push(ConnectResponse {
                welcome: Some(Welcome { worker: Some(worker) }),
                ..ConnectResponse::default()
            }),
            Outgoing::Event(event) => events.push(event),
            Outgoing::Load(loads, drains) => {
                load = Some(loads);
                draining |= drains;
            }
        }
    }
    responses.extend(
        frames(events, FRAME_BYTES).into_iter().map(|events| ConnectResponse { events, ..ConnectResponse::default() }),
    );
    if let Some(loads) = load {
        if responses.last().is_none_or(|last| last.welcome.is_some()) {
            responses.push(ConnectResponse::default());
        }
        if let Some(last) = responses.last_mut() {
            (last.loads, last.draining) = (loads, draining);
        }
    }
    responses
}
