//! The merged view.

use std::{collections::HashMap, ops::Range, time::Duration};

use kvist_blocks::{Batch, BlockHash, Event, Incarnation, SourceKey, Tier, TierDigest, WorkerUid};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{
    holdings::{Added, Ahead, Holdings, Removed, SHARDS},
    lookup::Walk,
    segments::Seat,
    sets::{Holder, SetId, tier_bit},
    source::{Overlap, Slot, SlotUse, Source, SourceStatus, TierSum},
    sources::{Overlaps, Sources},
};

/// Blocks of a snapshot that are taken in under one hold of the lock, so that look-ups go on between.
const SNAPSHOT_BLOCKS_AT_ONCE: usize = 128;

/// How long a scrub takes for all blocks.
pub const SCRUB_PERIOD: Duration = Duration::from_secs(120);

/// Sets that are changed under one hold of the lock, when a source goes.
const SETS_AT_ONCE: usize = 256;

/// Blocks that are swept out under one hold of the lock.
const SWEPT_AT_ONCE: usize = 64;

/// How often the lock is tried before a thread goes to sleep for it.
const TRIES: usize = 200;
/// Pauses between two tries.
const PAUSES: usize = 8;

/// Blocks from which on a batch is large enough to look where they are before the lock is taken, and so many under one
/// hold of it.
const TOUCHED_BLOCKS: usize = 16;
const TOUCHED_AT_ONCE: usize = 256;

/// Blocks that a look-up joins at most, and so many under one hold of the lock.
const JOINED_BLOCKS: usize = 1024;
const JOINED_AT_ONCE: usize = 64;

/// Blocks by tier; tiers without blocks are left out.
pub type TierBlocks = Vec<(Tier, Vec<BlockHash>)>;

/// How an index is kept.
#[derive(Clone, Copy, Debug)]
pub struct IndexSettings {
    /// Most bytes for blocks and holders, the copies made while tables grow included; what does not fit is given up and
    /// makes its source TRUNCATED. What each source costs beside its blocks, about 1 KiB, is not counted.
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
    /// Distinct blocks.
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
    holdings: Holdings,
    sources: Sources,
    slots: Vec<Slot>,
    /// Slots whose blocks a source holds, a bit for each.
    live: Vec<u64>,
    /// Slots some of whose blocks were given up, a bit for each.
    truncated: Vec<u64>,
    free_slots: Vec<u32>,
    dead_slots: Vec<u32>,
    /// Blocks of the tables before this one are part of the sums of the scrub that runs.
    scrub_shard: usize,
    /// Grows when all dead slots were swept under one hold of the lock, so that a sweep in steps notices.
    whole_sweeps: u64,
    fillings: HashMap<SnapshotId, Filling>,
    next_snapshot: u64,
    /// Closed incarnations by worker: everything up to and including the value.
    closed: HashMap<WorkerUid, Incarnation>,
}

/// Who holds which block.
#[derive(Debug)]
pub struct Index {
    inner: RwLock<Inner>,
    /// Held by the one sweep that runs.
    sweep: Mutex<()>,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(settings: IndexSettings) -> Self {
        let inner = Inner {
            holdings: Holdings::new(settings.byte_budget),
            sources: Sources::default(),
            slots: Vec::new(),
            live: Vec::new(),
            truncated: Vec::new(),
            free_slots: Vec::new(),
            dead_slots: Vec::new(),
            scrub_shard: 0,
            whole_sweeps: 0,
            fillings: HashMap::new(),
            next_snapshot: 0,
            closed: HashMap::new(),
        };
        Self { inner: RwLock::new(inner), sweep: Mutex::new(()) }
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
        self.touch(batch);
        let inner = &mut *self.write();
        // Searched for once: among a thousand sources that takes as long as to store a block.
        let mut position = inner.sources.position(key);
        let known = inner.sources.at(position).map(|source| source.incarnation);
        if known.is_some_and(|known| incarnation < known) || inner.is_worker_closed(&key.worker, incarnation) {
            return Applied::OldIncarnation;
        }
        let is_new = known != Some(incarnation);
        if is_new {
            inner.open(key, incarnation);
            position = inner.sources.position(key);
        }
        let Some(source) = inner.sources.at(position) else { return Applied::OldIncarnation };
        source.heard_at_unix_nanos = now_unix_nanos;
        if batch.sequence < source.next_sequence {
            return Applied::Duplicate;
        }
        if batch.sequence > source.next_sequence {
            if !source.catching_up {
                source.gaps += 1;
            }
            source.catching_up = true;
            return if is_new { Applied::NewIncarnation } else { Applied::Gap { expected: source.next_sequence } };
        }
        source.next_sequence += 1;
        source.stale = false;
        let mut slot = source.slot;
        let mut unknown_removals = 0;
        for event in &batch.events {
            match event {
                Event::Stored { tier, parent, hashes } => inner.store_run(slot, *tier, *parent, hashes),
                Event::Removed { tier, hashes } => {
                    unknown_removals += hashes.iter().filter(|hash| !inner.remove(slot, *tier, **hash)).count() as u64;
                }
                Event::Cleared { tier: None } => slot = inner.replace_slot(key),
                Event::Cleared { tier: Some(tier) } => inner.clear_tier(slot, *tier),
            }
        }
        if let Some(source) = inner.sources.at(position) {
            source.unknown_removals += unknown_removals;
        }
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
        if !inner.is_welcome(key, incarnation, next_sequence) {
            return None;
        }
        inner.abandon(|filling| filling.key == *key);
        let slot = inner.take_slot(SlotUse::Filling);
        let id = SnapshotId(inner.next_snapshot);
        inner.next_snapshot += 1;
        inner.fillings.insert(id, Filling { key: key.clone(), incarnation, next_sequence, complete, slot });
        Some(id)
    }

    /// Takes in a part of a snapshot; false when it was abandoned or finished.
    pub fn snapshot_chunk(&self, id: SnapshotId, tier: Tier, hashes: &[BlockHash]) -> bool {
        for hashes in hashes.chunks(SNAPSHOT_BLOCKS_AT_ONCE) {
            self.read().holdings.touch(hashes);
            let inner = &mut *self.write();
            let Some(slot) = inner.fillings.get(&id).map(|filling| filling.slot) else { return false };
            hashes.iter().for_each(|hash| {
                inner.store(slot, tier, *hash, None);
            });
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
        if !inner.is_welcome(&key, incarnation, next_sequence) {
            inner.bury(slot);
            return false;
        }
        inner.open_with(&key, incarnation, slot);
        if let Some(source) = inner.sources.get_mut(&key) {
            source.next_sequence = next_sequence;
            source.complete = complete;
            source.snapshots += 1;
            source.heard_at_unix_nanos = now_unix_nanos;
        }
        true
    }

    /// Drops a snapshot that will not be finished.
    pub fn abandon_snapshot(&self, id: SnapshotId) {
        let inner = &mut *self.write();
        if let Some(filling) = inner.fillings.remove(&id) {
            inner.bury(filling.slot);
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
        blocks: &[(Tier, Vec<BlockHash>)],
        complete: bool,
        now_unix_nanos: u64,
    ) -> bool {
        let Some(id) = self.begin_snapshot(key, incarnation, next_sequence, complete) else { return false };
        blocks.iter().all(|(tier, hashes)| self.snapshot_chunk(id, *tier, hashes))
            && self.finish_snapshot(id, now_unix_nanos)
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
        let inner = &mut *self.write();
        if inner.is_closed(key, incarnation) {
            return DigestVerdict::OldIncarnation;
        }
        let Some(source) = inner.sources.get_mut(key).filter(|source| source.incarnation == incarnation) else {
            return DigestVerdict::Unknown;
        };
        source.heard_at_unix_nanos = now_unix_nanos;
        if next_sequence < source.next_sequence {
            return DigestVerdict::Old;
        }
        if next_sequence > source.next_sequence {
            source.catching_up = true;
            return DigestVerdict::Behind;
        }
        source.complete = complete;
        let applied = &inner.slots[source.slot as usize].applied;
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
        let inner = &mut *self.write();
        let known = inner.sources.get(key).is_some_and(|source| source.incarnation >= incarnation);
        if known || inner.is_closed(key, incarnation) {
            return;
        }
        inner.open(key, incarnation);
        if let Some(source) = inner.sources.get_mut(key) {
            source.catching_up = true;
        }
    }

    /// Closes all incarnations of a worker up to and including one: its blocks are gone at once, late batches refused.
    pub fn close(&self, worker: &WorkerUid, up_to: Incarnation) {
        let inner = &mut *self.write();
        let closed = inner.closed.entry(worker.clone()).or_insert(up_to);
        *closed = (*closed).max(up_to);
        inner.drop_sources(|key, incarnation| key.worker == *worker && incarnation <= up_to);
    }

    /// Forgets a worker that was withdrawn, whatever its incarnation.
    pub fn remove_worker(&self, worker: &WorkerUid) {
        self.write().drop_sources(|key, _| key.worker == *worker);
    }

    /// For every source, how much of the beginning of a prompt it holds; by worker and rank.
    ///
    /// Two probes for up to 128 blocks, up to the first that no source has in an unbroken run. Holders are compared only
    /// where the set of them differs from the block before. Blocks of which nobody has told yet how they follow each
    /// other take one probe each; the look-up has seen how, and tells.
    #[must_use]
    pub fn lookup(&self, prompt: &[BlockHash]) -> Overlaps {
        let (overlaps, scattered) = {
            let inner = self.read();
            let walk = inner.walk(prompt);
            let scattered = walk.alone > 4 + walk.depth / 64;
            (inner.overlaps(&walk), scattered.then_some(walk.depth))
        };
        if let Some(depth) = scattered {
            self.join(&prompt[..depth]);
        }
        overlaps
    }

    /// All sources, by worker and rank.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceStatus> {
        let inner = self.read();
        inner.sources.iter().map(|(key, source)| inner.status(key, source)).collect()
    }

    /// One source.
    #[must_use]
    pub fn source(&self, key: &SourceKey) -> Option<SourceStatus> {
        let inner = self.read();
        inner.sources.get(key).map(|source| inner.status(key, source))
    }

    /// All blocks of a source, by tier, and the position at which that is true; walks the whole map.
    #[must_use]
    pub fn snapshot_of(&self, key: &SourceKey) -> Option<(SourceStatus, TierBlocks)> {
        let inner = self.read();
        let source = inner.sources.get(key)?;
        let mut tiers: [Vec<BlockHash>; 4] = Default::default();
        for (hash, held) in (0..SHARDS).flat_map(|shard| inner.held_in_shard(shard, source.slot)) {
            for tier in Tier::ALL.into_iter().filter(|tier| held & tier_bit(*tier) != 0) {
                tiers[tier.position()].push(hash);
            }
        }
        let blocks = Tier::ALL.into_iter().zip(tiers).filter(|(_, hashes)| !hashes.is_empty()).collect();
        Some((inner.status(key, source), blocks))
    }

    /// Recomputes digests from the blocks themselves, as large a part of all blocks as the time since the last call is of
    /// [`SCRUB_PERIOD`], at least one of 1,024 parts and each under a hold of the lock of its own. Changes in between are
    /// followed, so a source is checked however busy it is.
    ///
    /// At the end of a round, says which sources have other contents than their account states. Their account states
    /// the contents from there on, so that the ledger's next digest does not match and brings a snapshot.
    pub fn scrub(&self, elapsed: Duration) -> Vec<Divergence> {
        let parts = elapsed.as_millis() * SHARDS as u128 / SCRUB_PERIOD.as_millis();
        let parts = parts.clamp(1, SHARDS as u128) as usize;
        (0..parts).flat_map(|_| self.write().scrub_shard()).collect()
    }

    /// Bytes in use and the budget.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let inner = self.read();
        Memory {
            blocks: inner.holdings.blocks(),
            holders: inner.holdings.holders(),
            bytes: inner.holdings.bytes(),
            byte_budget: inner.holdings.byte_budget(),
        }
    }

    /// Sweeps out the blocks of closed sources and replaced snapshots, in short steps between which others use the
    /// index. They are invisible before that; this frees the memory.
    ///
    /// Holders are taken out of the sets that name them, so that blocks which others hold as well are not touched.
    pub fn collect_garbage(&self) {
        let _only = self.sweep.lock();
        let (dead, sets, begun) = {
            let inner = self.read();
            (inner.dead_slots.clone(), inner.holdings.sets(), inner.whole_sweeps)
        };
        // A set that is made later has no dead slot in it.
        for first in (0..if dead.is_empty() { 0 } else { sets }).step_by(SETS_AT_ONCE) {
            let inner = &mut *self.write();
            if inner.whole_sweeps != begun {
                // All of it is done, and a slot of the list may live again.
                return;
            }
            inner.drop_dead_holders(first..first + SETS_AT_ONCE);
        }
        if !dead.is_empty() {
            let inner = &mut *self.write();
            if inner.whole_sweeps == begun {
                inner.free(&dead);
            }
        }
        for shard in 0..SHARDS {
            let orphans = {
                let inner = self.read();
                if inner.holdings.orphans() == 0 {
                    return;
                }
                inner.holdings.orphans_in(shard)
            };
            for hashes in orphans.chunks(SWEPT_AT_ONCE) {
                let inner = &mut *self.write();
                hashes.iter().for_each(|hash| inner.holdings.sweep(*hash));
            }
        }
    }

    /// Does the slow part of a large batch, waiting for memory, while others may read.
    fn touch(&self, batch: &Batch) {
        let hashes_of = |event: &Event| match event {
            Event::Stored { hashes, .. } | Event::Removed { hashes, .. } => hashes.len(),
            Event::Cleared { .. } => 0,
        };
        if batch.events.iter().map(hashes_of).sum::<usize>() < TOUCHED_BLOCKS {
            return;
        }
        for event in &batch.events {
            if let Event::Stored { hashes, .. } | Event::Removed { hashes, .. } = event {
                hashes.chunks(TOUCHED_AT_ONCE).for_each(|hashes| self.read().holdings.touch(hashes));
            }
        }
    }

    /// Tells how the blocks of a prompt follow each other, without waiting for anybody.
    fn join(&self, prompt: &[BlockHash]) {
        let (mut position, mut joined) = (0, 0);
        while position < prompt.len() && joined < JOINED_BLOCKS {
            let Some(mut inner) = self.inner.try_write() else { return };
            let mut now = 0;
            while position < prompt.len() && now < JOINED_AT_ONCE {
                if position > 0 {
                    inner.holdings.join(prompt[position - 1], prompt[position]);
                }
                let Some(stretch) = inner.holdings.stretch(prompt, position, &mut Ahead::default()) else { return };
                now += 1;
                position += stretch.blocks;
            }
            joined += now;
        }
    }

    // The lock is held for microseconds, and going to sleep for it takes longer than that. A writer that sleeps also
    // keeps all readers out until it is awake. So both try for a while first, a writer without asking readers to stay out.

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        for _ in 0..TRIES {
            if let Some(guard) = self.inner.try_read() {
                return guard;
            }
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        }
        self.inner.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        for _ in 0..TRIES {
            if let Some(guard) = self.inner.try_write() {
                return guard;
            }
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        }
        self.inner.write()
    }

    /// Takes a block out of the contents alone, as a mistake of this crate would.
    #[cfg(test)]
    pub(crate) fn lose_silently(&self, key: &SourceKey, hash: BlockHash) {
        let inner = &mut *self.write();
        let Some(slot) = inner.sources.get(key).map(|source| source.slot) else { return };
        inner.holdings.remove(hash, slot, Tier::Device);
    }

    fn with_source(&self, key: &SourceKey, change: impl FnOnce(&mut Source)) {
        if let Some(source) = self.write().sources.get_mut(key) {
            change(source);
        }
    }
}

impl Inner {
    fn is_worker_closed(&self, worker: &WorkerUid, incarnation: Incarnation) -> bool {
        self.closed.get(worker).is_some_and(|closed| incarnation <= *closed)
    }

    fn is_closed(&self, key: &SourceKey, incarnation: Incarnation) -> bool {
        self.is_worker_closed(&key.worker, incarnation)
            || self.sources.get(key).is_some_and(|source| incarnation < source.incarnation)
    }

    /// Whether a snapshot of this position tells nothing older than what is known.
    fn is_welcome(&self, key: &SourceKey, incarnation: Incarnation, next_sequence: u64) -> bool {
        let is_behind = |source: &Source| source.incarnation == incarnation && source.next_sequence > next_sequence;
        !self.is_closed(key, incarnation) && !self.sources.get(key).is_some_and(is_behind)
    }

    /// Goes along a prompt as far as a live source holds it.
    fn walk(&self, prompt: &[BlockHash]) -> Walk {
        let (mut walk, mut ahead) = (Walk::new(self.slots.len()), Ahead::default());
        while walk.depth < prompt.len() {
            let Some(stretch) = self.holdings.stretch(prompt, walk.depth, &mut ahead) else { break };
            let start = walk.depth;
            stretch.for_each_set(|ahead, set| walk.meet(start + ahead, set, self.holdings.lanes(set), &self.live));
            if walk.is_over() {
                break;
            }
            walk.depth += stretch.blocks;
            walk.alone += usize::from(stretch.is_alone());
        }
        walk.finish();
        walk
    }

    fn overlaps(&self, walk: &Walk) -> Overlaps {
        self.sources.overlaps(|source| Overlap {
            incarnation: source.incarnation,
            state: source.state(self.is_truncated(source.slot)),
            applied_sequence: source.next_sequence.checked_sub(1),
            tier_blocks: walk.tier_blocks(source.slot),
            matched_blocks: walk.matched_blocks(source.slot),
        })
    }

    fn is_truncated(&self, slot: u32) -> bool {
        self.truncated.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 != 0)
    }

    fn status(&self, key: &SourceKey, source: &Source) -> SourceStatus {
        source.status(key, &self.slots[source.slot as usize])
    }

    fn take_slot(&mut self, used_for: SlotUse) -> u32 {
        match self.free_slots.pop() {
            Some(slot) => {
                let changes = self.slots[slot as usize].changes;
                self.slots[slot as usize] = Slot { changes: changes + 1, ..Slot::new(used_for) };
                self.note_truncation(slot);
                slot
            }
            None => {
                self.slots.push(Slot::new(used_for));
                self.live.resize(self.slots.len().div_ceil(64), 0);
                self.truncated.resize(self.live.len(), 0);
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// What a slot holds is what its source holds from here on.
    fn show(&mut self, slot: u32, key: &SourceKey) {
        self.slots[slot as usize].used_for = SlotUse::Live(key.clone());
        self.live[slot as usize / 64] |= 1 << (slot % 64);
    }

    /// What a slot holds belongs to nobody from here on.
    fn bury(&mut self, slot: u32) {
        self.slots[slot as usize].used_for = SlotUse::Dead;
        self.live[slot as usize / 64] &= !(1 << (slot % 64));
        self.holdings.mark_dead(slot);
        self.dead_slots.push(slot);
    }

    /// Starts an empty account of a source.
    fn open(&mut self, key: &SourceKey, incarnation: Incarnation) {
        let slot = self.take_slot(SlotUse::Filling);
        self.open_with(key, incarnation, slot);
    }

    /// Starts the account of a source with what a slot holds; counters live on.
    fn open_with(&mut self, key: &SourceKey, incarnation: Incarnation, slot: u32) {
        let mut source = Source::new(slot, incarnation);
        if let Some(old) = self.sources.get(key) {
            (source.gaps, source.snapshots, source.mismatches) = (old.gaps, old.snapshots, old.mismatches);
            source.unknown_removals = old.unknown_removals;
            source.heard_at_unix_nanos = old.heard_at_unix_nanos;
            let old = old.slot;
            self.bury(old);
        }
        self.show(slot, key);
        self.sources.insert(key, source);
    }

    /// Gives a source a new, empty slot.
    fn replace_slot(&mut self, key: &SourceKey) -> u32 {
        let slot = self.take_slot(SlotUse::Filling);
        self.show(slot, key);
        if let Some(source) = self.sources.get_mut(key) {
            let old = std::mem::replace(&mut source.slot, slot);
            let used = self.slots[old as usize].applied.map(|sum| sum.used);
            for (sum, used) in self.slots[slot as usize].applied.iter_mut().zip(used) {
                sum.used = used;
            }
            self.bury(old);
        }
        slot
    }

    fn drop_sources(&mut self, which: impl Fn(&SourceKey, Incarnation) -> bool) {
        let mut slots = Vec::new();
        self.sources.retain(|key, source| {
            let goes = which(key, source.incarnation);
            if goes {
                slots.push(source.slot);
            }
            !goes
        });
        slots.into_iter().for_each(|slot| self.bury(slot));
        self.abandon(|filling| which(&filling.key, filling.incarnation));
    }

    fn abandon(&mut self, which: impl Fn(&Filling) -> bool) {
        let slots: Vec<u32> = self.fillings.extract_if(|_, filling| which(filling)).map(|(_, one)| one.slot).collect();
        slots.into_iter().for_each(|slot| self.bury(slot));
    }

    fn store_run(&mut self, slot: u32, tier: Tier, parent: Option<BlockHash>, hashes: &[BlockHash]) {
        // A block behind one that was given up can not be reached; its place is better used for another.
        let is_truncated = self.slots[slot as usize].given_up_blocks() > 0;
        let mut is_reached = !is_truncated || parent.is_none_or(|parent| self.holdings.holds(parent, slot));
        let mut before = parent.and_then(|parent| Some((parent, self.holdings.seat_of(parent)?)));
        for hash in hashes {
            let seat = if is_reached || self.holdings.holds(*hash, slot) {
                self.store(slot, tier, *hash, before)
            } else {
                self.give_up(slot, tier, *hash);
                None
            };
            is_reached = seat.is_some();
            before = seat.map(|seat| (*hash, seat));
        }
    }

    /// Takes a block in and says where it is, or gives it up.
    fn store(&mut self, slot: u32, tier: Tier, hash: BlockHash, before: Option<(BlockHash, Seat)>) -> Option<Seat> {
        let (mut added, mut seat) = self.holdings.add(hash, slot, tier, before);
        if added == Added::NoRoom && !self.dead_slots.is_empty() {
            // Nobody gives up a block while the dead take room.
            self.sweep_all();
            let before = before.and_then(|(before, _)| Some((before, self.holdings.seat_of(before)?)));
            (added, seat) = self.holdings.add(hash, slot, tier, before);
        }
        match added {
            Added::Present => {}
            Added::NoRoom => self.give_up(slot, tier, hash),
            Added::New => {
                let account = &mut self.slots[slot as usize];
                account.applied[tier.position()].add(hash);
                account.changes += 1;
                if self.holdings.is_before(hash, self.scrub_shard) {
                    account.scrubbed[tier.position()].add(hash);
                }
            }
        }
        seat
    }

    fn give_up(&mut self, slot: u32, tier: Tier, hash: BlockHash) {
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()].add(hash);
        account.given_up[tier.position()].add(hash);
        account.changes += 1;
        self.note_truncation(slot);
    }

    /// Takes a block out; false when it was neither held nor, as far as can be known, given up.
    fn remove(&mut self, slot: u32, tier: Tier, hash: BlockHash) -> bool {
        let is_scrubbed = self.is_scrubbed(hash);
        let account = &mut self.slots[slot as usize];
        match self.holdings.remove(hash, slot, tier) {
            Removed::Absent => {
                let given_up = &mut account.given_up[tier.position()];
                if given_up.count == 0 {
                    return false;
                }
                given_up.remove(hash);
                account.applied[tier.position()].remove(hash);
                account.changes += 1;
                self.note_truncation(slot);
                return true;
            }
            Removed::Gone => {}
            Removed::GivenUp(others) => others.into_iter().for_each(|holder| self.give_up_kept(hash, holder)),
        }
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()].remove(hash);
        account.changes += 1;
        if is_scrubbed {
            account.scrubbed[tier.position()].remove(hash);
        }
        true
    }

    /// Enters a kept block as given up.
    fn give_up_kept(&mut self, hash: BlockHash, holder: Holder) {
        let is_scrubbed = self.is_scrubbed(hash);
        let account = &mut self.slots[holder.slot as usize];
        for tier in Tier::ALL.into_iter().filter(|tier| holder.tiers & tier_bit(*tier) != 0) {
            account.given_up[tier.position()].add(hash);
            if is_scrubbed {
                account.scrubbed[tier.position()].remove(hash);
            }
        }
        account.changes += 1;
        self.note_truncation(holder.slot);
    }

    fn note_truncation(&mut self, slot: u32) {
        let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
        if self.slots[slot as usize].given_up_blocks() > 0 {
            self.truncated[word] |= bit;
        } else {
            self.truncated[word] &= !bit;
        }
    }

    fn clear_tier(&mut self, slot: u32, tier: Tier) {
        let (of_word, bit) = (slot / 64, 1u64 << (slot % 64));
        let sets = self.holdings.sets();
        self.holdings.filter_sets(0..sets, |word, position, mask| {
            if word == of_word && position == tier.position() { mask & !bit } else { mask }
        });
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()].clear();
        account.given_up[tier.position()].clear();
        account.scrubbed[tier.position()].clear();
        account.changes += 1;
        self.note_truncation(slot);
    }

    /// Blocks of a shard that carry a slot, with a bit for each tier.
    fn held_in_shard(&self, shard: usize, slot: u32) -> impl Iterator<Item = (BlockHash, u8)> {
        let mut last: Option<(SetId, u8)> = None;
        self.holdings.in_shard(shard).filter_map(move |(hash, set)| {
            let tiers = match last {
                Some((same, tiers)) if same == set => tiers,
                _ => self.holdings.tiers_of(set, slot),
            };
            last = Some((set, tiers));
            (tiers != 0).then_some((hash, tiers))
        })
    }

    fn drop_dead_holders(&mut self, sets: Range<usize>) {
        let dead: Vec<u64> =
            (0..self.slots.len() as u32).step_by(64).map(|slot| self.holdings.dead_mask(slot / 64)).collect();
        self.holdings.filter_sets(sets, |word, _, mask| mask & !dead.get(word as usize).copied().unwrap_or(0));
    }

    fn sweep_all(&mut self) {
        let sets = self.holdings.sets();
        self.drop_dead_holders(0..sets);
        for shard in 0..SHARDS {
            if self.holdings.orphans() == 0 {
                break;
            }
            self.holdings.orphans_in(shard).into_iter().for_each(|hash| self.holdings.sweep(hash));
        }
        self.whole_sweeps += 1;
        let dead = std::mem::take(&mut self.dead_slots);
        self.free(&dead);
    }

    fn is_scrubbed(&self, hash: BlockHash) -> bool {
        self.holdings.is_before(hash, self.scrub_shard)
    }

    fn scrub_shard(&mut self) -> Vec<Divergence> {
        let slots = &mut self.slots;
        self.holdings.sum_shard(self.scrub_shard, |slot, tier, sum| {
            let scrubbed = &mut slots[slot as usize].scrubbed[tier];
            *scrubbed = scrubbed.plus(sum);
        });
        self.scrub_shard += 1;
        if self.scrub_shard < SHARDS {
            return Vec::new();
        }
        self.scrub_shard = 0;
        let mut diverged = Vec::new();
        for (key, source) in self.sources.iter_mut() {
            let account = &mut self.slots[source.slot as usize];
            let mut blocks = 0;
            for tier in 0..Tier::ALL.len() {
                let found = account.scrubbed[tier].plus(&account.given_up[tier]);
                blocks += found.differs_by(&account.applied[tier]);
                let used = account.applied[tier].used;
                account.applied[tier] = TierSum { used, ..found };
            }
            if blocks > 0 {
                account.changes += 1;
                (source.catching_up, source.divergent_blocks) = (true, blocks);
                diverged.push(Divergence { source: key.clone(), incarnation: source.incarnation, blocks });
            }
        }
        self.slots.iter_mut().for_each(|slot| slot.scrubbed = Default::default());
        diverged
    }

    /// Makes swept slots usable again.
    fn free(&mut self, slots: &[u32]) {
        self.dead_slots.retain(|slot| !slots.contains(slot));
        for slot in slots {
            self.slots[*slot as usize].used_for = SlotUse::Free;
            self.holdings.forget_dead(*slot);
            self.free_slots.push(*slot);
        }
    }
}
