//! Virtual time: the simulated engine.
//!
//! Time is an argument, so the same engine runs live behind a worker and, in virtual time, in tests and studies. It
//! batches continuously, computes prompts in chunks, keeps a block pool with LRU, reuses prefixes, and says what it
//! stores and evicts, as a real engine does. Its tokens are a function of the prompt, so equal prompts give equal text.

mod pool;
mod sim;

pub use sim::{Finish, Finished, SimCounters, SimEngine, SimRequest, SimSettings, Step};

#[cfg(test)]
mod tests;
