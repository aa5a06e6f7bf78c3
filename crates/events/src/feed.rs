//! The index's subscription: NATS and workers on one side, the index on the other.
//!
//! One task owns everything that is known of sources, so nothing here needs an order of locks; look-ups go to the index
//! directly and never wait for this task.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_nats::Message;
use futures::{FutureExt as _, StreamExt as _};
use kvist_blocks::{Incarnation, SourceKey, WorkerUid};
use kvist_doors::ClientTls;
use kvist_index::Index;
use kvist_proto::{
    events::v1::{KvEventMessage, Tombstone},
    router::v1::SourceStatus,
};
use parking_lot::Mutex;
use prost::Message as _;
use rand::SeedableRng as _;
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior},
};

use crate::{
    BusSettings, EventsError, FeedWorker, Subjects, TrackerCounters, bootstrap,
    bus::{Bus, is_connected_state},
    convert::{batch_from, digest_from, source_from, status_to},
    lanes::Lanes,
    refusals::Refusal,
    relay::MOST_MESSAGE_BYTES,
    room::Held,
    tracker::{CatchUpOrder, History, Moment, Tracker, TrackerSettings},
};

const TICK: Duration = Duration::from_millis(250);
/// Most messages applied before deaths and commands are looked at again.
const MESSAGES_A_TURN: usize = 64;
/// New sources from which on a KV master is asked: fewer are fetched as fast from their workers.
const LEAST_BOOTSTRAP_SOURCES: usize = 4;
/// Snapshots of a KV master that wait for their turn.
const MOST_WAITING_SNAPSHOTS: usize = 4;

/// How an index is fed.
#[derive(Clone, Debug)]
pub struct FeedSettings {
    /// The bus.
    pub bus: BusSettings,
    /// Time between two digests of a ledger; a source silent for three of them is STALE.
    pub digest_interval: Duration,
    /// When everything has to catch up, workers are asked over this time.
    pub catch_up_spread: Duration,
    /// Most histories fetched at once; bounds memory and what workers have to send. Those that take longer than half a
    /// second do not count, and have a limit of their own: eight times this one.
    pub most_catch_ups: usize,
    /// Most bytes of histories that are received at once; one that is larger by itself comes in all the same, alone.
    pub most_history_bytes: usize,
    /// Most batches kept for a source while it catches up.
    pub most_kept_batches: usize,
    /// Most messages of the bus that wait to be applied; what comes beyond is lost, and found like any other loss.
    pub most_waiting_messages: usize,
    /// TLS towards workers and KV masters; none for plain connections.
    pub worker_tls: Option<ClientTls>,
    /// `host:port` of KV masters. When many sources are new at once, one of these is asked for all of them before the
    /// workers are.
    pub kvmasters: Vec<String>,
}

impl FeedSettings {
    /// Defaults for a bus.
    #[must_use]
    pub fn new(bus: BusSettings) -> Self {
        Self {
            bus,
            digest_interval: Duration::from_secs(5),
            catch_up_spread: Duration::from_millis(500),
            most_catch_ups: 8,
            most_history_bytes: 64 * 1024 * 1024,
            most_kept_batches: 16_384,
            most_waiting_messages: 16_384,
            worker_tls: None,
            kvmasters: Vec::new(),
        }
    }
}

/// Numbers of a feed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FeedStats {
    /// Whether the bus is connected.
    pub bus_connected: bool,
    /// Messages received.
    pub messages: u64,
    /// Sources being caught up.
    pub catching_up_sources: usize,
    /// Sources that have fallen silent.
    pub silent_sources: usize,
    /// Sources whose first snapshot came from a KV master.
    pub bootstrapped_sources: u64,
    /// Messages lost because too many waited to be applied.
    pub overrun_messages: u64,
    /// What happened since the start.
    #[serde(flatten)]
    pub counters: TrackerCounters,
}

enum Command {
    SetWorkers(Vec<FeedWorker>),
    Close(Vec<(WorkerUid, Incarnation)>),
}

/// A running feed. Dropping it stops it.
pub struct IndexFeed {
    index: Arc<Index>,
    commands: mpsc::UnboundedSender<Command>,
    stats: Arc<Mutex<FeedStats>>,
    bus_changes: watch::Receiver<u64>,
    task: JoinHandle<()>,
}

impl IndexFeed {
    /// Subscribes and begins; the bus may come later.
    ///
    /// # Errors
    /// The settings of the bus are wrong.
    pub async fn start(settings: FeedSettings, index: Arc<Index>) -> Result<Self, EventsError> {
        let subjects = Subjects::new(&settings.bus.cluster)?;
        let bus = Bus::connect(&settings.bus, settings.most_waiting_messages).await?;
        // Subscriptions outlive the connection: the client makes them anew whenever it is back.
        let closed = |_| EventsError::Bus("the connection is closed".to_owned());
        let events = bus.client.subscribe(subjects.all_events()).await.map_err(closed)?;
        let tombstones = bus.client.subscribe(subjects.all_tombstones()).await.map_err(closed)?;
        let bus_changes = bus.state_changes();
        let (commands, inbox) = mpsc::unbounded_channel();
        let stats = Arc::new(Mutex::new(FeedStats::default()));
        let tracker_settings = TrackerSettings {
            silence_limit: settings.digest_interval * 3,
            spread: settings.catch_up_spread,
            most_kept_batches: settings.most_kept_batches,
        };
        let rng = rand::rngs::SmallRng::from_rng(&mut rand::rng());
        let (whole, snapshots) = mpsc::channel(MOST_WAITING_SNAPSHOTS);
        let worker = Worker {
            tracker: Tracker::new(Arc::clone(&index), tracker_settings, rng),
            bus,
            subjects,
            started: Instant::now(),
            stats: Arc::clone(&stats),
            messages: 0,
            lanes: Lanes::new(settings.most_catch_ups.max(1), settings.most_history_bytes),
            fetches: JoinSet::new(),
            fetch_of: HashMap::new(),
            bootstraps: JoinSet::new(),
            bootstrapping: HashMap::new(),
            whole,
            bootstrapped_sources: 0,
            catching_up_and_silent: (0, 0),
            kvmasters: settings.kvmasters,
            tls: settings.worker_tls,
        };
        let task = tokio::spawn(worker.run(inbox, snapshots, events, tombstones));
        Ok(Self { index, commands, stats, bus_changes, task })
    }

    /// The index that is fed.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The workers there are. Those that are missing are forgotten; new ones, and new incarnations, are fetched.
    pub fn set_workers(&self, workers: Vec<FeedWorker>) {
        // The task ends only with the feed itself.
        let _ = self.commands.send(Command::SetWorkers(workers));
    }

    /// Incarnations that are known to be dead, from the cluster state; as tombstones on the bus.
    pub fn close_incarnations(&self, dead: Vec<(WorkerUid, Incarnation)>) {
        let _ = self.commands.send(Command::Close(dead));
    }

    /// All sources, by worker and rank.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceStatus> {
        self.index.sources().iter().map(status_to).collect()
    }

    /// Numbers since the start, a moment old at most.
    #[must_use]
    pub fn stats(&self) -> FeedStats {
        FeedStats { bus_connected: is_connected_state(*self.bus_changes.borrow()), ..*self.stats.lock() }
    }

    /// Whether the bus is connected.
    #[must_use]
    pub fn is_bus_connected(&self) -> bool {
        is_connected_state(*self.bus_changes.borrow())
    }
}

impl Drop for IndexFeed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Fetched = (CatchUpOrder, Result<(History, Held), EventsError>);

/// KV masters have been asked for these; which of them broke off.
struct Bootstrapped {
    orders: Vec<CatchUpOrder>,
    broken: Vec<String>,
}

struct Worker {
    tracker: Tracker,
    bus: Bus,
    subjects: Subjects,
    started: Instant,
    stats: Arc<Mutex<FeedStats>>,
    messages: u64,
    lanes: Lanes,
    fetches: JoinSet<Fetched>,
    /// The open fetch of each source, to end it when it is superseded.
    fetch_of: HashMap<SourceKey, (CatchUpOrder, AbortHandle)>,
    bootstraps: JoinSet<Bootstrapped>,
    /// What KV masters are asked for.
    bootstrapping: HashMap<SourceKey, CatchUpOrder>,
    /// Where their answers come in, source by source.
    whole: mpsc::Sender<(SourceKey, History)>,
    bootstrapped_sources: u64,
    /// Counted when something may have changed.
    catching_up_and_silent: (usize, usize),
    kvmasters: Vec<String>,
    tls: Option<ClientTls>,
}

impl Worker {
    async fn run(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Command>,
        mut snapshots: mpsc::Receiver<(SourceKey, History)>,
        mut events: async_nats::Subscriber,
        mut tombstones: async_nats::Subscriber,
    ) {
        let mut bus_changes = self.bus.state_changes();
        bus_changes.mark_changed();
        let mut seen_state = 0;
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let mut has_news_of_sources = true;
            tokio::select! {
                // Deaths and changes of the bus go before events: both say which events still count.
                biased;
                changed = bus_changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let state = *bus_changes.borrow_and_update();
                    // Away and back between two looks is another number, and so still seen as away.
                    if state != seen_state {
                        self.tracker.set_bus_connected(is_connected_state(state), self.now());
                    }
                    seen_state = state;
                }
                command = inbox.recv() => match command {
                    Some(Command::SetWorkers(workers)) => self.tracker.set_workers(workers, self.now()),
                    Some(Command::Close(dead)) => {
                        dead.iter().for_each(|(worker, incarnation)| self.tracker.close(worker, *incarnation));
                    }
                    None => return,
                },
                Some(message) = tombstones.next() => self.tombstone(&message),
                Some(joined) = self.fetches.join_next() => {
                    if let Ok((order, answer)) = joined {
                        self.answered(&order, answer);
                    }
                }
                // Before the end of the question that brought them.
                Some((key, history)) = snapshots.recv() => self.whole_snapshot(&key, history),
                Some(joined) = self.bootstraps.join_next() => {
                    if let Ok(bootstrapped) = joined {
                        self.bootstrapped(bootstrapped);
                    }
                }
                _ = ticks.tick() => self.tracker.tick(self.now()),
                message = events.next() => match message {
                    Some(message) => {
                        has_news_of_sources = false;
                        self.event_message(&message);
                        // What is at hand goes in one turn; the rest of the loop then costs little a message.
                        for _ in 0..MESSAGES_A_TURN {
                            let Some(Some(message)) = events.next().now_or_never() else { break };
                            self.event_message(&message);
                        }
                    }
                    // The client is closed; there is nothing left to hear.
                    None => return,
                },
            }
            has_news_of_sources |= self.start_fetches();
            if has_news_of_sources {
                // Looks at each source: not for every turn of a busy bus.
                self.catching_up_and_silent = self.tracker.catching_up_and_silent();
            }
            self.publish_stats();
        }
    }

    fn now(&self) -> Moment {
        Moment { since_start: self.started.elapsed(), unix_nanos: kvist_telemetry::now_unix_nanos() }
    }

    fn event_message(&mut self, message: &Message) {
        self.messages += 1;
        let now = self.now();
        let subject = message.subject.as_str();
        if message.payload.len() > MOST_MESSAGE_BYTES {
            return self.tracker.refuse(Refusal::Oversized, subject, now);
        }
        let Some(speaker) = self.subjects.speaker(subject) else {
            return self.tracker.refuse(Refusal::Garbage, subject, now);
        };
        let Ok(decoded) = KvEventMessage::decode(message.payload.clone()) else {
            return self.tracker.refuse(Refusal::Garbage, subject, now);
        };
        let digest_source = decoded.digest.iter().map(|digest| digest.source.as_ref());
        for source in decoded.batches.iter().map(|batch| batch.source.as_ref()).chain(digest_source) {
            // The subject is what a bus's permissions are about: nobody speaks for another.
            let Some(source) = source else { return self.tracker.refuse(Refusal::Garbage, subject, now) };
            if (source.worker_uid.as_str(), source.rank) != speaker {
                return self.tracker.refuse(Refusal::WrongSubject, subject, now);
            }
        }
        for batch in &decoded.batches {
            let Ok((key, incarnation)) = source_from(batch.source.as_ref()) else {
                self.tracker.refuse(Refusal::Garbage, subject, now);
                continue;
            };
            match batch_from(batch) {
                Ok(batch) => self.tracker.batch(&key, incarnation, batch, now),
                Err(_) => self.tracker.malformed(&key, incarnation, now),
            }
        }
        if let Some(digest) = &decoded.digest {
            let Ok((key, incarnation)) = source_from(digest.source.as_ref()) else {
                return self.tracker.refuse(Refusal::Garbage, subject, now);
            };
            match digest_from(digest) {
                Ok(digest) => self.tracker.digest(&key, incarnation, &digest, now),
                Err(_) => self.tracker.malformed(&key, incarnation, now),
            }
        }
    }

    fn tombstone(&mut self, message: &Message) {
        self.messages += 1;
        let (now, subject) = (self.now(), message.subject.as_str());
        match Tombstone::decode(message.payload.clone()) {
            Ok(tombstone) => {
                let worker = WorkerUid::from(tombstone.worker_uid.as_str());
                if self.subjects.tombstone(&worker) != subject {
                    return self.tracker.refuse(Refusal::WrongSubject, subject, now);
                }
                if !now.may_have_seen(Incarnation(tombstone.incarnation)) {
                    return self.tracker.refuse(Refusal::Garbage, subject, now);
                }
                tracing::info!(
                    worker = worker.as_str(),
                    incarnation = tombstone.incarnation,
                    reason = tombstone.reason,
                    "worker_incarnation_closed"
                );
                self.tracker.close(&worker, Incarnation(tombstone.incarnation));
            }
            Err(_) => self.tracker.refuse(Refusal::Garbage, subject, now),
        }
    }

    /// Begins what the tracker has ordered; whether there was anything.
    fn start_fetches(&mut self) -> bool {
        let orders: Vec<CatchUpOrder> =
            self.tracker.take_orders().into_iter().filter(|order| self.tracker.is_open(order)).collect();
        let has_orders = !orders.is_empty();
        // New is a source of which nothing was ever applied. What had no use for an answer of a KV master, and what is
        // distrusted, is for the worker to say.
        let is_new = |order: &CatchUpOrder| order.attempt == 0 && matches!(order.resume, Some((_, None)));
        let (new, known): (Vec<_>, Vec<_>) = orders.into_iter().partition(is_new);
        if !self.kvmasters.is_empty() && new.len() >= LEAST_BOOTSTRAP_SOURCES {
            self.start_bootstrap(new);
        } else {
            new.into_iter().for_each(|order| self.start_fetch(order));
        }
        known.into_iter().for_each(|order| self.start_fetch(order));
        // Questions that nobody waits for any more, such as those to the dead.
        let tracker = &self.tracker;
        self.fetch_of.retain(|_, (order, handle)| {
            let is_open = tracker.is_open(order);
            if !is_open {
                handle.abort();
            }
            is_open
        });
        has_orders
    }

    fn start_fetch(&mut self, order: CatchUpOrder) {
        let (lanes, tls, asked) = (self.lanes.clone(), self.tls.clone(), order.clone());
        let handle = self.fetches.spawn(async move {
            tokio::time::sleep(asked.delay).await;
            let answer = lanes.fetch(&asked, tls.as_ref()).await;
            (asked, answer)
        });
        if let Some((_, superseded)) = self.fetch_of.insert(order.key.clone(), (order, handle)) {
            superseded.abort();
        }
    }

    /// Asks one KV master after the other for all of these sources; what none has, the workers are asked for.
    fn start_bootstrap(&mut self, orders: Vec<CatchUpOrder>) {
        let (kvmasters, tls, whole) = (self.kvmasters.clone(), self.tls.clone(), self.whole.clone());
        self.bootstrapping.extend(orders.iter().map(|order| (order.key.clone(), order.clone())));
        self.bootstraps.spawn(async move {
            let mut worker_uids: Vec<String> = orders.iter().map(|order| order.key.worker.to_string()).collect();
            worker_uids.sort_unstable();
            worker_uids.dedup();
            let mut broken = Vec::new();
            for address in kvmasters {
                match bootstrap::fetch(&address, worker_uids.clone(), tls.as_ref(), &whole).await {
                    Ok(()) => break,
                    Err(error) => {
                        tracing::debug!(error = error.to_string(), "kv_bootstrap_failed");
                        if error.is_broken_history() {
                            broken.push(address);
                        }
                    }
                }
            }
            Bootstrapped { orders, broken }
        });
    }

    fn whole_snapshot(&mut self, key: &SourceKey, history: History) {
        let Some(order) = self.bootstrapping.remove(key) else { return };
        if self.tracker.is_open(&order) {
            self.bootstrapped_sources += 1;
            self.tracker.answer(&order, Ok(history), self.now());
        }
    }

    fn bootstrapped(&mut self, bootstrapped: Bootstrapped) {
        let Bootstrapped { orders, broken } = bootstrapped;
        for kvmaster in broken {
            self.tracker.refuse(Refusal::BrokenHistory, &kvmaster, self.now());
        }
        for order in orders {
            if self.bootstrapping.get(&order.key).is_some_and(|asked| asked.number == order.number) {
                self.bootstrapping.remove(&order.key);
            }
            if self.tracker.is_open(&order) {
                self.start_fetch(order);
            }
        }
    }

    fn answered(&mut self, order: &CatchUpOrder, answer: Result<(History, Held), EventsError>) {
        let now = self.now();
        let (answer, _held_until_applied) = match answer {
            Ok((history, held)) => (Ok(history), Some(held)),
            Err(error) => (Err(error), None),
        };
        let answer = answer.map_err(|error| {
            tracing::debug!(
                worker = order.key.worker.as_str(),
                rank = order.key.rank.0,
                error = error.to_string(),
                "kv_catch_up_failed"
            );
            if error.is_broken_history() {
                self.tracker.refuse(Refusal::BrokenHistory, order.key.worker.as_str(), now);
            }
        });
        self.tracker.answer(order, answer, now);
    }

    fn publish_stats(&self) {
        let (catching_up_sources, silent_sources) = self.catching_up_and_silent;
        *self.stats.lock() = FeedStats {
            bus_connected: false,
            messages: self.messages,
            catching_up_sources,
            silent_sources,
            bootstrapped_sources: self.bootstrapped_sources,
            overrun_messages: self.bus.overrun_messages(),
            counters: self.tracker.counters(),
        };
    }
}
