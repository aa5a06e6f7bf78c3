//! What waits beside the stream: prompts on their way in, large results on their way out.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::TokenLogprobs;
use parking_lot::Mutex;

/// How long anything waits to be used.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Things by name: each used once, dropped when old, bounded in bytes together.
#[derive(Debug)]
struct Store<T> {
    limit_bytes: usize,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    items: HashMap<String, Item<T>>,
    bytes: usize,
}

#[derive(Debug)]
struct Item<T> {
    value: T,
    bytes: usize,
    since: Instant,
}

impl<T> Store<T> {
    fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, state: Mutex::new(State { items: HashMap::new(), bytes: 0 }) }
    }

    fn put(&self, now: Instant, name: String, value: T, bytes: usize) -> Result<(), KvistError> {
        let mut state = self.state.lock();
        let replaced = state.items.get(&name).map_or(0, |item| item.bytes);
        if state.bytes - replaced + bytes > self.limit_bytes {
            // Looked for only when there is no room, so that a put costs the same however many wait.
            state.expire(now);
        }
        state.remove(&name);
        if state.bytes + bytes > self.limit_bytes {
            return Err(KvistError::new(Code::Overloaded, "too many bytes wait beside the stream").before_start());
        }
        state.bytes += bytes;
        state.items.insert(name, Item { value, bytes, since: now });
        Ok(())
    }

    fn take(&self, now: Instant, name: &str) -> Option<T> {
        let item = self.state.lock().remove(name)?;
        (now.duration_since(item.since) <= KEPT_FOR).then_some(item.value)
    }

    fn expire(&self, now: Instant) {
        self.state.lock().expire(now);
    }
}

impl<T> State<T> {
    fn remove(&mut self, name: &str) -> Option<Item<T>> {
        let item = self.items.remove(name)?;
        self.bytes -= item.bytes;
        Some(item)
    }

    fn expire(&mut self, now: Instant) {
        let bytes = &mut self.bytes;
        self.items.retain(|_, item| {
            let is_kept = now.duration_since(item.since) <= KEPT_FOR;
            *bytes -= if is_kept { 0 } else { item.bytes };
            is_kept
        });
    }
}

/// Prompts that were uploaded ahead of their request.
#[derive(Debug)]
pub struct PromptStore(Store<Vec<u32>>);

impl PromptStore {
    /// An empty store.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        Self(Store::new(limit_bytes))
    }

    /// Keeps a prompt; one of the same name is replaced.
    ///
    /// # Errors
    /// `OVERLOADED` when too many bytes wait.
    pub fn put(&self, now: Instant, reference: String, tokens: Vec<u32>) -> Result<(), KvistError> {
        let bytes = 4 * tokens.len();
        self.0.put(now, reference, tokens, bytes)
    }

    /// Uses a prompt, once.
    #[must_use]
    pub fn take(&self, now: Instant, reference: &str) -> Option<Vec<u32>> {
        self.0.take(now, reference)
    }

    /// Drops what is too old.
    pub fn expire(&self, now: Instant) {
        self.0.expire(now);
    }
}

/// Results that are too large for a frame.
#[derive(Debug)]
pub struct ResultStore(Store<Vec<TokenLogprobs>>);

impl ResultStore {
    /// An empty store.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        Self(Store::new(limit_bytes))
    }

    /// Keeps the log-probabilities of a prompt.
    ///
    /// # Errors
    /// `OVERLOADED` when too many bytes wait.
    pub fn put(&self, now: Instant, request_id: String, result: Vec<TokenLogprobs>) -> Result<(), KvistError> {
        let bytes = result.iter().map(|one| size_of::<TokenLogprobs>() + 8 * one.top.len()).sum();
        self.0.put(now, request_id, result, bytes)
    }

    /// Fetches a result, once.
    #[must_use]
    pub fn take(&self, now: Instant, request_id: &str) -> Option<Vec<TokenLogprobs>> {
        self.0.take(now, request_id)
    }

    /// Drops what is too old.
    pub fn expire(&self, now: Instant) {
        self.0.expire(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_used_once_and_not_for_ever() {
        let (store, start) = (PromptStore::new(100), Instant::now());
        store.put(start, "a".to_owned(), vec![1, 2]).unwrap();
        store.put(start, "b".to_owned(), vec![3]).unwrap();
        assert_eq!(Some(vec![1, 2]), store.take(start, "a"));
        assert_eq!(None, store.take(start, "a"));
        assert_eq!(None, store.take(start + KEPT_FOR + Duration::from_secs(1), "b"));
    }

    #[test]
    fn bytes_are_bounded_and_come_back() {
        let (store, start) = (PromptStore::new(40), Instant::now());
        store.put(start, "a".to_owned(), vec![0; 10]).unwrap();
        assert_eq!(Code::Overloaded, store.put(start, "b".to_owned(), vec![0]).unwrap_err().code);
        // The same name again takes the place of the first.
        store.put(start, "a".to_owned(), vec![1; 10]).unwrap();
        // An old one makes room.
        store.put(start + 2 * KEPT_FOR, "c".to_owned(), vec![2; 10]).unwrap();
        assert_eq!(Some(vec![2; 10]), store.take(start + 2 * KEPT_FOR, "c"));
        store.put(start, "d".to_owned(), vec![0; 10]).unwrap();
    }
}
