//! What the worker offers its engine: the ledgers, and a place to report load.

use std::sync::{Arc, Weak};

use kvist_blocks::{BlockHash, HashSeed, Namespace, Tier};
use kvist_errors::{Code, KvistError};
use kvist_history::SharedLedger;
use kvist_ledger::{EngineEvent, EngineHash, Ledger, LedgerSettings, StoredBlocks};
use kvist_proto::events::v1::{LoadReport, SourceId};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    vllm_events::{VllmEventsSettings, VllmFollower},
    worker::Worker,
};

/// A clonable handle to the ledgers and the load of one worker.
#[derive(Clone)]
pub struct EngineHost {
    inner: Arc<Inner>,
}

struct Inner {
    namespace: String,
    hash_seed: HashSeed,
    block_size_tokens: usize,
    ledgers: Vec<Arc<SharedLedger>>,
    loads: Mutex<Vec<LoadReport>>,
    load_number: watch::Sender<u64>,
    worker: Weak<Worker>,
    followers: Mutex<Vec<VllmFollower>>,
}

/// How an engine host is set up.
pub(crate) struct HostSettings<'a> {
    pub(crate) worker_uid: &'a str,
    pub(crate) incarnation: u64,
    pub(crate) namespace: &'a str,
    pub(crate) hash_seed: u64,
    pub(crate) block_size_tokens: u32,
    pub(crate) ranks: u32,
    pub(crate) kv_blocks: u64,
    pub(crate) ring_batches: usize,
}

impl EngineHost {
    pub(crate) fn new(settings: &HostSettings<'_>, worker: Weak<Worker>) -> Self {
        let block_size_tokens = settings.block_size_tokens as usize;
        let ledgers = (0..settings.ranks.max(1))
            .map(|rank| {
                let source =
                    SourceId { worker_uid: settings.worker_uid.to_owned(), rank, incarnation: settings.incarnation };
                let ledger = LedgerSettings { ring_batches: settings.ring_batches, block_size_tokens };
                Arc::new(SharedLedger::new(source, Ledger::new(ledger)))
            })
            .collect();
        let load = |rank| LoadReport { rank, total_blocks: settings.kv_blocks, ..LoadReport::default() };
        Self {
            inner: Arc::new(Inner {
                namespace: settings.namespace.to_owned(),
                hash_seed: HashSeed(settings.hash_seed),
                block_size_tokens,
                ledgers,
                loads: Mutex::new((0..settings.ranks.max(1)).map(load).collect()),
                load_number: watch::Sender::new(0),
                worker,
                followers: Mutex::default(),
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

    /// Tells the ledger what changed in a rank's cache, in order. A removal must be told before its memory is used for
    /// something else, a block only once it can be hit: then no claim is ever false. An unknown rank is ignored.
    pub fn cache_changed(&self, rank: u32, events: &[EngineEvent]) {
        if events.is_empty() {
            return;
        }
        let Some(ledger) = self.inner.ledgers.get(rank as usize) else { return };
        if ledger.apply(events).is_some()
            && let Some(worker) = self.inner.worker.upgrade()
        {
            worker.metrics.ledger_batches.inc();
        }
    }

    /// Blocks are in the device tier from here on.
    pub fn stored(
        &self,
        rank: u32,
        hashes: Vec<EngineHash>,
        parent: Option<EngineHash>,
        tokens: Vec<u32>,
        root: BlockHash,
    ) {
        let stored = StoredBlocks { hashes, parent, tokens, tier: Tier::Device, root };
        self.cache_changed(rank, &[EngineEvent::Stored(stored)]);
    }

    /// One copy of each of these blocks leaves the device tier.
    pub fn removed(&self, rank: u32, hashes: Vec<EngineHash>) {
        self.cache_changed(rank, &[EngineEvent::Removed { hashes, tier: Tier::Device }]);
    }

    /// The whole cache of a rank is empty.
    pub fn cleared(&self, rank: u32) {
        self.cache_changed(rank, &[EngineEvent::Cleared]);
    }

    /// Feeds a rank's ledger from the sockets on which the engine publishes its KV events. Called within a runtime.
    ///
    /// # Errors
    /// The settings are wrong, or there is no such rank.
    pub fn follow_vllm(&self, rank: u32, settings_json: &str) -> Result<(), KvistError> {
        let settings = VllmEventsSettings::from_json(settings_json)?;
        let Some(ledger) = self.inner.ledgers.get(rank as usize).cloned() else {
            return Err(KvistError::field(Code::InvalidArgument, "rank", "the engine has no such rank"));
        };
        let Inner { namespace, hash_seed, worker, followers, .. } = &*self.inner;
        followers.lock().push(VllmFollower::start(&settings, namespace, *hash_seed, ledger, Weak::clone(worker)));
        Ok(())
    }

    /// The engine is about to empty its cache, and will say so late, after events that are older than the order: nothing
    /// is claimed until then. Returns how many blocks were claimed.
    pub fn clear_ordered(&self) -> u64 {
        let claimed = self.block_count();
        self.tell_all_ranks(&EngineEvent::ClearOrdered);
        claimed
    }

    /// Nothing is known of what the engine holds: the accounts of all ranks start over, empty and incomplete.
    pub fn cache_unknown(&self) {
        self.tell_all_ranks(&EngineEvent::Lost);
    }

    fn tell_all_ranks(&self, event: &EngineEvent) {
        for rank in 0..self.inner.ledgers.len() {
            self.cache_changed(u32::try_from(rank).unwrap_or(u32::MAX), std::slice::from_ref(event));
        }
    }

    /// Leading blocks of a prompt that a rank's ledger claims.
    #[must_use]
    pub fn claimed_blocks(&self, rank: u32, prompt: &[BlockHash]) -> usize {
        self.inner
            .ledgers
            .get(rank as usize)
            .map_or(0, |ledger| ledger.read(|ledger| ledger.claimed_prefix_blocks(prompt)))
    }

    /// Replaces the load report of its rank; routers hear of it. The worker numbers reports itself.
    pub fn report_load(&self, mut report: LoadReport) {
        let accepted = {
            let mut loads = self.inner.loads.lock();
            let Some(load) = loads.get_mut(report.rank as usize) else { return };
            report.report_number = load.report_number + 1;
            let accepted = report.outstanding_prefill_tokens > load.outstanding_prefill_tokens;
            *load = report;
            accepted
        };
        self.inner.load_number.send_modify(|number| *number += 1);
        if let Some(worker) = self.inner.worker.upgrade() {
            worker.link.load_changed(accepted);
        }
    }

    /// The engine is broken: the worker takes nothing new and fails what runs. The reason is for the log.
    pub fn engine_failed(&self, reason: &str) {
        if let Some(worker) = self.inner.worker.upgrade() {
            worker.engine_failed(reason);
        }
    }

    pub(crate) fn loads(&self) -> Vec<LoadReport> {
        self.inner.loads.lock().clone()
    }

    /// Prompt tokens that a rank's engine has accepted and not yet computed, as it last said.
    pub(crate) fn outstanding_prefill_tokens(&self, rank: u32) -> u64 {
        self.inner.loads.lock().get(rank as usize).map_or(0, |load| load.outstanding_prefill_tokens)
    }

    pub(crate) fn watch_load(&self) -> watch::Receiver<u64> {
        self.inner.load_number.subscribe()
    }

    pub(crate) fn ledgers(&self) -> &[Arc<SharedLedger>] {
        &self.inner.ledgers
    }

    pub(crate) fn block_count(&self) -> u64 {
        self.inner.ledgers.iter().map(|ledger| ledger.read(Ledger::block_count)).sum()
    }
}
