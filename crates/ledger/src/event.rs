//! What an engine says about its cache.

use kvist_blocks::{BlockHash, Tier};

/// An engine's name for a block. Opaque: only equality counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EngineHash(pub u64);

/// A run of blocks that an engine has stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// The engine's hashes, in prompt order.
    pub hashes: Vec<EngineHash>,
    /// The engine's hash of the block before the first; none when the first starts a prompt.
    pub parent: Option<EngineHash>,
    /// Tokens of all the blocks, in order; a whole number of blocks. Empty when the engine only says that blocks which
    /// it has described before are in a tier.
    pub tokens: Vec<u32>,
    /// Where they lie.
    pub tier: Tier,
    /// What the first block of this namespace follows.
    pub root: BlockHash,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks were stored; one that is held already gets one more copy where copies are counted.
    Stored(StoredBlocks),
    /// One copy of each of these blocks is gone.
    Removed {
        /// The engine's hashes.
        hashes: Vec<EngineHash>,
        /// Which tier lost them.
        tier: Tier,
    },
    /// The whole cache is empty.
    Cleared,
    /// Events of the engine were missed, removals perhaps among them. The account starts over, empty and incomplete,
    /// until the engine's cache is known to be empty.
    Lost,
}
