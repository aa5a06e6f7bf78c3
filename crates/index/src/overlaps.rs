//! The answer of a look-up.

use std::sync::Arc;

use kvist_blocks::{Rank, SourceKey, WorkerUid};

use crate::{
    source::Overlap,
    sources::{Seen, SourceList},
    walk::Reached,
};

/// What each source holds of a prompt.
///
/// A look-up notes how far the slots came and what the sources said of themselves; what that means for one source is put
/// together when it is asked for, since who asks mostly wants a few of a thousand.
#[derive(Clone, Debug)]
pub struct Overlaps {
    list: Arc<SourceList>,
    /// By position in the list.
    seen: Vec<Seen>,
    reached: Reached,
}

impl Overlaps {
    pub(crate) fn new(list: Arc<SourceList>, seen: Vec<Seen>, reached: Reached) -> Self {
        Self { list, seen, reached }
    }

    /// All sources, by worker and rank.
    pub fn iter(&self) -> impl Iterator<Item = (&SourceKey, Overlap)> {
        self.list.keys().iter().zip(&self.seen).map(|(key, seen)| (key, self.overlap(seen)))
    }

    /// The source at a position in the order of `iter`.
    #[must_use]
    pub fn source(&self, position: usize) -> Option<&SourceKey> {
        self.list.keys().get(position)
    }

    /// What the source at a position holds.
    #[must_use]
    pub fn at(&self, position: usize) -> Option<Overlap> {
        self.seen.get(position).map(|seen| self.overlap(seen))
    }

    /// One source.
    #[must_use]
    pub fn get(&self, worker: &WorkerUid, rank: Rank) -> Option<Overlap> {
        let position = self.list.keys().binary_search_by(|key| (&key.worker, key.rank).cmp(&(worker, rank))).ok()?;
        self.at(position)
    }

    #[inline]
    fn overlap(&self, seen: &Seen) -> Overlap {
        let (tier_blocks, matched_blocks) = self.reached.blocks_of(seen.slot());
        Overlap {
            incarnation: seen.incarnation,
            state: seen.state(),
            applied_sequence: seen.next_sequence.checked_sub(1),
            tier_blocks,
            matched_blocks,
        }
    }
}
