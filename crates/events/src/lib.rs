//! KV events: an engine's own sockets, and on NATS the agent's relay, the index's subscription, catch-up.
//!
//! ```text
//! worker ledger ══WatchKvEvents══▶ Relay ══NATS══▶ IndexFeed ──▶ Index
//!        ▲                                             │
//!        └──────────── WatchKvEvents, no follow ◀──────┘ on start, gap, mismatch, new incarnation
//! ```
//!
//! The bus carries deltas and is never the record. Whatever it loses, repeats or reorders is found by sequence or by
//! digest and fetched from the worker itself, so a feed needs no acknowledgements and a relay keeps no history.

mod attached;
mod bootstrap;
mod bus;
mod care;
#[cfg(test)]
mod cases;
mod catch_up;
pub mod convert;
mod credentials;
mod error;
mod feed;
mod lanes;
mod refusals;
mod relay;
mod room;
mod strange_store;
mod subject;
mod tracker;
mod vllm;
mod worker_channel;

pub use attached::{
    AttachSettings, AttachedEngine, AttachedEngineStats, AttachedEngines, AttachedRankStats, AttachedSettings,
    HashAlgorithmName, MediumMeaning,
};
pub use bootstrap::{BootstrapAnswer, Bootstraps, SharedParts};
pub use bus::BusSettings;
pub use care::care_for_index;
pub use credentials::Credentials;
pub use error::EventsError;
pub use feed::{FeedSettings, FeedStats, IndexFeed};
pub use refusals::RefusalCounts;
pub use relay::{Relay, RelaySettings, RelayStats, RelayWorker, RelayWorkerStats};
pub use strange_store::is_of_strange_store;
pub use subject::Subjects;
pub use tracker::{FeedWorker, TrackerCounters};
pub use vllm::{VllmReader, VllmReaderSettings, VllmReaderStats, VllmSaid, VllmStreamCounters};
