//! Stretches of consecutive blocks of one prompt.
//!
//! A hash stands for its whole prefix: if two blocks of a stretch are in a prompt, so is everything between them. A
//! look-up therefore asks for the last block of a stretch and skips the rest. A stretch has up to 128 places; each holds
//! a block, or held one that is gone. A place is not filled again as long as a block behind it is there, since another block
//! may follow the same parent. Holders are kept for runs of places with the same set, so a stretch costs 32 bytes where they do not change.

use crate::sets::{EMPTY, SetId};

/// Most places of a segment.
pub(crate) const SEGMENT_BLOCKS: u32 = 128;
const OFFSET_BITS: u32 = SEGMENT_BLOCKS.trailing_zeros();
/// A place of the table has 31 bits for a segment and the place in it.
const MAX_SEGMENTS: usize = 1 << (31 - OFFSET_BITS);
const IN_SEGMENT: u32 = 1 << 31;

/// Stands for a set that is yet to be made.
pub(crate) const NEW: SetId = SetId::MAX;

/// Where the holders of a block are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seat {
    /// The block stands alone.
    Lone(SetId),
    /// It has a place in a segment.
    In {
        /// Which segment.
        segment: u32,
        /// Which place.
        offset: u32,
    },
}

impl Seat {
    /// As a value of the table; never 0 for a set that is not the empty one.
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Lone(set) => set,
            Self::In { segment, offset } => IN_SEGMENT | segment << OFFSET_BITS | offset,
        }
    }

    pub(crate) fn decode(value: u32) -> Self {
        if value & IN_SEGMENT == 0 {
            Self::Lone(value)
        } else {
            Self::In { segment: (value & !IN_SEGMENT) >> OFFSET_BITS, offset: value & (SEGMENT_BLOCKS - 1) }
        }
    }
}

/// From `start` up to the next piece, every block has this set. What a piece says of places without a block means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u32,
    set: SetId,
}

#[derive(Debug)]
enum Pieces {
    One(SetId),
    /// By start; the first starts at 0.
    Many(Box<[Piece]>),
}

#[derive(Debug)]
pub(crate) struct Segment {
    /// A bit for each place that has a block.
    present: u128,
    pieces: Pieces,
}

impl Segment {
    /// Places that have or had a block; the next block goes behind them.
    fn len(&self) -> u32 {
        u128::BITS - self.present.leading_zeros()
    }

    /// How many blocks stand without a gap from a place on.
    pub(crate) fn run_from(&self, offset: u32) -> u32 {
        (self.present >> offset).trailing_ones()
    }

    pub(crate) fn has(&self, offset: u32) -> bool {
        self.present >> offset & 1 != 0
    }

    fn set_at(&self, offset: u32) -> SetId {
        match &self.pieces {
            Pieces::One(set) => *set,
            Pieces::Many(pieces) => {
                let after = pieces.partition_point(|piece| piece.start <= offset);
                pieces[after.max(1) - 1].set
            }
        }
    }

    /// The sets of some places: where each begins, counted from the first, and which.
    pub(crate) fn sets_in(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, SetId)> {
        let (one, many): (_, &[Piece]) = match &self.pieces {
            Pieces::One(set) => (Some((0, *set)), &[]),
            Pieces::Many(pieces) => {
                let after = pieces.partition_point(|piece| piece.start <= from);
                (None, &pieces[after.max(1) - 1..])
            }
        };
        let many = many.iter().take_while(move |piece| piece.start < to);
        one.into_iter().chain(many.map(move |piece| (piece.start.saturating_sub(from), piece.set)))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Segments {
    entries: Vec<Segment>,
    free: Vec<u32>,
    piece_bytes: u64,
    scratch: Vec<Piece>,
}

impl Segments {
    pub(crate) fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<Segment>() + self.free.capacity() * size_of::<u32>()) as u64
            + self.piece_bytes
    }

    pub(crate) fn get(&self, segment: u32) -> Option<&Segment> {
        self.entries.get(segment as usize)
    }

    pub(crate) fn set_of(&self, seat: Seat) -> SetId {
        match seat {
            Seat::Lone(set) => set,
            Seat::In { segment, offset } => self.entries[segment as usize].set_at(offset),
        }
    }

    /// The place behind the last one of a segment; none when the block at hand is not the last or there is no more room.
    pub(crate) fn next_place(&self, segment: u32, offset: u32) -> Option<u32> {
        let next = offset + 1;
        (self.entries[segment as usize].len() == next && next < SEGMENT_BLOCKS).then_some(next)
    }

    /// Most bytes that [`Segments::open`] allocates, old and new places together; none when there may be no more.
    pub(crate) fn open_bytes(&self) -> Option<u64> {
        if !self.free.is_empty() || self.entries.len() < self.entries.capacity() {
            return Some(0);
        }
        let places = (self.entries.capacity() * 2).max(4);
        (places <= MAX_SEGMENTS).then(|| (places * (size_of::<Segment>() + size_of::<u32>())) as u64)
    }

    /// A segment with one block.
    pub(crate) fn open(&mut self, set: SetId) -> u32 {
        let segment = Segment { present: 1, pieces: Pieces::One(set) };
        match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = segment;
                number
            }
            None => {
                self.entries.push(segment);
                // Freeing a segment never allocates.
                self.free.reserve_exact(self.entries.capacity());
                (self.entries.len() - 1) as u32
            }
        }
    }

    /// Prepares giving a place a set and says how many bytes [`Segments::commit`] allocates for that. The set may be
    /// [`NEW`], which is unlike all others.
    pub(crate) fn plan(&mut self, segment: u32, offset: u32, set: SetId) -> u64 {
        let Segment { present, pieces } = &self.entries[segment as usize];
        if matches!(pieces, Pieces::One(of_all) if *of_all == set) {
            self.scratch.clear();
            self.scratch.push(Piece { start: 0, set });
            return 0;
        }
        let used = present | 1 << offset;
        let one;
        let pieces: &[Piece] = match pieces {
            Pieces::One(of_all) => {
                one = [Piece { start: 0, set: *of_all }];
                &one
            }
            Pieces::Many(pieces) => pieces,
        };
        let scratch = &mut self.scratch;
        scratch.clear();
        let mut push = |start: u32, end: u32, set: SetId| {
            let is_used = start < end && (used >> start) & mask_of(end - start) != 0;
            if is_used && scratch.last().is_none_or(|last: &Piece| last.set != set) {
                let start = if scratch.is_empty() { 0 } else { start };
                scratch.push(Piece { start, set });
            }
        };
        for (position, piece) in pieces.iter().enumerate() {
            let end = pieces.get(position + 1).map_or(SEGMENT_BLOCKS, |next| next.start);
            if (piece.start..end).contains(&offset) {
                push(piece.start, offset, piece.set);
                push(offset, offset + 1, set);
                push(offset + 1, end, piece.set);
            } else {
                push(piece.start, end, piece.set);
            }
        }
        match &self.entries[segment as usize].pieces {
            Pieces::Many(pieces) if pieces.len() == self.scratch.len() => 0,
            _ if self.scratch.len() == 1 => 0,
            _ => piece_bytes(self.scratch.len()),
        }
    }

    /// Does what was planned last; `set` is the one that was meant by [`NEW`].
    pub(crate) fn commit(&mut self, segment: u32, offset: u32, set: SetId) {
        for piece in self.scratch.iter_mut().filter(|piece| piece.set == NEW) {
            piece.set = set;
        }
        let Segment { present, pieces } = &mut self.entries[segment as usize];
        *present |= 1 << offset;
        match (&mut *pieces, self.scratch.as_slice()) {
            (Pieces::Many(pieces), new) if pieces.len() == new.len() => pieces.copy_from_slice(new),
            (pieces, new) => {
                if let Pieces::Many(old) = &pieces {
                    self.piece_bytes -= piece_bytes(old.len());
                }
                *pieces = match new {
                    [] => return,
                    [all] => Pieces::One(all.set),
                    many => {
                        self.piece_bytes += piece_bytes(many.len());
                        Pieces::Many(many.into())
                    }
                };
            }
        }
    }

    /// Takes the block of a place out; allocates nothing.
    pub(crate) fn vacate(&mut self, segment: u32, offset: u32) {
        let Segment { present, pieces } = &mut self.entries[segment as usize];
        *present &= !(1 << offset);
        if *present == 0 {
            if let Pieces::Many(old) = std::mem::replace(pieces, Pieces::One(EMPTY)) {
                self.piece_bytes -= piece_bytes(old.len());
            }
            self.free.push(segment);
        }
    }
}

fn mask_of(places: u32) -> u128 {
    if places >= u128::BITS { u128::MAX } else { (1 << places) - 1 }
}

/// Bytes of a segment's pieces with the allocator's rounding.
fn piece_bytes(pieces: usize) -> u64 {
    (pieces * size_of::<Piece>()).next_multiple_of(16) as u64 + 16
}
