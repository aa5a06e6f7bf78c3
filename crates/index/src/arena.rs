//! Memory in lines of eight words, which readers may look at while it changes.
//!
//! All of it is made of atomic words, so a reader that comes too late reads nonsense and never anything that is not
//! there; what it read counts only if the version of the node it belongs to is the same afterwards. Chunks are shared
//! with the readers that still know them, and go back to the allocator when the last of these is done.
//!
//! Within a chunk a buddy allocator gives out powers of two lines. Its books are the writer's own.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Words of a line, which is what a processor's cache takes at once.
pub(crate) const LINE_WORDS: usize = 8;
const LINE_BYTES: u64 = 64;
/// Stands for no line.
pub(crate) const NO_LINE: u32 = u32::MAX;
/// Lines of the smallest chunk are a power of two below this.
const ORDERS: usize = 24;
/// Word of a free line that links it: the first word of a freed record keeps its version.
const LINK: usize = 1;
/// A line of the books that begins nothing.
const INSIDE: u8 = 0;
const FREE: u8 = 0x40;
const TAKEN: u8 = 0x80;

/// Lines that lie beside each other.
///
/// Of a size that is a power of two, so that a usual allocator adds nothing and a line of ours is one of the processor's.
#[derive(Debug)]
pub(crate) struct Chunk {
    words: Box<[AtomicU64]>,
}

impl Chunk {
    fn new(lines: usize) -> Self {
        Self { words: std::iter::repeat_with(AtomicU64::default).take(lines * LINE_WORDS).collect() }
    }
}

/// The chunks that there are, by number.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    shift: u32,
    chunks: Vec<Option<Arc<Chunk>>>,
}

impl Lines {
    /// Some words from the beginning of a line on; none of them when they are not all there.
    pub(crate) fn words(&self, line: u32, count: usize) -> &[AtomicU64] {
        let Some(Some(chunk)) = self.chunks.get((line >> self.shift) as usize) else { return &[] };
        let start = (line & ((1 << self.shift) - 1)) as usize * LINE_WORDS;
        chunk.words.get(start..start + count).unwrap_or_default()
    }

    /// One word from the beginning of a line on.
    pub(crate) fn word(&self, line: u32, word: usize) -> Option<&AtomicU64> {
        let chunk = self.chunks.get((line >> self.shift) as usize)?.as_ref()?;
        chunk.words.get((line & ((1 << self.shift) - 1)) as usize * LINE_WORDS + word)
    }

    /// One line.
    pub(crate) fn line(&self, line: u32) -> Option<&[AtomicU64; LINE_WORDS]> {
        self.words(line, LINE_WORDS).first_chunk()
    }

    /// A number above those of all lines.
    pub(crate) fn end(&self) -> u32 {
        (self.chunks.len() as u32) << self.shift
    }
}

/// The writer's side.
#[derive(Debug)]
pub(crate) struct Arena {
    lines: Arc<Lines>,
    /// By chunk, for each line: whether it begins a piece, taken or free, and of which order.
    books: Vec<Box<[u8]>>,
    /// By order: the first free piece.
    free: [u32; ORDERS],
    free_numbers: Vec<u32>,
    /// Chunks of which nothing is taken.
    whole_chunks: u32,
    /// Pieces that are taken.
    taken: u64,
    bytes: u64,
}

impl Arena {
    /// Chunks of so many lines, a power of two.
    pub(crate) fn new(chunk_lines: u32) -> Self {
        let shift = chunk_lines.max(1).ilog2().min(ORDERS as u32 - 1);
        Self {
            lines: Arc::new(Lines { shift, chunks: Vec::new() }),
            books: Vec::new(),
            free: [NO_LINE; ORDERS],
            free_numbers: Vec::new(),
            whole_chunks: 0,
            taken: 0,
            bytes: 0,
        }
    }

    pub(crate) fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Bytes of all chunks and of their books.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pieces that are taken.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Bytes that another chunk takes.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        let lines = 1u64 << self.lines.shift;
        // The entry in the list of chunks, once for the writer and once for readers, and what counts the chunk's readers.
        lines * (LINE_BYTES + 1) + 96
    }

    /// The order of the largest piece.
    pub(crate) fn most_order(&self) -> u32 {
        self.lines.shift
    }

    /// A piece of `1 << order` lines with unknown contents; none when no chunk has room for it.
    pub(crate) fn take(&mut self, order: u32) -> Option<u32> {
        let mut from = (order..=self.lines.shift).find(|from| self.free[*from as usize] != NO_LINE)?;
        let line = self.free[from as usize];
        self.unlink(line, from);
        if from == self.lines.shift {
            self.whole_chunks -= 1;
        }
        while from > order {
            from -= 1;
            self.link(line + (1 << from), from);
        }
        self.set_book(line, TAKEN | order as u8);
        self.taken += 1;
        Some(line)
    }

    /// Adds a chunk.
    pub(crate) fn grow(&mut self, fill: impl Fn(&AtomicU64)) {
        let shift = self.lines.shift;
        let chunk = Arc::new(Chunk::new(1 << shift));
        chunk.words.iter().step_by(LINE_WORDS).for_each(fill);
        let lines = Arc::make_mut(&mut self.lines);
        let books = vec![INSIDE; 1 << shift].into_boxed_slice();
        let number = match self.free_numbers.pop() {
            Some(number) => {
                lines.chunks[number as usize] = Some(chunk);
                self.books[number as usize] = books;
                number
            }
            None => {
                lines.chunks.push(Some(chunk));
                self.books.push(books);
                lines.chunks.len() as u32 - 1
            }
        };
        self.bytes += self.chunk_bytes();
        self.link(number << shift, shift);
        self.whole_chunks += 1;
    }

    /// The piece that lies last, if all are of one order.
    pub(crate) fn last(&self, order: u32) -> Option<u32> {
        let shift = self.lines.shift;
        self.books.iter().enumerate().rev().find_map(|(number, books)| {
            let within = books.iter().step_by(1 << order).rposition(|book| book & TAKEN != 0)? << order;
            Some((number as u32) << shift | within as u32)
        })
    }

    /// Takes a piece back.
    pub(crate) fn give_back(&mut self, line: u32) {
        let Some(mut order) = self.order_of(line) else { return };
        let mut line = line;
        self.taken -= 1;
        self.set_book(line, INSIDE);
        while order < self.lines.shift {
            let buddy = line ^ (1 << order);
            if self.book(buddy) != FREE | order as u8 {
                break;
            }
            self.unlink(buddy, order);
            line = line.min(buddy);
            order += 1;
        }
        self.link(line, order);
        if order == self.lines.shift {
            self.whole_chunks += 1;
        }
    }

    /// Whether a chunk has nothing in it and can be released. One of many is kept, unless all are wanted, since it is
    /// soon needed again.
    pub(crate) fn has_spare(&self, all: bool) -> bool {
        let chunks = self.books.len() - self.free_numbers.len();
        self.whole_chunks > u32::from(!all && chunks >= 16)
    }

    /// Lets go of a chunk that has nothing in it.
    pub(crate) fn release_spare(&mut self) {
        let shift = self.lines.shift;
        let line = self.free[shift as usize];
        if line == NO_LINE {
            return;
        }
        self.unlink(line, shift);
        let number = line >> shift;
        Arc::make_mut(&mut self.lines).chunks[number as usize] = None;
        self.books[number as usize] = Box::default();
        self.free_numbers.push(number);
        self.whole_chunks -= 1;
        self.bytes -= self.chunk_bytes();
    }

    /// The order of the piece that begins at a line; none when none does.
    pub(crate) fn order_of(&self, line: u32) -> Option<u32> {
        let book = self.book(line);
        (book & TAKEN != 0).then_some(u32::from(book & 0x3f))
    }

    fn book(&self, line: u32) -> u8 {
        let (number, within) = ((line >> self.lines.shift) as usize, line & ((1 << self.lines.shift) - 1));
        self.books.get(number).and_then(|books| books.get(within as usize)).copied().unwrap_or(INSIDE)
    }

    fn set_book(&mut self, line: u32, book: u8) {
        let (number, within) = ((line >> self.lines.shift) as usize, line & ((1 << self.lines.shift) - 1));
        if let Some(place) = self.books.get_mut(number).and_then(|books| books.get_mut(within as usize)) {
            *place = book;
        }
    }

    fn link_of(&self, line: u32) -> (u32, u32) {
        let word = self.lines.line(line).map_or(0, |words| words[LINK].load(Relaxed));
        ((word >> 32) as u32, word as u32)
    }

    fn set_link(&self, line: u32, before: u32, after: u32) {
        if let Some(words) = self.lines.line(line) {
            words[LINK].store(u64::from(before) << 32 | u64::from(after), Relaxed);
        }
    }

    fn link(&mut self, line: u32, order: u32) {
        let after = self.free[order as usize];
        self.set_link(line, NO_LINE, after);
        if after != NO_LINE {
            let (_, next) = self.link_of(after);
            self.set_link(after, line, next);
        }
        self.free[order as usize] = line;
        self.set_book(line, FREE | order as u8);
    }

    fn unlink(&mut self, line: u32, order: u32) {
        let (before, after) = self.link_of(line);
        if before == NO_LINE {
            self.free[order as usize] = after;
        } else {
            let (first, _) = self.link_of(before);
            self.set_link(before, first, after);
        }
        if after != NO_LINE {
            let (_, last) = self.link_of(after);
            self.set_link(after, before, last);
        }
        self.set_book(line, INSIDE);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Pieces never overlap, and when all are back, all chunks are whole.
        #[test]
        fn pieces_are_apart_and_come_together_again(steps in prop::collection::vec((any::<bool>(), 0u32..5, any::<usize>()), 0..200)) {
            let mut arena = Arena::new(16);
            let mut taken: BTreeMap<u32, u32> = BTreeMap::new();
            for (take, order, choice) in steps {
                if take {
                    let line = arena.take(order).or_else(|| {
                        arena.grow(|_| {});
                        arena.take(order)
                    });
                    let line = line.unwrap();
                    prop_assert_eq!(8 << order, arena.lines().words(line, 8 << order).len());
                    let before = taken.range(..line).next_back();
                    prop_assert!(before.is_none_or(|(start, order)| start + (1 << order) <= line));
                    prop_assert!(taken.range(line..).next().is_none_or(|(start, _)| line + (1 << order) <= *start));
                    taken.insert(line, order);
                } else if let Some(line) = taken.keys().nth(choice % taken.len().max(1)).copied() {
                    prop_assert_eq!(taken.remove(&line), arena.order_of(line));
                    arena.give_back(line);
                    while arena.has_spare(false) {
                        arena.release_spare();
                    }
                }
            }
            taken.keys().for_each(|line| arena.give_back(*line));
            while arena.has_spare(true) {
                arena.release_spare();
            }
            prop_assert_eq!(0, arena.bytes());
        }
    }
}
