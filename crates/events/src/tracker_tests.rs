//! The tracker against a world that loses, repeats, reorders and delays, with the ledgers' own history as the oracle.

use std::collections::{BTreeSet, HashMap};

use kvist_blocks::BlockHash;
use kvist_index::{IndexSettings, SourceState};
use kvist_ledger::{EngineEvent, EngineHash, Ledger, LedgerSettings, StoredBlocks};
use proptest::prelude::*;
use rand::SeedableRng as _;

use super::*;

const WORKERS: usize = 2;
const BLOCK_SIZE: usize = 2;

#[derive(Clone, Debug)]
enum Said {
    Batch(Incarnation, Batch),
    Digest(Incarnation, LedgerDigest),
    Tombstone(Incarnation),
    Malformed(Incarnation),
}

#[derive(Clone, Debug)]
enum Step {
    Store(u64),
    Remove(u64),
    Clear,
    SayDigest,
    Deliver,
    Lose,
    DeliverTwice,
    DeliverSecondFirst,
    Garble,
    Ask,
    Answer,
    Fail,
    Restart,
    Die,
    Announce,
    BusGone,
    BusBack,
    Silence,
}

struct Process {
    incarnation: Incarnation,
    ledger: Ledger,
    is_alive: bool,
}

struct World {
    tracker: Tracker,
    index: Arc<Index>,
    processes: Vec<Process>,
    bus: Vec<VecDeque<Said>>,
    orders: Vec<CatchUpOrder>,
    answers: Vec<(CatchUpOrder, History)>,
    /// What each ledger held at each of its positions.
    truth: HashMap<(usize, Incarnation, u64), BTreeSet<u64>>,
    closed: HashMap<usize, Incarnation>,
    now: Moment,
}

fn key(worker: usize) -> SourceKey {
    SourceKey { worker: uid(worker), rank: Rank(0) }
}

fn uid(worker: usize) -> WorkerUid {
    WorkerUid::from(format!("w-{worker}").as_str())
}

fn new_ledger(ring_batches: usize) -> Ledger {
    Ledger::new(LedgerSettings { ring_batches, block_size_tokens: BLOCK_SIZE })
}

fn stated(ledger: &Ledger) -> LedgerDigest {
    ledger.digest()
}

impl World {
    fn new() -> Self {
        let index = Arc::new(Index::new(IndexSettings { byte_budget: 1 << 30 }));
        let settings =
            TrackerSettings { silence_limit: Duration::from_secs(3), spread: Duration::ZERO, most_kept_batches: 3 };
        let mut world = Self {
            tracker: Tracker::new(Arc::clone(&index), settings, SmallRng::seed_from_u64(1)),
            index,
            processes: Vec::new(),
            bus: vec![VecDeque::new(); WORKERS],
            orders: Vec::new(),
            answers: Vec::new(),
            truth: HashMap::new(),
            closed: HashMap::new(),
            now: Moment::default(),
        };
        for worker in 0..WORKERS {
            world.processes.push(Process { incarnation: Incarnation(1), ledger: new_ledger(4), is_alive: true });
            world.record(worker);
        }
        world.announce();
        world.tracker.set_bus_connected(true, world.now);
        world
    }

    fn record(&mut self, worker: usize) {
        let process = &self.processes[worker];
        let snapshot = process.ledger.snapshot();
        let blocks = snapshot.sets().iter().flat_map(|(_, hashes)| hashes.iter().map(|hash| hash.0)).collect();
        self.truth.insert((worker, process.incarnation, snapshot.next_sequence), blocks);
    }

    fn announce(&mut self) {
        let workers = (0..WORKERS)
            .map(|worker| FeedWorker {
                uid: uid(worker),
                is_attached: false,
                address: format!("incarnation {}", self.processes[worker].incarnation.0),
                incarnation: self.processes[worker].incarnation,
                ranks: 1,
            })
            .collect();
        self.tracker.set_workers(workers, self.now);
    }

    fn engine(&mut self, worker: usize, event: EngineEvent) {
        let process = &mut self.processes[worker];
        if !process.is_alive {
            return;
        }
        if let Some(batch) = process.ledger.apply(self.now.unix_nanos, &[event]) {
            self.bus[worker].push_back(Said::Batch(process.incarnation, (*batch).clone()));
            self.record(worker);
        }
    }

    fn say(&mut self, worker: usize, said: Said) {
        let now = self.now;
        match said {
            Said::Batch(incarnation, batch) => self.tracker.batch(&key(worker), incarnation, batch, now),
            Said::Digest(incarnation, digest) => self.tracker.digest(&key(worker), incarnation, &digest, now),
            Said::Malformed(incarnation) => self.tracker.malformed(&key(worker), incarnation, now),
            Said::Tombstone(incarnation) => {
                let closed = self.closed.entry(worker).or_insert(incarnation);
                *closed = (*closed).max(incarnation);
                self.tracker.close(&uid(worker), incarnation);
            }
        }
    }

    fn history(&self, order: &CatchUpOrder) -> Option<History> {
        let worker = (0..WORKERS).find(|worker| key(*worker) == order.key)?;
        let process = &self.processes[worker];
        if !process.is_alive {
            return None;
        }
        let range = order
            .resume
            .filter(|(incarnation, _)| *incarnation == process.incarnation)
            .and_then(|(_, sequence)| process.ledger.range_after(sequence).ok());
        let snapshot = range.is_none().then(|| {
            let snapshot = process.ledger.snapshot();
            HistorySnapshot {
                next_sequence: snapshot.next_sequence,
                blocks: snapshot.blocks,
                complete: snapshot.complete,
            }
        });
        Some(History {
            incarnation: process.incarnation,
            snapshot,
            batches: range.unwrap_or_default().iter().map(|batch| (**batch).clone()).collect(),
            digest: Some(stated(&process.ledger)),
        })
    }

    fn step(&mut self, worker: usize, step: &Step) {
        self.now.since_start += Duration::from_millis(10);
        self.now.unix_nanos += 10_000_000;
        match step {
            Step::Store(start) => {
                let stored = StoredBlocks {
                    hashes: vec![EngineHash(*start), EngineHash(*start + 100)],
                    parent: None,
                    tokens: vec![u32::try_from(*start).unwrap(), 1, 2, 3],
                    tier: Tier::Device,
                    root: BlockHash(9),
                };
                self.engine(worker, EngineEvent::Stored(stored));
            }
            Step::Remove(start) => {
                let hashes = vec![EngineHash(*start + 100), EngineHash(*start)];
                self.engine(worker, EngineEvent::Removed { hashes, tier: Tier::Device });
            }
            Step::Clear => self.engine(worker, EngineEvent::Cleared),
            Step::SayDigest => {
                let process = &self.processes[worker];
                if process.is_alive {
                    let said = Said::Digest(process.incarnation, stated(&process.ledger));
                    self.bus[worker].push_back(said);
                }
            }
            Step::Deliver => {
                if let Some(said) = self.bus[worker].pop_front() {
                    self.say(worker, said);
                }
            }
            Step::Lose => {
                // Everything may be lost except a death, which the cluster state repeats.
                if !matches!(self.bus[worker].front(), Some(Said::Tombstone(_))) {
                    self.bus[worker].pop_front();
                }
            }
            Step::DeliverTwice => {
                if let Some(said) = self.bus[worker].pop_front() {
                    self.say(worker, said.clone());
                    self.say(worker, said);
                }
            }
            Step::DeliverSecondFirst => {
                if self.bus[worker].len() > 1 {
                    self.bus[worker].swap(0, 1);
                }
            }
            Step::Garble => {
                if let Some(Said::Batch(incarnation, _)) = self.bus[worker].front() {
                    let said = Said::Malformed(*incarnation);
                    self.bus[worker].pop_front();
                    self.say(worker, said);
                }
            }
            Step::Ask => {
                if let Some(order) = self.orders.pop() {
                    match self.history(&order) {
                        Some(history) => self.answers.push((order, history)),
                        None => self.tracker.answer(&order, Err(()), self.now),
                    }
                }
            }
            Step::Answer => {
                if !self.answers.is_empty() {
                    let (order, history) = self.answers.remove(0);
                    self.tracker.answer(&order, Ok(history), self.now);
                }
            }
            Step::Fail => {
                if let Some((order, _)) = self.answers.pop() {
                    self.tracker.answer(&order, Err(()), self.now);
                }
            }
            Step::Restart => self.restart(worker),
            Step::Die => {
                let process = &mut self.processes[worker];
                process.is_alive = false;
                let said = Said::Tombstone(process.incarnation);
                self.bus[worker].push_back(said);
            }
            Step::Announce => self.announce(),
            Step::BusGone => self.tracker.set_bus_connected(false, self.now),
            Step::BusBack => self.tracker.set_bus_connected(true, self.now),
            Step::Silence => {
                self.now.since_start += Duration::from_secs(4);
                self.tracker.tick(self.now);
            }
        }
        self.orders.extend(self.tracker.take_orders());
        self.check();
    }

    fn restart(&mut self, worker: usize) {
        let process = &mut self.processes[worker];
        *process =
            Process { incarnation: Incarnation(process.incarnation.0 + 1), ledger: new_ledger(4), is_alive: true };
        self.record(worker);
    }

    /// Every claim was true at its position, and nothing is claimed for the dead.
    fn check(&self) {
        for (worker, closed) in &self.closed {
            let tracked = &self.tracker.sources[&key(*worker)];
            assert!(tracked.incarnation > *closed || tracked.catching_up.is_none(), "the dead are asked");
        }
        for worker in 0..WORKERS {
            let Some((status, runs)) = self.index.snapshot_of(&key(worker)) else { continue };
            let claimed: BTreeSet<u64> =
                runs.iter().flat_map(|(_, runs)| runs).flat_map(|run| &run.hashes).map(|hash| hash.0).collect();
            let position = (worker, status.incarnation, status.next_sequence);
            assert_eq!(self.truth.get(&position), Some(&claimed), "worker {worker} at {status:?}");
            assert!(self.closed.get(&worker).is_none_or(|closed| status.incarnation > *closed));
            if status.state == SourceState::CatchingUp {
                assert!(self.tracker.sources[&key(worker)].catching_up.is_some(), "nobody asks for worker {worker}");
            }
        }
    }

    /// The world stops changing and loses nothing more: all must become equal and EXACT.
    fn settle(&mut self) {
        for worker in 0..WORKERS {
            if !self.processes[worker].is_alive {
                self.restart(worker);
            }
        }
        self.step(0, &Step::Announce);
        self.step(0, &Step::BusBack);
        for _ in 0..50 {
            for worker in 0..WORKERS {
                self.step(worker, &Step::SayDigest);
                while !self.bus[worker].is_empty() {
                    self.step(worker, &Step::Deliver);
                }
            }
            while !self.orders.is_empty() {
                self.step(0, &Step::Ask);
            }
            while !self.answers.is_empty() {
                self.step(0, &Step::Answer);
            }
        }
        for worker in 0..WORKERS {
            let status = self.index.source(&key(worker)).unwrap();
            let process = &self.processes[worker];
            let digest = process.ledger.digest();
            assert_eq!(
                (process.incarnation, digest.next_sequence, SourceState::Exact),
                (status.incarnation, status.next_sequence, status.state)
            );
            let held = |tiers: &[kvist_blocks::TierDigest]| {
                tiers.iter().filter(|tier| tier.block_count > 0).copied().collect::<Vec<_>>()
            };
            assert_eq!(held(&digest.tiers), held(&status.tiers));
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        8 => (1..6u64).prop_map(Step::Store),
        4 => (1..6u64).prop_map(Step::Remove),
        1 => Just(Step::Clear),
        2 => Just(Step::SayDigest),
        10 => Just(Step::Deliver),
        2 => Just(Step::Lose),
        1 => Just(Step::DeliverTwice),
        1 => Just(Step::DeliverSecondFirst),
        1 => Just(Step::Garble),
        4 => Just(Step::Ask),
        4 => Just(Step::Answer),
        1 => Just(Step::Fail),
        1 => Just(Step::Restart),
        1 => Just(Step::Die),
        1 => Just(Step::Announce),
        1 => Just(Step::BusGone),
        2 => Just(Step::BusBack),
        1 => Just(Step::Silence),
    ];
    prop::collection::vec((0..WORKERS, step), 0..120)
}

proptest! {
    #![proptest_config(crate::cases::usually(150))]

    /// R20, R21, R22, R23, R24.
    #[test]
    fn claims_are_always_true_and_become_complete_when_the_world_calms_down(steps in steps()) {
        let mut world = World::new();
        for (worker, step) in &steps {
            world.step(*worker, step);
        }
        world.settle();
    }
}

fn settled() -> World {
    let mut world = World::new();
    world.settle();
    world
}

/// R21.
#[test]
fn one_lost_batch_costs_one_question_and_no_snapshot() {
    let mut world = settled();
    let before = world.tracker.counters();
    for start in 1..4 {
        world.step(0, &Step::Store(start));
    }
    world.step(0, &Step::Deliver);
    world.step(0, &Step::Lose);
    world.step(0, &Step::Deliver);
    assert_eq!(1, world.orders.len());
    assert_eq!(Some((Incarnation(1), Some(0))), world.orders[0].resume);
    assert_eq!(SourceState::CatchingUp, world.index.source(&key(0)).unwrap().state);
    // The other source goes on undisturbed.
    assert_eq!(SourceState::Exact, world.index.source(&key(1)).unwrap().state);
    // What comes meanwhile is kept, and asks nobody again.
    world.step(0, &Step::Store(4));
    world.step(0, &Step::Ask);
    world.step(0, &Step::Store(5));
    world.step(0, &Step::Deliver);
    world.step(0, &Step::Deliver);
    world.step(0, &Step::Answer);
    let status = world.index.source(&key(0)).unwrap();
    assert_eq!((SourceState::Exact, 5), (status.state, status.next_sequence));
    let after = world.tracker.counters();
    assert_eq!(
        (1, 1, 0),
        (after.gaps - before.gaps, after.catch_ups - before.catch_ups, after.snapshots - before.snapshots,)
    );
}

/// R22.
#[test]
fn a_garbled_word_of_the_dead_asks_nobody() {
    let mut world = settled();
    world.tracker.close(&key(0).worker, Incarnation(1));
    world.tracker.malformed(&key(0), Incarnation(1), world.now);
    assert!(world.tracker.take_orders().is_empty());
    // Of a start that nobody has heard of before, it does ask.
    world.tracker.malformed(&key(0), Incarnation(2), world.now);
    assert_eq!(1, world.tracker.take_orders().len());
}

#[test]
fn a_ledger_that_keeps_disagreeing_is_asked_more_and_more_rarely() {
    let mut world = settled();
    let wrong = LedgerDigest {
        next_sequence: 0,
        tiers: vec![kvist_blocks::TierDigest { tier: Tier::Device, block_count: 1, digest: kvist_blocks::Digest(7) }],
        complete: true,
    };
    let mut delays = Vec::new();
    for _ in 0..8 {
        world.tracker.digest(&key(0), Incarnation(1), &wrong, world.now);
        let order = world.tracker.take_orders().pop().unwrap();
        assert_eq!(None, order.resume);
        delays.push(order.delay);
        let mut history = world.history(&order).unwrap();
        history.digest = None;
        world.tracker.answer(&order, Ok(history), world.now);
    }
    assert_eq!(Duration::ZERO, delays[0]);
    assert!(delays[7] >= Duration::from_secs(30), "{delays:?}");
    assert_eq!(8, world.tracker.counters().mismatches);
}

/// R21.
#[test]
fn a_worker_that_does_not_answer_is_asked_again_with_growing_pauses() {
    let mut world = settled();
    for start in 1..3 {
        world.step(0, &Step::Store(start));
    }
    world.step(0, &Step::Lose);
    world.step(0, &Step::Deliver);
    let mut order = world.orders.pop().unwrap();
    let mut delays = Vec::new();
    for _ in 0..12 {
        world.tracker.answer(&order, Err(()), world.now);
        // A late answer to the same question changes nothing.
        world.tracker.answer(&order, Err(()), world.now);
        let mut orders = world.tracker.take_orders();
        assert_eq!(1, orders.len());
        order = orders.remove(0);
        delays.push(order.delay);
    }
    assert!(delays[0] <= SHORTEST_RETRY && delays[11] >= LONGEST_RETRY / 2, "{delays:?}");
    assert_eq!(SourceState::CatchingUp, world.index.source(&key(0)).unwrap().state);
    // An answer without a digest is believed as well.
    let mut history = world.history(&order).unwrap();
    assert_eq!((None, 2), (history.snapshot.as_ref(), history.batches.len()));
    history.digest = None;
    world.tracker.answer(&order, Ok(history), world.now);
    assert_eq!(SourceState::Exact, world.index.source(&key(0)).unwrap().state);
}

/// R24.
#[test]
fn a_bus_that_goes_makes_sources_stale_until_their_workers_were_asked() {
    let mut world = settled();
    world.step(0, &Step::BusGone);
    assert_eq!(SourceState::Stale, world.index.source(&key(0)).unwrap().state);
    world.step(0, &Step::BusBack);
    assert_eq!(WORKERS, world.orders.len());
    assert_eq!(SourceState::Stale, world.index.source(&key(0)).unwrap().state);
    world.settle();
}

/// R25.
#[test]
fn statements_of_strangers_are_counted_and_open_nothing() {
    let mut world = settled();
    let stranger = SourceKey { worker: "other".into(), rank: Rank(0) };
    let batch = Batch { sequence: 0, recorded_at_unix_nanos: 0, events: Vec::new() };
    world.tracker.batch(&stranger, Incarnation(5), batch, world.now);
    assert_eq!(None, world.index.source(&stranger));
    assert_eq!(1, world.tracker.counters().refusals.unknown_workers);
}

#[test]
fn a_withdrawn_worker_is_forgotten() {
    let mut world = settled();
    world.step(0, &Step::Store(1));
    world.step(0, &Step::Deliver);
    world.tracker.set_workers(Vec::new(), world.now);
    assert!(world.index.sources().is_empty());
    assert!(world.tracker.sources.is_empty());
}

#[test]
fn what_was_said_and_is_missing_is_the_lag() {
    let mut world = settled();
    let batch = |sequence| Batch { sequence, recorded_at_unix_nanos: 0, events: Vec::new() };
    let lag = |world: &mut World| {
        let now = world.now;
        world.tracker.tick(now);
        world.tracker.counters().lag_batches
    };
    let (incarnation, now) = (Incarnation(1), world.now);
    world.tracker.batch(&key(0), incarnation, batch(0), now);
    assert_eq!(0, lag(&mut world));
    world.tracker.batch(&key(0), incarnation, batch(4), now);
    assert_eq!(4, lag(&mut world));
    let mut digest = stated(&new_ledger(4));
    digest.next_sequence = 10;
    world.tracker.digest(&key(1), incarnation, &digest, now);
    assert_eq!(14, lag(&mut world));
    // A newer start owes what it has said itself, and nothing of the older one's.
    world.tracker.batch(&key(1), Incarnation(2), batch(1), now);
    assert_eq!(6, lag(&mut world));
    world.tracker.close(&uid(1), Incarnation(2));
    assert_eq!(4, lag(&mut world));
}
