//! The ledgers of an engine that publishes its KV events on sockets, as vLLM does, inside the worker's own process group.
//!
//! The reader is the one of engines that Kvist did not start. What differs is the life: this engine lives and dies with
//! its worker, so another start of it behind the same sockets is a fault, and nobody else can ask it to repeat itself.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use kvist_blocks::HashSeed;
use kvist_errors::{Code, KvistError};
use kvist_events::{HashAlgorithmName, VllmReader, VllmReaderSettings, VllmReaderStats, VllmSaid};
use kvist_history::SharedLedger;
use kvist_ledger::{EngineEvent, vllm::VllmSettings};
use kvist_telemetry::Rarely;
use serde::Deserialize;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::worker::Worker;

/// Between two looks at the reader's numbers.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// Between two lines about what a rank says wrong.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Where a rank publishes, and how it is understood.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VllmEventsSettings {
    /// PUB socket: `tcp://host:port` or `ipc://path`.
    pub endpoint: String,
    /// ROUTER socket for replays, likewise.
    pub replay_endpoint: String,
    /// The engine's own number of the rank.
    #[serde(default)]
    pub engine_rank: u32,
    /// How it names its blocks.
    #[serde(default)]
    pub hash_algorithm: HashAlgorithmName,
    /// The engine's `PYTHONHASHSEED`; none when it has none.
    #[serde(default)]
    pub python_hash_seed: Option<String>,
    /// Whether requests may ask the engine to report what it holds already. Not those of an adapter that makes all
    /// requests itself, and refuses such ones.
    #[serde(default)]
    pub may_repeat: bool,
}

impl VllmEventsSettings {
    /// # Errors
    /// `INVALID_ARGUMENT` with what is wrong.
    pub(crate) fn from_json(json: &str) -> Result<Self, KvistError> {
        serde_json::from_str(json)
            .map_err(|error| KvistError::field(Code::InvalidArgument, "vllm_events", error.to_string()))
    }

    fn reader(&self, namespace: &str, hash_seed: HashSeed) -> VllmReaderSettings {
        let mut engine = VllmSettings::new(namespace, hash_seed);
        engine.hashes = self.hash_algorithm.scheme(self.python_hash_seed.as_deref());
        engine.may_repeat = self.may_repeat;
        VllmReaderSettings::new(self.endpoint.clone(), self.replay_endpoint.clone(), engine)
    }
}

/// Follows the events of one rank until it is dropped.
#[derive(Debug)]
pub(crate) struct VllmFollower(JoinHandle<()>);

impl VllmFollower {
    /// Begins to read. Called within a runtime.
    pub(crate) fn start(
        settings: &VllmEventsSettings,
        namespace: &str,
        hash_seed: HashSeed,
        ledger: Arc<SharedLedger>,
        worker: Weak<Worker>,
    ) -> Self {
        // Nothing is known of the cache before the engine was reached.
        ledger.set_in_touch(false);
        let (reader, said) = VllmReader::start(settings.reader(namespace, hash_seed));
        let following = Following {
            ledger,
            worker,
            engine_rank: settings.engine_rank,
            before: VllmReaderStats::default(),
            foreign_log: Rarely::every(LOG_INTERVAL),
            refused_log: Rarely::every(LOG_INTERVAL),
            mismatch_log: Rarely::every(LOG_INTERVAL),
        };
        Self(tokio::spawn(following.run(reader, said)))
    }
}

impl Drop for VllmFollower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One rank on its way into its ledger.
struct Following {
    ledger: Arc<SharedLedger>,
    worker: Weak<Worker>,
    engine_rank: u32,
    before: VllmReaderStats,
    foreign_log: Rarely,
    refused_log: Rarely,
    mismatch_log: Rarely,
}

impl Following {
    async fn run(mut self, reader: VllmReader, mut said: mpsc::Receiver<VllmSaid>) {
        let mut samples = tokio::time::interval(SAMPLE_INTERVAL);
        loop {
            let said = tokio::select! {
                said = said.recv() => said,
                _ = samples.tick() => {
                    self.note(reader.stats());
                    continue;
                }
            };
            match said {
                Some(VllmSaid::Events { rank: Some(rank), .. }) if rank != self.engine_rank => self.foreign(rank),
                Some(VllmSaid::Events { events, .. }) => self.apply(&events),
                Some(VllmSaid::InTouch(is_in_touch)) => self.ledger.set_in_touch(is_in_touch),
                Some(VllmSaid::Restarted) => {
                    // The worker's incarnation is that of the engine it started; its successor needs another one.
                    if let Some(worker) = self.worker.upgrade() {
                        worker.engine_failed("another start of the engine publishes on its sockets");
                    }
                    return;
                }
                None => return,
            }
        }
    }

    fn apply(&self, events: &[EngineEvent]) {
        if self.ledger.apply(events).is_some()
            && let Some(worker) = self.worker.upgrade()
        {
            worker.metrics.ledger_batches.inc();
        }
    }

    /// What another rank says is no news of this one, whose own news may then be missing.
    fn foreign(&self, rank: u32) {
        self.apply(&[EngineEvent::Unreadable]);
        if let Some(batches) = self.foreign_log.due() {
            tracing::warn!(rank, expected = self.engine_rank, batches, "engine_batch_of_another_rank");
        }
    }

    fn note(&mut self, stats: VllmReaderStats) {
        let before = std::mem::replace(&mut self.before, stats);
        let rank = self.ledger.source().rank;
        let refused = stats.refused() - before.refused();
        if refused > 0
            && let Some(times) = self.refused_log.due()
        {
            tracing::warn!(rank, refused, times, "engine_statements_refused");
        }
        let mismatched = stats.batches.mismatched_hashes - before.batches.mismatched_hashes;
        if mismatched > 0
            && let Some(times) = self.mismatch_log.due()
        {
            tracing::warn!(rank, mismatched, times, "engine_hashes_are_others");
        }
        if stats.stream.losses > before.stream.losses {
            tracing::warn!(rank, losses = stats.stream.losses, "engine_events_lost");
        }
    }
}
