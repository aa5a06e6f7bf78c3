//! Bytes of the histories that are being received.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

/// Room is given in steps of so many bytes: a semaphore counts to 2^29 on a small machine, and histories are large.
const STEP_BYTES: usize = 1024;

/// Bounds the bytes of all histories that are being received.
///
/// A history may be larger than all the room there is, and nobody knows before its end. So one at a time may take more
/// than there is and comes to its end whatever the others hold; the rest stop reading meanwhile, and flow control stops
/// those who send. At most the limit and one history are in memory, and never do two wait for each other.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    steps: Arc<Semaphore>,
    limit_steps: u32,
    beyond: Arc<Mutex<()>>,
}

/// What one history holds; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    room: Room,
    bytes: usize,
    steps: Option<OwnedSemaphorePermit>,
    beyond: Option<OwnedMutexGuard<()>>,
}

impl Room {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let limit_steps = u32::try_from(limit_bytes / STEP_BYTES).unwrap_or(u32::MAX).min(1 << 28);
        Self { steps: Arc::new(Semaphore::new(limit_steps as usize)), limit_steps, beyond: Arc::default() }
    }

    /// Nothing yet.
    pub(crate) fn hold(&self) -> Held {
        Held { room: self.clone(), bytes: 0, steps: None, beyond: None }
    }
}

impl Held {
    /// Takes room for more bytes; waits while others have it all and one of them is beyond the limit already.
    pub(crate) async fn grow(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        let held = self.steps.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = self.bytes.div_ceil(STEP_BYTES).saturating_sub(held);
        if missing == 0 || self.beyond.is_some() {
            return;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        let more = async {
            // To wait for more than there is at all would hold up those behind.
            if missing <= self.room.limit_steps
                && let Ok(more) = Arc::clone(&self.room.steps).acquire_many_owned(missing).await
            {
                return more;
            }
            std::future::pending().await
        };
        tokio::select! {
            biased;
            more = more => match &mut self.steps {
                Some(steps) => steps.merge(more),
                None => self.steps = Some(more),
            },
            beyond = Arc::clone(&self.room.beyond).lock_owned() => self.beyond = Some(beyond),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use proptest::prelude::*;
    use tokio::{task::JoinSet, time::timeout};

    use super::*;

    const LIMIT_BYTES: usize = 10 * STEP_BYTES;

    /// Receives histories of these chunks, all at once; the most bytes that were held in one moment.
    async fn receive(histories: Vec<Vec<usize>>) -> usize {
        let room = Room::new(LIMIT_BYTES);
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut receiving = JoinSet::new();
        for chunks in histories {
            let (room, now, most) = (room.clone(), Arc::clone(&now), Arc::clone(&most));
            receiving.spawn(async move {
                let mut held = room.hold();
                for chunk in &chunks {
                    held.grow(*chunk).await;
                    most.fetch_max(now.fetch_add(*chunk, Ordering::SeqCst) + chunk, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                }
                now.fetch_sub(chunks.iter().sum(), Ordering::SeqCst);
            });
        }
        timeout(Duration::from_secs(60), receiving.join_all()).await.expect("each comes to its end");
        assert_eq!(room.limit_steps as usize, room.steps.available_permits());
        most.load(Ordering::SeqCst)
    }

    proptest! {
        /// R32.
        #[test]
        fn all_come_to_their_end_and_at_most_one_goes_beyond_the_limit(
            histories in proptest::collection::vec(
                proptest::collection::vec(1_usize..2 * LIMIT_BYTES, 1..6), 1..12,
            )
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let largest = histories.iter().map(|chunks| chunks.iter().sum::<usize>()).max().unwrap_or(0);
            let most = runtime.block_on(receive(histories));
            prop_assert!(most <= LIMIT_BYTES + largest, "{most} bytes at once, the largest has {largest}");
        }
    }
}
