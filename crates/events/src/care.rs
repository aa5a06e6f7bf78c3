//! What an index needs beside what it is told.

use std::{sync::Arc, time::Duration};

use kvist_index::Index;
use tokio::time::MissedTickBehavior;

/// How much time passes between two parts of a scrub.
const SCRUB_INTERVAL: Duration = Duration::from_secs(1);

/// Parts of a scrub between two sweeps of what closed sources left.
const PARTS_A_SWEEP: u64 = 2;

/// Recomputes an index's digests from its contents, part by part, and sweeps out what belongs to nobody. Runs until it is
/// dropped; one is enough for an index.
pub async fn care_for_index(index: Arc<Index>) {
    let mut tick = tokio::time::interval(SCRUB_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for part in 0u64.. {
        tick.tick().await;
        let index = Arc::clone(&index);
        // Takes up to milliseconds, in which a thread of the runtime has other things to do.
        let care = tokio::task::spawn_blocking(move || {
            let diverged = index.scrub(SCRUB_INTERVAL);
            if part.is_multiple_of(PARTS_A_SWEEP) {
                index.collect_garbage();
            }
            diverged
        });
        for found in care.await.unwrap_or_default() {
            tracing::error!(
                worker = %found.source.worker,
                rank = found.source.rank.0,
                incarnation = found.incarnation.0,
                blocks = found.blocks,
                "index_source_diverged"
            );
        }
    }
}
