//! Engine events to an exact account of the blocks a rank holds: ring, snapshot, digest.
//!
//! The engine's own hashes never leave the worker. The ledger keeps `engine hash → Kvist's block` by tier and cache group
//! and computes Kvist's hash from token ids and namespace. Engines may hold several physical copies of one block; a block
//! is `removed` only with its last copy. Everything is O(1) an event and block; the ring answers "from sequence n" by
//! position. What is not known for certain is not claimed, counted, and makes the account incomplete.

mod account;
mod event;
mod hint;
mod ring;
mod runs;
mod tier;
pub mod vllm;

pub use account::{Ledger, LedgerCounters, LedgerDigest, LedgerSettings, Snapshot, keyed_parent};
pub use event::{BlockKey, BlockKeys, DescribedBlocks, EngineEvent, EngineHash, Place, StoredBlocks};
pub use ring::RangeLost;

#[cfg(test)]
mod tests;
