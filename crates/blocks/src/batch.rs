//! What a ledger says, in the form that travels.

use crate::{BlockHash, Tier};

/// The unit that a sequence numbers. Applied whole or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number within (incarnation, rank).
    pub sequence: u64,
    /// When the ledger recorded it, nanoseconds since the Unix epoch by the worker's clock.
    pub recorded_at_unix_nanos: u64,
    /// In order.
    pub events: Vec<Event>,
}

/// One change of what a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A run of blocks, each the parent of the next, is held from here on.
    Stored {
        /// Where they lie.
        tier: Tier,
        /// The block before the first; none when the first starts a prompt.
        parent: Option<BlockHash>,
        /// In prompt order.
        hashes: Vec<BlockHash>,
    },
    /// The last copy of each of these blocks is gone.
    Removed {
        /// Which tier lost them.
        tier: Tier,
        /// In no particular order.
        hashes: Vec<BlockHash>,
    },
    /// Nothing of the tier, or of all tiers, is held any more.
    Cleared {
        /// Which tier; none for all.
        tier: Option<Tier>,
    },
}

/// Blocks that are held, each the parent of the next: how a snapshot tells what follows what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The block before the first; none when the first starts a prompt, or when what is before it is not known.
    pub parent: Option<BlockHash>,
    /// In prompt order.
    pub hashes: Vec<BlockHash>,
}
