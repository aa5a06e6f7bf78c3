//! Who holds which block: sources, byte budget, digests.
//!
//! The index merges the ledgers of all workers. It applies a batch only if the incarnation matches and the sequence is
//! the next one; anything else it reports to its feeder, which fetches what is missing.
//!
//! Blocks lie in nodes: up to 128 that follow each other in a prompt, with their hashes side by side and with those that
//! hold them as bits. A hash already stands for its whole prefix, so a node needs no way up: a table of the blocks with which
//! nodes begin finds it, and a look-up takes a step for a node, with one comparison where all of it is asked for. Where
//! its own blocks stand, each source has a map for itself.
//!
//! There is one writer at a time, and look-ups wait for nobody. All that they read is made of atomic words with versions
//! around them; a walk that finds the versions unchanged after it has read what each source says of itself was a walk
//! through one state, so every claim is true at the sequence stated beside it. A source whose batch is being applied is claimed as
//! it was before, as long as the walk has met nothing of the batch; else nothing is claimed of it.
//!
//! What the byte budget does not let in, or what nobody has asked for when others need its room, is given up: counted and
//! digested, so that a ledger's digest still proves the whole, and its source is TRUNCATED. A block behind one that was
//! given up is given up too, since no look-up reaches it.

mod alone;
mod apart;
mod arena;
mod budget;
mod core;
mod holders;
mod index;
mod lists;
mod lookup;
mod loose;
mod memory;
mod node;
mod overlaps;
mod places;
mod recent;
mod remove;
mod runs;
mod scrub;
mod snapshots;
mod source;
mod sources;
mod store;
mod table;
mod versions;
mod view;
mod walk;

pub use index::{Applied, DigestVerdict, Divergence, Index, IndexSettings, Memory, SCRUB_PERIOD, TierRuns};
pub use overlaps::Overlaps;
pub use recent::{Holder, RecentDecisions, RecentOverlap};
pub use snapshots::SnapshotId;
pub use source::{Overlap, SourceState, SourceStatus};

#[cfg(test)]
mod tests;
