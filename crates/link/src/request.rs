//! One request as its consumer sees it.

use std::{collections::VecDeque, sync::Arc};

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{AbortReason, Failed, Finished, TokenDelta, stream_event::Event};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::router_end::Session;

/// What happened to a request. The last two end it.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkEvent {
    /// New tokens.
    Delta(TokenDelta),
    /// The engine ended it.
    Finished(Finished),
    /// It failed.
    Failed(KvistError),
}

impl LinkEvent {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        !matches!(self, Self::Delta(_))
    }

    pub(crate) fn from_wire(event: Event) -> Self {
        match event {
            Event::Delta(delta) => Self::Delta(delta),
            Event::Finished(finished) => Self::Finished(finished),
            Event::Failed(failed) => Self::Failed(error_of(&failed)),
        }
    }
}

fn error_of(failed: &Failed) -> KvistError {
    let mut error = KvistError::new(Code::from_name(&failed.code).unwrap_or(Code::EngineFailed), &failed.message);
    error.not_started = failed.not_started;
    error.retry_after = failed.retry_after.and_then(|wait| std::time::Duration::try_from(wait).ok());
    error
}

#[derive(Debug, Default)]
struct Buffer {
    events: VecDeque<LinkEvent>,
    ended: bool,
}

/// Between the link's reader and the consumer; bounded in events.
#[derive(Debug)]
pub(crate) struct Mailbox {
    buffer: Mutex<Buffer>,
    notify: Notify,
    capacity: usize,
}

impl Mailbox {
    pub(crate) fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { buffer: Mutex::default(), notify: Notify::new(), capacity })
    }

    /// Puts an event in. False when the consumer is too slow; the request has then failed.
    pub(crate) fn deliver(&self, event: LinkEvent) -> bool {
        let mut buffer = self.buffer.lock();
        if buffer.ended {
            return true;
        }
        let fits = event.is_terminal() || buffer.events.len() < self.capacity;
        let event = if fits {
            event
        } else {
            buffer.events.clear();
            LinkEvent::Failed(KvistError::new(Code::SlowClient, "the client does not read; its buffer is full"))
        };
        buffer.ended = event.is_terminal();
        buffer.events.push_back(event);
        drop(buffer);
        self.notify.notify_one();
        fits
    }
}

/// The events of one request. Dropping it before the end aborts the request at the worker.
#[derive(Debug)]
pub struct RequestStream {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) session: Arc<Session>,
    pub(crate) stream_id: u32,
    pub(crate) ended: bool,
}

impl RequestStream {
    /// The next event; none after a terminal one.
    pub async fn next(&mut self) -> Option<LinkEvent> {
        if self.ended {
            return None;
        }
        loop {
            if let Some(event) = self.try_next() {
                return Some(event);
            }
            self.mailbox.notify.notified().await;
        }
    }

    /// The next event if it is at hand, so that all of them can go out in one write.
    pub fn try_next(&mut self) -> Option<LinkEvent> {
        if self.ended {
            return None;
        }
        let event = self.mailbox.buffer.lock().events.pop_front()?;
        self.ended = event.is_terminal();
        Some(event)
    }

    /// Asks the worker to end the request; its terminal event still comes.
    pub fn abort(&self, reason: AbortReason) {
        if !self.ended {
            self.session.abort(self.stream_id, reason);
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            self.session.abort(self.stream_id, AbortReason::Cancelled);
            self.session.forget(self.stream_id);
        }
    }
}
