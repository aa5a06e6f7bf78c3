//! The worker's gRPC server, its ledger, and the engines it can host.
//!
//! An engine stands behind [`Engine`]; everything that all engines share is here: the service, the ledger with its
//! event stream, ids and deadlines, draining. The simulated engine is built in.

mod convert;
mod engine;
mod host;
mod server;
mod service;
mod sim;

pub use engine::{Engine, EngineDescription, RequestSink, TokenizerFile};
pub use host::EngineHost;
pub use server::{WorkerAddresses, WorkerServer, WorkerSettings, new_incarnation};
pub use sim::{SimWorkerEngine, SimWorkerSettings};
