//! What waits to be written: put in from anywhere, taken out as whole frames.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug)]
struct State<T> {
    items: Vec<T>,
    closed: bool,
}

/// An unbounded queue with one taker. Bounds are kept elsewhere: by the number of requests and their token budgets.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    state: Mutex<State<T>>,
    notify: Notify,
}

impl<T> Outbox<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { items: Vec::new(), closed: false }), notify: Notify::new() })
    }

    /// Puts an item in; it is dropped when the outbox is closed.
    pub(crate) fn push(&self, item: T) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.items.push(item);
        drop(state);
        self.notify.notify_one();
    }

    /// Ends the taker once everything is taken.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.notify.notify_one();
    }

    /// Everything at hand, as soon as there is something; none when closed and empty.
    pub(crate) async fn take(&self) -> Option<Vec<T>> {
        loop {
            {
                let mut state = self.state.lock();
                if !state.items.is_empty() {
                    return Some(std::mem::take(&mut state.items));
                }
                if state.closed {
                    return None;
                }
            }
            self.notify.notified().await;
        }
    }
}

/// Splits items into runs whose encoded sizes add up to a frame at most; a single larger item is a run of its own.
pub(crate) fn frames<T: prost::Message>(items: Vec<T>, frame_bytes: usize) -> Vec<Vec<T>> {
    let mut frames = Vec::with_capacity(1);
    let (mut frame, mut size) = (Vec::with_capacity(items.len()), 0);
    for item in items {
        // Five bytes for the field's tag and length.
        let item_size = item.encoded_len() + 5;
        if size + item_size > frame_bytes && !frame.is_empty() {
            frames.push(std::mem::take(&mut frame));
            size = 0;
        }
        size += item_size;
        frame.push(item);
    }
    if !frame.is_empty() {
        frames.push(frame);
    }
    frames
}
