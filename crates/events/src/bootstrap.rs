//! A whole index as a stream of snapshots, for many readers that would otherwise ask every worker.

use std::collections::HashSet;

use kvist_index::{Index, SourceState};
use kvist_proto::kvmaster::v1::{BootstrapDone, BootstrapResponse, bootstrap_response::Part};

use crate::convert;

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
