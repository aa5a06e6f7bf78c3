//! One router's stream: what waits for it, and the frames it gets.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures::Stream;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{AbortReason, ConnectResponse, StreamEvent, TokenDelta, Welcome, stream_event};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{LinkServerSettings, RequestAcceptor};
use crate::{
    FRAME_LIMIT_BYTES,
    frame::{event_bytes, merge_delta},
};

/// What is kept free in a frame for load reports and flags.
const FRAME_RESERVE_BYTES: usize = 4 * 1024;

/// One router's stream.
pub(crate) struct Connection {
    pub(super) acceptor: Arc<dyn RequestAcceptor>,
    settings: LinkServerSettings,
    load_interval: Duration,
    closing: CancellationToken,
    state: Mutex<State>,
}

struct State {
    welcome: Option<Welcome>,
    events: VecDeque<StreamEvent>,
    /// Number of the first waiting event, counted from the start of the stream.
    first_event: u64,
    /// Running requests.
    streams: HashMap<u32, String>,
    load: LoadState,
    last_load: Option<Instant>,
    is_draining_due: bool,
    waker: Option<Waker>,
    closed: Option<Option<KvistError>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LoadState {
    Sent,
    /// The engine moved on.
    Changed,
    /// A prompt was accepted.
    Accepted,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Connection").field("load_interval", &self.load_interval).finish_non_exhaustive()
    }
}

impl Connection {
    pub(super) fn new(
        acceptor: Arc<dyn RequestAcceptor>,
        welcome: Welcome,
        load_interval: Duration,
        settings: LinkServerSettings,
    ) -> Self {
        let state = State {
            welcome: Some(welcome),
            events: VecDeque::new(),
            first_event: 0,
            streams: HashMap::new(),
            load: LoadState::Accepted,
            last_load: None,
            is_draining_due: false,
            waker: None,
            closed: None,
        };
        Self { acceptor, settings, load_interval, closing: CancellationToken::new(), state: Mutex::new(state) }
    }

    /// Takes a new request in.
    pub(super) fn open(&self, stream_id: u32, request_id: &str) -> Result<(), KvistError> {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return Err(KvistError::new(Code::Cancelled, "the stream is closed"));
        }
        match state.streams.insert(stream_id, request_id.to_owned()) {
            None => Ok(()),
            Some(_) => Err(KvistError::field(Code::InvalidArgument, "stream_id", "is in use")),
        }
    }

    pub(super) fn request_id(&self, stream_id: u32) -> Option<String> {
        self.state.lock().streams.get(&stream_id).cloned()
    }

    pub(super) fn push_delta(&self, stream_id: u32, delta: TokenDelta, waiting: &AtomicU64) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        // Gone with an earlier frame when its number is below the first waiting one.
        let position = waiting.load(Ordering::Relaxed).checked_sub(state.first_event);
        let position = position.and_then(|position| usize::try_from(position).ok());
        let rest = match position.and_then(|position| state.events.get_mut(position)) {
            Some(StreamEvent { event: Some(stream_event::Event::Delta(earlier)), .. }) => merge_delta(earlier, delta),
            _ => Some(delta),
        };
        if let Some(delta) = rest {
            waiting.store(state.first_event + state.events.len() as u64, Ordering::Relaxed);
            state.events.push_back(StreamEvent { stream_id, event: Some(stream_event::Event::Delta(delta)) });
        }
        state.wake();
    }

    pub(super) fn push_end(&self, stream_id: u32, event: stream_event::Event) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        state.streams.remove(&stream_id);
        if matches!(&event, stream_event::Event::Failed(failed) if failed.not_started) {
            // The router decides again, and the newest load goes with the refusal.
            state.last_load = None;
        }
        state.events.push_back(StreamEvent { stream_id, event: Some(event) });
        state.wake();
    }

    pub(super) fn load_changed(&self, accepted: bool) {
        let mut state = self.state.lock();
        let load = if accepted { LoadState::Accepted } else { LoadState::Changed };
        if load > state.load {
            state.load = load;
            state.wake();
        }
    }

    pub(super) fn announce_draining(&self) {
        let mut state = self.state.lock();
        state.is_draining_due = true;
        state.wake();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closing.is_cancelled()
    }

    pub(super) async fn closed(&self) {
        self.closing.cancelled().await;
    }

    /// Ends the stream and aborts its requests. The first reason counts, and comes after all that was said before;
    /// without one the stream just ends.
    pub(super) fn close(&self, error: Option<KvistError>) {
        let streams = {
            let mut state = self.state.lock();
            if state.closed.is_some() {
                return;
            }
            if error.is_none() {
                state.events.clear();
            }
            state.closed = Some(error);
            state.wake();
            std::mem::take(&mut state.streams)
        };
        self.closing.cancel();
        for request_id in streams.into_values() {
            self.acceptor.abort(&request_id, AbortReason::Cancelled);
        }
    }
}

impl State {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            crate::wake::wake(waker);
        }
    }

    fn take_events(&mut self) -> Vec<StreamEvent> {
        let limit = FRAME_LIMIT_BYTES - FRAME_RESERVE_BYTES;
        let (mut bytes, mut count) = (0, 0);
        for event in &self.events {
            bytes += event_bytes(event);
            if bytes > limit && count > 0 {
                break;
            }
            count += 1;
        }
        self.first_event += count as u64;
        self.events.drain(..count).collect()
    }
}

/// The frames of one router: everything at hand whenever the transport is ready for more. Dropping it closes the stream.
pub struct ConnectFrames {
    connection: Arc<Connection>,
    timer: Pin<Box<Sleep>>,
}

impl std::fmt::Debug for ConnectFrames {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ConnectFrames").finish_non_exhaustive()
    }
}

impl ConnectFrames {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        let timer = Box::pin(tokio::time::sleep(connection.load_interval));
        Self { connection, timer }
    }

    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ConnectResponse, Status>>> {
        let connection = &*self.connection;
        let mut state = connection.state.lock();
        if let Some(closed) = &mut state.closed {
            let error = closed.take();
            if state.events.is_empty() {
                return Poll::Ready(error.map(|error| Err(error.into())));
            }
            state.closed = Some(error);
            let (welcome, events) = (state.welcome.take(), state.take_events());
            return Poll::Ready(Some(Ok(ConnectResponse { welcome, events, ..ConnectResponse::default() })));
        }
        loop {
            let now = Instant::now();
            let since_load = state.last_load.map_or(Duration::MAX, |last| now.duration_since(last));
            let due_after = match state.load {
                LoadState::Accepted => connection.settings.accept_load_gap,
                LoadState::Changed => connection.settings.step_load_gap,
                LoadState::Sent => connection.load_interval,
            };
            let due_after = due_after.min(connection.load_interval);
            let is_load_due = since_load >= due_after;
            let has_more = state.welcome.is_some() || !state.events.is_empty() || state.is_draining_due;
            if is_load_due || has_more {
                let takes_load =
                    is_load_due || (state.load != LoadState::Sent && since_load >= connection.settings.accept_load_gap);
                let mut frame = ConnectResponse {
                    welcome: state.welcome.take(),
                    events: state.take_events(),
                    loads: Vec::new(),
                    draining: std::mem::take(&mut state.is_draining_due),
                };
                if takes_load {
                    state.load = LoadState::Sent;
                    state.last_load = Some(now);
                    frame.loads = connection.acceptor.loads();
                }
                return Poll::Ready(Some(Ok(frame)));
            }
            match &mut state.waker {
                Some(waker) => waker.clone_from(context.waker()),
                empty => *empty = Some(context.waker().clone()),
            }
            // Set anew only when it would ring too late; one that rings too early is just set again.
            let due = state.last_load.map_or(now, |last| last + due_after);
            if self.timer.deadline() > due || self.timer.is_elapsed() {
                self.timer.as_mut().reset(due);
            }
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl Stream for ConnectFrames {
    type Item = Result<ConnectResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_frame(context)
    }
}

impl Drop for ConnectFrames {
    fn drop(&mut self) {
        self.connection.close(None);
    }
}
