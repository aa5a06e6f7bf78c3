//! Decisions of recent requests, for `Explain` and `WatchDecisions`.

use std::collections::{HashMap, VecDeque};

use kvist_proto::events::v1::{DecisionRecord, Receipt};
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// Requests that are remembered.
const CAPACITY: usize = 10_000;

#[derive(Debug, Default)]
struct Ring {
    order: VecDeque<String>,
    by_request: HashMap<String, Vec<DecisionRecord>>,
}

/// The decisions of the last requests.
#[derive(Debug)]
pub(crate) struct Records {
    ring: Mutex<Ring>,
    live: broadcast::Sender<DecisionRecord>,
}

impl Records {
    pub(crate) fn new() -> Self {
        Self { ring: Mutex::default(), live: broadcast::Sender::new(256) }
    }

    pub(crate) fn add(&self, record: DecisionRecord) {
        if self.live.receiver_count() > 0 {
            let _ = self.live.send(record.clone());
        }
        let mut ring = self.ring.lock();
        if let Some(records) = ring.by_request.get_mut(&record.request_id) {
            records.push(record);
            return;
        }
        if ring.order.len() == CAPACITY
            && let Some(oldest) = ring.order.pop_front()
        {
            ring.by_request.remove(&oldest);
        }
        ring.order.push_back(record.request_id.clone());
        ring.by_request.insert(record.request_id.clone(), vec![record]);
    }

    /// Completes the last decision of a request.
    pub(crate) fn complete(
        &self,
        request_id: &str,
        outcome: &str,
        receipt: Option<&Receipt>,
        time_to_first_token: Option<std::time::Duration>,
    ) {
        let mut ring = self.ring.lock();
        if let Some(record) = ring.by_request.get_mut(request_id).and_then(|records| records.last_mut()) {
            outcome.clone_into(&mut record.outcome);
            record.receipt = receipt.cloned();
            record.time_to_first_token = time_to_first_token.and_then(|time| time.try_into().ok());
        }
    }

    pub(crate) fn get(&self, request_id: &str) -> Option<Vec<DecisionRecord>> {
        self.ring.lock().by_request.get(request_id).cloned()
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<DecisionRecord> {
        self.live.subscribe()
    }
}
