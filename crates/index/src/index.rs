//! The merged view.

use hashbrown::{HashMap, HashSet, hash_map::Entry};
use kvist_blocks::{Batch, BlockHash, Event, Incarnation, SourceKey, Tier, TierDigest, WorkerUid};
use parking_lot::RwLock;

use crate::{
    holders::Holders,
    source::{Overlap, Source, SourceState, SourceStatus},
};

/// Bytes of one map entry with its share of control bytes and free places at the map's load factor of 7/8.
const ENTRY_BYTES: u64 = 28;
/// Bytes of each further holder of a block, with the share of the vector's spare places.
const FURTHER_HOLDER_BYTES: u64 = 8;

/// Blocks by tier.
pub type TierBlocks = Vec<(Tier, Vec<BlockHash>)>;

/// How an index is kept.
#[derive(Clone, Copy, Debug)]
pub struct IndexSettings {
    /// Most bytes for blocks and holders; what does not fit is given up and makes its source TRUNCATED.
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
    /// Bytes in use, computed from the two.
    pub bytes: u64,
    /// Most bytes.
    pub byte_budget: u64,
}

#[derive(Debug, Default)]
struct Inner {
    blocks: HashMap<BlockHash, Holders>,
    holders: u64,
    sources: HashMap<SourceKey, Source>,
    by_slot: HashMap<u32, SourceKey>,
    next_slot: u32,
    /// Closed incarnations by worker: everything up to and including the value.
    closed: HashMap<WorkerUid, Incarnation>,
    /// Slots whose blocks are still in the map and belong to nobody.
    dead_slots: HashSet<u32>,
}

/// Who holds which block.
#[derive(Debug)]
pub struct Index {
    settings: IndexSettings,
    inner: RwLock<Inner>,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(settings: IndexSettings) -> Self {
        Self { settings, inner: RwLock::default() }
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
        let inner = &mut *self.inner.write();
        if inner.is_closed(key, incarnation) {
            return Applied::OldIncarnation;
        }
        let is_new = inner.sources.get(key).is_none_or(|source| source.incarnation < incarnation);
        if is_new {
            inner.open(key, incarnation);
        }
        let Some(source) = inner.sources.get_mut(key) else { return Applied::OldIncarnation };
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
        let budget = self.settings.byte_budget;
        for event in &batch.events {
            match event {
                Event::Stored { tier, hashes, .. } => {
                    hashes
                        .iter()
                        .for_each(|hash| store(&mut inner.blocks, &mut inner.holders, source, *hash, *tier, budget));
                }
                Event::Removed { tier, hashes } => {
                    hashes.iter().for_each(|hash| remove(&mut inner.blocks, &mut inner.holders, source, *hash, *tier));
                }
                Event::Cleared { tier: None } => {
                    let slot = inner.next_slot;
                    inner.next_slot += 1;
                    inner.dead_slots.insert(source.slot);
                    inner.by_slot.remove(&source.slot);
                    inner.by_slot.insert(slot, key.clone());
                    source.slot = slot;
                    source.given_up = 0;
                    for sum in &mut source.sums {
                        (sum.count, sum.digest) = (0, kvist_blocks::Digest::default());
                    }
                }
                Event::Cleared { tier: Some(tier) } => {
                    let slot = source.slot;
                    inner.blocks.retain(|_, holders| {
                        if holders.remove(slot, *tier) {
                            inner.holders -= 1;
                        }
                        !holders.is_empty()
                    });
                    let sum = &mut source.sums[tier.position()];
                    (sum.count, sum.digest) = (0, kvist_blocks::Digest::default());
                }
            }
        }
        Applied::Applied
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
        let inner = &mut *self.inner.write();
        if inner.is_closed(key, incarnation) {
            return false;
        }
        if let Some(source) = inner.sources.get(key)
            && (source.incarnation > incarnation
                || source.incarnation == incarnation && source.next_sequence > next_sequence)
        {
            return false;
        }
        inner.open(key, incarnation);
        let Some(source) = inner.sources.get_mut(key) else { return false };
        source.next_sequence = next_sequence;
        source.complete = complete;
        source.snapshots += 1;
        source.heard_at_unix_nanos = now_unix_nanos;
        for (tier, hashes) in blocks {
            for hash in hashes {
                store(&mut inner.blocks, &mut inner.holders, source, *hash, *tier, self.settings.byte_budget);
            }
        }
        true
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
        let inner = &mut *self.inner.write();
        if inner.is_closed(key, incarnation) {
            return DigestVerdict::OldIncarnation;
        }
        let Some(source) = inner.sources.get_mut(key) else { return DigestVerdict::Unknown };
        if source.incarnation != incarnation {
            return if source.incarnation > incarnation {
                DigestVerdict::OldIncarnation
            } else {
                DigestVerdict::Unknown
            };
        }
        source.heard_at_unix_nanos = now_unix_nanos;
        if next_sequence < source.next_sequence {
            return DigestVerdict::Old;
        }
        if next_sequence > source.next_sequence {
            source.catching_up = true;
            return DigestVerdict::Behind;
        }
        source.complete = complete;
        let equal = Tier::ALL.into_iter().all(|tier| {
            let own = source.sums[tier.position()];
            let stated = tiers.iter().find(|stated| stated.tier == tier);
            stated.map_or((0, kvist_blocks::Digest::default()), |stated| (stated.block_count, stated.digest))
                == (own.count, own.digest)
        });
        source.stale = false;
        source.catching_up = !equal;
        if equal {
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
        let inner = &mut *self.inner.write();
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
        let inner = &mut *self.inner.write();
        let closed = inner.closed.entry(worker.clone()).or_insert(up_to);
        *closed = (*closed).max(up_to);
        inner.drop_sources(|key, source| key.worker == *worker && source.incarnation <= up_to);
    }

    /// Forgets a worker that was withdrawn, whatever its incarnation.
    pub fn remove_worker(&self, worker: &WorkerUid) {
        let inner = &mut *self.inner.write();
        inner.drop_sources(|key, _| key.worker == *worker);
    }

    /// For every source, how much of the beginning of a prompt it holds.
    #[must_use]
    pub fn lookup(&self, prompt: &[BlockHash]) -> Vec<Overlap> {
        let inner = self.inner.read();
        let mut overlaps: Vec<Overlap> = inner
            .sources
            .iter()
            .map(|(key, source)| Overlap {
                source: key.clone(),
                incarnation: source.incarnation,
                state: source.state(),
                applied_sequence: source.next_sequence.checked_sub(1),
                tier_blocks: [0; 4],
                matched_blocks: 0,
            })
            .collect();
        // Slots are few and dense enough for a small map built once a look-up.
        let position_of: HashMap<u32, usize> =
            inner.sources.values().enumerate().map(|(position, source)| (source.slot, position)).collect();
        for (depth, hash) in (0u32..).zip(prompt) {
            let Some(holders) = inner.blocks.get(hash) else { break };
            let mut any = false;
            for holder in holders.as_slice() {
                let Some(overlap) = position_of.get(&holder.slot()).and_then(|position| overlaps.get_mut(*position))
                else {
                    continue;
                };
                // A hole ends the match, whatever lies behind it.
                if overlap.matched_blocks != depth {
                    continue;
                }
                overlap.matched_blocks = depth + 1;
                any = true;
                for tier in Tier::ALL {
                    let blocks = &mut overlap.tier_blocks[tier.position()];
                    if holder.has(tier) && *blocks == depth {
                        *blocks = depth + 1;
                    }
                }
            }
            if !any {
                break;
            }
        }
        overlaps
    }

    /// All sources, by worker and rank.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceStatus> {
        let inner = self.inner.read();
        let mut sources: Vec<SourceStatus> = inner.sources.iter().map(|(key, source)| source.status(key)).collect();
        sources.sort_by(|left, right| left.source.cmp(&right.source));
        sources
    }

    /// One source.
    #[must_use]
    pub fn source(&self, key: &SourceKey) -> Option<SourceStatus> {
        self.inner.read().sources.get(key).map(|source| source.status(key))
    }

    /// All blocks of a source, by tier, and the position at which that is true; walks the whole map.
    #[must_use]
    pub fn snapshot_of(&self, key: &SourceKey) -> Option<(SourceStatus, TierBlocks)> {
        let inner = self.inner.read();
        let source = inner.sources.get(key)?;
        let mut tiers: [Vec<BlockHash>; 4] = Default::default();
        for (hash, holders) in &inner.blocks {
            for holder in holders.as_slice().iter().filter(|holder| holder.slot() == source.slot) {
                for tier in Tier::ALL.into_iter().filter(|tier| holder.has(*tier)) {
                    tiers[tier.position()].push(*hash);
                }
            }
        }
        let blocks = Tier::ALL.into_iter().zip(tiers).filter(|(_, hashes)| !hashes.is_empty()).collect();
        Some((source.status(key), blocks))
    }

    /// Bytes in use and the budget.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let inner = self.inner.read();
        let blocks = inner.blocks.len() as u64;
        Memory {
            blocks,
            holders: inner.holders,
            bytes: bytes_of(blocks, inner.holders),
            byte_budget: self.settings.byte_budget,
        }
    }

    /// Sweeps the blocks of closed sources out of the map. They are invisible before that; this frees the memory.
    pub fn collect_garbage(&self) {
        let inner = &mut *self.inner.write();
        if inner.dead_slots.is_empty() {
            return;
        }
        let by_slot = &inner.by_slot;
        let mut left = 0;
        inner.blocks.retain(|_, holders| {
            let empty = holders.retain(|slot| by_slot.contains_key(&slot));
            if !empty {
                left += holders.as_slice().len() as u64;
            }
            !empty
        });
        inner.holders = left;
        inner.dead_slots.clear();
        if inner.blocks.capacity() > 4 * inner.blocks.len() {
            inner.blocks.shrink_to_fit();
        }
    }

    fn with_source(&self, key: &SourceKey, change: impl FnOnce(&mut Source)) {
        if let Some(source) = self.inner.write().sources.get_mut(key) {
            change(source);
        }
    }
}

impl Inner {
    fn is_closed(&self, key: &SourceKey, incarnation: Incarnation) -> bool {
        self.closed.get(&key.worker).is_some_and(|closed| incarnation <= *closed)
            || self.sources.get(key).is_some_and(|source| incarnation < source.incarnation)
    }

    /// Starts an empty account of a source under a new slot; counters live on.
    fn open(&mut self, key: &SourceKey, incarnation: Incarnation) {
        let slot = self.next_slot;
        self.next_slot += 1;
        let mut source = Source::new(slot, incarnation);
        if let Some(old) = self.sources.remove(key) {
            self.by_slot.remove(&old.slot);
            self.dead_slots.insert(old.slot);
            (source.gaps, source.snapshots, source.mismatches) = (old.gaps, old.snapshots, old.mismatches);
            source.heard_at_unix_nanos = old.heard_at_unix_nanos;
        }
        self.by_slot.insert(slot, key.clone());
        self.sources.insert(key.clone(), source);
    }

    fn drop_sources(&mut self, which: impl Fn(&SourceKey, &Source) -> bool) {
        let (by_slot, dead_slots) = (&mut self.by_slot, &mut self.dead_slots);
        self.sources.retain(|key, source| {
            let goes = which(key, source);
            if goes {
                by_slot.remove(&source.slot);
                dead_slots.insert(source.slot);
            }
            !goes
        });
    }
}

fn bytes_of(blocks: u64, holders: u64) -> u64 {
    blocks * ENTRY_BYTES + holders.saturating_sub(blocks) * FURTHER_HOLDER_BYTES
}

fn store(
    blocks: &mut HashMap<BlockHash, Holders>,
    holder_count: &mut u64,
    source: &mut Source,
    hash: BlockHash,
    tier: Tier,
    byte_budget: u64,
) {
    let fits = bytes_of(blocks.len() as u64 + 1, *holder_count + 1) <= byte_budget;
    match blocks.entry(hash) {
        Entry::Occupied(mut entry) => {
            if !fits {
                source.given_up += 1;
            } else if entry.get_mut().add(source.slot, tier) {
                *holder_count += 1;
            } else {
                return;
            }
        }
        Entry::Vacant(entry) => {
            if fits {
                entry.insert(Holders::new(source.slot, tier));
                *holder_count += 1;
            } else {
                source.given_up += 1;
            }
        }
    }
    source.sums[tier.position()].add(hash);
}

fn remove(
    blocks: &mut HashMap<BlockHash, Holders>,
    holder_count: &mut u64,
    source: &mut Source,
    hash: BlockHash,
    tier: Tier,
) {
    let mut was_held = false;
    if let Entry::Occupied(mut entry) = blocks.entry(hash) {
        was_held = entry.get_mut().remove(source.slot, tier);
        if was_held {
            *holder_count = holder_count.saturating_sub(1);
        }
        if entry.get().is_empty() {
            entry.remove();
        }
    }
    if !was_held {
        if source.given_up == 0 {
            return;
        }
        source.given_up -= 1;
    }
    source.sums[tier.position()].remove(hash);
}

/// States from which a claim may be used for steering.
impl SourceState {
    /// Whether the index speaks for the present of the source.
    #[must_use]
    pub fn is_exact(self) -> bool {
        self == Self::Exact
    }
}
