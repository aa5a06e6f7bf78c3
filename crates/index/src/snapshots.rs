//! Snapshots, which take the place of all that was known of a source.

use kvist_blocks::{Incarnation, Run, SourceKey, Tier};

use crate::{
    index::Index,
    source::{SlotUse, Source},
};

/// Blocks of a snapshot that are taken in under one hold of the lock, so that batches go on between.
const SNAPSHOT_BLOCKS_AT_ONCE: usize = 512;

/// Names a snapshot that is being taken in; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub(crate) u64);

/// A snapshot that is being taken in.
#[derive(Debug)]
pub(crate) struct Filling {
    pub(crate) key: SourceKey,
    pub(crate) incarnation: Incarnation,
    next_sequence: u64,
    complete: bool,
    pub(crate) slot: u32,
}

impl Index {
    /// Begins to take in a snapshot, beside what is known of the source, which stays visible until the snapshot is
    /// finished. An unfinished snapshot of the same source is abandoned.
    ///
    /// None when it is of a closed or older incarnation, or of a position before the source's own.
    pub fn begin_snapshot(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        next_sequence: u64,
        complete: bool,
    ) -> Option<SnapshotId> {
        let inner = &mut *self.write();
        if !inner.core.is_welcome(key, incarnation, next_sequence) {
            return None;
        }
        inner.abandon(|filling| filling.key == *key);
        let slot = inner.core.take_slot(SlotUse::Filling);
        let id = SnapshotId(inner.next_snapshot);
        inner.next_snapshot += 1;
        inner.fillings.insert(id, Filling { key: key.clone(), incarnation, next_sequence, complete, slot });
        Some(id)
    }

    /// Takes in a part of a snapshot; false when it was abandoned or finished. Runs may come in any order, but what comes
    /// behind its parent costs less memory and is found faster.
    pub fn snapshot_chunk(&self, id: SnapshotId, tier: Tier, runs: &[Run]) -> bool {
        let mut runs = runs.iter();
        let mut next = runs.next().map(|run| (run, 0));
        while let Some((run, start)) = next {
            let mut room = SNAPSHOT_BLOCKS_AT_ONCE;
            let inner = &mut *self.write();
            let Some(slot) = inner.fillings.get(&id).map(|filling| filling.slot) else { return false };
            let mut at = Some((run, start));
            while let Some((run, start)) = at
                && room > 0
            {
                let end = run.hashes.len().min(start + room);
                let parent = start.checked_sub(1).map_or(run.parent, |before| run.hashes.get(before).copied());
                let part = &run.hashes[start..end];
                inner.core.store_run(slot, tier, parent, part);
                room = room.saturating_sub(part.len().max(1));
                at = if end < run.hashes.len() { Some((run, end)) } else { runs.next().map(|run| (run, 0)) };
            }
            next = at;
        }
        true
    }

    /// Puts a snapshot in the place of all that was known of its source, at once.
    ///
    /// False when it was abandoned, or when the source was closed or has moved past it in the meantime.
    pub fn finish_snapshot(&self, id: SnapshotId, now_unix_nanos: u64) -> bool {
        let inner = &mut *self.write();
        let Some(filling) = inner.fillings.remove(&id) else { return false };
        let Filling { key, incarnation, next_sequence, complete, slot } = filling;
        if !inner.core.is_welcome(&key, incarnation, next_sequence) {
            inner.core.bury(slot);
            return false;
        }
        inner.core.tie_all(slot);
        let mut source = Source::new(slot, incarnation);
        source.next_sequence = next_sequence;
        source.complete = complete;
        source.snapshots = 1;
        source.heard_at_unix_nanos = now_unix_nanos;
        inner.core.open_with(&key, slot, source);
        true
    }

    /// Drops a snapshot that will not be finished.
    pub fn abandon_snapshot(&self, id: SnapshotId) {
        let inner = &mut *self.write();
        if let Some(filling) = inner.fillings.remove(&id) {
            inner.core.bury(filling.slot);
        }
    }

    /// Replaces all that is known of a source by a snapshot, at once.
    ///
    /// False when the snapshot is of a closed or older incarnation, or of a position before the source's own.
    pub fn apply_snapshot(
        &self,
        key: &SourceKey,
        incarnation: Incarnation,
        next_sequence: u64,
        runs: &[(Tier, Vec<Run>)],
        complete: bool,
        now_unix_nanos: u64,
    ) -> bool {
        let Some(id) = self.begin_snapshot(key, incarnation, next_sequence, complete) else { return false };
        runs.iter().all(|(tier, runs)| self.snapshot_chunk(id, *tier, runs)) && self.finish_snapshot(id, now_unix_nanos)
    }
}
