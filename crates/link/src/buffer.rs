//! The bounded buffer of one request, for callers that do not come over Connect.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use crate::slot::{Overflow, RequestEvent, Slot};

/// A buffer that holds `limit_tokens` at most.
#[must_use]
pub fn event_buffer(limit_tokens: usize) -> (EventSender, EventReceiver) {
    let slot = Arc::new(Slot::new(limit_tokens));
    (EventSender(Arc::clone(&slot)), EventReceiver { slot, has_ended: false })
}

/// The writing end.
#[derive(Debug)]
pub struct EventSender(Arc<Slot>);

impl EventSender {
    /// Takes an event; never waits. What comes after the end is dropped.
    ///
    /// # Errors
    /// The reader is too slow: the buffer has ended with `SLOW_CLIENT`.
    pub fn send(&self, event: RequestEvent) -> Result<(), Overflow> {
        let mut wakers = Vec::new();
        let result = self.0.push(event, &mut wakers);
        wakers.into_iter().for_each(crate::wake::wake);
        result
    }
}

/// The reading end.
#[derive(Debug)]
pub struct EventReceiver {
    slot: Arc<Slot>,
    has_ended: bool,
}

impl EventReceiver {
    /// The next event; none after the terminal one.
    pub fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<RequestEvent>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        self.slot.poll_next(context).map(|event| {
            self.has_ended = event.is_terminal();
            Some(event)
        })
    }

    /// Whether the terminal event was read.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}
