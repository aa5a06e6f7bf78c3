//! Virtual time: the simulated engine, and a whole mesh of the crates that run live.
//!
//! Time is an argument, so the same engine runs live behind a worker and, in virtual time, in tests and studies. It
//! batches continuously, computes prompts in chunks, keeps a block pool with LRU, reuses prefixes, and says what it
//! stores and evicts, as a real engine does. Its tokens are a function of the prompt, so equal prompts give equal text.
//!
//! A mesh puts many such engines with their ledgers behind routers with their own indices, and a network with delays and
//! losses between them. It answers what a policy is worth on a trace, in seconds of computing instead of days of GPUs.

mod mesh;
mod plot;
mod policy;
mod pool;
mod replay;
mod sim;
mod study;
mod trace;

pub use mesh::{EngineSettings, Incident, MeshReport, MeshSettings, Percentiles, run_mesh, table};
pub use plot::plot;
pub use policy::{NAMED_POLICIES, policy};
pub use replay::{ReplayReport, ReplayRule, replay};
pub use sim::{Finish, Finished, SimCounters, SimEngine, SimRequest, SimSettings, SimTransfer, Step};
pub use study::{MadeKind, Study, StudyRequest, study};
pub use trace::{
    MadeTrace, TRACE_BLOCK_TOKENS, TraceError, TraceRequest, cut, ideal_hit_rate, make_bursty, parse_trace,
    spread_arrivals,
};

#[cfg(test)]
mod tests;
