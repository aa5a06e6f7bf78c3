//! What a mesh in virtual time is made of.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How engines compute.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineSettings {
    /// Whether the engine batches continuously, computes prompts in chunks and decodes. Otherwise a prompt is in the cache
    /// as soon as it arrives, its computing is a backlog that drains, and there is no decoding.
    pub is_full: bool,
    /// Prompt tokens computed a second.
    pub prefill_tokens_per_second: f64,
    /// Prompt tokens computed in one step at most.
    pub prefill_chunk_tokens: usize,
    /// Time of a step that decodes one request, seconds.
    pub decode_step_seconds: f64,
    /// What each further request adds to it, seconds.
    pub decode_step_seconds_per_request: f64,
    /// Requests that run at once.
    pub max_running: usize,
    /// Blocks of each worker's pool.
    pub blocks: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            is_full: true,
            prefill_tokens_per_second: 15_000.0,
            prefill_chunk_tokens: 2048,
            decode_step_seconds: 0.012,
            decode_step_seconds_per_request: 0.000_2,
            max_running: 128,
            blocks: 4096,
        }
    }
}

/// Something that happens to the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "what", deny_unknown_fields)]
pub enum Incident {
    /// A new worker with an empty cache is there.
    Join {
        /// When, seconds.
        at_seconds: f64,
    },
    /// A worker takes nothing new, finishes what it has, and goes.
    Leave {
        /// When, seconds.
        at_seconds: f64,
        /// Which.
        worker: usize,
    },
    /// A worker is gone, with all it had.
    Crash {
        /// When, seconds.
        at_seconds: f64,
        /// Which.
        worker: usize,
    },
    /// No load report arrives anywhere.
    FreezeLoads {
        /// From when, seconds.
        from_seconds: f64,
        /// Until when, seconds.
        until_seconds: f64,
    },
    /// A worker needs this many times the time for everything.
    Slow {
        /// Which.
        worker: usize,
        /// How many times.
        factor: f64,
    },
}

/// A mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshSettings {
    /// Workers at the beginning.
    pub workers: usize,
    /// Routers, each with an index and a book of its own; requests go to them by chance.
    pub routers: usize,
    /// How engines compute.
    pub engine: EngineSettings,
    /// From an engine's KV event to an index, seconds.
    pub event_lag_seconds: f64,
    /// Share of event batches that are lost on the way.
    pub event_loss: f64,
    /// From a load report to a router, seconds.
    pub load_lag_seconds: f64,
    /// Between load reports while an engine works, seconds; one is also sent when a prompt is accepted.
    pub load_interval_seconds: f64,
    /// From a router to a worker, seconds.
    pub network_seconds: f64,
    /// Times that workers may refuse a request because more waits there than its router knew of; 0 for routers that
    /// decide once. See [`kvist_schedule::most_waiting_tokens`].
    pub most_refusals: u32,
    /// Of all draws.
    pub seed: u64,
    /// What happens.
    pub incidents: Vec<Incident>,
}

impl Default for MeshSettings {
    fn default() -> Self {
        Self {
            workers: 8,
            routers: 1,
            engine: EngineSettings::default(),
            event_lag_seconds: 0.005,
            event_loss: 0.0,
            load_lag_seconds: 0.005,
            load_interval_seconds: 0.05,
            network_seconds: 0.000_5,
            most_refusals: kvist_schedule::MOST_REFUSALS,
            seed: 1,
            incidents: Vec::new(),
        }
    }
}

pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
