//! The engine of a worker that speaks for a vLLM server which Kvist did not start.
//!
//! ```text
//! router ══Connect══▶ worker ▶ this engine ──HTTP, token ids──▶ vLLM's own server
//!                       ▲ ledger ◀──────────ZeroMQ events─────────┘
//! ```
//!
//! To the mesh it is a worker like any other: described, judged, routed to, audited. What the server can do is found
//! out by asking it, and what it cannot do is refused.

mod answer;
mod client;
mod engine;
mod facts;
mod failure;
mod introduction;
mod key;
mod load;
mod metrics;
pub mod modes;
mod request;
mod settings;
mod tokenizer;
mod watch;

pub use engine::AttachedEngine;
pub use settings::{Api, AttachedSettings, SchedulingPolicy};
