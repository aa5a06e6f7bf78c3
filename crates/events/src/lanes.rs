//! How many histories are fetched at once, and how many bytes of them: quick ones and slow ones apart.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kvist_doors::ClientTls;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    EventsError, catch_up,
    room::{Held, Room},
    tracker::{CatchUpOrder, History},
};

/// A history that takes longer makes room for the others and is asked for anew among its equals, so that workers which
/// are slow or gone delay nobody else.
const QUICK_FETCH: Duration = Duration::from_millis(500);
/// So many times [`crate::FeedSettings::most_catch_ups`] slow histories are fetched at once.
const SLOW_FETCHES_A_QUICK_ONE: usize = 8;

/// For so long after a question that took too long, others to the same address begin among the slow as well: a worker
/// with many ranks takes the quick places once and not rank by rank.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// Who may fetch.
#[derive(Clone)]
pub(crate) struct Lanes {
    quick: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    room: Room,
    /// Addresses at which somebody was slow, and until when that counts.
    slow_until: Arc<Mutex<HashMap<String, Instant>>>,
}

impl Lanes {
    /// So many quick fetches at once and eight times as many slow ones, and so many bytes of all together.
    pub(crate) fn new(most_catch_ups: usize, most_bytes: usize) -> Self {
        let slow = most_catch_ups.saturating_mul(SLOW_FETCHES_A_QUICK_ONE).min(Semaphore::MAX_PERMITS);
        Self {
            quick: Arc::new(Semaphore::new(most_catch_ups)),
            slow: Arc::new(Semaphore::new(slow)),
            room: Room::new(most_bytes),
            slow_until: Arc::default(),
        }
    }

    /// Fetches when it is the order's turn. One that has failed before begins among the slow. The room is to be held
    /// until the history has been applied.
    pub(crate) async fn fetch(
        &self,
        order: &CatchUpOrder,
        tls: Option<&ClientTls>,
    ) -> Result<(History, Held), EventsError> {
        // The semaphores are never closed; without a permit the answer would be an error like any other.
        let closed = |_| EventsError::Worker("no permit".to_owned());
        if order.attempt == 0 {
            let _permit = self.quick.acquire().await.map_err(closed)?;
            if !self.is_slow(&order.address) {
                if let Ok(answer) = tokio::time::timeout(QUICK_FETCH, catch_up::fetch(order, tls, &self.room)).await {
                    return answer;
                }
                self.note_slow(&order.address);
            }
        }
        // Asked anew, since an open question costs the worker something for as long as nobody reads the answer.
        let _permit = self.slow.acquire().await.map_err(closed)?;
        catch_up::fetch(order, tls, &self.room).await
    }

    fn is_slow(&self, address: &str) -> bool {
        self.slow_until.lock().get(address).is_some_and(|until| Instant::now() < *until)
    }

    fn note_slow(&self, address: &str) {
        let (mut slow_until, now) = (self.slow_until.lock(), Instant::now());
        slow_until.retain(|_, until| now < *until);
        slow_until.insert(address.to_owned(), now + SLOW_FOR);
    }
}
