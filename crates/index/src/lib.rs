//! Who holds which block: sources, byte budget, digests.
//!
//! The index merges the ledgers of all workers. It applies a batch only if the incarnation matches and the sequence is
//! the next one; anything else it reports to its feeder, which fetches what is missing. One lock covers all of it, so a
//! look-up sees whole batches only, and every claim is true at the sequence stated beside it.
//!
//! Beside the radix trees of the field: a hash already stands for its whole prefix, so a flat map from hash to holders
//! answers "longest held prefix" by walking the prompt's own hashes, at one probe a block, without parent pointers.

mod holders;
mod index;
mod source;

pub use index::{Applied, DigestVerdict, Index, IndexSettings, Memory, TierBlocks};
pub use source::{Overlap, SourceState, SourceStatus};

#[cfg(test)]
mod tests;
