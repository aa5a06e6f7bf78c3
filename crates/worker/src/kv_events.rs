//! `WatchKvEvents`: for each rank the missing range or a snapshot, then live batches and digests.
//!
//! A reader is served from the ledger's ring alone. It is woken when the ledger has moved on and then gets everything it
//! has not seen, so a slow reader costs nothing: it falls out of the ring and gets a snapshot.

use std::{sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_ledger::LedgerDigest;
use kvist_proto::{
    engine::v1::{
        CaughtUp, ResumePosition, WatchKvEventsRequest, WatchKvEventsResponse, watch_kv_events_response::Part,
    },
    events::v1::SourceId,
};
use kvist_telemetry::now_unix_nanos;
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

use crate::{EngineHost, convert, host::History, worker::stopped};

/// Messages that wait for the transport.
const CHANNEL_MESSAGES: usize = 16;
/// Snapshots that are sent at once, over all readers; each holds a copy of a ledger's blocks.
const CONCURRENT_SNAPSHOTS: usize = 4;

type Sender = mpsc::Sender<Result<WatchKvEventsResponse, Status>>;

/// What serves all readers.
#[derive(Debug)]
pub(crate) struct KvEvents {
    snapshots: Arc<Semaphore>,
    readers: TaskTracker,
    digest_interval: Duration,
    stopping: CancellationToken,
}

/// The reader has gone.
struct Gone;

/// One rank for one reader.
struct Reader {
    host: EngineHost,
    rank: u32,
    source: SourceId,
    snapshots: Arc<Semaphore>,
    sender: Sender,
    /// Sequence of the last batch that was sent.
    applied: Option<u64>,
    /// The reader knows nothing of this incarnation.
    needs_snapshot: bool,
}

impl KvEvents {
    /// Serves readers until told to stop, which ends each with an error.
    pub(crate) fn new(digest_interval: Duration, stopping: CancellationToken) -> Self {
        Self {
            snapshots: Arc::new(Semaphore::new(CONCURRENT_SNAPSHOTS)),
            readers: TaskTracker::new(),
            digest_interval: digest_interval.max(Duration::from_millis(10)),
            stopping,
        }
    }

    /// Begins to serve a reader.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a rank that the engine does not have.
    pub(crate) fn watch(
        &self,
        host: &EngineHost,
        request: &WatchKvEventsRequest,
    ) -> Result<mpsc::Receiver<Result<WatchKvEventsResponse, Status>>, KvistError> {
        let ranks = if request.ranks.is_empty() { (0..host.ranks()).collect() } else { request.ranks.clone() };
        let (sender, receiver) = mpsc::channel(CHANNEL_MESSAGES);
        for rank in ranks {
            let Some(source) = host.source(rank).cloned() else {
                return Err(KvistError::field(Code::InvalidArgument, "ranks", "the engine has no such rank"));
            };
            let known = |resume: &&ResumePosition| resume.rank == rank && resume.incarnation == source.incarnation;
            let resume = request.resume_after.iter().find(known);
            let reader = Reader {
                host: host.clone(),
                rank,
                applied: resume.and_then(|resume| resume.sequence),
                needs_snapshot: resume.is_none(),
                source,
                snapshots: Arc::clone(&self.snapshots),
                sender: sender.clone(),
            };
            let digest_interval = request.follow.then_some(self.digest_interval);
            let (sender, stopping) = (sender.clone(), self.stopping.clone());
            self.readers.spawn(async move {
                tokio::select! {
                    // A reader that has gone needs nothing more.
                    _ = reader.serve(digest_interval) => {}
                    () = stopping.cancelled() => {
                        let _ = sender.send(Err(stopped().into())).await;
                    }
                }
            });
        }
        Ok(receiver)
    }
}

impl Reader {
    async fn serve(mut self, digest_interval: Option<Duration>) -> Result<(), Gone> {
        let Some(mut moved_on) = self.host.watch_ledger(self.rank) else { return Ok(()) };
        moved_on.mark_unchanged();
        let digest = self.send_missing().await?;
        self.send_digest(&digest).await?;
        let caught_up = CaughtUp { source: Some(self.source.clone()), next_sequence: digest.next_sequence };
        self.send(Part::CaughtUp(caught_up)).await?;
        let Some(digest_interval) = digest_interval else { return Ok(()) };
        let mut ticks = tokio::time::interval_at(Instant::now() + digest_interval, digest_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                moved = moved_on.changed() => {
                    if moved.is_err() {
                        return Ok(());
                    }
                    self.send_missing().await?;
                }
                _ = ticks.tick() => {
                    // Read together with what it covers, so that it covers exactly what was sent.
                    let digest = self.send_missing().await?;
                    self.send_digest(&digest).await?;
                }
                () = self.sender.closed() => return Err(Gone),
            }
        }
    }

    /// Sends what the reader has not seen; returns the account that covers all that was sent.
    async fn send_missing(&mut self) -> Result<LedgerDigest, Gone> {
        let read = |needs_snapshot| self.host.read_ledger(self.rank, self.applied, needs_snapshot).ok_or(Gone);
        let (mut history, mut digest) = read(self.needs_snapshot)?;
        let mut permit = None;
        if matches!(history, History::Snapshot(_)) {
            // Read again when it is this reader's turn: waiting with a copy in hand is what the limit is for.
            drop(history);
            permit = Some(Arc::clone(&self.snapshots).acquire_owned().await.map_err(|_| Gone)?);
            (history, digest) = read(self.needs_snapshot)?;
        }
        match history {
            History::Range(batches) => {
                for batch in batches {
                    self.send(Part::Batch(convert::batch(&self.source, &batch))).await?;
                }
            }
            History::Snapshot(snapshot) => {
                for chunk in convert::snapshot(&self.source, &snapshot) {
                    self.send(Part::Snapshot(chunk)).await?;
                }
            }
        }
        drop(permit);
        self.needs_snapshot = false;
        self.applied = digest.next_sequence.checked_sub(1);
        Ok(digest)
    }

    async fn send_digest(&self, digest: &LedgerDigest) -> Result<(), Gone> {
        self.send(Part::Digest(convert::digest(&self.source, digest, now_unix_nanos()))).await
    }

    async fn send(&self, part: Part) -> Result<(), Gone> {
        self.sender.send(Ok(WatchKvEventsResponse { part: Some(part) })).await.map_err(|_| Gone)
    }
}
