//! Tokens to chained content hashes of blocks, and the namespaces that seed them.
//!
//! A block is a fixed run of tokens whose KV is cached as a unit. Its hash covers its own tokens and, through its
//! parent's hash, everything before it, so equal hashes mean equal prefixes in one namespace. Hashes are chained from
//! 64-bit XXH3, seeded per cluster: they steer, they do not authenticate. What would load KV by hash needs a cryptographic one.

mod batch;
mod digest;
mod hash;
mod source;

pub use batch::{Batch, Event, Run};
pub use digest::{Digest, TierDigest};
pub use hash::{BlockHash, BlockHasher, HashSeed, Namespace, block_hashes, usable_blocks};
pub use source::{Incarnation, Rank, Sequence, SourceKey, Tier, WorkerUid};
