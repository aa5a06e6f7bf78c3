//! One ledger, and those who follow it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use kvist_blocks::Batch;
use kvist_ledger::{EngineEvent, Ledger, LedgerDigest, Snapshot};
use kvist_proto::events::v1::SourceId;
use kvist_telemetry::now_unix_nanos;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The ledger of one rank of one start of an engine.
#[derive(Debug)]
pub struct SharedLedger {
    source: SourceId,
    ledger: Mutex<Ledger>,
    /// The ledger's next sequence, for those who follow it.
    next_sequence: watch::Sender<u64>,
    is_in_touch: AtomicBool,
    closed: CancellationToken,
}

/// What a reader of a ledger has not seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The batches after the reader's position.
    Batches(Vec<Arc<Batch>>),
    /// Everything, since the batches are not there any more.
    Snapshot(Snapshot),
}

impl SharedLedger {
    /// A ledger that nobody else changes, of a source.
    #[must_use]
    pub fn new(source: SourceId, ledger: Ledger) -> Self {
        Self {
            source,
            ledger: Mutex::new(ledger),
            next_sequence: watch::Sender::new(0),
            is_in_touch: AtomicBool::new(true),
            closed: CancellationToken::new(),
        }
    }

    /// Whose ledger it is.
    #[must_use]
    pub fn source(&self) -> &SourceId {
        &self.source
    }

    /// Takes what the engine said, in order, and wakes those who follow when anything visible changed.
    pub fn apply(&self, events: &[EngineEvent]) -> Option<Arc<Batch>> {
        let batch = self.ledger.lock().apply(now_unix_nanos(), events)?;
        self.next_sequence.send_if_modified(|next| {
            let is_newer = batch.sequence >= *next;
            *next = (*next).max(batch.sequence + 1);
            is_newer
        });
        Some(batch)
    }

    /// Reads the ledger; nothing changes it meanwhile.
    pub fn read<T>(&self, read: impl FnOnce(&Ledger) -> T) -> T {
        read(&self.ledger.lock())
    }

    /// Says whether the engine is heard at present. While it is not, what was said stays as it is, the account does not
    /// count as complete, and no digest is sent by itself: a digest says that the source is well.
    pub fn set_in_touch(&self, is_in_touch: bool) {
        self.is_in_touch.store(is_in_touch, Ordering::Release);
    }

    /// Whether the engine is heard at present.
    #[must_use]
    pub fn is_in_touch(&self) -> bool {
        self.is_in_touch.load(Ordering::Acquire)
    }

    /// Another start of the engine has a ledger of its own: those who follow this one are sent away.
    pub fn close(&self) {
        self.closed.cancel();
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.next_sequence.subscribe()
    }

    /// Count and digest of each tier.
    #[must_use]
    pub fn digest(&self) -> LedgerDigest {
        self.sincere(self.read(Ledger::digest))
    }

    /// What follows a position, and the account that covers exactly it. Without a position, everything from 0 is wanted;
    /// `from_snapshot` skips the ring.
    #[must_use]
    pub fn missing_after(&self, last_applied: Option<u64>, from_snapshot: bool) -> (Missing, LedgerDigest) {
        let (mut missing, digest) = self.read(|ledger| {
            let range = if from_snapshot { None } else { ledger.range_after(last_applied).ok() };
            (range.map_or_else(|| Missing::Snapshot(ledger.snapshot()), Missing::Batches), ledger.digest())
        });
        let digest = self.sincere(digest);
        if let Missing::Snapshot(snapshot) = &mut missing {
            snapshot.complete = digest.complete;
        }
        (missing, digest)
    }

    fn sincere(&self, mut digest: LedgerDigest) -> LedgerDigest {
        digest.complete &= self.is_in_touch();
        digest
    }
}
