//! What does not belong on the bus, and what breaks off: counted by its reason, and otherwise as if it had not been.

use kvist_blocks::{Batch, BlockHash, Event, Tier};
use kvist_events::{RefusalCounts, Subjects, convert};
use kvist_proto::events::v1::{KvEventMessage, Tombstone};
use prost::Message as _;

use super::*;

/// Somebody who may publish, and says what he likes.
struct Stranger {
    client: async_nats::Client,
    subjects: Subjects,
}

impl Stranger {
    async fn come(mesh: &Mesh) -> Self {
        let client = async_nats::connect(mesh.nats.url()).await.unwrap();
        Self { client, subjects: Subjects::new(HEARD).unwrap() }
    }

    async fn say(&self, subject: String, payload: Vec<u8>) {
        self.client.publish(subject, payload.into()).await.unwrap();
        self.client.flush().await.unwrap();
    }
}

fn refusals(mesh: &Mesh) -> RefusalCounts {
    mesh.feed.stats().counters.refusals
}

fn batch_about(uid: &str, incarnation: u64, sequence: u64) -> KvEventMessage {
    let key = SourceKey { worker: uid.into(), rank: Rank(0) };
    let events = vec![Event::Stored { tier: Tier::Device, parent: None, hashes: vec![BlockHash(7)] }];
    let batch = Batch { sequence, recorded_at_unix_nanos: 1, events };
    let batch = convert::batch_to(&convert::source_to(&key, Incarnation(incarnation)), &batch);
    KvEventMessage { batches: vec![batch], digest: None }
}

/// R25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_belong_on_the_bus_is_counted_by_its_reason_and_changes_nothing() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store(0, 1);
    eventually("the batch is applied", || mesh.is_exact_copy("one", 0, &worker)).await;
    let stranger = Stranger::come(&mesh).await;
    let before = mesh.source("one", 0);
    let asked = worker.snapshots_and_questions();
    let own = stranger.subjects.events("one", 0);
    let tombstone =
        |uid: &str, incarnation| Tombstone { worker_uid: uid.to_owned(), incarnation, ..Tombstone::default() };
    let next = batch_about("one", 10, 1).encode_to_vec();
    let far_future = batch_about("one", u64::MAX, 0).encode_to_vec();
    let mut nameless = batch_about("one", 10, 1);
    nameless.batches[0].source = None;

    let mut expected = RefusalCounts::default();
    for (subject, payload, count) in [
        (own.clone(), b"no message of ours".to_vec(), (|counts| counts.garbage += 1) as fn(&mut RefusalCounts)),
        ("kvist.v1.heard.kv.one.0.more".to_owned(), next.clone(), |counts| counts.garbage += 1),
        ("kvist.v1.heard.kv.one".to_owned(), next.clone(), |counts| counts.garbage += 1),
        (own.clone(), nameless.encode_to_vec(), |counts| counts.garbage += 1),
        (own.clone(), far_future, |counts| counts.garbage += 1),
        (stranger.subjects.tombstone(&"one".into()), tombstone("one", u64::MAX).encode_to_vec(), |counts| {
            counts.garbage += 1
        }),
        (stranger.subjects.tombstone(&"one".into()), vec![0xff; 9], |counts| counts.garbage += 1),
        (stranger.subjects.events("two", 0), next.clone(), |counts| counts.wrong_subject += 1),
        (stranger.subjects.events("one", 1), next.clone(), |counts| counts.wrong_subject += 1),
        (stranger.subjects.tombstone(&"two".into()), tombstone("one", 10).encode_to_vec(), |counts| {
            counts.wrong_subject += 1
        }),
        (stranger.subjects.events("two", 0), batch_about("two", 10, 0).encode_to_vec(), |counts| {
            counts.unknown_workers += 1
        }),
        (own.clone(), vec![0; 600 * 1024], |counts| counts.oversized += 1),
    ] {
        count(&mut expected);
        stranger.say(subject.clone(), payload).await;
        eventually(&format!("{subject} is counted as {expected:?}"), || refusals(&mesh) == expected).await;
    }
    assert_eq!(before, mesh.source("one", 0));
    assert_eq!((1, asked), (mesh.feed.sources().len(), worker.snapshots_and_questions()));
    // The true one is as welcome as before.
    worker.store(0, 2);
    eventually("the worker is followed", || mesh.is_exact_copy("one", 0, &worker)).await;
    assert_eq!(expected, refusals(&mesh));
}

/// R25, R22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_known_source_says_and_nobody_understands_is_fetched_anew() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store(0, 1);
    eventually("the batch is applied", || mesh.is_exact_copy("one", 0, &worker)).await;
    let stranger = Stranger::come(&mesh).await;
    let mut odd = batch_about("one", 10, 1);
    odd.batches[0].events[0].event = None;
    let asked = worker.snapshots_and_questions();
    stranger.say(stranger.subjects.events("one", 0), odd.encode_to_vec()).await;
    eventually("it is counted", || refusals(&mesh) == RefusalCounts { malformed: 1, ..RefusalCounts::default() }).await;
    eventually("one snapshot is taken", || worker.snapshots_and_questions() == (asked.0 + 1, asked.1 + 1)).await;
    eventually("and the source is exact", || mesh.is_exact_copy("one", 0, &worker)).await;
}

/// R21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_history_that_ends_early_is_counted_and_fetched_again() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 2).await;
    for prompt in 0..10 {
        worker.store(0, prompt);
    }
    worker.break_off_answers(2);
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    eventually("the third answer is whole", || mesh.is_exact_copy("one", 0, &worker)).await;
    assert_eq!(RefusalCounts { broken_histories: 2, ..RefusalCounts::default() }, refusals(&mesh));
    assert_eq!(2, mesh.feed.stats().counters.failed_catch_ups);
}

/// R31.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_falls_behind_the_bus_has_a_gap_like_any_other() {
    let Some(nats) = NatsServer::start() else { return };
    let mesh = Mesh::start_on(nats, |settings| settings.most_waiting_messages = 1).await;
    let worker = ScriptedWorker::start("one", 10, 1, 1_024).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    let stranger = Stranger::come(&mesh).await;
    // Words of strangers fill the one place there is, until something of the worker was lost among them.
    let noise = batch_about("nobody", 10, 0).encode_to_vec();
    let subject = stranger.subjects.events("nobody", 0);
    let is_behind = || mesh.feed.stats().overrun_messages > 0 && mesh.feed.stats().counters.gaps > 0;
    let mut prompt = 0;
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !is_behind() {
        assert!(std::time::Instant::now() < deadline, "nothing was lost: {:?}", mesh.feed.stats());
        for _ in 0..200 {
            stranger.client.publish(subject.clone(), noise.clone().into()).await.unwrap();
        }
        stranger.client.flush().await.unwrap();
        worker.store(0, prompt % 200);
        worker.remove(0, prompt % 200);
        prompt += 1;
    }
    eventually("what was lost is fetched", || {
        worker.say_digests();
        mesh.is_exact_copy("one", 0, &worker)
    })
    .await;
    assert_eq!(0, mesh.feed.stats().counters.mismatches);
}

/// R21, R25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_is_too_large_for_the_bus_is_fetched() {
    let Some(mesh) = Mesh::start(LONG).await else { return };
    let worker = ScriptedWorker::start("one", 10, 1, 64).await;
    mesh.set_workers(&[("one", 10, 1, &worker)]).await;
    worker.store_blocks(0, 1, 80_000);
    eventually("the relay keeps it back", || mesh.relay.stats().workers["one"].dropped_batches == 1).await;
    worker.store(0, 1_000_000);
    eventually("the gap is filled", || mesh.is_exact_copy("one", 0, &worker)).await;
    assert_eq!(RefusalCounts::default(), refusals(&mesh));
    assert_eq!(1, mesh.source("one", 0).unwrap().gaps);
}
