//! Deadlines of running requests: one timer for all of them.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// Names one deadline.
pub(crate) type DeadlineKey = (Instant, u64);

#[derive(Debug, Default)]
struct State {
    by_time: BTreeMap<DeadlineKey, Arc<str>>,
    last_number: u64,
}

/// Request ids by when their time is up.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    state: Mutex<State>,
    earlier: Notify,
}

impl Deadlines {
    pub(crate) fn add(&self, at: Instant, request_id: Arc<str>) -> DeadlineKey {
        let (key, is_first) = {
            let mut state = self.state.lock();
            state.last_number += 1;
            let key = (at, state.last_number);
            state.by_time.insert(key, request_id);
            (key, state.by_time.first_key_value().is_some_and(|(first, _)| *first == key))
        };
        if is_first {
            self.earlier.notify_one();
        }
        key
    }

    pub(crate) fn remove(&self, key: DeadlineKey) {
        self.state.lock().by_time.remove(&key);
    }

    /// The requests whose time is up, as soon as there are some.
    pub(crate) async fn expired(&self) -> Vec<Arc<str>> {
        loop {
            let (expired, next) = {
                let mut state = self.state.lock();
                let later = state.by_time.split_off(&(Instant::now(), u64::MAX));
                let expired = std::mem::replace(&mut state.by_time, later);
                (expired, state.by_time.first_key_value().map(|((at, _), _)| *at))
            };
            if !expired.is_empty() {
                return expired.into_values().collect();
            }
            match next {
                Some(next) => tokio::select! {
                    () = tokio::time::sleep_until(next) => {}
                    () = self.earlier.notified() => {}
                },
                None => self.earlier.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn deadlines_pass_in_order_and_removed_ones_do_not() {
        let (deadlines, start) = (Deadlines::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        deadlines.add(at(30), "c".into());
        let removed = deadlines.add(at(10), "a".into());
        deadlines.add(at(20), "b".into());
        deadlines.remove(removed);
        let mut expired: Vec<Arc<str>> = Vec::new();
        while expired.len() < 2 {
            expired.extend(deadlines.expired().await);
        }
        assert_eq!(vec![Arc::from("b"), Arc::from("c")], expired);
        assert!(Instant::now() >= at(30));
    }
}
