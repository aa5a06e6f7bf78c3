//! The sources in order.

use std::sync::Arc;

use kvist_blocks::{Rank, SourceKey, WorkerUid};

use crate::source::{Overlap, Source};

/// Sources by worker and rank. Their keys are shared with the answers of look-ups, which copy none of them; a new source
/// pays for that with a new list.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    keys: Arc<[SourceKey]>,
    sources: Vec<Source>,
}

impl Sources {
    /// Where a source is, until one is added or goes.
    pub(crate) fn position(&self, key: &SourceKey) -> Option<usize> {
        self.keys.binary_search(key).ok()
    }

    pub(crate) fn at(&mut self, position: Option<usize>) -> Option<&mut Source> {
        self.sources.get_mut(position?)
    }

    pub(crate) fn get(&self, key: &SourceKey) -> Option<&Source> {
        self.sources.get(self.position(key)?)
    }

    pub(crate) fn get_mut(&mut self, key: &SourceKey) -> Option<&mut Source> {
        self.at(self.position(key))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&SourceKey, &Source)> {
        self.keys.iter().zip(&self.sources)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&SourceKey, &mut Source)> {
        self.keys.iter().zip(&mut self.sources)
    }

    /// Puts a source in the place of the one that has its key, if there is one.
    pub(crate) fn insert(&mut self, key: &SourceKey, source: Source) {
        match self.keys.binary_search(key) {
            Ok(position) => self.sources[position] = source,
            Err(position) => {
                self.sources.insert(position, source);
                let (before, after) = self.keys.split_at(position);
                self.keys = before.iter().chain([key]).chain(after).cloned().collect();
            }
        }
    }

    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&SourceKey, &Source) -> bool) {
        let before = self.sources.len();
        let mut keys = self.keys.iter();
        let mut kept = Vec::with_capacity(before);
        self.sources.retain(|source| {
            let Some(key) = keys.next() else { return false };
            let stay = stays(key, source);
            if stay {
                kept.push(key.clone());
            }
            stay
        });
        if kept.len() != before {
            self.keys = kept.into();
        }
    }

    pub(crate) fn overlaps(&self, overlap: impl FnMut(&Source) -> Overlap) -> Overlaps {
        Overlaps { keys: Arc::clone(&self.keys), overlaps: self.sources.iter().map(overlap).collect() }
    }
}

/// What each source holds of a prompt.
#[derive(Clone, Debug)]
pub struct Overlaps {
    keys: Arc<[SourceKey]>,
    overlaps: Vec<Overlap>,
}

impl Overlaps {
    /// All sources, by worker and rank.
    pub fn iter(&self) -> impl Iterator<Item = (&SourceKey, &Overlap)> {
        self.keys.iter().zip(&self.overlaps)
    }

    /// One source.
    #[must_use]
    pub fn get(&self, worker: &WorkerUid, rank: Rank) -> Option<&Overlap> {
        let position = self.keys.binary_search_by(|key| (&key.worker, key.rank).cmp(&(worker, rank))).ok()?;
        self.overlaps.get(position)
    }
}
