//! The worker's gRPC server, its ledger, and the engines it can host.
//!
//! An engine stands behind [`Engine`]; what all engines share is here: the service, the ledger and its event stream,
//! request ids, deadlines, draining. The simulated engine is built in.

mod choices;
mod deadlines;
mod drain;
mod embed;
mod engine;
mod hand_over;
mod host;
mod metrics;
mod promise;
mod server;
mod service;
mod settings;
mod sim;
mod sink;
mod vllm_events;
mod worker;

pub use embed::{EmbedSink, makes_no_embeddings};
pub use engine::{Engine, EngineDescription, TokenizerFile, takes_no_adapters};
pub use hand_over::{HandOverSettings, TransferFailurePolicy, TransferProtocol};
pub use host::EngineHost;
pub use server::{WorkerAddresses, WorkerServer};
pub use settings::WorkerSettings;
pub use sim::{SimWorkerEngine, SimWorkerSettings, TransferFault, sim_tokenizer};
pub use sink::RequestSink;
pub use vllm_events::VllmEventsSettings;
