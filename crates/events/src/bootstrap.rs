//! A whole index as a stream of snapshots, for many readers that would otherwise ask every worker.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use kvist_blocks::{Incarnation, SourceKey};
use kvist_doors::ClientTls;
use kvist_index::{Index, SourceState};
use kvist_proto::{
    engine::v1::SnapshotChunk,
    kvmaster::v1::{BootstrapDone, BootstrapRequest, BootstrapResponse, bootstrap_response::Part},
};
use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use crate::{
    EventsError,
    convert::{self, collect_chunk, source_from},
    tracker::{History, HistorySnapshot},
    worker_channel,
};

/// Longest time between two parts of an answer, and until the first.
const PART_TIME_LIMIT: Duration = Duration::from_secs(2);

/// A snapshot is handed to several readers for this long though its source has moved on; one whose source has not is
/// handed out for as long as it is kept.
const FRESH: Duration = Duration::from_millis(250);
/// Most bytes of snapshots that are kept for the next reader.
const MOST_KEPT_BYTES: usize = 64 * 1024 * 1024;

/// The parts of one source's snapshot, shared by all who read it.
pub type SharedParts = Arc<[BootstrapResponse]>;

/// Answers of a KV master: each source's snapshot is made once for all readers that come together.
///
/// Only sources that are EXACT or PARTIAL are sent: what a byte budget has cut, or what is behind, is no snapshot of
/// anything, and its readers ask the worker.
#[derive(Debug)]
pub struct Bootstraps {
    index: Arc<Index>,
    fresh: Duration,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    snapshots: HashMap<SourceKey, Arc<Mutex<Option<Snapshot>>>>,
    /// In the order in which they were made, with their bytes.
    order: VecDeque<(SourceKey, usize)>,
    bytes: usize,
}

#[derive(Debug)]
struct Snapshot {
    made_at: Instant,
    incarnation: Incarnation,
    next_sequence: u64,
    state: SourceState,
    parts: SharedParts,
}

impl Bootstraps {
    /// Answers from an index.
    #[must_use]
    pub fn new(index: Arc<Index>) -> Arc<Self> {
        Self::with_freshness(index, FRESH)
    }

    fn with_freshness(index: Arc<Index>, fresh: Duration) -> Arc<Self> {
        Arc::new(Self { index, fresh, kept: Mutex::default() })
    }

    /// Snapshots of the named workers' sources, or of all when none is named, and the end mark; one source at a time,
    /// so that a reader that is slow holds up nobody and costs one source's memory.
    #[must_use]
    pub fn answer(self: &Arc<Self>, worker_uids: &[String]) -> BootstrapAnswer {
        let wanted: HashSet<&str> = worker_uids.iter().map(String::as_str).collect();
        let keys = self.index.sources().into_iter().map(|status| status.source);
        let keys: Vec<_> = keys.filter(|key| wanted.is_empty() || wanted.contains(key.worker.as_str())).collect();
        BootstrapAnswer { bootstraps: Arc::clone(self), keys: keys.into_iter(), sources: 0, is_done: false }
    }

    /// The snapshot of a source; none when there is nothing to say.
    fn parts_of(&self, key: &SourceKey) -> Option<SharedParts> {
        let cell = Arc::clone(self.kept.lock().snapshots.entry(key.clone()).or_default());
        // Whoever comes meanwhile waits here and takes what was made.
        let mut snapshot = cell.lock();
        let status = self.index.source(key).filter(|status| is_sent(status.state));
        if let (Some(status), Some(known)) = (&status, &*snapshot)
            && (status.incarnation, status.state) == (known.incarnation, known.state)
            && (status.next_sequence == known.next_sequence || known.made_at.elapsed() < self.fresh)
        {
            return Some(Arc::clone(&known.parts));
        }
        let made = status.and_then(|_| self.make(key));
        let parts = made.as_ref().map(|made| Arc::clone(&made.parts));
        *snapshot = made;
        drop(snapshot);
        self.keep(key, parts.as_deref());
        parts
    }

    fn make(&self, key: &SourceKey) -> Option<Snapshot> {
        // The state is read again together with the blocks: it may have changed meanwhile.
        let (status, blocks) = self.index.snapshot_of(key)?;
        if !is_sent(status.state) {
            return None;
        }
        let source = convert::source_to(&status.source, status.incarnation);
        let complete = status.state == SourceState::Exact;
        let snapshot = kvist_ledger::Snapshot { next_sequence: status.next_sequence, blocks, complete };
        let chunks = convert::snapshot_to(&source, &snapshot);
        let parts = chunks.into_iter().map(|chunk| BootstrapResponse { part: Some(Part::Snapshot(chunk)) });
        Some(Snapshot {
            made_at: Instant::now(),
            incarnation: status.incarnation,
            next_sequence: status.next_sequence,
            state: status.state,
            parts: parts.collect(),
        })
    }

    /// Accounts for what was made, and forgets the oldest beyond the bound.
    fn keep(&self, key: &SourceKey, parts: Option<&[BootstrapResponse]>) {
        let kept = &mut *self.kept.lock();
        if let Some(position) = kept.order.iter().position(|(other, _)| other == key) {
            let replaced = kept.order.remove(position).map_or(0, |(_, bytes)| bytes);
            kept.bytes -= replaced;
        }
        let Some(parts) = parts else {
            kept.snapshots.remove(key);
            return;
        };
        let bytes = parts.iter().map(prost::Message::encoded_len).sum();
        kept.order.push_back((key.clone(), bytes));
        kept.bytes += bytes;
        while kept.bytes > MOST_KEPT_BYTES
            && let Some((oldest, bytes)) = kept.order.pop_front()
        {
            kept.snapshots.remove(&oldest);
            kept.bytes -= bytes;
        }
    }
}

fn is_sent(state: SourceState) -> bool {
    matches!(state, SourceState::Exact | SourceState::Partial)
}

/// One reader's answer: the parts of one source after the other, and at last the end mark.
#[derive(Debug)]
pub struct BootstrapAnswer {
    bootstraps: Arc<Bootstraps>,
    keys: std::vec::IntoIter<SourceKey>,
    sources: u32,
    is_done: bool,
}

impl Iterator for BootstrapAnswer {
    type Item = SharedParts;

    fn next(&mut self) -> Option<SharedParts> {
        if let Some(parts) = self.keys.by_ref().find_map(|key| self.bootstraps.parts_of(&key)) {
            self.sources += 1;
            return Some(parts);
        }
        let done = BootstrapResponse { part: Some(Part::Done(BootstrapDone { sources: self.sources })) };
        (!std::mem::replace(&mut self.is_done, true)).then(|| Arc::from([done]))
    }
}

/// Asks a KV master for the named workers' sources, and hands each on as soon as it is whole. A source that it has no
/// snapshot of is missing.
///
/// # Errors
/// It did not answer in time, broke off, or what it says cannot be understood; what was handed on before is whole.
pub(crate) async fn fetch(
    address: &str,
    worker_uids: Vec<String>,
    tls: Option<&ClientTls>,
    whole: &mpsc::Sender<(SourceKey, History)>,
) -> Result<(), EventsError> {
    let failed = |status: tonic::Status| EventsError::KvMaster(status.code().to_string());
    let late = |_| EventsError::KvMaster("it fell silent".to_owned());
    let mut client = worker_channel::kvmaster_client(address, tls)?;
    let opened = timeout(PART_TIME_LIMIT, client.bootstrap(BootstrapRequest { worker_uids })).await.map_err(late)?;
    let mut parts = opened.map_err(failed)?.into_inner();
    let mut reading = Reading::default();
    while let Some(message) = timeout(PART_TIME_LIMIT, parts.message()).await.map_err(late)?.map_err(failed)? {
        match message.part.ok_or(EventsError::Malformed("unknown part"))? {
            Part::Snapshot(chunk) => {
                if let Some(history) = reading.take(&chunk)? {
                    // While the index is busy nothing more is read, and flow control stops the KV master.
                    whole.send(history).await.map_err(|_| EventsError::KvMaster("nobody listens".to_owned()))?;
                }
            }
            Part::Done(_) => return reading.finish(),
        }
    }
    Err(EventsError::BrokenOff)
}

/// The snapshot whose chunks are coming.
#[derive(Default)]
struct Reading(Option<(SourceKey, Incarnation, HistorySnapshot)>);

impl Reading {
    /// Takes a chunk; the snapshot when it was the last.
    fn take(&mut self, chunk: &SnapshotChunk) -> Result<Option<(SourceKey, History)>, EventsError> {
        let (key, incarnation) = source_from(chunk.source.as_ref())?;
        if chunk.first {
            if self.0.is_some() {
                return Err(EventsError::Malformed("snapshot without an end"));
            }
            let snapshot =
                HistorySnapshot { next_sequence: chunk.next_sequence, blocks: Vec::new(), complete: chunk.complete };
            self.0 = Some((key.clone(), incarnation, snapshot));
        }
        let reading = self.0.as_mut().filter(|(reading, _, _)| *reading == key);
        let (_, first, snapshot) = reading.ok_or(EventsError::Malformed("snapshot without a beginning"))?;
        if (*first, snapshot.next_sequence) != (incarnation, chunk.next_sequence) {
            return Err(EventsError::Malformed("chunks of two snapshots"));
        }
        collect_chunk(chunk, &mut snapshot.blocks)?;
        if !chunk.last {
            return Ok(None);
        }
        Ok(self.0.take().map(|(key, incarnation, snapshot)| {
            (key, History { incarnation, snapshot: Some(snapshot), batches: Vec::new(), digest: None })
        }))
    }

    fn finish(self) -> Result<(), EventsError> {
        match self.0 {
            Some(_) => Err(EventsError::Malformed("snapshot without an end")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::{Batch, BlockHash, Event, Rank, Run, Tier};
    use kvist_index::IndexSettings;

    use super::*;

    const START: Incarnation = Incarnation(1);

    fn key(worker: &str) -> SourceKey {
        SourceKey { worker: worker.into(), rank: Rank(0) }
    }

    fn index_of(workers: &[&str]) -> Arc<Index> {
        let index = Arc::new(Index::new(IndexSettings { byte_budget: 1 << 24 }));
        for worker in workers {
            index.expect_source(&key(worker), START);
            let run = Run { parent: None, hashes: (0..10).map(BlockHash).collect() };
            let blocks = [(Tier::Device, vec![run])];
            assert!(index.apply_snapshot(&key(worker), START, 1, &blocks, true, 1));
            index.mark_caught_up(&key(worker), START);
        }
        index
    }

    fn go_on(index: &Index, worker: &str, sequence: u64) {
        let stored = Event::Stored { tier: Tier::Device, parent: None, hashes: vec![BlockHash(100 + sequence)] };
        index.apply_batch(&key(worker), START, &Batch { sequence, recorded_at_unix_nanos: 1, events: vec![stored] }, 1);
    }

    fn first_of(bootstraps: &Arc<Bootstraps>) -> SharedParts {
        bootstraps.answer(&[]).next().unwrap()
    }

    /// R32.
    #[test]
    fn a_snapshot_is_made_once_for_all_who_come_together() {
        let index = index_of(&["one", "two"]);
        let bootstraps = Bootstraps::with_freshness(Arc::clone(&index), Duration::MAX);
        let first = first_of(&bootstraps);
        assert!(Arc::ptr_eq(&first, &first_of(&bootstraps)));
        assert_eq!(3, bootstraps.answer(&[]).count());
        assert_eq!(2, bootstraps.answer(&["two".to_owned()]).count());
        // While it is fresh, a source that has moved on is given as it was; its readers ask for the rest.
        go_on(&index, "one", 1);
        assert!(Arc::ptr_eq(&first, &first_of(&bootstraps)));
    }

    /// R32.
    #[test]
    fn a_source_that_has_moved_on_is_read_anew_and_one_that_has_not_is_not() {
        let index = index_of(&["one"]);
        let bootstraps = Bootstraps::with_freshness(Arc::clone(&index), Duration::ZERO);
        let first = first_of(&bootstraps);
        assert!(Arc::ptr_eq(&first, &first_of(&bootstraps)));
        go_on(&index, "one", 1);
        let later = first_of(&bootstraps);
        assert!(!Arc::ptr_eq(&first, &later));
        assert!(Arc::ptr_eq(&later, &first_of(&bootstraps)));
    }

    /// R32.
    #[test]
    fn what_is_behind_or_gone_is_not_sent_and_not_kept() {
        let index = index_of(&["one", "two"]);
        let bootstraps = Bootstraps::new(Arc::clone(&index));
        assert_eq!(3, bootstraps.answer(&[]).count());
        let bytes = bootstraps.kept.lock().bytes;
        index.mark_catching_up(&key("one"));
        let parts: Vec<_> = bootstraps.answer(&[]).flat_map(|parts| parts.to_vec()).collect();
        assert_eq!(2, parts.len());
        assert_eq!(Some(Part::Done(BootstrapDone { sources: 1 })), parts[1].part);
        let kept = bootstraps.kept.lock();
        assert_eq!((bytes / 2, 1, 1), (kept.bytes, kept.order.len(), kept.snapshots.len()));
    }
}
