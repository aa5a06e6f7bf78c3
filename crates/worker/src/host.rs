//! What the worker offers its engine: the ledger, and a place to report load.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kvist_blocks::{Batch, BlockHash, HashSeed, Incarnation, Namespace};
use kvist_ledger::{EngineEvent, Ledger, LedgerDigest, LedgerSettings, RangeLost, Snapshot};
use kvist_link::LoadListener;
use kvist_proto::events::v1::LoadReport;
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// Batches that a slow reader of events may lag behind before it starts over from the ring.
const LIVE_BATCHES: usize = 4096;

struct Inner {
    namespace: String,
    hash_seed: HashSeed,
    incarnation: Incarnation,
    block_size_tokens: usize,
    ledger: Mutex<Ledger>,
    live: broadcast::Sender<Arc<Batch>>,
    load: Mutex<LoadReport>,
    listeners: Mutex<Vec<LoadListener>>,
    draining: std::sync::atomic::AtomicBool,
}

/// A clonable handle to the ledger and the load of one worker.
#[derive(Clone)]
pub struct EngineHost {
    inner: Arc<Inner>,
}

impl EngineHost {
    pub(crate) fn new(
        namespace: &str,
        hash_seed: u64,
        incarnation: Incarnation,
        block_size_tokens: usize,
        ring_batches: usize,
    ) -> Self {
        let ledger = Ledger::new(LedgerSettings { ring_batches, block_size_tokens });
        Self {
            inner: Arc::new(Inner {
                namespace: namespace.to_owned(),
                hash_seed: HashSeed(hash_seed),
                incarnation,
                block_size_tokens,
                ledger: Mutex::new(ledger),
                live: broadcast::Sender::new(LIVE_BATCHES),
                load: Mutex::default(),
                listeners: Mutex::default(),
                draining: false.into(),
            }),
        }
    }

    /// Tokens a block.
    #[must_use]
    pub fn block_size_tokens(&self) -> usize {
        self.inner.block_size_tokens
    }

    /// What the first block of a request follows.
    #[must_use]
    pub fn root(&self, adapter: &str, cache_salt: &str) -> BlockHash {
        Namespace::new(&self.inner.namespace, adapter, cache_salt).root(self.inner.hash_seed)
    }

    /// Tells the ledger what changed in the cache. Removals must be told before the memory is used for something else.
    pub fn cache_changed(&self, events: &[EngineEvent]) {
        if events.is_empty() {
            return;
        }
        // The lock is held while the batch is sent, so that batches arrive in order.
        let mut ledger = self.inner.ledger.lock();
        if let Some(batch) = ledger.apply(now_unix_nanos(), events) {
            let _ = self.inner.live.send(batch);
        }
    }

    /// Leading blocks of a prompt that the ledger claims.
    #[must_use]
    pub fn claimed_blocks(&self, prompt: &[BlockHash]) -> usize {
        self.inner.ledger.lock().claimed_prefix_blocks(prompt)
    }

    /// Replaces the load report and tells all routers.
    pub fn report_load(&self, mut report: LoadReport) {
        {
            let mut load = self.inner.load.lock();
            report.report_number = load.report_number + 1;
            *load = report;
        }
        self.tell_listeners();
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.inner.incarnation
    }

    pub(crate) fn load(&self) -> LoadReport {
        *self.inner.load.lock()
    }

    pub(crate) fn add_listener(&self, listener: LoadListener) {
        self.inner.listeners.lock().push(listener);
    }

    pub(crate) fn set_draining(&self) {
        self.inner.draining.store(true, std::sync::atomic::Ordering::Relaxed);
        self.tell_listeners();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.inner.draining.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The missing range or a snapshot, and live batches from there on, without a gap between them.
    pub(crate) fn follow(&self, last_applied: Option<u64>, same_incarnation: bool) -> Following {
        let ledger = self.inner.ledger.lock();
        let live = self.inner.live.subscribe();
        let range =
            if same_incarnation { ledger.range_after(last_applied) } else { Err(RangeLost { oldest_sequence: 0 }) };
        let history = match range {
            Ok(batches) => History::Range(batches),
            Err(_) => History::Snapshot(ledger.snapshot()),
        };
        Following { history, digest: ledger.digest(), live }
    }

    pub(crate) fn digest(&self) -> LedgerDigest {
        self.inner.ledger.lock().digest()
    }

    fn tell_listeners(&self) {
        let (load, draining) = (self.load(), self.is_draining());
        self.inner.listeners.lock().retain(|listener| listener(std::slice::from_ref(&load), draining));
    }
}

pub(crate) enum History {
    Range(Vec<Arc<Batch>>),
    Snapshot(Snapshot),
}

pub(crate) struct Following {
    pub(crate) history: History,
    pub(crate) digest: LedgerDigest,
    pub(crate) live: broadcast::Receiver<Arc<Batch>>,
}

pub(crate) fn now_unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
