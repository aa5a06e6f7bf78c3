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
    core::{Core, Counters},
    runs,
    scrub::PARTS,
    source::{SlotUse, Source, SourceStatus, TierSum},
    view::Published,
};

/// Blocks of a snapshot that are taken in under one hold of the lock, so that batches go on between.
const SNAPSHOT_BLOCKS_AT_ONCE: usize = 512;

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

/// Names a snapshot that is being taken in; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotId(u64);

#[derive(Debug)]
struct Filling {
    key: SourceKey,
    incarnation: Incarnation,
    next_sequence: u64,
    complete: bool,
    slot: u32,
}

#[derive(Debug)]
struct Inner {
    core: Core,
    fillings: HashMap<SnapshotId, Filling>,
    next_snapshot: u64,
}

/// Who holds which block.
#[derive(Debug)]
pub struct Index {
    /// The writer's; look-ups do without.
    inner: Mutex<Inner>,
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
        Self { inner: Mutex::new(inner), published, counters, byte_budget: settings.byte_budget }
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

    /// Begins to take in a snapshot, beside what is known of the source, which stays visible until the snapshot is
    /// finished. An unfinished snapshot of the same source is abandoned.
    ///
    /// None when it is of a closed or older incarnation, or of a position before the source's own.
    pub fn begin_snapshot(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        next_sequence: u64,
        complete: bool,
    ) -> Option<SnapshotId> {
        let inner = &mut *self.write();
        if !inner.core.is_welcome(key, incarnation, next_sequence) {
            return None;
        }
        inner.abandon(|filling| filling.key == *key);
        let slot = inner.core.take_slot(SlotUse::Filling);
        let id = SnapshotId(inner.next_snapshot);
        inner.next_snapshot += 1;
        inner.fillings.insert(id, Filling { key: key.clone(), incarnation, next_sequence, complete, slot });
        Some(id)
    }

    /// Takes in a part of a snapshot; false when it was abandoned or finished. Runs may come in any order, but what comes
    /// behind its parent costs less memory and is found faster.
    pub fn snapshot_chunk(&self, id: SnapshotId, tier: Tier, runs: &[Run]) -> bool {
        let mut runs = runs.iter();
        let mut next = runs.next().map(|run| (run, 0));
        while let Some((run, start)) = next {
            let mut room = SNAPSHOT_BLOCKS_AT_ONCE;
            let inner = &mut *self.write();
            let Some(slot) = inner.fillings.get(&id).map(|filling| filling.slot) else { return false };
            let mut at = Some((run, start));
            while let Some((run, start)) = at
                && room > 0
            {
                let end = run.hashes.len().min(start + room);
                let parent = start.checked_sub(1).map_or(run.parent, |before| run.hashes.get(before).copied());
                let part = &run.hashes[start..end];
                inner.core.store_run(slot, tier, parent, part);
                room = room.saturating_sub(part.len().max(1));
                at = if end < run.hashes.len() { Some((run, end)) } else { runs.next().map(|run| (run, 0)) };
            }
            next = at;
        }
        true
    }

    /// Puts a snapshot in the place of all that was known of its source, at once.
    ///
    /// False when it was abandoned, or when the source was closed or has moved past it in the meantime.
    pub fn finish_snapshot(&self, id: SnapshotId, now_unix_nanos: u64) -> bool {
        let inner = &mut *self.write();
        let Some(filling) = inner.fillings.remove(&id) else { return false };
        let Filling { key, incarnation, next_sequence, complete, slot } = filling;
        if !inner.core.is_welcome(&key, incarnation, next_sequence) {
            inner.core.bury(slot);
            return false;
        }
        inner.core.tie_all(slot);
        let mut source = Source::new(slot, incarnation);
        source.next_sequence = next_sequence;
        source.complete = complete;
        source.snapshots = 1;
        source.heard_at_unix_nanos = now_unix_nanos;
        inner.core.open_with(&key, slot, source);
        true
    }

    /// Drops a snapshot that will not be finished.
    pub fn abandon_snapshot(&self, id: SnapshotId) {
        let inner = &mut *self.write();
        if let Some(filling) = inner.fillings.remove(&id) {
            inner.core.bury(filling.slot);
        }
    }

    /// Replaces all that is known of a source by a snapshot, at once.
    ///
    /// False when the snapshot is of a closed or older incarnation, or of a position before the source's own.
    pub fn apply_snapshot(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        next_sequence: u64,
        runs: &[(Tier, Vec<Run>)],
        complete: bool,
        now_unix_nanos: u64,
    ) -> bool {
        let Some(id) = self.begin_snapshot(key, incarnation, next_sequence, complete) else { return false };
        runs.iter().all(|(tier, runs)| self.snapshot_chunk(id, *tier, runs)) && self.finish_snapshot(id, now_unix_nanos)
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

    fn write(&self) -> MutexGuard<'_, Inner> {
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
    fn apply_events(&mut self, key: &SourceKey, mut slot: u32, events: &[Event]) -> u64 {
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

    fn abandon(&mut self, which: impl Fn(&Filling) -> bool) {
        let slots: Vec<u32> = self.fillings.extract_if(|_, filling| which(filling)).map(|(_, one)| one.slot).collect();
        slots.into_iter().for_each(|slot| self.core.bury(slot));
    }
}

/// What tests do to an index that no caller can.
#[cfg(test)]
impl Index {
    /// Takes a block out of the contents alone, as a mistake of this crate would.
    pub(crate) fn lose_silently(&self, key: &SourceKey, hash: kvist_blocks::BlockHash) {
        let core = &mut self.write().core;
        let Some(slot) = core.sources.get(key).map(|source| source.slot) else { return };
        let Some(seat) = core.place_of(slot, hash) else { return };
        core.take_out(seat.node, slot, Tier::Device, 1 << seat.offset);
    }

    /// Keeps the writer's lock and leaves a source and a node in the middle of a change while something runs, as a writer
    /// does that has lost its core.
    pub(crate) fn while_stopped<T>(
        &self,
        key: Option<&SourceKey>,
        hash: Option<kvist_blocks::BlockHash>,
        run: impl FnOnce() -> T,
    ) -> T {
        let inner = &mut *self.write();
        let core = &mut inner.core;
        let position = key.and_then(|key| core.sources.position(key));
        if let Some(position) = position {
            core.sources.begin(position, core.versions.newest());
        }
        let slots = 0..core.slots.len() as u32;
        let node =
            hash.and_then(|hash| slots.into_iter().find_map(|slot| core.place_of(slot, hash))).map(|seat| seat.node);
        if let Some(record) = node.and_then(|node| core.record(node)) {
            crate::node::begin_change(record);
        }
        let result = run();
        if let Some(node) = node {
            core.change(node, |_, _| {});
        }
        if let Some(position) = position {
            core.end(position);
        }
        result
    }

    /// Applies the next batch of a source, and runs something when all of it is applied and nothing of that is said yet.
    pub(crate) fn while_applying<T>(&self, key: &SourceKey, events: &[Event], run: impl FnOnce() -> T) -> T {
        let core = &mut self.write().core;
        let position = core.sources.position(key).unwrap();
        core.sources.begin(position, core.versions.newest());
        let source = core.sources.at(Some(position)).unwrap();
        source.next_sequence += 1;
        let slot = source.slot;
        core.apply_events(key, slot, events);
        let result = run();
        core.end(position);
        result
    }

    /// Looks at what the writer keeps.
    pub(crate) fn with_core<T>(&self, look: impl FnOnce(&mut Core) -> T) -> T {
        look(&mut self.write().core)
    }

    /// Nodes that the writer has looked at so far.
    pub(crate) fn visits(&self) -> u64 {
        self.write().core.visits
    }
}
