//! One source as the index sees it.

use kvist_blocks::{BlockHash, Digest, Incarnation, SourceKey, Tier, TierDigest};

use crate::{lists::List, places::Places, table::Seat};

/// How much may be said about a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceState {
    /// Every batch up to the stated sequence was applied.
    Exact,
    /// A gap is being filled.
    CatchingUp,
    /// True, but the source's own history is incomplete.
    Partial,
    /// Exact for what the byte budget lets the index keep.
    Truncated,
    /// Silent: true of a known past.
    Stale,
}

/// What one source holds of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Of which incarnation.
    pub incarnation: Incarnation,
    /// How much may be said about it.
    pub state: SourceState,
    /// The claim is true after this batch; none before the first.
    pub applied_sequence: Option<u64>,
    /// Leading blocks held in each tier alone, by [`Tier::position`].
    pub tier_blocks: [u32; 4],
    /// Leading blocks held in any tier.
    pub matched_blocks: u32,
}

/// A source and its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceStatus {
    /// Which source.
    pub source: SourceKey,
    /// Of which incarnation.
    pub incarnation: Incarnation,
    /// How much may be said about it.
    pub state: SourceState,
    /// The sequence the next batch must carry.
    pub next_sequence: u64,
    /// What was applied, by tier.
    pub tiers: Vec<TierDigest>,
    /// Of these, how many blocks the byte budget did not let the index keep, over all tiers.
    pub given_up_blocks: u64,
    /// When the last statement arrived, nanoseconds since the Unix epoch.
    pub heard_at_unix_nanos: u64,
    /// Gaps seen.
    pub gaps: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Digests that did not match.
    pub mismatches: u64,
    /// By how many blocks, at least, the last digest or scrub found the source to differ; 0 once that is mended.
    pub divergent_blocks: u64,
    /// Removals of blocks that were not held.
    pub unknown_removals: u64,
}

/// States from which a claim may be used for steering.
impl SourceState {
    /// Whether the index speaks for the present of the source.
    #[must_use]
    pub fn is_exact(self) -> bool {
        self == Self::Exact
    }
}

/// Numbers of one tier of one source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TierSum {
    pub(crate) count: u64,
    pub(crate) digest: Digest,
    pub(crate) used: bool,
}

impl TierSum {
    /// Of some blocks.
    pub(crate) fn of(hashes: impl Iterator<Item = BlockHash>) -> Self {
        let mut sum = Self::default();
        hashes.for_each(|hash| sum.add(hash));
        sum
    }

    pub(crate) fn add(&mut self, hash: BlockHash) {
        self.count += 1;
        self.digest.add(hash);
        self.used = true;
    }

    pub(crate) fn remove(&mut self, hash: BlockHash) {
        self.count = self.count.saturating_sub(1);
        self.digest.remove(hash);
    }

    /// Takes blocks out that are in it.
    pub(crate) fn subtract(&mut self, other: &Self) {
        self.count = self.count.saturating_sub(other.count);
        self.digest.0 = self.digest.0.wrapping_sub(other.digest.0);
    }

    pub(crate) fn clear(&mut self) {
        (self.count, self.digest) = (0, Digest::default());
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        let digest = Digest(self.digest.0.wrapping_add(other.digest.0));
        Self { count: self.count + other.count, digest, used: self.used || other.used }
    }

    /// By how many blocks two sets differ, at least; 0 when they are the same.
    pub(crate) fn differs_by(&self, other: &Self) -> u64 {
        self.count.abs_diff(other.count).max(u64::from(self.digest != other.digest))
    }
}

/// What a slot is good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// Nothing; no block carries it.
    Free,
    /// The blocks that carry it are what the source holds.
    Live(SourceKey),
    /// A snapshot is being taken in under it; nobody sees it yet.
    Filling,
    /// Its blocks belong to nobody and are swept in time.
    Dead,
}

/// The account of the blocks that carry one slot.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) used_for: SlotUse,
    /// All that was applied, kept or given up.
    pub(crate) applied: [TierSum; 4],
    /// What was applied and the budget does not let the index keep.
    pub(crate) given_up: [TierSum; 4],
    /// What a scrub has found so far.
    pub(crate) scrubbed: [TierSum; 4],
    /// Pairs of a kept block and this slot.
    pub(crate) pairs: u64,
    /// Nodes of which it holds something.
    pub(crate) nodes: u32,
    /// Which.
    pub(crate) list: List,
    /// Where its blocks stand.
    pub(crate) places: Places,
    /// Where it was changed last, or before that; may be wrong.
    pub(crate) recent: Seat,
}

impl Slot {
    pub(crate) fn new(used_for: SlotUse) -> Self {
        Self {
            used_for,
            applied: Default::default(),
            given_up: Default::default(),
            scrubbed: Default::default(),
            pairs: 0,
            nodes: 0,
            list: List::default(),
            places: Places::default(),
            recent: Seat { node: 0, offset: 0 },
        }
    }

    pub(crate) fn given_up_blocks(&self) -> u64 {
        self.given_up.iter().map(|sum| sum.count).sum()
    }

    /// Enters blocks that are kept from here on, in a node that a scrub has passed or not.
    pub(crate) fn enter(&mut self, tier: Tier, sum: &TierSum, is_scrubbed: bool) {
        let tier = tier.position();
        self.applied[tier] = self.applied[tier].plus(sum);
        if is_scrubbed {
            self.scrubbed[tier] = self.scrubbed[tier].plus(sum);
        }
    }

    /// Takes kept blocks out of the account.
    pub(crate) fn leave(&mut self, tier: Tier, sum: &TierSum, is_scrubbed: bool) {
        let tier = tier.position();
        self.applied[tier].subtract(sum);
        if is_scrubbed {
            self.scrubbed[tier].subtract(sum);
        }
    }
}

/// What is known of a source beside its blocks. Those carry `slot`; a new incarnation, a snapshot or an emptied cache
/// takes a new slot, so that everything the old one held is gone at once and swept later.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) slot: u32,
    pub(crate) incarnation: Incarnation,
    pub(crate) next_sequence: u64,
    pub(crate) catching_up: bool,
    pub(crate) stale: bool,
    pub(crate) complete: bool,
    pub(crate) heard_at_unix_nanos: u64,
    pub(crate) gaps: u64,
    pub(crate) snapshots: u64,
    pub(crate) mismatches: u64,
    pub(crate) divergent_blocks: u64,
    pub(crate) unknown_removals: u64,
}

impl Source {
    pub(crate) fn new(slot: u32, incarnation: Incarnation) -> Self {
        Self {
            slot,
            incarnation,
            next_sequence: 0,
            catching_up: false,
            stale: false,
            complete: true,
            heard_at_unix_nanos: 0,
            gaps: 0,
            snapshots: 0,
            mismatches: 0,
            divergent_blocks: 0,
            unknown_removals: 0,
        }
    }

    pub(crate) fn state(&self, is_truncated: bool) -> SourceState {
        if self.stale {
            SourceState::Stale
        } else if self.catching_up {
            SourceState::CatchingUp
        } else if !self.complete {
            SourceState::Partial
        } else if is_truncated {
            SourceState::Truncated
        } else {
            SourceState::Exact
        }
    }

    pub(crate) fn status(&self, key: &SourceKey, slot: &Slot) -> SourceStatus {
        let tiers = Tier::ALL
            .into_iter()
            .zip(&slot.applied)
            .filter(|(_, sum)| sum.used)
            .map(|(tier, sum)| TierDigest { tier, block_count: sum.count, digest: sum.digest })
            .collect();
        SourceStatus {
            source: key.clone(),
            incarnation: self.incarnation,
            state: self.state(slot.given_up_blocks() > 0),
            next_sequence: self.next_sequence,
            tiers,
            given_up_blocks: slot.given_up_blocks(),
            heard_at_unix_nanos: self.heard_at_unix_nanos,
            gaps: self.gaps,
            snapshots: self.snapshots,
            mismatches: self.mismatches,
            divergent_blocks: self.divergent_blocks,
            unknown_removals: self.unknown_removals,
        }
    }
}
