//! Engines that Kvist did not start: their ledgers live in an agent, which reads what the engines publish.
//!
//! ```text
//! engine's sockets ──▶ VllmReader ──▶ SharedLedger ──WatchKvEvents──▶ relay, routers, KV masters
//! ```
//!
//! Each rank has a reader and a ledger. Another start of the engine is a new incarnation with a ledger of its own; those
//! who follow the old one are sent away. While an engine is not reached, its sources say nothing by themselves.

mod floor;
mod settings;
mod stats;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use kvist_blocks::HashSeed;
use kvist_errors::KvistError;
use kvist_history::{HistoryServer, SharedLedger, convert};
use kvist_ledger::{EngineEvent, Ledger, LedgerCounters, LedgerSettings};
use kvist_proto::{
    agent,
    engine::v1::{WatchKvEventsRequest, WatchKvEventsResponse},
    events::v1::{LedgerDigest, SourceId},
};
use kvist_telemetry::{Rarely, now_unix_nanos};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::floor::IncarnationFloor;
pub use self::{
    settings::{AttachSettings, HashAlgorithmName, MediumMeaning},
    stats::{AttachedEngineStats, AttachedRankStats},
};
use crate::{EventsError, VllmReader, VllmSaid};

/// Between two looks at a reader's numbers.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// Between two lines about what one source says wrong.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// All engines that an agent attaches.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachedSettings {
    /// Seed of the cluster's block hashes.
    pub hash_seed: u64,
    /// Where incarnations are kept.
    pub folder: PathBuf,
    /// Batches that each ledger's ring holds.
    #[serde(default = "ring_batches")]
    pub ring_batches: usize,
    /// Milliseconds between digests of a ledger.
    #[serde(default = "digest_interval_ms")]
    pub digest_interval_ms: u64,
    /// The engines.
    pub engines: Vec<AttachSettings>,
}

fn ring_batches() -> usize {
    16_384
}

fn digest_interval_ms() -> u64 {
    2_000
}

/// The attached engines of an agent. Dropping them stops their readers.
#[derive(Debug)]
pub struct AttachedEngines {
    engines: Vec<Arc<AttachedEngine>>,
    stopping: CancellationToken,
}

impl AttachedEngines {
    /// Looks for what cannot be right, as [`AttachedEngines::start`] does.
    ///
    /// # Errors
    /// The name of the engine, the setting, and what is wrong with it.
    pub fn check(settings: &AttachedSettings) -> Result<(), EventsError> {
        for (position, engine) in settings.engines.iter().enumerate() {
            engine.check()?;
            if settings.engines[..position].iter().any(|other| other.worker_uid == engine.worker_uid) {
                let reason = "is another engine's".to_owned();
                return Err(EventsError::Attach { name: engine.name.clone(), field: "worker_uid", reason });
            }
        }
        Ok(())
    }

    /// Begins to read; the engines may come later. Called within a runtime.
    ///
    /// # Errors
    /// As [`AttachedEngines::check`].
    pub fn start(settings: &AttachedSettings) -> Result<Self, EventsError> {
        Self::check(settings)?;
        let stopping = CancellationToken::new();
        let digest_interval = Duration::from_millis(settings.digest_interval_ms);
        let server = Arc::new(HistoryServer::new(digest_interval, stopping.clone()));
        let start = |engine: &AttachSettings| AttachedEngine::start(settings, engine, Arc::clone(&server));
        let engines = settings.engines.iter().map(start).collect::<Result<_, _>>()?;
        Ok(Self { engines, stopping })
    }

    /// All of them.
    #[must_use]
    pub fn engines(&self) -> &[Arc<AttachedEngine>] {
        &self.engines
    }

    /// One of them.
    #[must_use]
    pub fn engine(&self, worker_uid: &str) -> Option<&Arc<AttachedEngine>> {
        self.engines.iter().find(|engine| engine.settings.worker_uid == worker_uid)
    }
}

impl Drop for AttachedEngines {
    fn drop(&mut self) {
        self.stopping.cancel();
        for engine in &self.engines {
            engine.tasks.lock().drain(..).for_each(|task| task.abort());
        }
    }
}

/// One attached engine.
#[derive(Debug)]
pub struct AttachedEngine {
    settings: AttachSettings,
    ranks: Vec<Arc<AttachedRank>>,
    server: Arc<HistoryServer>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl AttachedEngine {
    fn start(
        all: &AttachedSettings,
        settings: &AttachSettings,
        server: Arc<HistoryServer>,
    ) -> Result<Arc<Self>, EventsError> {
        let mut floor = IncarnationFloor::read(&all.folder, &settings.worker_uid);
        let incarnation = floor.next();
        let floor = Arc::new(Mutex::new(floor));
        let ledger =
            LedgerSettings { ring_batches: all.ring_batches, block_size_tokens: settings.block_size_tokens as usize };
        let ranks: Vec<_> = (0..settings.ranks)
            .map(|rank| {
                let source = SourceId { worker_uid: settings.worker_uid.clone(), rank, incarnation };
                Arc::new(AttachedRank::new(source, ledger, Arc::clone(&floor)))
            })
            .collect();
        let mut tasks = Vec::with_capacity(ranks.len());
        for (number, rank) in (0..).zip(&ranks) {
            let (reader, said) = VllmReader::start(settings.reader(number, HashSeed(all.hash_seed))?);
            let called = settings.first_rank.saturating_add(number);
            tasks.push(tokio::spawn(Arc::clone(rank).follow(reader, said, called)));
        }
        let tasks = Mutex::new(tasks);
        Ok(Arc::new(Self { settings: settings.clone(), ranks, server, tasks }))
    }

    /// UID under which its ledger speaks.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.settings.worker_uid
    }

    /// The ledgers of its ranks, in order, as they are at present.
    #[must_use]
    pub fn ledgers(&self) -> Vec<Arc<SharedLedger>> {
        self.ranks.iter().map(|rank| rank.ledger()).collect()
    }

    /// What others are told of it; none before each of its ranks was reached once.
    #[must_use]
    pub fn description(&self) -> Option<agent::v1::AttachedEngine> {
        if !self.ranks.iter().all(|rank| rank.was_reached.load(Ordering::Relaxed)) {
            return None;
        }
        let incarnations = self.ranks.iter().map(|rank| rank.ledger().source().incarnation);
        Some(agent::v1::AttachedEngine {
            worker_uid: self.settings.worker_uid.clone(),
            name: self.settings.name.clone(),
            model: self.settings.model.clone(),
            incarnation: incarnations.min().unwrap_or(0),
            ranks: self.settings.ranks,
            block_size_tokens: self.settings.block_size_tokens,
            namespace: self.settings.effective_namespace().to_owned(),
        })
    }

    /// Serves a reader, as a worker's `WatchKvEvents` does. Called within a runtime.
    ///
    /// # Errors
    /// The engine has no such rank.
    pub fn watch(
        &self,
        request: &WatchKvEventsRequest,
    ) -> Result<mpsc::Receiver<Result<WatchKvEventsResponse, Status>>, KvistError> {
        self.server.watch(&self.ledgers(), request)
    }

    /// Digests of its ledgers, by rank.
    #[must_use]
    pub fn digests(&self) -> Vec<LedgerDigest> {
        let now = now_unix_nanos();
        self.ledgers().iter().map(|ledger| convert::digest_to(ledger.source(), &ledger.digest(), now)).collect()
    }

    /// Numbers since the start.
    #[must_use]
    pub fn stats(&self) -> AttachedEngineStats {
        AttachedEngineStats {
            worker_uid: self.settings.worker_uid.clone(),
            name: self.settings.name.clone(),
            ranks: self.ranks.iter().map(|rank| rank.stats()).collect(),
        }
    }
}

/// One rank of an attached engine.
#[derive(Debug)]
struct AttachedRank {
    present: Mutex<Present>,
    settings: LedgerSettings,
    floor: Arc<Mutex<IncarnationFloor>>,
    was_reached: AtomicBool,
    foreign_batches: AtomicU64,
    foreign_log: Rarely,
    refused_log: Rarely,
    mismatch_log: Rarely,
    reader: Mutex<crate::VllmReaderStats>,
}

/// The ledger of the present start, and the numbers of the earlier ones.
#[derive(Debug)]
struct Present {
    ledger: Arc<SharedLedger>,
    earlier: LedgerCounters,
}

impl AttachedRank {
    fn new(source: SourceId, settings: LedgerSettings, floor: Arc<Mutex<IncarnationFloor>>) -> Self {
        let ledger = new_ledger(source, settings);
        Self {
            present: Mutex::new(Present { ledger, earlier: LedgerCounters::default() }),
            settings,
            floor,
            was_reached: AtomicBool::new(false),
            foreign_batches: AtomicU64::new(0),
            foreign_log: Rarely::every(LOG_INTERVAL),
            refused_log: Rarely::every(LOG_INTERVAL),
            mismatch_log: Rarely::every(LOG_INTERVAL),
            reader: Mutex::default(),
        }
    }

    fn ledger(&self) -> Arc<SharedLedger> {
        Arc::clone(&self.present.lock().ledger)
    }

    /// Takes what the engine says, for ever; `called` is the engine's own number of the rank.
    async fn follow(self: Arc<Self>, reader: VllmReader, mut said: mpsc::Receiver<VllmSaid>, called: u32) {
        let mut samples = tokio::time::interval(SAMPLE_INTERVAL);
        loop {
            let said = tokio::select! {
                said = said.recv() => said,
                _ = samples.tick() => {
                    self.note(reader.stats());
                    continue;
                }
            };
            let Some(said) = said else { return };
            match said {
                VllmSaid::Events { rank: Some(rank), .. } if rank != called => self.foreign(rank, called),
                VllmSaid::Events { events, .. } => {
                    self.ledger().apply(&events);
                }
                VllmSaid::Restarted => self.restart(),
                VllmSaid::InTouch(is_in_touch) => {
                    let ledger = self.ledger();
                    ledger.set_in_touch(is_in_touch);
                    self.was_reached.fetch_or(is_in_touch, Ordering::Relaxed);
                    let source = ledger.source();
                    tracing::info!(worker = source.worker_uid, rank = source.rank, is_in_touch, "attached_engine");
                }
            }
        }
    }

    /// What another rank says is no news of this one. That it comes here means that the settings are wrong, or the
    /// engine is: then this rank's own news may be missing.
    fn foreign(&self, rank: u32, called: u32) {
        self.foreign_batches.fetch_add(1, Ordering::Relaxed);
        let ledger = self.ledger();
        ledger.apply(&[EngineEvent::Unreadable]);
        if let Some(batches) = self.foreign_log.due() {
            let worker = &ledger.source().worker_uid;
            tracing::warn!(worker, rank, expected = called, batches, "attached_batch_of_another_rank");
        }
    }

    fn restart(&self) {
        let incarnation = self.floor.lock().next();
        let mut present = self.present.lock();
        let source = SourceId { incarnation, ..present.ledger.source().clone() };
        tracing::info!(worker = source.worker_uid, rank = source.rank, incarnation, "attached_engine_restarted");
        let old = std::mem::replace(&mut present.ledger, new_ledger(source, self.settings));
        present.earlier += old.read(Ledger::counters);
        old.close();
    }

    fn note(&self, stats: crate::VllmReaderStats) {
        let before = std::mem::replace(&mut *self.reader.lock(), stats);
        let refused = stats.refused() - before.refused();
        if refused > 0
            && let Some(times) = self.refused_log.due()
        {
            let ledger = self.ledger();
            let SourceId { worker_uid, rank, .. } = ledger.source();
            tracing::warn!(worker = worker_uid, rank, refused, times, "attached_statements_refused");
        }
        let mismatched = stats.batches.mismatched_hashes - before.batches.mismatched_hashes;
        if mismatched > 0
            && let Some(times) = self.mismatch_log.due()
        {
            let ledger = self.ledger();
            let SourceId { worker_uid, rank, .. } = ledger.source();
            tracing::warn!(worker = worker_uid, rank, mismatched, times, "attached_hashes_are_others");
        }
    }
}

/// A ledger of an engine that was not reached yet.
fn new_ledger(source: SourceId, settings: LedgerSettings) -> Arc<SharedLedger> {
    let ledger = SharedLedger::new(source, Ledger::new(settings));
    ledger.set_in_touch(false);
    Arc::new(ledger)
}
