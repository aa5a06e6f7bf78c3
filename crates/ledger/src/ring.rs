//! The last batches, found by sequence.

use std::{collections::VecDeque, sync::Arc};

use kvist_blocks::Batch;

/// The wanted batches are older than the ring; take a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLost {
    /// Sequence of the oldest batch that is still there.
    pub oldest_sequence: u64,
}

/// Batches of consecutive sequences, bounded in number.
#[derive(Debug)]
pub(crate) struct Ring {
    batches: VecDeque<Arc<Batch>>,
    capacity: usize,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { batches: VecDeque::with_capacity(capacity.min(1024)), capacity: capacity.max(1) }
    }

    pub(crate) fn push(&mut self, batch: Arc<Batch>) {
        if self.batches.len() == self.capacity {
            self.batches.pop_front();
        }
        self.batches.push_back(batch);
    }

    /// Batches from `first` on; `next` is the sequence the next batch will carry.
    pub(crate) fn from(&self, first: u64, next: u64) -> Result<Vec<Arc<Batch>>, RangeLost> {
        let oldest_sequence = next - self.batches.len() as u64;
        if first > next || first < oldest_sequence {
            return Err(RangeLost { oldest_sequence });
        }
        let skip = usize::try_from(first - oldest_sequence).unwrap_or(usize::MAX);
        Ok(self.batches.iter().skip(skip).cloned().collect())
    }
}
