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

/// Where an engine keeps a block, and what its word about it is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Which tier.
    pub tier: Tier,
    /// Which of the engine's cache groups: layers of one kind share one. Engines with a single group say 0.
    pub group: u32,
    /// The medium never reports removals: what is stored there is a hint that ages, and no claim.
    pub is_hint: bool,
}

impl Place {
    /// The only group of an engine that reports removals.
    #[must_use]
    pub fn sole(tier: Tier) -> Self {
        Self { tier, group: 0, is_hint: false }
    }
}

/// Something beside its tokens that separates a block from others: an image in it, an embedding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockKey {
    /// Where it begins, in tokens from the first one of the event.
    pub token: usize,
    /// What it is.
    pub name: String,
}

/// What separates blocks beside tokens, as far as the engine says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKeys {
    /// The engine states all of it.
    Stated(Vec<BlockKey>),
    /// The engine is silent, and the caller vouches that there is nothing: no salts, no images, no embeddings.
    Vouched,
    /// The engine is silent. Tokens do not tell what the blocks are.
    Unstated,
}

/// A run of blocks that an engine has stored, of an engine with namespaces, cache groups and block sizes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedBlocks {
    /// The engine's hashes, in prompt order. A group that keeps only a window may leave some out.
    pub hashes: Vec<EngineHash>,
    /// The engine's hash of the block before the first; none when the first starts a prompt.
    pub parent: Option<EngineHash>,
    /// Tokens of the range, in order. Empty when the engine only names blocks that it has described before.
    pub tokens: Vec<u32>,
    /// Tokens of one of the engine's blocks; a multiple of the ledger's own size. Of no meaning without tokens.
    pub block_size_tokens: usize,
    /// Where they lie.
    pub place: Place,
    /// What the first block of this namespace follows; none when the namespace is not known.
    pub root: Option<BlockHash>,
    /// What separates them beside tokens.
    pub keys: BlockKeys,
    /// The engine may be asked to repeat what it holds, and a repetition looks like a further copy: then a run from
    /// the start of a prompt adds no copies to blocks that are held.
    pub may_repeat: bool,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks were stored; one that is held already gets one more copy where copies are counted.
    Stored(StoredBlocks),
    /// The same, for engines that say more.
    Described(Box<DescribedBlocks>),
    /// One copy of each of these blocks is gone from the only group.
    Removed {
        /// The engine's hashes.
        hashes: Vec<EngineHash>,
        /// Which tier lost them.
        tier: Tier,
    },
    /// One copy of each of these blocks is gone.
    RemovedFrom {
        /// The engine's hashes.
        hashes: Vec<EngineHash>,
        /// Which place lost them.
        place: Place,
    },
    /// The whole cache is empty.
    Cleared,
    /// The device's pool is empty, and the engine does not say what became of lower tiers.
    PoolCleared,
    /// The engine was told to empty its cache and will say [`EngineEvent::PoolCleared`] late, after events that are
    /// older than the order. Nothing is claimed until then.
    ClearOrdered,
    /// Stored blocks that could not be understood: they are held, and not known.
    Unreadable,
    /// Events of the engine were missed, removals perhaps among them. The account starts over, empty and incomplete,
    /// until the engine's cache is known to be empty.
    Lost,
}
