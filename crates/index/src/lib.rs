//! Who holds which block: sources, byte budget, digests.
//!
//! The index merges the ledgers of all workers. It applies a batch only if the incarnation matches and the sequence is
//! the next one; anything else it reports to its feeder, which fetches what is missing. One lock covers all of it, so a
//! look-up sees whole batches only, and every claim is true at the sequence stated beside it.
//!
//! Beside the radix trees of the field: a hash already stands for its whole prefix, so a flat map from hash to holders
//! answers "longest held prefix" without parent pointers. Stretches of up to 128 blocks that follow each other are
//! known as such, and a look-up asks for the last block of one and skips the rest: two probes for 128 blocks. Sets of
//! holders are interned, since blocks that were computed together are held together: a block costs 15 to 30 bytes,
//! however many hold it, and a look-up compares holders, 64 at a time, only where they change along the prompt.
//!
//! What the byte budget does not let in is given up: counted and digested, so that a ledger's digest still proves the
//! whole, and its source is TRUNCATED. A block behind one that was given up is given up too, since no look-up reaches it.

mod holdings;
mod index;
mod lookup;
mod recent;
mod segments;
mod sets;
mod source;
mod sources;
mod table;

pub use index::{
    Applied, DigestVerdict, Divergence, Index, IndexSettings, Memory, SCRUB_PERIOD, SnapshotId, TierBlocks,
};
pub use recent::{Holder, RecentDecisions, RecentOverlap};
pub use source::{Overlap, SourceState, SourceStatus};
pub use sources::Overlaps;

#[cfg(test)]
mod tests;
