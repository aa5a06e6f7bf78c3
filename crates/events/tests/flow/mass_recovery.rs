//! A thousand sources and a dozen indexes that all begin, or all lose the bus, in the same moment.

use std::time::Instant;

use tokio::net::TcpListener;

use super::*;

const WORKERS: usize = 125;
const RANKS: u32 = 8;
const SOURCES: usize = WORKERS * RANKS as usize;
const CONSUMERS: usize = 12;
/// Each stores four blocks.
const PROMPTS: u32 = 50;
/// Those who never answer have none in the KV master's index either.
const NO_ANSWER: &str = "no-answer";

fn new_feed_settings(nats: &NatsServer) -> FeedSettings {
    let mut settings = FeedSettings::new(BusSettings::new(nats.url(), HEARD));
    settings.digest_interval = LONG;
    settings
}

async fn new_feed(settings: FeedSettings) -> IndexFeed {
    let index = Arc::new(Index::new(IndexSettings { byte_budget: 1 << 30 }));
    let feed = IndexFeed::start(settings, index).await.unwrap();
    eventually("the bus is there", || feed.is_bus_connected()).await;
    feed
}

fn exact_sources(feed: &IndexFeed) -> usize {
    feed.index().sources().iter().filter(|status| status.state == SourceState::Exact).count()
}

/// Whether an index holds what every ledger holds.
fn is_copy_of_all(feed: &IndexFeed, workers: &[ScriptedWorker]) -> bool {
    workers.iter().enumerate().all(|(number, worker)| {
        (0..RANKS).all(|rank| {
            let (key, digest) =
                (SourceKey { worker: name(number).as_str().into(), rank: Rank(rank) }, worker.digest(rank));
            feed.index().source(&key).is_some_and(|status| {
                status.state == SourceState::Exact
                    && status.next_sequence == digest.next_sequence
                    && held(&status.tiers) == held(&digest.tiers)
            })
        })
    })
}

fn name(number: usize) -> String {
    format!("worker-{number}")
}

fn feed_workers_of(workers: &[ScriptedWorker]) -> Vec<FeedWorker> {
    let named = workers.iter().enumerate();
    named
        .map(|(number, worker)| FeedWorker {
            uid: name(number).as_str().into(),
            address: worker.address(),
            incarnation: Incarnation(10),
            ranks: RANKS,
            is_attached: false,
        })
        .collect()
}

/// R32.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thousand_sources_recover_in_a_dozen_indexes_at_once_through_a_kv_master() {
    let Some(mut nats) = NatsServer::start() else { return };
    let mut workers = Vec::new();
    for number in 0..WORKERS {
        let worker = ScriptedWorker::start(&name(number), 10, RANKS, 4).await;
        for rank in 0..RANKS {
            for prompt in 0..PROMPTS {
                worker.store(rank, prompt + PROMPTS * (rank + RANKS * u32::try_from(number).unwrap()));
            }
        }
        workers.push(worker);
    }
    let sum_of = |numbers: fn(&ScriptedWorker) -> u64| workers.iter().map(numbers).sum::<u64>();
    let snapshots = || sum_of(|worker| worker.snapshots_and_questions().0);

    let began = Instant::now();
    let master = new_feed(new_feed_settings(&nats)).await;
    master.set_workers(feed_workers_of(&workers));
    eventually_within(MINUTES, "the KV master knows all", || is_copy_of_all(&master, &workers)).await;
    println!("one index from {SOURCES} sources' workers: {:?}", began.elapsed());
    assert_eq!(SOURCES as u64, snapshots());

    // One more worker is there that takes connections and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_worker = FeedWorker {
        uid: NO_ANSWER.into(),
        address: silent.local_addr().unwrap().to_string(),
        incarnation: Incarnation(10),
        ranks: RANKS,
        is_attached: false,
    };
    let kvmaster = ScriptedKvMaster::start(Arc::clone(master.index()), None).await;
    let mut feeds = Vec::new();
    for _ in 0..CONSUMERS {
        let mut settings = new_feed_settings(&nats);
        settings.kvmasters = vec![kvmaster.address()];
        feeds.push(new_feed(settings).await);
    }
    let began = Instant::now();
    for feed in &feeds {
        feed.set_workers([feed_workers_of(&workers), vec![silent_worker.clone()]].concat());
    }
    eventually_within(MINUTES, "all indexes know all", || feeds.iter().all(|feed| exact_sources(feed) == SOURCES))
        .await;
    println!("{CONSUMERS} indexes from a KV master: {:?}", began.elapsed());
    assert!(feeds.iter().all(|feed| is_copy_of_all(feed, &workers)));
    assert_eq!(SOURCES as u64, snapshots(), "nobody but the KV master has asked a worker for a snapshot");
    for feed in &feeds {
        let stats = feed.stats();
        assert_eq!((SOURCES as u64, RANKS as usize), (stats.bootstrapped_sources, stats.catching_up_sources));
    }

    // The bus goes, and comes back for all in the same moment. What was missed is a range, not a snapshot. Ranges come
    // from the workers, source by source; a few indexes show that as well as all.
    feeds.truncate(3);
    nats.kill();
    eventually_within(MINUTES, "all is stale", || feeds.iter().all(|feed| exact_sources(feed) == 0)).await;
    for worker in &workers {
        worker.store(0, 1_000_000);
    }
    let began = Instant::now();
    nats.start_again();
    eventually_within(MINUTES, "all is exact again", || feeds.iter().all(|feed| exact_sources(feed) == SOURCES)).await;
    println!("{} indexes after the bus was away: {:?}", feeds.len(), began.elapsed());
    assert!(feeds.iter().all(|feed| is_copy_of_all(feed, &workers)));
    assert_eq!(SOURCES as u64, snapshots());
    assert!(feeds.iter().all(|feed| feed.stats().counters.mismatches == 0));
}

/// R32.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_workers_delay_nobody_and_are_asked_by_few_at_once() {
    const MOST: usize = 2;
    const MOST_SLOW: u64 = 8 * MOST as u64;
    // Those in the places for the quick, and those that were given up and of which the worker hears a little late.
    const MOST_OPEN: u64 = MOST_SLOW + 2 * MOST as u64;
    let Some(nats) = NatsServer::start() else { return };
    let slow = ScriptedWorker::start("slow", 10, 40, 64).await;
    slow.hold_answers();
    let quick = ScriptedWorker::start("quick", 10, 20, 64).await;
    for rank in 0..20 {
        quick.store(rank, rank);
    }
    let mut settings = new_feed_settings(&nats);
    settings.most_catch_ups = MOST;
    let feed = new_feed(settings).await;
    // The slow one alone first, so that it has all the places there are.
    let named = |uid: &str, ranks, worker: &ScriptedWorker| FeedWorker {
        uid: uid.into(),
        address: worker.address(),
        incarnation: Incarnation(10),
        ranks,
        is_attached: false,
    };
    feed.set_workers(vec![named("slow", 40, &slow)]);
    eventually("the slow one is asked by as many as may", || slow.open_questions().0 == MOST_SLOW).await;
    feed.set_workers(vec![named("slow", 40, &slow), named("quick", 20, &quick)]);
    let began = Instant::now();
    eventually("the quick one is known", || exact_sources(&feed) == 20).await;
    println!("20 sources of a quick worker beside 40 that do not answer: {:?}", began.elapsed());
    slow.answer_again();
    eventually("the slow one is known as well", || exact_sources(&feed) == 60).await;
    assert!((MOST_SLOW..=MOST_OPEN).contains(&slow.open_questions().1), "{:?}", slow.open_questions());
}

/// R32.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_that_are_larger_than_all_the_room_come_in_one_after_the_other() {
    const RANKS: u32 = 20;
    let Some(nats) = NatsServer::start() else { return };
    let worker = ScriptedWorker::start("worker", 10, RANKS, 64).await;
    for rank in 0..RANKS {
        (0..PROMPTS).for_each(|prompt| worker.store(rank, prompt + PROMPTS * rank));
    }
    let mut settings = new_feed_settings(&nats);
    settings.most_history_bytes = 1;
    let feed = new_feed(settings).await;
    feed.set_workers(vec![FeedWorker {
        uid: "worker".into(),
        address: worker.address(),
        incarnation: Incarnation(10),
        ranks: RANKS,
        is_attached: false,
    }]);
    eventually("all is known", || exact_sources(&feed) == RANKS as usize).await;
}
