//! Asking a worker for what is missing.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use kvist_blocks::Incarnation;
use kvist_doors::ClientTls;
use kvist_ledger::LedgerDigest;
use kvist_proto::{
    agent,
    engine::v1::{ResumePosition, WatchKvEventsRequest, WatchKvEventsResponse, watch_kv_events_response::Part},
};
use prost::Message as _;
use tokio::time::timeout;

use crate::{
    EventsError,
    convert::{batch_from, collect_chunk, digest_from, source_from},
    room::{Held, Room},
    tracker::{CatchUpOrder, History, HistorySnapshot},
    worker_channel,
};

/// Longest time between two parts of an answer.
const PART_TIME_LIMIT: Duration = Duration::from_secs(10);

/// Longest time between the last part and the end.
const END_TIME_LIMIT: Duration = Duration::from_millis(200);

/// What a worker has said so far.
#[derive(Default)]
struct Answer {
    incarnation: Option<Incarnation>,
    snapshot: Option<HistorySnapshot>,
    snapshot_is_whole: bool,
    history: Vec<kvist_blocks::Batch>,
    digest: Option<LedgerDigest>,
}

impl Answer {
    /// Takes a part; true when it was the last.
    fn take(&mut self, order: &CatchUpOrder, part: Part) -> Result<bool, EventsError> {
        let source = match &part {
            Part::Snapshot(chunk) => chunk.source.as_ref(),
            Part::Batch(batch) => batch.source.as_ref(),
            Part::Digest(digest) => digest.source.as_ref(),
            Part::CaughtUp(caught_up) => caught_up.source.as_ref(),
        };
        let (key, incarnation) = source_from(source)?;
        if key.worker != order.key.worker {
            return Err(EventsError::Worker("another worker answers at the address".to_owned()));
        }
        if key.rank != order.key.rank {
            return Ok(false);
        }
        if *self.incarnation.get_or_insert(incarnation) != incarnation {
            return Err(EventsError::Malformed("two incarnations in one answer"));
        }
        match part {
            Part::Snapshot(chunk) => {
                if chunk.first {
                    // A worker whose ring overflowed while it was sending begins again.
                    let next_sequence = chunk.next_sequence;
                    self.snapshot =
                        Some(HistorySnapshot { next_sequence, blocks: Vec::new(), complete: chunk.complete });
                    self.history.clear();
                }
                let snapshot = self.snapshot.as_mut().ok_or(EventsError::Malformed("snapshot without a beginning"))?;
                if snapshot.next_sequence != chunk.next_sequence {
                    return Err(EventsError::Malformed("chunks of two snapshots"));
                }
                collect_chunk(&chunk, &mut snapshot.blocks)?;
                self.snapshot_is_whole = chunk.last;
            }
            Part::Batch(batch) => self.history.push(batch_from(&batch)?),
            Part::Digest(digest) => self.digest = Some(digest_from(&digest)?),
            Part::CaughtUp(_) => return Ok(true),
        }
        Ok(false)
    }

    fn finish(self) -> Result<History, EventsError> {
        if self.snapshot.is_some() && !self.snapshot_is_whole {
            return Err(EventsError::Malformed("snapshot without an end"));
        }
        let incarnation = self.incarnation.ok_or(EventsError::Malformed("no answer for the rank"))?;
        Ok(History { incarnation, snapshot: self.snapshot, batches: self.history, digest: self.digest })
    }
}

fn failed(status: tonic::Status) -> EventsError {
    EventsError::Worker(status.code().to_string())
}

/// Asks the worker, or the agent that keeps the ledger of an engine that Kvist did not start.
async fn open(
    order: &CatchUpOrder,
    request: WatchKvEventsRequest,
    tls: Option<&ClientTls>,
) -> Result<BoxStream<'static, Result<WatchKvEventsResponse, tonic::Status>>, EventsError> {
    let worker_uid = order.key.worker.as_str();
    if !order.is_attached {
        let mut client = worker_channel::client(worker_uid, &order.address, tls)?;
        return Ok(client.watch_kv_events(request).await.map_err(failed)?.into_inner().boxed());
    }
    let mut client = worker_channel::agent_client(worker_uid, &order.address, tls)?;
    let request = agent::v1::WatchKvEventsRequest { worker_uid: worker_uid.to_owned(), request: Some(request) };
    let parts = client.watch_kv_events(request).await.map_err(failed)?.into_inner();
    Ok(parts.map_ok(|part| part.response.unwrap_or_default()).boxed())
}

/// One question and its whole answer, with the room that it takes.
pub(crate) async fn fetch(
    order: &CatchUpOrder,
    tls: Option<&ClientTls>,
    room: &Room,
) -> Result<(History, Held), EventsError> {
    let late = |_| EventsError::Worker("it fell silent".to_owned());
    let rank = order.key.rank.0;
    let resume_after = order
        .resume
        .map(|(incarnation, sequence)| ResumePosition { rank, incarnation: incarnation.0, sequence })
        .into_iter()
        .collect();
    let request = WatchKvEventsRequest { resume_after, follow: false, ranks: vec![rank] };
    let mut parts = timeout(PART_TIME_LIMIT, open(order, request, tls)).await.map_err(late)??;
    let mut answer = Answer::default();
    let mut held = room.hold();
    while let Some(message) = timeout(PART_TIME_LIMIT, parts.try_next()).await.map_err(late)?.map_err(failed)? {
        held.grow(message.encoded_len()).await;
        let part = message.part.ok_or(EventsError::Malformed("unknown part"))?;
        if answer.take(order, part)? {
            // Its end follows at once; to hang up before would look like a reader that has given up.
            let _ = timeout(END_TIME_LIMIT, parts.try_next()).await;
            return answer.finish().map(|history| (history, held));
        }
    }
    Err(EventsError::BrokenOff)
}

#[cfg(test)]
mod tests {
    use kvist_blocks::{Rank, SourceKey};
    use kvist_proto::{
        engine::v1::{CaughtUp, SnapshotBlocks, SnapshotChunk, SnapshotRun},
        events::v1::SourceId,
    };

    use super::*;

    fn order() -> CatchUpOrder {
        CatchUpOrder {
            number: 1,
            key: SourceKey { worker: "w".into(), rank: Rank(0) },
            address: String::new(),
            is_attached: false,
            resume: None,
            attempt: 0,
            delay: Duration::ZERO,
        }
    }

    fn source() -> Option<SourceId> {
        Some(SourceId { worker_uid: "w".to_owned(), rank: 0, incarnation: 1 })
    }

    fn chunk(first: bool, last: bool, next_sequence: u64, runs: Vec<SnapshotRun>) -> Part {
        let blocks = vec![SnapshotBlocks { tier: 1, block_hashes: vec![1], runs }];
        Part::Snapshot(SnapshotChunk { source: source(), next_sequence, blocks, first, last, complete: true })
    }

    fn answer(parts: Vec<Part>) -> Result<History, EventsError> {
        let mut answer = Answer::default();
        for part in parts.into_iter().chain([Part::CaughtUp(CaughtUp { source: source(), next_sequence: 2 })]) {
            if answer.take(&order(), part)? {
                return answer.finish();
            }
        }
        Err(EventsError::BrokenOff)
    }

    /// R21.
    #[test]
    fn a_snapshot_that_ends_early_or_is_none_is_not_used() {
        let whole = answer(vec![chunk(true, false, 2, vec![]), chunk(false, true, 2, vec![])]).unwrap();
        assert_eq!(2, whole.snapshot.unwrap().blocks[0].1.len());
        let wrong_run = SnapshotRun { parent_block_hash: None, blocks: 2 };
        for parts in [
            vec![chunk(true, false, 2, vec![])],
            vec![chunk(false, true, 2, vec![])],
            vec![chunk(true, false, 2, vec![]), chunk(false, true, 3, vec![])],
            vec![chunk(true, true, 2, vec![wrong_run])],
        ] {
            assert!(answer(parts).unwrap_err().is_broken_history());
        }
    }
}
