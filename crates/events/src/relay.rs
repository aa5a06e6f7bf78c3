//! The agent's relay: the ledgers of a node's workers and attached engines, in order, onto the bus.
//!
//! One task a worker or engine reads its ledgers and publishes. It keeps no history: after a break it goes on where it stopped, and
//! what the worker can no longer send it as a range, the indexes fetch themselves.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, stream::BoxStream};
use kvist_doors::ClientTls;
use kvist_proto::{
    engine::v1::{
        DescribeRequest, ResumePosition, WatchKvEventsRequest, WatchKvEventsResponse, watch_kv_events_response::Part,
    },
    events::v1::KvEventMessage,
};
use parking_lot::Mutex;
use prost::Message as _;
use rand::SeedableRng as _;
use serde::{Deserialize, Serialize};
use tokio::{task::JoinHandle, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    AttachedEngine, AttachedEngines, BusSettings, EventsError, Subjects,
    bus::Bus,
    subject::check_token,
    worker_channel::{self, retry_delay},
};

/// Most bytes of one message; batches are packed below it, and receivers refuse more.
pub(crate) const MOST_MESSAGE_BYTES: usize = 512 * 1024;
const SHORTEST_RETRY: Duration = Duration::from_millis(50);
const LONGEST_RETRY: Duration = Duration::from_secs(2);
const CALL_TIME_LIMIT: Duration = Duration::from_secs(5);

/// How a relay works.
#[derive(Clone, Debug)]
pub struct RelaySettings {
    /// The bus.
    pub bus: BusSettings,
    /// TLS towards workers; none for plain connections.
    pub worker_tls: Option<ClientTls>,
}

impl RelaySettings {
    /// Defaults for a bus.
    #[must_use]
    pub fn new(bus: BusSettings) -> Self {
        Self { bus, worker_tls: None }
    }
}

/// A worker of the node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayWorker {
    /// UID of its slot.
    pub uid: String,
    /// Host and port of its engine service.
    pub address: String,
}

/// Numbers of one worker's relay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RelayWorkerStats {
    /// Whether the worker's stream stands.
    pub connected: bool,
    /// Incarnation that is relayed; 0 before the first.
    pub incarnation: u64,
    /// Sequence of the last batch that was published, by rank.
    pub published_sequences: BTreeMap<u32, u64>,
    /// Batches published.
    pub batches: u64,
    /// Messages published.
    pub messages: u64,
    /// Bytes published.
    pub bytes: u64,
    /// Batches that were not published: the bus was away, or they were too large for it.
    pub dropped_batches: u64,
    /// Snapshots that came instead of a range; indexes fetch them themselves.
    pub skipped_snapshots: u64,
    /// Streams that broke or could not be made.
    pub broken_streams: u64,
}

/// Numbers of a relay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RelayStats {
    /// Whether the bus is connected.
    pub bus_connected: bool,
    /// By UID of the worker.
    pub workers: BTreeMap<String, RelayWorkerStats>,
}

type Parts = BoxStream<'static, Result<WatchKvEventsResponse, tonic::Status>>;
type SharedStats = Arc<Mutex<RelayWorkerStats>>;

/// Where ledgers are read.
#[derive(Clone, Debug)]
enum Origin {
    Worker(RelayWorker),
    Attached(Arc<AttachedEngine>),
}

impl Origin {
    fn uid(&self) -> &str {
        match self {
            Self::Worker(worker) => &worker.uid,
            Self::Attached(engine) => engine.uid(),
        }
    }
}

struct Running {
    origin: Origin,
    stats: SharedStats,
    task: JoinHandle<()>,
}

/// A running relay. Dropping it stops it.
pub struct Relay {
    bus: Bus,
    subjects: Subjects,
    tls: Option<ClientTls>,
    runtime: tokio::runtime::Handle,
    running: Mutex<HashMap<String, Running>>,
}

impl Relay {
    /// Begins without workers; the bus may come later.
    ///
    /// # Errors
    /// The settings of the bus are wrong.
    pub async fn start(settings: RelaySettings) -> Result<Self, EventsError> {
        let subjects = Subjects::new(&settings.bus.cluster)?;
        // A relay subscribes to nothing.
        let bus = Bus::connect(&settings.bus, 1).await?;
        let runtime = tokio::runtime::Handle::current();
        Ok(Self { bus, subjects, tls: settings.worker_tls, runtime, running: Mutex::default() })
    }

    /// The workers there are. Those that are missing are no longer relayed; one with another address begins anew.
    ///
    /// # Errors
    /// A UID cannot be part of a subject or an address is none; nothing is changed then.
    pub fn set_workers(&self, workers: Vec<RelayWorker>) -> Result<(), EventsError> {
        for worker in &workers {
            check_token("worker_uid", &worker.uid)?;
            let _in_runtime = self.runtime.enter();
            worker_channel::client(&worker.uid, &worker.address, self.tls.as_ref())?;
        }
        let mut running = self.running.lock();
        running.retain(|_, entry| {
            let stays = match &entry.origin {
                Origin::Worker(worker) => workers.contains(worker),
                Origin::Attached(_) => true,
            };
            if !stays {
                entry.task.abort();
            }
            stays
        });
        for worker in workers {
            if !running.contains_key(&worker.uid) {
                self.run(&mut running, Origin::Worker(worker));
            }
        }
        Ok(())
    }

    /// Relays attached engines too, from here on. Their ledgers are in this process.
    pub fn attach(&self, engines: &AttachedEngines) {
        let mut running = self.running.lock();
        for engine in engines.engines() {
            self.run(&mut running, Origin::Attached(Arc::clone(engine)));
        }
    }

    fn run(&self, running: &mut HashMap<String, Running>, origin: Origin) {
        let stats = SharedStats::default();
        let relaying = Relaying {
            origin: origin.clone(),
            bus: self.bus.clone(),
            subjects: self.subjects.clone(),
            tls: self.tls.clone(),
            stats: Arc::clone(&stats),
            published: BTreeMap::new(),
        };
        let task = self.runtime.spawn(relaying.run());
        let uid = origin.uid().to_owned();
        if let Some(before) = running.insert(uid, Running { origin, stats, task }) {
            before.task.abort();
        }
    }

    /// Numbers since the start, of the workers there are.
    #[must_use]
    pub fn stats(&self) -> RelayStats {
        let running = self.running.lock();
        let workers = running.iter().map(|(uid, entry)| (uid.clone(), entry.stats.lock().clone())).collect();
        RelayStats { bus_connected: self.bus.is_connected(), workers }
    }

    /// Whether the bus is connected.
    #[must_use]
    pub fn is_bus_connected(&self) -> bool {
        self.bus.is_connected()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        for entry in self.running.lock().values() {
            entry.task.abort();
        }
    }
}

/// The relay of one worker or engine.
struct Relaying {
    origin: Origin,
    bus: Bus,
    subjects: Subjects,
    tls: Option<ClientTls>,
    stats: SharedStats,
    /// Incarnation and sequence of the last batch that was handed to the bus, by rank.
    published: BTreeMap<u32, (u64, Option<u64>)>,
}

impl Relaying {
    async fn run(mut self) {
        let mut rng = rand::rngs::SmallRng::from_rng(&mut rand::rng());
        let mut attempt = 0u32;
        loop {
            let batches_before = self.stats.lock().batches;
            let ended = self.follow().await;
            let made_progress = {
                let mut stats = self.stats.lock();
                let made_progress = stats.connected || stats.batches > batches_before;
                stats.connected = false;
                stats.broken_streams += 1;
                made_progress
            };
            attempt = if made_progress { 1 } else { attempt.saturating_add(1) };
            if let Err(error) = ended {
                tracing::debug!(worker = self.origin.uid(), error = error.to_string(), attempt, "kv_stream_broken");
            }
            tokio::time::sleep(retry_delay(attempt, SHORTEST_RETRY, LONGEST_RETRY, &mut rng)).await;
        }
    }

    /// One stream, from its beginning to its end.
    async fn follow(&mut self) -> Result<(), EventsError> {
        let (incarnation, mut parts) = match self.origin.clone() {
            Origin::Worker(worker) => self.open_worker(&worker).await?,
            Origin::Attached(engine) => self.open_attached(&engine)?,
        };
        {
            let mut stats = self.stats.lock();
            (stats.connected, stats.incarnation) = (true, incarnation);
        }
        while let Some(first) = parts.next().await {
            // Everything at hand goes out together; nothing waits for more.
            let mut packed = Packed::default();
            let mut next = Some(first);
            while let Some(part) = next {
                if let Some(part) = part.map_err(failed)?.part {
                    self.pack(part, &mut packed).await?;
                }
                next = parts.next().now_or_never().flatten();
            }
            self.publish(&mut packed).await?;
        }
        Ok(())
    }

    /// The worker's incarnation and what it says.
    async fn open_worker(&self, worker: &RelayWorker) -> Result<(u64, Parts), EventsError> {
        let late = |_| EventsError::Worker("it does not answer".to_owned());
        let mut client = worker_channel::client(&worker.uid, &worker.address, self.tls.as_ref())?;
        let described = timeout(CALL_TIME_LIMIT, client.describe(DescribeRequest {})).await.map_err(late)?;
        let description = described.map_err(failed)?.into_inner().worker.unwrap_or_default();
        if description.worker_uid != worker.uid {
            return Err(EventsError::Worker("another worker answers at the address".to_owned()));
        }
        let incarnation = description.incarnation;
        let ranks = (0..description.ranks.max(1)).map(|rank| (rank, incarnation));
        let opened = timeout(CALL_TIME_LIMIT, client.watch_kv_events(self.request(ranks))).await.map_err(late)?;
        Ok((incarnation, opened.map_err(failed)?.into_inner().boxed()))
    }

    /// The latest incarnation of an attached engine, and what its ledgers say.
    fn open_attached(&self, engine: &AttachedEngine) -> Result<(u64, Parts), EventsError> {
        let ledgers = engine.ledgers();
        let ranks = ledgers.iter().map(|ledger| (ledger.source().rank, ledger.source().incarnation));
        let request = self.request(ranks.clone());
        let parts = engine.watch(&request).map_err(|error| failed(error.into()))?;
        let incarnation = ranks.map(|(_, incarnation)| incarnation).max().unwrap_or(0);
        Ok((incarnation, ReceiverStream::new(parts).boxed()))
    }

    /// Asks for what was not relayed yet. A start of which nothing was is wanted from its beginning, so that indexes can
    /// follow it without asking.
    fn request(&self, ranks: impl Iterator<Item = (u32, u64)>) -> WatchKvEventsRequest {
        let resume_after = ranks
            .map(|(rank, incarnation)| {
                let known = self.published.get(&rank).filter(|(published, _)| *published == incarnation);
                ResumePosition { rank, incarnation, sequence: known.and_then(|(_, sequence)| *sequence) }
            })
            .collect();
        WatchKvEventsRequest { resume_after, follow: true, ranks: Vec::new() }
    }

    async fn pack(&mut self, part: Part, packed: &mut Packed) -> Result<(), EventsError> {
        match part {
            Part::Batch(batch) => {
                let source = batch.source.as_ref().ok_or(EventsError::Malformed("no source"))?;
                let (rank, bytes) = (source.rank, batch.encoded_len());
                if packed.bytes + bytes > MOST_MESSAGE_BYTES {
                    self.publish(packed).await?;
                }
                packed.bytes += bytes;
                packed.message(rank).batches.push(batch);
            }
            Part::Digest(digest) => {
                let source = digest.source.as_ref().ok_or(EventsError::Malformed("no source"))?;
                let rank = source.rank;
                packed.message(rank).digest = Some(digest);
                // A digest stands for the batches before it and for nothing after.
                self.publish(packed).await?;
            }
            Part::Snapshot(chunk) if chunk.last => {
                self.publish(packed).await?;
                let source = chunk.source.ok_or(EventsError::Malformed("no source"))?;
                self.published.insert(source.rank, (source.incarnation, chunk.next_sequence.checked_sub(1)));
                self.stats.lock().skipped_snapshots += 1;
            }
            Part::Snapshot(_) | Part::CaughtUp(_) => {}
        }
        Ok(())
    }

    /// Publishes what is packed, in order.
    async fn publish(&mut self, packed: &mut Packed) -> Result<(), EventsError> {
        // A batch that is too large alone is a gap for the indexes, which fetch it from the worker.
        let most_bytes = self.bus.client.max_payload().min(MOST_MESSAGE_BYTES);
        for (rank, message) in std::mem::take(packed).messages {
            let payload = message.encode_to_vec();
            let last =
                message.batches.last().and_then(|batch| Some((batch.source.as_ref()?.incarnation, batch.sequence)));
            let batches = message.batches.len() as u64;
            // While the bus is away everybody falls behind and will ask the workers; keeping messages for them here
            // would only say late what they then know.
            if !self.bus.is_connected() || payload.len() > most_bytes {
                self.stats.lock().dropped_batches += batches;
            } else {
                let bytes = payload.len() as u64;
                let subject = self.subjects.events(self.origin.uid(), rank);
                self.bus
                    .client
                    .publish(subject, payload.into())
                    .await
                    .map_err(|error| EventsError::Bus(error.to_string()))?;
                let mut stats = self.stats.lock();
                stats.messages += 1;
                stats.batches += batches;
                stats.bytes += bytes;
                if let Some((_, sequence)) = last {
                    stats.published_sequences.insert(rank, sequence);
                }
            }
            if let Some((incarnation, sequence)) = last {
                self.published.insert(rank, (incarnation, Some(sequence)));
            }
        }
        Ok(())
    }
}

fn failed(status: tonic::Status) -> EventsError {
    EventsError::Worker(status.code().to_string())
}

/// Messages being filled, by rank.
#[derive(Default)]
struct Packed {
    messages: BTreeMap<u32, KvEventMessage>,
    bytes: usize,
}

impl Packed {
    fn message(&mut self, rank: u32) -> &mut KvEventMessage {
        self.messages.entry(rank).or_default()
    }
}
