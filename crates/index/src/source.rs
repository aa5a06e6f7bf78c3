//! One source as the index sees it.

use kvist_blocks::{BlockHash, Digest, Incarnation, SourceKey, Tier, TierDigest};

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Which source.
    pub source: SourceKey,
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
    /// When the last statement arrived, nanoseconds since the Unix epoch.
    pub heard_at_unix_nanos: u64,
    /// Gaps seen.
    pub gaps: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Digests that did not match.
    pub mismatches: u64,
}

/// Numbers of one tier of one source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TierSum {
    pub(crate) count: u64,
    pub(crate) digest: Digest,
    pub(crate) used: bool,
}

impl TierSum {
    pub(crate) fn add(&mut self, hash: BlockHash) {
        self.count += 1;
        self.digest.add(hash);
        self.used = true;
    }

    pub(crate) fn remove(&mut self, hash: BlockHash) {
        self.count = self.count.saturating_sub(1);
        self.digest.remove(hash);
    }
}

/// A source's account. Its blocks carry `slot`; a new incarnation or snapshot takes a new slot, so that everything the
/// old one held is gone at once and swept later.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) slot: u32,
    pub(crate) incarnation: Incarnation,
    pub(crate) next_sequence: u64,
    pub(crate) sums: [TierSum; 4],
    pub(crate) catching_up: bool,
    pub(crate) stale: bool,
    pub(crate) complete: bool,
    /// Blocks that were applied and that the budget did not let in.
    pub(crate) given_up: u64,
    pub(crate) heard_at_unix_nanos: u64,
    pub(crate) gaps: u64,
    pub(crate) snapshots: u64,
    pub(crate) mismatches: u64,
}

impl Source {
    pub(crate) fn new(slot: u32, incarnation: Incarnation) -> Self {
        Self {
            slot,
            incarnation,
            next_sequence: 0,
            sums: [TierSum::default(); 4],
            catching_up: false,
            stale: false,
            complete: true,
            given_up: 0,
            heard_at_unix_nanos: 0,
            gaps: 0,
            snapshots: 0,
            mismatches: 0,
        }
    }

    pub(crate) fn state(&self) -> SourceState {
        if self.stale {
            SourceState::Stale
        } else if self.catching_up {
            SourceState::CatchingUp
        } else if !self.complete {
            SourceState::Partial
        } else if self.given_up > 0 {
            SourceState::Truncated
        } else {
            SourceState::Exact
        }
    }

    pub(crate) fn tiers(&self) -> Vec<TierDigest> {
        Tier::ALL
            .into_iter()
            .zip(&self.sums)
            .filter(|(_, sum)| sum.used)
            .map(|(tier, sum)| TierDigest { tier, block_count: sum.count, digest: sum.digest })
            .collect()
    }

    pub(crate) fn status(&self, key: &SourceKey) -> SourceStatus {
        SourceStatus {
            source: key.clone(),
            incarnation: self.incarnation,
            state: self.state(),
            next_sequence: self.next_sequence,
            tiers: self.tiers(),
            heard_at_unix_nanos: self.heard_at_unix_nanos,
            gaps: self.gaps,
            snapshots: self.snapshots,
            mismatches: self.mismatches,
        }
    }
}
