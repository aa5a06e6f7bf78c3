//! Engine events to an exact account of the blocks a rank holds: ring, snapshot, digest.
//!
//! The engine's own hashes never leave the worker. The ledger keeps `engine hash → Kvist's block` and computes Kvist's
//! hash from token ids and namespace. Engines may hold several physical copies of one block; a block is `removed` only
//! with its last copy. Everything is O(1) an event and block; the ring answers "from sequence n" by position.

mod account;
mod event;
mod ring;

pub use account::{Ledger, LedgerCounters, LedgerDigest, LedgerSettings, Snapshot};
pub use event::{EngineEvent, EngineHash, StoredBlocks};
pub use ring::RangeLost;

#[cfg(test)]
mod tests;
