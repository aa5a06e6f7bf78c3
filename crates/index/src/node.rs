//! A node: up to 128 consecutive blocks of one prompt path, in a record of one line.
//!
//! A hash stands for its whole prefix, so a node is found by the hash of its first block and needs no way up. The hashes
//! lie beside each other in prompt order. A block keeps its place as long as any block behind it in the node is held, held or not.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use kvist_blocks::BlockHash;

use crate::{
    arena::{LINE_WORDS, Lines, NO_LINE},
    table::Seat,
};

/// Most blocks of a node.
pub(crate) const NODE_BLOCKS: u32 = 128;
/// Slots from this number on can not be entered.
pub(crate) const MAX_SLOTS: u32 = 1 << 20;
/// Most entries of one kind in a node.
pub(crate) const MAX_ENTRIES: usize = u16::MAX as usize;

// Words of a record.
const VERSION: usize = 0;
const SHAPE: usize = 1;
const PIECES: usize = 2;
const LINKS: usize = 3;
const TOUCHED: usize = 4;
const PARENT: usize = 5;
/// The hash of a node with a single block.
const ONLY_HASH: usize = 6;
const FIRST_MASK: usize = 7;

const HAS_PARENT: u64 = 1 << 60;

/// The line in which a node lies.
pub(crate) type Record = [AtomicU64; LINE_WORDS];

/// What a record says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// Blocks.
    pub(crate) len: u32,
    /// Those that lanes name hold so many leading blocks, and no others.
    pub(crate) full: u32,
    /// Lanes, the first of which is in the record itself.
    pub(crate) lanes: u32,
    /// Holders of another number of leading blocks.
    pub(crate) cuts: u32,
    /// Holders of other blocks.
    pub(crate) holed: u32,
    /// Line of the hashes; none while there is one place.
    pub(crate) hashes: u32,
    /// Line of the holders that are not in the record.
    pub(crate) holders: u32,
    /// The node that followed last; may be wrong.
    pub(crate) next: u32,
    /// Word and tier of the first lane.
    pub(crate) first_key: u16,
    /// Slots of the first lane.
    pub(crate) first_mask: u64,
    /// A bit for each tier in which somebody holds, or held, a block of it.
    pub(crate) tiers: u8,
    /// The block before the first.
    pub(crate) parent: Option<BlockHash>,
}

impl Node {
    /// A node without blocks.
    pub(crate) fn new(parent: Option<BlockHash>) -> Self {
        Self {
            len: 0,
            full: 0,
            lanes: 0,
            cuts: 0,
            holed: 0,
            hashes: NO_LINE,
            holders: NO_LINE,
            next: 0,
            first_key: 0,
            first_mask: 0,
            tiers: 0,
            parent,
        }
    }

    pub(crate) fn load(record: &Record) -> Self {
        let word = |position: usize| record[position].load(Ordering::Relaxed);
        let (shape, pieces, links) = (word(SHAPE), word(PIECES), word(LINKS));
        Self {
            len: (shape as u32 & 0xff).min(NODE_BLOCKS),
            full: ((shape >> 8) as u32 & 0xff).min(NODE_BLOCKS),
            lanes: (shape >> 16) as u32 & 0xffff,
            cuts: (shape >> 32) as u32 & 0xffff,
            holed: (shape >> 48) as u32,
            hashes: pieces as u32,
            holders: (pieces >> 32) as u32,
            next: links as u32,
            first_key: (links >> 32) as u16,
            first_mask: word(FIRST_MASK),
            tiers: (links >> 48) as u8,
            parent: (links & HAS_PARENT != 0).then(|| BlockHash(word(PARENT))),
        }
    }

    /// Writes how many blocks and holders there are, and where; the record must be marked as changing.
    pub(crate) fn store_blocks(&self, record: &Record) {
        let shape = u64::from(self.len)
            | u64::from(self.full) << 8
            | u64::from(self.lanes) << 16
            | u64::from(self.cuts) << 32
            | u64::from(self.holed) << 48;
        record[SHAPE].store(shape, Ordering::Relaxed);
        record[PIECES].store(u64::from(self.hashes) | u64::from(self.holders) << 32, Ordering::Relaxed);
    }

    /// Writes all but the only hash; the record must be marked as changing.
    pub(crate) fn store(&self, record: &Record) {
        self.store_blocks(record);
        let has_parent = if self.parent.is_some() { HAS_PARENT } else { 0 };
        let links =
            u64::from(self.next) | u64::from(self.first_key) << 32 | u64::from(self.tiers & 0xf) << 48 | has_parent;
        record[LINKS].store(links, Ordering::Relaxed);
        record[PARENT].store(self.parent.map_or(0, |hash| hash.0), Ordering::Relaxed);
        record[FIRST_MASK].store(self.first_mask, Ordering::Relaxed);
    }

    /// The hashes in prompt order.
    pub(crate) fn hashes<'a>(&self, record: &'a Record, words: &'a Lines) -> &'a [AtomicU64] {
        if self.hashes == NO_LINE {
            &record[ONLY_HASH..=ONLY_HASH][..(self.len as usize).min(1)]
        } else {
            words.words(self.hashes, self.len as usize)
        }
    }

    /// Words of the piece with the holders that are not in the record.
    pub(crate) fn holder_words(&self) -> usize {
        (self.lanes.saturating_sub(1) * 2 + self.cuts + self.holed * 3) as usize
    }

    /// How many hashes have room.
    pub(crate) fn capacity(&self, order_of: impl FnOnce(u32) -> Option<u32>) -> u32 {
        if self.hashes == NO_LINE { 1 } else { order_of(self.hashes).map_or(0, |order| 8 << order) }
    }
}

/// Order of a piece for so many words.
pub(crate) fn order_for(words: usize) -> u32 {
    words.div_ceil(LINE_WORDS).next_power_of_two().ilog2()
}

/// Copies hashes from one piece to another.
pub(crate) fn copy_hashes(lines: &Lines, from: u32, into: u32, count: usize) {
    let (from, into) = (lines.words(from, count), lines.words(into, count));
    into.iter().zip(from).for_each(|(to, from)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
}

pub(crate) fn set_only_hash(record: &Record, hash: u64) {
    record[ONLY_HASH].store(hash, Ordering::Relaxed);
}

/// The hash at a seat.
pub(crate) fn hash_at(records: &Lines, words: &Lines, seat: Seat) -> Option<BlockHash> {
    read_hash(records, words, seat).ok().flatten()
}

/// Says that what was to be read lies in memory that is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutOfView;

/// The hash at a seat, if the node is as long as that. A reader may not know memory that came after its view.
pub(crate) fn read_hash(records: &Lines, words: &Lines, seat: Seat) -> Result<Option<BlockHash>, OutOfView> {
    let record = records.line(seat.node.wrapping_sub(1)).ok_or(OutOfView)?;
    let len = record[SHAPE].load(Ordering::Relaxed) as u32 & 0xff;
    if seat.offset >= len {
        return Ok(None);
    }
    let hashes = record[PIECES].load(Ordering::Relaxed) as u32;
    let hash = if hashes == NO_LINE { record.get(ONLY_HASH) } else { words.word(hashes, seat.offset as usize) };
    hash.map(|hash| Some(BlockHash(hash.load(Ordering::Relaxed)))).ok_or(OutOfView)
}

/// Odd while the node changes, or is none; never the same for two states of anything.
pub(crate) fn version_of(record: &Record) -> u64 {
    record[VERSION].load(Ordering::Acquire)
}

/// Marks a node as changing.
pub(crate) fn begin_change(record: &Record) {
    record[VERSION].store(record[VERSION].load(Ordering::Relaxed) | 1, Ordering::Relaxed);
    fence(Ordering::Release);
}

/// Ends a change.
pub(crate) fn end_change(record: &Record, version: u64) {
    record[VERSION].store(version, Ordering::Release);
}

/// Says that a word is that of a record without a node.
pub(crate) fn mark_free(version: &AtomicU64) {
    version.store(1, Ordering::Relaxed);
}

/// Notes that a look-up came by.
pub(crate) fn touch(record: &Record) {
    if record[TOUCHED].load(Ordering::Relaxed) == 0 {
        record[TOUCHED].store(1, Ordering::Relaxed);
    }
}

pub(crate) fn is_touched(record: &Record) -> bool {
    record[TOUCHED].load(Ordering::Relaxed) != 0
}

pub(crate) fn set_touched(record: &Record, touched: bool) {
    record[TOUCHED].store(u64::from(touched), Ordering::Relaxed);
}

/// Notes which block comes before a node; readers do not ask.
pub(crate) fn set_parent(record: &Record, hash: BlockHash) {
    record[PARENT].store(hash.0, Ordering::Relaxed);
    record[LINKS].store(record[LINKS].load(Ordering::Relaxed) | HAS_PARENT, Ordering::Relaxed);
}

/// Notes which node comes next. Readers look whether it is the one, so this is no change.
pub(crate) fn set_next(record: &Record, next: u32) {
    let links = record[LINKS].load(Ordering::Relaxed);
    record[LINKS].store(links & !0xffff_ffff | u64::from(next), Ordering::Relaxed);
}
