//! A whole index as a stream of snapshots, for many readers that would otherwise ask every worker.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use kvist_blocks::SourceKey;
use kvist_index::{Index, SourceState};
use kvist_proto::{
    engine::v1::SnapshotChunk,
    kvmaster::v1::{BootstrapDone, BootstrapRequest, BootstrapResponse, bootstrap_response::Part},
};
use tokio::time::timeout;
use tonic::transport::ClientTlsConfig;

use crate::{
    EventsError,
    convert::{self, collect_chunk, source_from},
    tracker::{History, HistorySnapshot},
    worker_channel,
};

/// Longest time between two parts of an answer, and until the first.
const PART_TIME_LIMIT: Duration = Duration::from_secs(2);

/// Snapshots of the named workers' sources, or of all when none is named, and the end mark.
///
/// Only sources that are EXACT or PARTIAL are sent: what a byte budget has cut, or what is behind, is no snapshot of
/// anything, and its readers ask the worker.
#[must_use]
pub fn bootstrap_chunks(index: &Index, worker_uids: &[String]) -> Vec<BootstrapResponse> {
    let wanted: HashSet<&str> = worker_uids.iter().map(String::as_str).collect();
    let mut parts = Vec::new();
    let mut sources = 0;
    for status in index.sources() {
        if !wanted.is_empty() && !wanted.contains(status.source.worker.as_str()) {
            continue;
        }
        // The state is read again together with the blocks: it may have changed since the list was made.
        let Some((status, blocks)) = index.snapshot_of(&status.source) else { continue };
        if !matches!(status.state, SourceState::Exact | SourceState::Partial) {
            continue;
        }
        let source = convert::source_to(&status.source, status.incarnation);
        let complete = status.state == SourceState::Exact;
        let chunks = convert::snapshot_to(&source, status.next_sequence, &blocks, complete);
        parts.extend(chunks.into_iter().map(|chunk| BootstrapResponse { part: Some(Part::Snapshot(chunk)) }));
        sources += 1;
    }
    parts.push(BootstrapResponse { part: Some(Part::Done(BootstrapDone { sources })) });
    parts
}

/// The snapshots of the named workers' sources that a KV master has. A source that it has no snapshot of is missing.
///
/// # Errors
/// It did not answer in time, broke off, or what it says cannot be understood: nothing of it is used.
pub(crate) async fn fetch(
    address: &str,
    worker_uids: Vec<String>,
    tls: Option<&ClientTlsConfig>,
) -> Result<HashMap<SourceKey, History>, EventsError> {
    let failed = |status: tonic::Status| EventsError::KvMaster(status.code().to_string());
    let late = |_| EventsError::KvMaster("it fell silent".to_owned());
    let mut client = worker_channel::kvmaster_client(address, tls)?;
    let opened = timeout(PART_TIME_LIMIT, client.bootstrap(BootstrapRequest { worker_uids })).await.map_err(late)?;
    let mut parts = opened.map_err(failed)?.into_inner();
    let mut collected = Collected::default();
    while let Some(message) = timeout(PART_TIME_LIMIT, parts.message()).await.map_err(late)?.map_err(failed)? {
        match message.part.ok_or(EventsError::Malformed("unknown part"))? {
            Part::Snapshot(chunk) => collected.take(&chunk)?,
            Part::Done(_) => return collected.finish(),
        }
    }
    Err(EventsError::KvMaster("it broke off".to_owned()))
}

/// Snapshots as their chunks come, one source after the other.
#[derive(Default)]
struct Collected {
    histories: HashMap<SourceKey, History>,
    open: Option<SourceKey>,
}

impl Collected {
    fn take(&mut self, chunk: &SnapshotChunk) -> Result<(), EventsError> {
        let (key, incarnation) = source_from(chunk.source.as_ref())?;
        if chunk.first {
            if self.open.is_some() {
                return Err(EventsError::Malformed("snapshot without an end"));
            }
            let snapshot =
                HistorySnapshot { next_sequence: chunk.next_sequence, blocks: Vec::new(), complete: chunk.complete };
            let history = History { incarnation, snapshot: Some(snapshot), batches: Vec::new(), digest: None };
            self.histories.insert(key.clone(), history);
            self.open = Some(key.clone());
        }
        if self.open.as_ref() != Some(&key) {
            return Err(EventsError::Malformed("snapshot without a beginning"));
        }
        let snapshot = self.histories.get_mut(&key).and_then(|history| history.snapshot.as_mut());
        let snapshot = snapshot.filter(|snapshot| snapshot.next_sequence == chunk.next_sequence);
        let snapshot = snapshot.ok_or(EventsError::Malformed("chunks of two snapshots"))?;
        collect_chunk(chunk, &mut snapshot.blocks)?;
        if chunk.last {
            self.open = None;
        }
        Ok(())
    }

    fn finish(self) -> Result<HashMap<SourceKey, History>, EventsError> {
        match self.open {
            Some(_) => Err(EventsError::Malformed("snapshot without an end")),
            None => Ok(self.histories),
        }
    }
}
