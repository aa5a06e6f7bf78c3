//! Draining: nothing new, what runs may end, the rest is ended.

use std::{sync::Arc, time::Duration};

use kvist_proto::engine::v1::{AbortReason, DrainResponse};
use kvist_telemetry::{now_unix_nanos, timestamp};

use crate::worker::Worker;

/// How long an engine may take to end an aborted request.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// Drains. May be called again; each call waits for itself.
pub(crate) async fn drain(worker: &Arc<Worker>, limit: Duration) -> DrainResponse {
    worker.begin_drain();
    let mut running = worker.watch_running();
    let before = *running.borrow_and_update();
    let all_ended = async |running: &mut tokio::sync::watch::Receiver<usize>, limit| {
        // The sender lives as long as the worker.
        let _ = tokio::time::timeout(limit, running.wait_for(|count| *count == 0)).await;
    };
    all_ended(&mut running, limit).await;
    let rest = worker.running_ids();
    for request_id in &rest {
        worker.abort_request(request_id, AbortReason::Cancelled);
    }
    if !rest.is_empty() {
        all_ended(&mut running, ABORT_LIMIT).await;
    }
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    DrainResponse {
        finished_requests: number(before.saturating_sub(rest.len())),
        aborted_requests: number(rest.len()),
        drained_at: Some(timestamp(now_unix_nanos())),
    }
}
