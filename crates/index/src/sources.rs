//! The sources in order.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

use hashbrown::HashMap;
use kvist_blocks::{Incarnation, SourceKey};

use crate::{
    apart::Apart,
    source::{Source, SourceState},
};

/// The words of the cell change.
const CHANGING: u64 = 1;
/// Another list has taken the place of the one with this cell; always with [`CHANGING`].
const RETIRED: u64 = 1 << 1;
/// A batch is being applied; the cell says what was true before it.
const APPLYING: u64 = 1 << 6;
const STALE: u64 = 1 << 2;
const CATCHING_UP: u64 = 1 << 3;
const INCOMPLETE: u64 = 1 << 4;
const TRUNCATED: u64 = 1 << 5;
const SLOT_SHIFT: u32 = 8;
/// A number of a slot that is above all there are; all bits of one are set.
const NO_SLOT: u64 = (1 << 24) - 1;
const COUNT_SHIFT: u32 = 32;

/// What look-ups have to know of a source.
#[derive(Debug, Default)]
pub(crate) struct Cell {
    /// Flags, the slot, and a number that grows with each change.
    state: AtomicU64,
    incarnation: AtomicU64,
    next_sequence: AtomicU64,
}

/// A source as a look-up found it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    state: u64,
    pub(crate) incarnation: Incarnation,
    pub(crate) next_sequence: u64,
}

impl Seen {
    /// A source of which nothing is known: before its first batch it holds nothing, which is true of each.
    pub(crate) fn unknown(incarnation: Incarnation) -> Self {
        Self { state: CATCHING_UP | NO_SLOT << SLOT_SHIFT, incarnation, next_sequence: 0 }
    }

    /// The slot that its blocks carry, or a number that is none.
    pub(crate) fn slot(&self) -> u32 {
        (self.state >> SLOT_SHIFT & NO_SLOT) as u32
    }

    pub(crate) fn state(&self) -> SourceState {
        if self.state & (STALE | CATCHING_UP | INCOMPLETE | TRUNCATED) == 0 {
            SourceState::Exact
        } else if self.state & STALE != 0 {
            SourceState::Stale
        } else if self.state & CATCHING_UP != 0 {
            SourceState::CatchingUp
        } else if self.state & INCOMPLETE != 0 {
            SourceState::Partial
        } else {
            SourceState::Truncated
        }
    }
}

/// Why a cell could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// Its source changes at this moment.
    Busy(Incarnation),
    /// There is a newer list.
    Retired(Incarnation),
}

impl Cell {
    /// What the source says of itself to who has walked through states up to a version. A batch that is being applied does not
    /// matter as long as the walk has met nothing that it has changed: what the walk found was true before the batch.
    #[inline]
    pub(crate) fn read(&self, newest_met: u64, before_batch: &AtomicU64) -> Result<Seen, Unread> {
        let before = self.state.load(Ordering::Acquire);
        let incarnation = Incarnation(self.incarnation.load(Ordering::Relaxed));
        let next_sequence = self.next_sequence.load(Ordering::Relaxed);
        if before & RETIRED != 0 {
            return Err(Unread::Retired(incarnation));
        }
        // If the batch is another one by then, the state is too.
        let is_touched = before & APPLYING != 0 && newest_met > before_batch.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if before & CHANGING != 0 || is_touched || self.state.load(Ordering::Relaxed) != before {
            return Err(Unread::Busy(incarnation));
        }
        Ok(Seen { state: before, incarnation, next_sequence })
    }

    /// A batch is being applied from here on.
    fn begin(&self) {
        // Who sees this sees all that came before, and who sees a change of the batch sees this.
        self.state.store(self.state.load(Ordering::Relaxed) | APPLYING, Ordering::Release);
        fence(Ordering::Release);
    }

    /// Shows a source as it is now.
    fn write(&self, source: &Source, is_truncated: bool) {
        let old = self.state.load(Ordering::Relaxed);
        self.state.store(old | CHANGING, Ordering::Relaxed);
        fence(Ordering::Release);
        self.incarnation.store(source.incarnation.0, Ordering::Relaxed);
        self.next_sequence.store(source.next_sequence, Ordering::Relaxed);
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let count = (old >> COUNT_SHIFT).wrapping_add(1) << COUNT_SHIFT;
        let state = count
            | u64::from(source.slot) << SLOT_SHIFT
            | flag(source.stale, STALE)
            | flag(source.catching_up, CATCHING_UP)
            | flag(!source.complete, INCOMPLETE)
            | flag(is_truncated, TRUNCATED);
        self.state.store(state, Ordering::Release);
    }
}

/// The sources that look-ups answer about, by worker and rank.
#[derive(Debug)]
pub(crate) struct SourceList {
    keys: Arc<[SourceKey]>,
    /// By position; more than there are keys.
    cells: Box<[Cell]>,
    /// The newest version of anything before the batch that is being applied.
    before_batch: Apart<AtomicU64>,
}

impl SourceList {
    pub(crate) fn keys(&self) -> &Arc<[SourceKey]> {
        &self.keys
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn cells(&self) -> &[Cell] {
        &self.cells[..self.keys.len()]
    }

    /// The newest version of anything before the batch that is being applied.
    pub(crate) fn before_batch(&self) -> &AtomicU64 {
        &self.before_batch
    }
}

/// The writer's side. Keys are shared with the answers of look-ups, which copy none of them; a new source pays for that
/// with a new list.
#[derive(Debug)]
pub(crate) struct Sources {
    list: Arc<SourceList>,
    sources: Vec<Source>,
    positions: HashMap<SourceKey, usize>,
    /// The one whose batch is being applied.
    applying: Option<usize>,
}

impl Default for Sources {
    fn default() -> Self {
        let list = SourceList { keys: Arc::new([]), cells: Box::default(), before_batch: Apart::default() };
        Self { list: Arc::new(list), sources: Vec::new(), positions: HashMap::new(), applying: None }
    }
}

impl Sources {
    pub(crate) fn list(&self) -> &Arc<SourceList> {
        &self.list
    }

    /// Where a source is, until one is added or goes.
    pub(crate) fn position(&self, key: &SourceKey) -> Option<usize> {
        self.positions.get(key).copied()
    }

    pub(crate) fn at(&mut self, position: Option<usize>) -> Option<&mut Source> {
        self.sources.get_mut(position?)
    }

    pub(crate) fn get(&self, key: &SourceKey) -> Option<&Source> {
        self.sources.get(self.position(key)?)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&SourceKey, &Source)> {
        self.list.keys.iter().zip(&self.sources)
    }

    /// Look-ups see a source as it was before this until [`Sources::end`]. No version is newer yet than the one that is given.
    pub(crate) fn begin(&mut self, position: usize, newest: u64) {
        // Not before the state that the last batch has left.
        fence(Ordering::Release);
        self.list.before_batch.store(newest, Ordering::Relaxed);
        self.list.cells[position].begin();
        self.applying = Some(position);
    }

    /// Shows a source as it is now.
    pub(crate) fn end(&mut self, position: usize, is_truncated: bool) {
        self.applying = None;
        self.show(position, is_truncated);
    }

    /// Shows a source as it is now, or when its batch is applied.
    pub(crate) fn show(&self, position: usize, is_truncated: bool) {
        if self.applying != Some(position) {
            self.list.cells[position].write(&self.sources[position], is_truncated);
        }
    }

    /// Adds a source that is not there. The list before it has to be retired when this one is published.
    pub(crate) fn insert(&mut self, key: &SourceKey, source: Source) -> Arc<SourceList> {
        let position = self.list.keys.partition_point(|other| other < key);
        self.sources.insert(position, source);
        let (before, after) = self.list.keys.split_at(position);
        let keys = before.iter().chain([key]).chain(after).cloned().collect();
        self.relist(keys)
    }

    /// Drops sources; the list before it has to be retired when this one is published.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&SourceKey, &Source) -> bool) -> Option<Arc<SourceList>> {
        let before = self.sources.len();
        let mut keys = self.list.keys.iter();
        let mut kept = Vec::with_capacity(before);
        self.sources.retain(|source| {
            let Some(key) = keys.next() else { return false };
            let stay = stays(key, source);
            if stay {
                kept.push(key.clone());
            }
            stay
        });
        (kept.len() != before).then(|| self.relist(kept.into()))
    }

    /// Says that a list is no longer the one: who reads it has to look for the new one.
    pub(crate) fn retire(list: &SourceList) {
        list.cells.iter().for_each(|cell| cell.state.store(CHANGING | RETIRED, Ordering::Release));
    }

    /// The cells of the new list say nothing yet.
    fn relist(&mut self, keys: Arc<[SourceKey]>) -> Arc<SourceList> {
        // Of few sizes, so that an allocator can use again what was a list before.
        let cell = |_| Cell { state: AtomicU64::new(CHANGING), ..Cell::default() };
        let cells = (0..keys.len().next_power_of_two()).map(cell).collect();
        self.positions.clear();
        self.positions.extend(keys.iter().cloned().zip(0..));
        std::mem::replace(&mut self.list, Arc::new(SourceList { keys, cells, before_batch: Apart::default() }))
    }
}
