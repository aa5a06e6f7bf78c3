//! Feeds the index without a bus: each worker's own history, then what comes after it.
//!
//! Streams grow with routers times workers, which is fine on one machine and not in a cluster; there the bus carries
//! the live part. The stream states its position in every message, so a lost one goes on where the index stands, and a
//! history that is gone comes back as a snapshot, taken in at once.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kvist_blocks::{Incarnation, Rank, Run, SourceKey, Tier, WorkerUid};
use kvist_events::convert::{batch_from, collect_chunk, digest_from, source_from};
use kvist_index::{Applied, DigestVerdict, Index};
use kvist_link::WorkerLink;
use kvist_proto::{
    engine::v1::{ResumePosition, WatchKvEventsRequest, watch_kv_events_response::Part},
    events::v1::SourceId,
};
use kvist_telemetry::now_unix_nanos;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use crate::cluster::ClusterView;

/// Wait before a stream that broke is opened again.
const RETRY: Duration = Duration::from_millis(200);

/// A source that says nothing for so long is stale; ledgers speak every two seconds, also when idle.
const SILENCE: Duration = Duration::from_secs(7);

/// One stream for each worker of the cluster state.
#[derive(Debug)]
pub(crate) struct Followers {
    index: Arc<Index>,
    running: Mutex<HashMap<(WorkerUid, Incarnation, String), AbortOnDropHandle<()>>>,
}

impl Followers {
    pub(crate) fn new(index: Arc<Index>) -> Self {
        Self { index, running: Mutex::default() }
    }

    /// Takes up a new cluster state. Called within a runtime.
    pub(crate) fn follow(&self, view: &ClusterView) {
        let mut running = self.running.lock();
        let mut wanted = HashMap::new();
        for node in view.workers.values() {
            let Some(connection) = &node.connection else { continue };
            let key = (node.uid.clone(), node.incarnation, node.target.address.clone());
            let task = running.remove(&key).unwrap_or_else(|| {
                let follower = Follower {
                    index: Arc::clone(&self.index),
                    link: connection.link.clone(),
                    uid: node.uid.clone(),
                    incarnation: node.incarnation,
                    ranks: node.ranks(),
                };
                AbortOnDropHandle::new(tokio::spawn(follower.run()))
            });
            wanted.insert(key, task);
        }
        let gone: Vec<WorkerUid> =
            running.keys().map(|(uid, ..)| uid.clone()).filter(|uid| !view.workers.contains_key(uid)).collect();
        *running = wanted;
        gone.iter().for_each(|uid| self.index.remove_worker(uid));
    }
}

struct Follower {
    index: Arc<Index>,
    link: WorkerLink,
    uid: WorkerUid,
    incarnation: Incarnation,
    ranks: u32,
}

impl Follower {
    async fn run(self) {
        for key in self.keys() {
            self.index.expect_source(&key, self.incarnation);
        }
        loop {
            self.follow().await;
            self.keys().for_each(|key| self.index.mark_stale(&key));
            tokio::time::sleep(RETRY).await;
        }
    }

    fn keys(&self) -> impl Iterator<Item = SourceKey> {
        let uid = self.uid.clone();
        (0..self.ranks).map(move |rank| SourceKey { worker: uid.clone(), rank: Rank(rank) })
    }

    /// Where the index stands, for each rank of which it knows something.
    fn positions(&self) -> Vec<ResumePosition> {
        self.keys()
            .filter_map(|key| self.index.source(&key))
            .filter(|source| source.incarnation == self.incarnation && source.next_sequence > 0)
            .map(|source| ResumePosition {
                rank: source.source.rank.0,
                incarnation: source.incarnation.0,
                sequence: source.next_sequence.checked_sub(1),
            })
            .collect()
    }

    /// Whether a message is about this start of this worker.
    fn key_of(&self, source: Option<&SourceId>) -> Option<SourceKey> {
        let (key, incarnation) = source_from(source).ok()?;
        (key.worker == self.uid && incarnation == self.incarnation).then_some(key)
    }

    /// One stream, until it ends or does not fit what the index has; the next one then starts from there.
    async fn follow(&self) -> Option<()> {
        let request = WatchKvEventsRequest { resume_after: self.positions(), follow: true, ranks: Vec::new() };
        let mut stream = self.link.client().watch_kv_events(request).await.ok()?.into_inner();
        let mut snapshots: HashMap<SourceKey, Vec<(Tier, Vec<Run>)>> = HashMap::new();
        loop {
            let message = tokio::time::timeout(SILENCE, stream.message()).await.ok()?.ok()??;
            let now = now_unix_nanos();
            match message.part? {
                Part::Snapshot(chunk) => {
                    let key = self.key_of(chunk.source.as_ref())?;
                    let blocks = snapshots.entry(key.clone()).or_default();
                    if chunk.first {
                        blocks.clear();
                    }
                    collect_chunk(&chunk, blocks).ok()?;
                    if chunk.last {
                        let blocks = snapshots.remove(&key).unwrap_or_default();
                        let (next, complete) = (chunk.next_sequence, chunk.complete);
                        self.index.apply_snapshot(&key, self.incarnation, next, &blocks, complete, now);
                    }
                }
                Part::Batch(batch) => {
                    let key = self.key_of(batch.source.as_ref())?;
                    let batch = batch_from(&batch).ok()?;
                    match self.index.apply_batch(&key, self.incarnation, &batch, now) {
                        Applied::Applied | Applied::Duplicate => {}
                        _ => return None,
                    }
                }
                Part::Digest(digest) => {
                    let key = self.key_of(digest.source.as_ref())?;
                    let stated = digest_from(&digest).ok()?;
                    let verdict = self.index.apply_digest(
                        &key,
                        self.incarnation,
                        stated.next_sequence,
                        &stated.tiers,
                        stated.complete,
                        now,
                    );
                    match verdict {
                        DigestVerdict::Mismatch => {
                            tracing::warn!(worker = %self.uid, rank = key.rank.0, "index_diverged");
                            // Forgotten whole, so that the next stream brings a snapshot.
                            self.index.remove_worker(&self.uid);
                            self.keys().for_each(|key| self.index.expect_source(&key, self.incarnation));
                            return None;
                        }
                        DigestVerdict::Behind | DigestVerdict::OldIncarnation => return None,
                        _ => {}
                    }
                }
                Part::CaughtUp(caught_up) => {
                    let key = self.key_of(caught_up.source.as_ref())?;
                    self.index.mark_caught_up(&key, self.incarnation);
                }
            }
        }
    }
}
