//! The merged view.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvist_blocks::{Batch, Event, Incarnation, Run, SourceKey, Tier, TierDigest, WorkerUid};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    apart::Apart,
    core::{Core, Counters},
    runs,
    scrub::PARTS,
    snapshots::{Filling, SnapshotId},
    source::{SlotUse, Source, SourceStatus, TierSum},
    view::Published,
};

/// How long a scrub takes for all blocks.
pub const SCRUB_PERIOD: Duration = Duration::from_secs(120);

/// Nodes that are swept under one hold of the lock.
const SWEPT_AT_ONCE: usize = 64;

/// Runs of blocks by tier; tiers without blocks are left out.
pub type TierRuns = Vec<(Tier, Vec<Run>)>;

/// How an index is kept.
#[derive(Clone, Copy, Debug)]
pub struct IndexSettings {
    /// Most bytes for blocks and holders, free room in their chunks and the copies made while tables grow included; what
    /// does not fit is given up and makes its source TRUNCATED. What each source costs beside its blocks, about 1 KiB, is
    /// not counted.
    pub byte_budget: u64,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It is part of the index.
    Applied,
    /// It was part of the index before.
    Duplicate,
    /// Batches before it are missing; the source is CATCHING_UP from here on.
    Gap {
        /// The sequence that is missing.
        expected: u64,
    },
    /// It belongs to an incarnation that is closed or older.
    OldIncarnation,
    /// It belongs to a newer incarnation of which this is not the first batch: what came before is missing.
    NewIncarnation,
}

/// What a ledger's digest says about the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestVerdict {
    /// Both agree.
    Equal,
    /// The ledger is further: batches are missing.
    Behind,
    /// The index is further: the digest is old.
    Old,
    /// Same position, other content.
    Mismatch,
    /// Of an incarnation that is closed or older.
    OldIncarnation,
    /// Of an incarnation that the index does not know.
    Unknown,
}

/// Memory of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Blocks that somebody holds. One that sources know behind other blocks, or behind none, may be counted twice.
    pub blocks: u64,
    /// Pairs of a block and a holder, those of closed sources that are not yet swept included.
    pub holders: u64,
    /// Bytes allocated for them.
    pub bytes: u64,
    /// Most bytes.
    pub byte_budget: u64,
}

/// A source whose blocks are not those that its account states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Which source.
    pub source: SourceKey,
    /// Of which incarnation.
    pub incarnation: Incarnation,
    /// By how many blocks, at least.
    pub blocks: u64,
}

/// What the lock is for.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) core: Core,
    pub(crate) fillings: HashMap<SnapshotId, Filling>,
    pub(crate) next_snapshot: u64,
}

/// Who holds which block.
#[derive(Debug)]
pub struct Index {
    /// The writer's; look-ups do without.
    inner: Apart<Mutex<Inner>>,
    pub(crate) published: Arc<Published>,
    counters: Arc<Counters>,
    byte_budget: u64,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(settings: IndexSettings) -> Self {
        let core = Core::new(settings.byte_budget);
        let (published, counters) = (Arc::clone(&core.published), Arc::clone(&core.counters));
        let inner = Inner { core, fillings: HashMap::new(), next_snapshot: 0 };
        Self { inner: Apart::new(Mutex::new(inner)), published, counters, byte_budget: settings.byte_budget }
    }

    /// Applies a batch if it is the next one of its source. The first batch of an unknown or newer incarnation opens
    /// it; the older one's blocks are gone with that.
    pub fn apply_batch(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        batch: &Batch,
        now_unix_nanos: u64,
    ) -> Applied {
        let core = &mut self.write().core;
        // Searched for once: among a thousand sources that takes as long as to store a block.
        let mut position = core.sources.position(key);
        let known = core.sources.at(position).map(|source| source.incarnation);
        if known.is_some_and(|known| incarnation < known) || core.is_worker_closed(&key.worker, incarnation) {
            return Applied::OldIncarnation;
        }
        let is_new = known != Some(incarnation);
        if is_new {
            core.open(key, incarnation);
            position = core.sources.position(key);
        }
        let Some(position) = position else { return Applied::OldIncarnation };
        let Some(source) = core.sources.at(Some(position)) else { return Applied::OldIncarnation };
        source.heard_at_unix_nanos = now_unix_nanos;
        if batch.sequence < source.next_sequence {
            return Applied::Duplicate;
        }
        if batch.sequence > source.next_sequence {
            if !source.catching_up {
                source.gaps += 1;
            }
            source.catching_up = true;
            let expected = source.next_sequence;
            core.show(position);
            return if is_new { Applied::NewIncarnation } else { Applied::Gap { expected } };
        }
        core.sources.begin(position, core.versions.newest());
        let Some(source) = core.sources.at(Some(position)) else { return Applied::OldIncarnation };
        source.next_sequence += 1;
        source.stale = false;
        let slot = source.slot;
        let unknown_removals = core.apply_events(key, slot, &batch.events);
        if let Some(source) = core.sources.at(Some(position)) {
            source.unknown_removals += unknown_removals;
        }
        core.end(position);
        Applied::Applied
    }

    /// Holds a ledger's digest against the index. A mismatch marks the source as CATCHING_UP.
    pub fn apply_digest(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        next_sequence: u64,
        tiers: &[TierDigest],
        complete: bool,
        now_unix_nanos: u64,
    ) -> DigestVerdict {
        let core = &mut self.write().core;
        if core.is_closed(key, incarnation) {
            return DigestVerdict::OldIncarnation;
        }
        let Some(position) = core.sources.position(key) else { return DigestVerdict::Unknown };
        let Some(source) = core.sources.at(Some(position)).filter(|source| source.incarnation == incarnation) else {
            return DigestVerdict::Unknown;
        };
        source.heard_at_unix_nanos = now_unix_nanos;
        if next_sequence < source.next_sequence {
            return DigestVerdict::Old;
        }
        let verdict = if next_sequence > source.next_sequence {
            source.catching_up = true;
            DigestVerdict::Behind
        } else {
            source.complete = complete;
            let applied = &core.slots[source.slot as usize].applied;
            let differs = |tier: Tier| {
                let stated = tiers.iter().find(|stated| stated.tier == tier);
                let stated = stated.map_or_else(TierSum::default, |stated| TierSum {
                    count: stated.block_count,
                    digest: stated.digest,
                    used: true,
                });
                stated.differs_by(&applied[tier.position()])
            };
            source.divergent_blocks = Tier::ALL.into_iter().map(differs).sum();
            source.stale = false;
            source.catching_up = source.divergent_blocks > 0;
            if source.divergent_blocks == 0 {
                DigestVerdict::Equal
            } else {
                source.mismatches += 1;
                DigestVerdict::Mismatch
            }
        };
        core.show(position);
        verdict
    }

    /// Says that what was missing has been applied.
    pub fn mark_caught_up(&self, key: &SourceKey, incarnation: Incarnation) {
        self.with_source(key, |source| {
            if source.incarnation == incarnation {
                (source.catching_up, source.stale) = (false, false);
            }
        });
    }

    /// Says that something is missing.
    pub fn mark_catching_up(&self, key: &SourceKey) {
        self.with_source(key, |source| source.catching_up = true);
    }

    /// Says that a source has fallen silent.
    pub fn mark_stale(&self, key: &SourceKey) {
        self.with_source(key, |source| source.stale = true);
    }

    /// Opens an incarnation of which nothing is known yet, as CATCHING_UP, so that it is seen. Does nothing when it is
    /// open, older or closed.
    pub fn expect_source(&self, key: &SourceKey, incarnation: Incarnation) {
        let core = &mut self.write().core;
        let known = core.sources.get(key).is_some_and(|source| source.incarnation >= incarnation);
        if known || core.is_closed(key, incarnation) {
            return;
        }
        let slot = core.take_slot(SlotUse::Filling);
        let mut source = Source::new(slot, incarnation);
        source.catching_up = true;
        core.open_with(key, slot, source);
    }

    /// Closes all incarnations of a worker up to and including one: its blocks are gone at once, late batches refused.
    pub fn close(&self, worker: &WorkerUid, up_to: Incarnation) {
        let inner = &mut *self.write();
        let closed = inner.core.closed.entry(worker.clone()).or_insert(up_to);
        *closed = (*closed).max(up_to);
        inner.drop_sources(|key, incarnation| key.worker == *worker && incarnation <= up_to);
    }

    /// Forgets a worker that was withdrawn, whatever its incarnation.
    pub fn remove_worker(&self, worker: &WorkerUid) {
        self.write().drop_sources(|key, _| key.worker == *worker);
    }

    /// All sources, by worker and rank.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceStatus> {
        let inner = self.write();
        inner.core.sources.iter().map(|(key, source)| inner.core.status(key, source)).collect()
    }

    /// One source.
    #[must_use]
    pub fn source(&self, key: &SourceKey) -> Option<SourceStatus> {
        let inner = self.write();
        inner.core.sources.get(key).map(|source| inner.core.status(key, source))
    }

    /// All blocks of a source as runs by tier, each behind the one that has its parent, and the position at which that is
    /// true. Takes time in proportion to them.
    #[must_use]
    pub fn snapshot_of(&self, key: &SourceKey) -> Option<(SourceStatus, TierRuns)> {
        let (status, tiers) = {
            let core = &mut self.write().core;
            let source = core.sources.get(key)?;
            let slot = source.slot;
            (core.status(key, source), core.runs_of(slot))
        };
        let runs = Tier::ALL.into_iter().zip(tiers).filter(|(_, runs)| !runs.is_empty());
        Some((status, runs.map(|(tier, runs)| (tier, runs::in_order(runs))).collect()))
    }

    /// Recomputes digests from the blocks themselves, as large a part of all blocks as the time since the last call is of
    /// [`SCRUB_PERIOD`], at least one of 1,024 parts and each under a hold of the lock of its own. Changes in between are
    /// followed, so a source is checked however busy it is.
    ///
    /// At the end of a round, says which sources have other contents than their account states. Their account states
    /// the contents from there on, so that the ledger's next digest does not match and brings a snapshot.
    pub fn scrub(&self, elapsed: Duration) -> Vec<Divergence> {
        let parts = elapsed.as_millis() * u128::from(PARTS) / SCRUB_PERIOD.as_millis();
        let parts = parts.clamp(1, u128::from(PARTS)) as u32;
        (0..parts).flat_map(|_| self.write().core.scrub_part()).collect()
    }

    /// Bytes in use and the budget. Waits for nobody.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Memory {
            blocks: number(&self.counters.blocks),
            holders: number(&self.counters.holders),
            bytes: number(&self.counters.bytes),
            byte_budget: self.byte_budget,
        }
    }

    /// Sweeps out the blocks of closed sources and replaced snapshots, in short steps between which others use the
    /// index. They are invisible before that; this frees the memory.
    ///
    /// Each source that went has a list of what it held, so this takes time in proportion to that alone.
    pub fn collect_garbage(&self) {
        loop {
            let core = &mut self.write().core;
            let Some(slot) = core.dead_slots.last().copied() else { return };
            core.sweep(slot, SWEPT_AT_ONCE);
        }
    }

    /// The writer's side, for one change.
    pub(crate) fn write(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn with_source(&self, key: &SourceKey, change: impl FnOnce(&mut Source)) {
        let core = &mut self.write().core;
        let Some(position) = core.sources.position(key) else { return };
        if let Some(source) = core.sources.at(Some(position)) {
            change(source);
        }
        core.show(position);
    }
}

impl Core {
    /// Applies events of a source; says how many removals were of blocks that it does not hold.
    pub(crate) fn apply_events(&mut self, key: &SourceKey, mut slot: u32, events: &[Event]) -> u64 {
        let mut unknown_removals = 0;
        for event in events {
            match event {
                Event::Stored { tier, parent, hashes } => self.store_run(slot, *tier, *parent, hashes),
                Event::Removed { tier, hashes } => unknown_removals += self.remove_all(slot, *tier, hashes),
                Event::Cleared { tier: None } => slot = self.replace_slot(key),
                Event::Cleared { tier: Some(tier) } => self.clear_tier(slot, *tier),
            }
        }
        unknown_removals
    }
}

impl Inner {
    fn drop_sources(&mut self, which: impl Fn(&SourceKey, Incarnation) -> bool) {
        self.core.drop_sources(&which);
        self.abandon(|filling| which(&filling.key, filling.incarnation));
    }

    pub(crate) fn abandon(&mut self, which: impl Fn(&Filling) -> bool) {
        let slots: Vec<u32> = self.fillings.extract_if(|_, filling| which(filling)).map(|(_, one)| one.slot).collect();
        slots.into_iter().for_each(|slot| self.core.bury(slot));
    }
}
