//! A ledger as others read it: what it says as messages, and `WatchKvEvents`, which serves what a reader has missed.
//!
//! A worker serves the ledgers of its engine with it, an agent those of engines that Kvist did not start.

pub mod convert;
mod incarnation;
mod server;
mod shared;

pub use incarnation::new_incarnation;
pub use server::HistoryServer;
pub use shared::{Missing, SharedLedger};
