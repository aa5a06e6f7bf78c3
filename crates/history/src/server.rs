//! `WatchKvEvents`: for each rank the missing range or a snapshot, then live batches and digests.
//!
//! A reader is served from the ledger's ring alone. It is woken when the ledger has moved on and then gets everything it
//! has not seen, so a slow reader costs nothing: it falls out of the ring and gets a snapshot.

use std::{sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_ledger::LedgerDigest;
use kvist_proto::engine::v1::{
    CaughtUp, ResumePosition, WatchKvEventsRequest, WatchKvEventsResponse, watch_kv_events_response::Part,
};
use kvist_telemetry::now_unix_nanos;
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

use crate::{Missing, SharedLedger, convert};

/// Messages that wait for the transport.
const CHANNEL_MESSAGES: usize = 16;
/// Snapshots that are sent at once, over all readers; each holds a copy of a ledger's blocks.
const CONCURRENT_SNAPSHOTS: usize = 4;

type Sender = mpsc::Sender<Result<WatchKvEventsResponse, Status>>;

/// Serves `WatchKvEvents` to all readers.
#[derive(Debug)]
pub struct HistoryServer {
    snapshots: Arc<Semaphore>,
    readers: TaskTracker,
    digest_interval: Duration,
    stopping: CancellationToken,
}

/// The reader has gone.
struct Gone;

/// One rank for one reader.
struct Reader {
    ledger: Arc<SharedLedger>,
    snapshots: Arc<Semaphore>,
    sender: Sender,
    /// Sequence of the last batch that was sent.
    applied: Option<u64>,
    /// The reader knows nothing of this incarnation.
    needs_snapshot: bool,
}

impl HistoryServer {
    /// Serves readers until told to stop, which ends each with an error.
    #[must_use]
    pub fn new(digest_interval: Duration, stopping: CancellationToken) -> Self {
        Self {
            snapshots: Arc::new(Semaphore::new(CONCURRENT_SNAPSHOTS)),
            readers: TaskTracker::new(),
            digest_interval: digest_interval.max(Duration::from_millis(10)),
            stopping,
        }
    }

    /// Begins to serve a reader; `ledgers` are those of an engine, one for each rank. Called within a runtime.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a rank that the engine does not have.
    pub fn watch(
        &self,
        ledgers: &[Arc<SharedLedger>],
        request: &WatchKvEventsRequest,
    ) -> Result<mpsc::Receiver<Result<WatchKvEventsResponse, Status>>, KvistError> {
        let is_wanted =
            |ledger: &&Arc<SharedLedger>| request.ranks.is_empty() || request.ranks.contains(&ledger.source().rank);
        let exists = |rank: &u32| ledgers.iter().any(|ledger| ledger.source().rank == *rank);
        if !request.ranks.iter().all(exists) {
            return Err(KvistError::field(Code::InvalidArgument, "ranks", "the engine has no such rank"));
        }
        let (sender, receiver) = mpsc::channel(CHANNEL_MESSAGES);
        for ledger in ledgers.iter().filter(is_wanted) {
            let source = ledger.source();
            let is_known =
                |resume: &&ResumePosition| resume.rank == source.rank && resume.incarnation == source.incarnation;
            let resume = request.resume_after.iter().find(is_known);
            let reader = Reader {
                ledger: Arc::clone(ledger),
                applied: resume.and_then(|resume| resume.sequence),
                needs_snapshot: resume.is_none(),
                snapshots: Arc::clone(&self.snapshots),
                sender: sender.clone(),
            };
            let digest_interval = request.follow.then_some(self.digest_interval);
            let (sender, stopping, ledger) = (sender.clone(), self.stopping.clone(), Arc::clone(ledger));
            self.readers.spawn(async move {
                let ending = tokio::select! {
                    // A reader that has gone needs nothing more.
                    _ = reader.serve(digest_interval) => return,
                    () = stopping.cancelled() => KvistError::new(Code::Draining, "the process is being stopped"),
                    () = ledger.closed().cancelled() => {
                        KvistError::new(Code::EngineUnavailable, "the engine was started again; ask anew")
                    }
                };
                let _ = sender.send(Err(ending.into())).await;
            });
        }
        Ok(receiver)
    }
}

impl Reader {
    async fn serve(mut self, digest_interval: Option<Duration>) -> Result<(), Gone> {
        let mut moved_on = self.ledger.watch();
        moved_on.mark_unchanged();
        let digest = self.send_missing().await?;
        self.send_digest(&digest).await?;
        let caught_up = CaughtUp { source: Some(self.ledger.source().clone()), next_sequence: digest.next_sequence };
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
                    if self.ledger.is_in_touch() {
                        self.send_digest(&digest).await?;
                    }
                }
                () = self.sender.closed() => return Err(Gone),
            }
        }
    }

    /// Sends what the reader has not seen; returns the account that covers all that was sent.
    async fn send_missing(&mut self) -> Result<LedgerDigest, Gone> {
        let source = self.ledger.source().clone();
        let (mut missing, mut digest) = self.ledger.missing_after(self.applied, self.needs_snapshot);
        let mut permit = None;
        if matches!(missing, Missing::Snapshot(_)) {
            // Read again when it is this reader's turn: waiting with a copy in hand is what the limit is for.
            drop(missing);
            permit = Some(Arc::clone(&self.snapshots).acquire_owned().await.map_err(|_| Gone)?);
            (missing, digest) = self.ledger.missing_after(self.applied, self.needs_snapshot);
        }
        match missing {
            Missing::Batches(batches) => {
                for batch in batches {
                    self.send(Part::Batch(convert::batch_to(&source, &batch))).await?;
                }
            }
            Missing::Snapshot(snapshot) => {
                for chunk in convert::snapshot_to(&source, &snapshot) {
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
        self.send(Part::Digest(convert::digest_to(self.ledger.source(), digest, now_unix_nanos()))).await
    }

    async fn send(&self, part: Part) -> Result<(), Gone> {
        self.sender.send(Ok(WatchKvEventsResponse { part: Some(part) })).await.map_err(|_| Gone)
    }
}
