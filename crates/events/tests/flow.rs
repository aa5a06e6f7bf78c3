//! Ledger to index over a real NATS server, with everything that may go wrong on the way.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "functions beside the tests")]

#[path = "flow/bad_input.rs"]
mod bad_input;
#[path = "flow/mass_recovery.rs"]
mod mass_recovery;
mod support;

use std::{sync::Arc, time::Duration};

use kvist_blocks::{Incarnation, Rank, SourceKey, TierDigest};
use kvist_events::{Bootstraps, BusSettings, FeedSettings, FeedWorker, IndexFeed, Relay, RelaySettings, RelayWorker};
use kvist_index::{Index, IndexSettings, SourceState, SourceStatus};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use support::{Forwarder, MINUTES, NatsServer, ScriptedKvMaster, ScriptedWorker, eventually, eventually_within};

/// Where the relay speaks, and where the feed listens; a forwarder stands between.
const SPOKEN: &str = "spoken";
const HEARD: &str = "heard";

struct Mesh {
    forwarder: Forwarder,
    relay: Relay,
    feed: IndexFeed,
    // Last, so that the server outlives its clients.
    nats: NatsServer,
}

impl Mesh {
    async fn start(digest_interval: Duration) -> Option<Self> {
        let nats = NatsServer::start()?;
        Some(Self::start_on(nats, |settings| settings.digest_interval = digest_interval).await)
    }

    async fn start_on(nats: NatsServer, set: impl FnOnce(&mut FeedSettings)) -> Self {
        let forwarder = Forwarder::start(&nats.url(), SPOKEN, HEARD).await;
        let relay = Relay::start(RelaySettings::new(BusSettings::new(nats.url(), SPOKEN))).await.unwrap();
        let index = Arc::new(Index::new(IndexSettings { byte_budget: 1 << 30 }));
        let mut settings = FeedSettings::new(BusSettings::new(nats.url(), HEARD));
        settings.digest_interval = LONG;
        settings.catch_up_spread = Duration::from_millis(20);
        set(&mut settings);
        let feed = IndexFeed::start(settings, index).await.unwrap();
        let mesh = Self { forwarder, relay, feed, nats };
        mesh.until_connected().await;
        mesh
    }

    async fn until_connected(&self) {
        eventually("both ends are connected", || self.relay.is_bus_connected() && self.feed.is_bus_connected()).await;
    }

    async fn set_workers(&self, workers: &[(&str, u64, u32, &ScriptedWorker)]) {
        let relayed = workers
            .iter()
            .map(|(uid, _, _, worker)| RelayWorker { uid: (*uid).to_owned(), address: worker.address() })
            .collect();
        self.relay.set_workers(relayed).unwrap();
        self.feed.set_workers(feed_workers(workers));
        for (uid, _, _, worker) in workers {
            eventually(&format!("{uid} is relayed"), || worker.followers() > 0).await;
        }
    }

    fn source(&self, uid: &str, rank: u32) -> Option<SourceStatus> {
        self.feed.index().source(&SourceKey { worker: uid.into(), rank: Rank(rank) })
    }

    fn is_in_state(&self, uid: &str, state: SourceState) -> bool {
        self.source(uid, 0).is_some_and(|status| status.state == state)
    }

    fn is_exact_copy(&self, uid: &str, rank: u32, worker: &ScriptedWorker) -> bool {
        let digest = worker.digest(rank);
        self.source(uid, rank).is_some_and(|status| {
            status.state == SourceState::Exact
                && status.next_sequence == digest.next_sequence
                && held(&status.tiers) == held(&digest.tiers)
        })
    }
}

fn feed_workers(workers: &[(&str, u64, u32, &ScriptedWorker)]) -> Vec<FeedWorker> {
    workers
        .iter()
        .map(|(uid, incarnation, ranks, worker)| FeedWorker {
            uid: (*uid).into(),
            address: worker.address(),
            is_attached: false,
            incarnation: Incarnation(*incarnation),
            ranks: *ranks,
        })
        .collect()
}

fn held(tiers: &[TierDigest]) -> Vec<TierDigest> {
    tiers.iter().filter(|tier| tier.block_count > 0).copied().collect()
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_random_activity_index_and_ledgers_have_equal_digests() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let one = ScriptedWorker::start("one", 10, 2, 64).await;
    let two = ScriptedWorker::start("two", 10, 1, 64).await;
    // One was busy for longer than its ring remembers before anybody looked.
    for prompt in 0..100 {
        one.store(0, prompt);
    }
    mesh.set_workers(&[("one", 10, 2, &one), ("two", 10, 1, &two)]).await;
    let mut rng = SmallRng::seed_from_u64(7);
    for turn in 0..3000 {
        let (worker, rank) = [(&one, 0), (&one, 1), (&two, 0)][rng.random_range(0..3)];
        let prompt = rng.random_range(0..200);
        match rng.random_range(0..100) {
            0 => worker.clear(rank),
            1..60 => worker.store(rank, prompt),
            _ => worker.remove(rank, prompt),
        }
        if turn % 100 == 0 {
            one.say_digests();
            two.say_digests();
            tokio::task::yield_now().await;
        }
    }
    for (uid, rank, worker) in [("one", 0, &one), ("one", 1, &one), ("two", 0, &two)] {
        eventually(&format!("{uid}/{rank} is equal"), || mesh.is_exact_copy(uid, rank, worker)).await;
    }
    assert_eq!(0, mesh.feed.stats().counters.mismatches);
    let sources = mesh.feed.sources();
    assert_eq!(3, sources.len());
    assert!(sources.iter().all(|source| source.heard_at.is_some()));
    // A whole index as snapshots: one end mark, and every source in between.
    let answer = Bootstraps::new(Arc::clone(mesh.feed.index())).answer(&["one".to_owned()]);
    assert_eq!(3, answer.count());
    let relayed = mesh.relay.stats();
    assert_eq!(10, relayed.workers["one"].incarnation);
    assert!(relayed.workers["two"].batches > 0 && relayed.workers["two"].dropped_batches == 0, "{relayed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_message_is_a_gap_and_costs_one_range() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store(0, 1);
    eventually("the first batch is applied", || mesh.is_exact_copy("one", 0, &worker)).await;
    let (snapshots, questions) = worker.snapshots_and_questions();
    mesh.forwarder.lose_batches_from(worker.digest(0).next_sequence);
    worker.store(0, 2);
    eventually("the second is lost", || mesh.forwarder.spoiled() == 1).await;
    mesh.forwarder.behave();
    worker.store(0, 3);
    eventually("the gap is filled", || mesh.is_exact_copy("one", 0, &worker)).await;
    assert_eq!((snapshots, questions + 1), worker.snapshots_and_questions());
    assert_eq!(1, mesh.source("one", 0).unwrap().gaps);
    // The last one before a silence is found by the digest.
    mesh.forwarder.lose_batches_from(worker.digest(0).next_sequence);
    worker.store(0, 4);
    eventually("the fourth is lost", || mesh.forwarder.spoiled() == 2).await;
    worker.say_digests();
    eventually("the digest told", || mesh.is_exact_copy("one", 0, &worker)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spoiled_message_is_found_by_arithmetic_and_repaired_by_a_snapshot() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    eventually("the empty ledger is known", || mesh.is_exact_copy("one", 0, &worker)).await;
    mesh.forwarder.spoil_batches_from(0);
    worker.store(0, 1);
    eventually("the batch was applied without its events", || {
        mesh.source("one", 0).is_some_and(|status| status.next_sequence == 1 && held(&status.tiers).is_empty())
    })
    .await;
    worker.say_digests();
    eventually("the index is repaired", || mesh.is_exact_copy("one", 0, &worker)).await;
    let status = mesh.source("one", 0).unwrap();
    assert_eq!((1, 1), (status.mismatches, status.snapshots));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_worker_is_followed_from_its_beginning() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let old = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &old)]).await;
    old.store(0, 1);
    eventually("the first start is known", || mesh.is_exact_copy("one", 0, &old)).await;
    old.die();
    let new = ScriptedWorker::start("one", 11, 1, 64).await;
    new.store(0, 2);
    mesh.set_workers(&[("one", 11, 1, &new)]).await;
    new.store(0, 3);
    eventually("the second start is known", || mesh.is_exact_copy("one", 0, &new)).await;
    assert_eq!(Incarnation(11), mesh.source("one", 0).unwrap().incarnation);
    let relayed = mesh.relay.stats();
    assert_eq!(11, relayed.workers["one"].incarnation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tombstone_removes_at_once_and_for_ever() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    let other = ScriptedWorker::start("two", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker), ("two", 10, 1, &other)]).await;
    worker.store(0, 1);
    other.store(0, 1);
    eventually("both are known", || mesh.is_exact_copy("one", 0, &worker) && mesh.is_exact_copy("two", 0, &other))
        .await;
    mesh.forwarder.announce_death("one", 10).await;
    eventually("the dead is gone", || mesh.source("one", 0).is_none()).await;
    // A late word of the dead opens nothing, and does not hold up the living.
    worker.store(0, 2);
    worker.say_digests();
    other.store(0, 2);
    eventually("the living goes on", || mesh.is_exact_copy("two", 0, &other)).await;
    eventually("the late word was refused", || mesh.feed.stats().counters.refused_batches >= 1).await;
    assert_eq!(None, mesh.source("one", 0));
    // Its successor starts afresh.
    worker.die();
    let successor = ScriptedWorker::start("one", 12, 1, 64).await;
    successor.store(0, 5);
    mesh.set_workers(&[("one", 12, 1, &successor), ("two", 10, 1, &other)]).await;
    eventually("the successor is known", || mesh.is_exact_copy("one", 0, &successor)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_bus_sources_are_stale_and_with_it_they_are_exact_again() {
    let Some(mut mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 4).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store(0, 1);
    eventually("the first batch is applied", || mesh.is_exact_copy("one", 0, &worker)).await;
    mesh.nats.kill();
    eventually("the source is stale", || mesh.is_in_state("one", SourceState::Stale)).await;
    eventually("the relay knows", || !mesh.relay.is_bus_connected()).await;
    // More than the worker's ring remembers.
    for prompt in 2..10 {
        worker.store(0, prompt);
    }
    eventually("the relay drops what nobody can hear", || mesh.relay.stats().workers["one"].dropped_batches >= 8).await;
    assert!(mesh.is_in_state("one", SourceState::Stale));
    mesh.nats.start_again();
    eventually("the source is exact", || mesh.is_exact_copy("one", 0, &worker)).await;
    mesh.until_connected().await;
    worker.store(0, 20);
    // The forwarder may still be away; what it loses is found by the digests that a ledger sends at all times.
    eventually("and followed again", || {
        worker.say_digests();
        mesh.is_exact_copy("one", 0, &worker)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_falls_silent_is_stale_until_it_speaks() {
    let Some(mesh) = Mesh::start(Duration::from_millis(200)).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store(0, 1);
    eventually("the batch is applied", || mesh.source("one", 0).is_some_and(|status| status.next_sequence == 1)).await;
    eventually("silence makes it stale", || mesh.is_in_state("one", SourceState::Stale)).await;
    eventually("a digest proves it", || {
        worker.say_digests();
        mesh.is_exact_copy("one", 0, &worker)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_index_comes_from_a_kv_master_and_from_the_workers_where_that_fails() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let uids = ["one", "two", "three", "four", "five"];
    let mut workers = Vec::new();
    for uid in uids {
        workers.push(ScriptedWorker::start(uid, 10, 1, 64).await);
    }
    let named: Vec<_> = uids.iter().zip(&workers).map(|(uid, worker)| (*uid, 10, 1, worker)).collect();
    mesh.set_workers(&named).await;
    for (prompt, worker) in (0..).zip(&workers) {
        worker.store(0, prompt);
    }
    let is_exact = |index: &Arc<Index>| {
        named.iter().all(|(uid, _, _, worker)| {
            let digest = worker.digest(0);
            index
                .source(&SourceKey { worker: (*uid).into(), rank: Rank(0) })
                .is_some_and(|status| status.state == SourceState::Exact && held(&status.tiers) == held(&digest.tiers))
        })
    };
    eventually("the master's index is exact", || is_exact(mesh.feed.index())).await;
    let questions = || workers.iter().map(|worker| worker.snapshots_and_questions().1).sum::<u64>();

    // The first of these is dead, the second breaks off after three sources, the third is whole.
    let dead = "127.0.0.1:1".to_owned();
    let broken = ScriptedKvMaster::start(Arc::clone(mesh.feed.index()), Some(3)).await;
    let whole = ScriptedKvMaster::start(Arc::clone(mesh.feed.index()), None).await;
    for (kvmasters, bootstrapped, asked) in [
        (vec![dead.clone(), broken.address(), whole.address()], 5, 0),
        (vec![dead, broken.address()], 3, 2),
        (Vec::new(), 0, 5),
    ] {
        let (before, breaks_off) = (questions(), kvmasters.contains(&broken.address()));
        let mut settings = FeedSettings::new(BusSettings::new(mesh.nats.url(), HEARD));
        settings.digest_interval = LONG;
        settings.kvmasters = kvmasters;
        let index = Arc::new(Index::new(IndexSettings { byte_budget: 1 << 30 }));
        let feed = IndexFeed::start(settings, index).await.unwrap();
        eventually("the bus is there", || feed.is_bus_connected()).await;
        feed.set_workers(feed_workers(&named));
        eventually("the new index is exact", || is_exact(feed.index())).await;
        let stats = feed.stats();
        assert_eq!((bootstrapped, asked), (stats.bootstrapped_sources, questions() - before));
        assert_eq!(u64::from(breaks_off), stats.counters.refusals.broken_histories);
    }
}
