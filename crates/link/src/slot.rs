//! The router's buffer of one request.

use std::{
    collections::VecDeque,
    task::{Context, Poll, Waker},
};

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{Finished, TokenDelta};
use parking_lot::Mutex;

use crate::frame::merge_delta;

/// What a request yields; the last two end it.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// New tokens.
    Delta(TokenDelta),
    /// The engine ended the request.
    Finished(Finished),
    /// The request failed.
    Failed(KvistError),
}

impl RequestEvent {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        !matches!(self, Self::Delta(_))
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<RequestEvent>,
    queued_tokens: usize,
    waker: Option<Waker>,
    /// A terminal event was queued.
    is_ended: bool,
}

/// Written by the link's reader, read by the request's owner; bounded in tokens.
#[derive(Debug)]
pub(crate) struct Slot {
    limit_tokens: usize,
    state: Mutex<State>,
}

/// The buffer was full; the request has been ended with `SLOW_CLIENT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

impl Slot {
    pub(crate) fn new(limit_tokens: usize) -> Self {
        Self { limit_tokens, state: Mutex::default() }
    }

    /// A slot whose request has failed already.
    pub(crate) fn failed(error: KvistError) -> Self {
        let state = State { queue: VecDeque::from([RequestEvent::Failed(error)]), is_ended: true, ..State::default() };
        Self { limit_tokens: 0, state: Mutex::new(state) }
    }

    /// Takes an event; the reader to wake is put into `wakers`. What comes after the end is dropped.
    pub(crate) fn push(&self, event: RequestEvent, wakers: &mut Vec<Waker>) -> Result<(), Overflow> {
        let mut state = self.state.lock();
        if state.is_ended {
            return Ok(());
        }
        wakers.extend(state.waker.take());
        match event {
            RequestEvent::Delta(delta) => {
                state.queued_tokens += delta.token_ids.len();
                if state.queued_tokens > self.limit_tokens {
                    let error = KvistError::new(Code::SlowClient, "the client reads too slowly");
                    state.queue.push_back(RequestEvent::Failed(error));
                    state.is_ended = true;
                    return Err(Overflow);
                }
                let rest = match state.queue.back_mut() {
                    Some(RequestEvent::Delta(waiting)) => merge_delta(waiting, delta),
                    _ => Some(delta),
                };
                state.queue.extend(rest.map(RequestEvent::Delta));
            }
            terminal => {
                state.is_ended = true;
                state.queue.push_back(terminal);
            }
        }
        Ok(())
    }

    pub(crate) fn try_next(&self) -> Option<RequestEvent> {
        self.state.lock().pop()
    }

    pub(crate) fn poll_next(&self, context: &Context<'_>) -> Poll<RequestEvent> {
        let mut state = self.state.lock();
        if let Some(event) = state.pop() {
            return Poll::Ready(event);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            empty => *empty = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl State {
    fn pop(&mut self) -> Option<RequestEvent> {
        let event = self.queue.pop_front();
        if let Some(RequestEvent::Delta(delta)) = &event {
            self.queued_tokens = self.queued_tokens.saturating_sub(delta.token_ids.len());
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(tokens: &[u32]) -> RequestEvent {
        RequestEvent::Delta(TokenDelta { token_ids: tokens.to_vec(), ..TokenDelta::default() })
    }

    #[test]
    fn what_waits_is_read_at_once() {
        let slot = Slot::new(10);
        let mut wakers = Vec::new();
        for token in 0..3 {
            assert_eq!(Ok(()), slot.push(delta(&[token]), &mut wakers));
        }
        slot.push(RequestEvent::Finished(Finished::default()), &mut wakers).unwrap();
        assert_eq!(Some(delta(&[0, 1, 2])), slot.try_next());
        assert_eq!(Some(RequestEvent::Finished(Finished::default())), slot.try_next());
        assert_eq!(None, slot.try_next());
    }

    #[test]
    fn a_full_buffer_ends_the_request_once() {
        let slot = Slot::new(4);
        let mut wakers = Vec::new();
        assert_eq!(Ok(()), slot.push(delta(&[1, 2, 3, 4]), &mut wakers));
        assert_eq!(Err(Overflow), slot.push(delta(&[5]), &mut wakers));
        assert_eq!(Ok(()), slot.push(delta(&[6]), &mut wakers));
        assert_eq!(Some(delta(&[1, 2, 3, 4])), slot.try_next());
        assert!(matches!(slot.try_next(), Some(RequestEvent::Failed(error)) if error.code == Code::SlowClient));
        assert_eq!(None, slot.try_next());
    }

    #[test]
    fn a_reader_that_keeps_up_is_never_slow() {
        let slot = Slot::new(4);
        let mut wakers = Vec::new();
        for token in 0..100 {
            assert_eq!(Ok(()), slot.push(delta(&[token, token]), &mut wakers));
            assert_eq!(Some(delta(&[token, token])), slot.try_next());
        }
    }
}
