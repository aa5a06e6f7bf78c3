//! Hash of the block with which a node begins to that node, at eight bytes a place.
//!
//! A place has 32 bits of the hash and the seat: which node, and where in it (at its beginning). Whether the block there is the one that is
//! asked for, the node's own hashes tell, so a place need not hold them.
//!
//! Places are in pages, and a directory says which page has the hashes that begin in some way. A page that is full becomes
//! two, two that are nearly empty become one: no entry but theirs moves, and since all pages have one size, what one lets go
//! another takes. Within a page there is linear probing with backward-shift deletion, so there are no tombstones.
//!
//! Readers look at the same words. What they find, they verify at the node; that they find nothing counts only if the page is
//! the one for the hash, and its version the same afterwards.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
};

use kvist_blocks::BlockHash;

use crate::{
    arena::{LINE_WORDS, Lines},
    versions::Versions,
};

/// Order of a page's piece of memory.
pub(crate) const PAGE_ORDER: u32 = 3;
const PAGE_WORDS: usize = 64;
/// Word with the version: odd while entries move, or while the page is none; else a number like those of nodes, which grow.
const VERSION: usize = 0;
/// Word with the way in which the hashes of the page begin: how many bits, and the bits.
const HEADER: usize = 1;
/// First word with a place.
const FIRST: usize = 2;
const PLACES: usize = PAGE_WORDS - FIRST;
/// Places from where an entry belongs to where it is, at most: a page without such a place becomes two. So it does not have
/// to be known how many entries there are, and a new one takes one line of memory.
const MOST_STEPS: usize = 54;
/// Entries of two pages that become one.
const MERGED_ENTRIES: usize = 46;
/// Entries of a directory for each page, at most: hashes that are chosen to begin alike get no larger one.
const MOST_ENTRIES_PER_PAGE: u64 = 64;
/// Bits of the directory at most, so that some are left to tell the entries of a page apart.
const MOST_DEPTH: u32 = 26;

/// Bits of a seat for the place in a node.
const OFFSET_BITS: u32 = 7;
/// Nodes are numbered below this, from 1.
pub(crate) const MAX_NODES: u32 = 1 << (32 - OFFSET_BITS);

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) node: u32,
    pub(crate) offset: u32,
}

impl Seat {
    pub(crate) fn encode(self) -> u32 {
        self.node << OFFSET_BITS | self.offset
    }

    pub(crate) fn decode(value: u32) -> Self {
        Self { node: value >> OFFSET_BITS, offset: value & ((1 << OFFSET_BITS) - 1) }
    }
}

/// The 32 bits of a hash by which it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(u32);

impl Tag {
    /// Some tags are twice as likely as others, in about the way of a logarithm. Were all alike, all pages would be full at
    /// the same time and half empty soon after. So there are always some that are about to become two.
    pub(crate) fn of(hash: BlockHash) -> Self {
        let even = (hash.0 ^ hash.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let bulge = (even * ((1 << 32) - even)) >> 32;
        Self((even + ((bulge * 22_479) >> 16)) as u32)
    }

    /// The first bits.
    fn first(self, bits: u32) -> u32 {
        (u64::from(self.0) << bits >> 32) as u32
    }

    /// The first place of the line of memory where it is, or behind which: few are in the next one. By the last bits, since those
    /// of a page have the first in common.
    fn home(self) -> usize {
        let place = FIRST + (((self.0 & 0xffff) as usize * PLACES) >> 16);
        (place & !(LINE_WORDS - 1)).max(FIRST)
    }
}

fn after(position: usize) -> usize {
    if position + 1 == PAGE_WORDS { FIRST } else { position + 1 }
}

/// What the header of a page says.
#[derive(Clone, Copy, Debug)]
struct Header {
    depth: u32,
    first: u32,
}

impl Header {
    fn load(page: &Page) -> Self {
        let word = page[HEADER].load(Ordering::Relaxed);
        Self { depth: (word >> 32) as u32 & 0xff, first: word as u32 }
    }

    fn store(self, page: &Page) {
        page[HEADER].store(u64::from(self.first) | u64::from(self.depth) << 32, Ordering::Relaxed);
    }

    fn is_for(self, tag: Tag) -> bool {
        tag.first(self.depth.min(32)) == self.first
    }
}

type Page = [AtomicU64; PAGE_WORDS];

/// Which page has which hashes.
#[derive(Debug)]
pub(crate) struct Directory {
    depth: u32,
    pages: Box<[AtomicU32]>,
    /// Whether, having no pages, it is still the one.
    is_empty: AtomicBool,
}

/// What a reader finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is there.
    Here(Seat),
    /// It is not. If it is not there later either, in the same version of the page, it has not been there in between.
    Nowhere { page: u32, version: u64 },
    /// Entries move at this moment, or the directory is an old one.
    Changing,
}

impl Directory {
    /// The page for a hash.
    fn page(&self, tag: Tag) -> u32 {
        self.pages.get(tag.first(self.depth) as usize).map_or(u32::MAX, |page| page.load(Ordering::Relaxed))
    }

    /// Looks for a hash; `is_there` says whether a seat is the one.
    pub(crate) fn find(&self, lines: &Lines, tag: Tag, is_there: impl FnMut(Seat) -> bool) -> Found {
        if self.pages.is_empty() {
            let is_empty = self.is_empty.load(Ordering::Acquire);
            return if is_empty { Found::Nowhere { page: u32::MAX, version: 0 } } else { Found::Changing };
        }
        let number = self.page(tag);
        let Some(page) = page_at(lines, number) else { return Found::Changing };
        let version = page[VERSION].load(Ordering::Acquire);
        match search(page, tag, is_there) {
            Ok((_, seat)) => Found::Here(seat),
            Err(_) if version & 1 == 0 && Header::load(page).is_for(tag) => Found::Nowhere { page: number, version },
            Err(_) => Found::Changing,
        }
    }

    /// Says that there are pages now.
    pub(crate) fn retire(&self) {
        self.is_empty.store(false, Ordering::Release);
    }

    fn new(depth: u32, pages: Box<[AtomicU32]>) -> Arc<Self> {
        Arc::new(Self { depth, is_empty: AtomicBool::new(pages.is_empty()), pages })
    }
}

fn page_at(lines: &Lines, page: u32) -> Option<&Page> {
    lines.words(page, PAGE_WORDS).first_chunk()
}

/// Where a hash is, or the free place where it belongs.
fn search(page: &Page, tag: Tag, mut is_there: impl FnMut(Seat) -> bool) -> Result<(usize, Seat), usize> {
    let home = tag.home();
    for (first, places) in [(home, &page[home..]), (FIRST, &page[FIRST..home])] {
        for (position, place) in places.iter().enumerate() {
            let place = place.load(Ordering::Relaxed);
            if place == 0 {
                return Err(first + position);
            }
            if (place >> 32) as u32 == tag.0 {
                let seat = Seat::decode(place as u32);
                if is_there(seat) {
                    return Ok((first + position, seat));
                }
            }
        }
    }
    Err(home)
}

/// Whether a free place is near enough to where an entry belongs.
fn is_near(page: &Page, tag: Tag, position: usize) -> bool {
    let home = tag.home();
    let steps = if position >= home { position - home } else { position + PLACES - home };
    steps <= MOST_STEPS && page[position].load(Ordering::Relaxed) == 0
}

fn begin(page: &Page) {
    page[VERSION].store(page[VERSION].load(Ordering::Relaxed) | 1, Ordering::Relaxed);
    fence(Ordering::Release);
}

fn end(page: &Page, version: u64) {
    page[VERSION].store(version, Ordering::Release);
}

/// Takes all entries out of a page.
fn drain(page: &Page) -> Vec<u64> {
    let places = page[FIRST..].iter();
    let take = |place: &AtomicU64| {
        let taken = place.load(Ordering::Relaxed);
        place.store(0, Ordering::Relaxed);
        taken
    };
    places.map(take).filter(|place| *place != 0).collect()
}

fn entries_of(page: &Page) -> usize {
    page[FIRST..].iter().filter(|place| place.load(Ordering::Relaxed) != 0).count()
}

fn put(page: &Page, place: u64) {
    if let Err(position) = search(page, Tag((place >> 32) as u32), |_| false) {
        page[position].store(place, Ordering::Relaxed);
    }
}

/// What became of a hash that was to be taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    Done,
    IsThere,
    NoRoom,
}

/// What another entry needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Nothing.
    Enough,
    /// Another page.
    Page,
    /// A larger directory of so many bytes, while the old one is still there.
    Directory(u64),
    /// There can be none: too many hashes begin in the same way.
    Never,
}

/// The writer's side.
#[derive(Debug)]
pub(crate) struct Table {
    directory: Arc<Directory>,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self { directory: Directory::new(0, Box::default()) }
    }

    pub(crate) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// Bytes of the directory; the pages are others' to count.
    pub(crate) fn bytes(&self) -> u64 {
        self.directory.pages.len() as u64 * size_of::<AtomicU32>() as u64
    }

    pub(crate) fn find(&self, lines: &Lines, hash: BlockHash, is_there: impl FnMut(Seat) -> bool) -> Option<Seat> {
        let tag = Tag::of(hash);
        let page = page_at(lines, self.directory.page(tag))?;
        search(page, tag, is_there).ok().map(|(_, seat)| seat)
    }

    /// What another entry needs.
    pub(crate) fn room(&self, lines: &Lines, hash: BlockHash, pages: u64) -> Room {
        let tag = Tag::of(hash);
        let Some(page) = page_at(lines, self.directory.page(tag)) else {
            return Room::Directory(size_of::<AtomicU32>() as u64);
        };
        let header = Header::load(page);
        if search(page, tag, |_| false).is_err_and(|position| is_near(page, tag, position)) {
            Room::Enough
        } else if header.depth < self.directory.depth {
            Room::Page
        } else if header.depth < MOST_DEPTH && self.directory.pages.len() as u64 <= pages * MOST_ENTRIES_PER_PAGE {
            Room::Directory(self.bytes() * 2)
        } else {
            Room::Never
        }
    }

    /// Makes the directory larger. It has to be published before anything else changes. A first one needs a page.
    pub(crate) fn grow(&mut self) {
        let old = &self.directory;
        let pages = old.pages.iter().flat_map(|page| [page.load(Ordering::Relaxed); 2]);
        let pages: Box<[AtomicU32]> = pages.map(AtomicU32::new).collect();
        let depth = if pages.is_empty() { 0 } else { old.depth + 1 };
        self.directory = Directory::new(depth, pages);
    }

    /// Has the first page. The directory has to be published.
    pub(crate) fn start(&mut self, lines: &Lines, number: u32, versions: &mut Versions) {
        if let Some(page) = page_at(lines, number) {
            begin(page);
            drain(page);
            Header { depth: 0, first: 0 }.store(page);
            end(page, versions.next());
            self.directory = Directory::new(0, Box::new([AtomicU32::new(number)]));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.directory.pages.is_empty()
    }

    /// Makes two pages of the full one that is for a hash.
    pub(crate) fn split(&mut self, lines: &Lines, hash: BlockHash, number: u32, versions: &mut Versions) {
        let tag = Tag::of(hash);
        let (Some(old), Some(new)) = (page_at(lines, self.directory.page(tag)), page_at(lines, number)) else { return };
        let header = Header::load(old);
        let depth = header.depth + 1;
        let [low, high] = [header.first * 2, header.first * 2 + 1];
        begin(old);
        begin(new);
        drain(new);
        let all = drain(old);
        for place in all {
            let is_high = Tag((place >> 32) as u32).first(depth) == high;
            put(if is_high { new } else { old }, place);
        }
        Header { depth, first: low }.store(old);
        Header { depth, first: high }.store(new);
        end(new, versions.next());
        self.point(depth, high, number);
        end(old, versions.next());
    }

    /// All hashes that begin in some way are in a page.
    fn point(&self, depth: u32, first: u32, number: u32) {
        let more = self.directory.depth - depth;
        let from = (first as usize) << more;
        for page in self.directory.pages.get(from..from + (1 << more)).unwrap_or_default() {
            page.store(number, Ordering::Release);
        }
    }

    /// Takes in a hash, if it is not there and has room.
    pub(crate) fn insert(
        &mut self,
        lines: &Lines,
        hash: BlockHash,
        seat: Seat,
        is_there: impl FnMut(Seat) -> bool,
    ) -> Inserted {
        let tag = Tag::of(hash);
        let Some(page) = page_at(lines, self.directory.page(tag)) else { return Inserted::NoRoom };
        let Err(position) = search(page, tag, is_there) else { return Inserted::IsThere };
        if !is_near(page, tag, position) {
            return Inserted::NoRoom;
        }
        // Nothing moves, so the version stays.
        page[position].store(u64::from(tag.0) << 32 | u64::from(seat.encode()), Ordering::Release);
        Inserted::Done
    }

    /// Takes out the hash that has this seat. A page that is no longer needed is returned, still marked as changing.
    pub(crate) fn remove(
        &mut self,
        lines: &Lines,
        hash: BlockHash,
        seat: Seat,
        versions: &mut Versions,
    ) -> Option<u32> {
        let tag = Tag::of(hash);
        let page = page_at(lines, self.directory.page(tag))?;
        let (position, _) = search(page, tag, |there| there == seat).ok()?;
        begin(page);
        remove_at(page, position);
        end(page, versions.next());
        // Looked at now and then, and when it looks empty.
        let line = position & !(LINE_WORDS - 1);
        let looks_empty =
            || page[line.max(FIRST)..line + LINE_WORDS].iter().all(|place| place.load(Ordering::Relaxed) == 0);
        if tag.0 & 3 != 0 && !looks_empty() {
            return None;
        }
        let header = Header::load(page);
        if header.depth == 0 {
            return (entries_of(page) == 0).then(|| {
                begin(page);
                let number = self.directory.page(tag);
                self.directory = Directory::new(0, Box::default());
                number
            });
        }
        self.merge(lines, header, versions)
    }

    /// Makes one page of two that have few entries, if the other half is a page too.
    fn merge(&mut self, lines: &Lines, header: Header, versions: &mut Versions) -> Option<u32> {
        let more = self.directory.depth - header.depth;
        let [low, high] = [header.first & !1, header.first | 1];
        let number = |first: u32| Some(self.directory.pages.get((first as usize) << more)?.load(Ordering::Relaxed));
        let (low_number, high_number) = (number(low)?, number(high)?);
        let (into, from) = (page_at(lines, low_number)?, page_at(lines, high_number)?);
        let (of_low, of_high) = (Header::load(into), Header::load(from));
        let entries = entries_of(into) + entries_of(from);
        if of_low.depth != of_high.depth || low_number == high_number || entries > MERGED_ENTRIES {
            return None;
        }
        begin(into);
        begin(from);
        drain(from).into_iter().for_each(|place| put(into, place));
        Header { depth: header.depth - 1, first: header.first >> 1 }.store(into);
        self.point(header.depth, high, low_number);
        end(into, versions.next());
        Some(high_number)
    }

    /// Puts a page in the place of one that is no longer needed.
    pub(crate) fn move_page(&mut self, lines: &Lines, from: u32, to: u32, versions: &mut Versions) {
        let (Some(old), Some(new)) = (page_at(lines, from), page_at(lines, to)) else { return };
        begin(old);
        begin(new);
        old[HEADER..].iter().zip(&new[HEADER..]).for_each(|(old, new)| {
            new.store(old.load(Ordering::Relaxed), Ordering::Relaxed);
        });
        let header = Header::load(new);
        end(new, versions.next());
        self.point(header.depth, header.first, to);
    }

    /// A directory of half the size, if no page needs more and there are far fewer pages than entries of it.
    pub(crate) fn shrink(&mut self, lines: &Lines, pages: u64) -> bool {
        let entries = &self.directory.pages;
        // The look at all entries is long, so it is taken when the pages have halved, and not for each.
        if self.directory.depth == 0 || pages * 4 > entries.len() as u64 || !pages.is_power_of_two() {
            return false;
        }
        let depth = self.directory.depth - 1;
        let is_shallow = |page: &AtomicU32| {
            page_at(lines, page.load(Ordering::Relaxed)).is_some_and(|page| Header::load(page).depth <= depth)
        };
        if !entries.iter().all(is_shallow) {
            return false;
        }
        let pages = entries.iter().step_by(2).map(|page| AtomicU32::new(page.load(Ordering::Relaxed))).collect();
        self.directory = Directory::new(depth, pages);
        true
    }
}

/// Frees a place and moves up the entries behind it that would not be found past a free place.
fn remove_at(page: &Page, position: usize) {
    let distance = |from: usize, to: usize| if to >= from { to - from } else { to + PLACES - from };
    let (mut free, mut next) = (position, after(position));
    loop {
        let entry = page[next].load(Ordering::Relaxed);
        if entry == 0 || next == position {
            break;
        }
        let home = Tag((entry >> 32) as u32).home();
        if distance(home, free) < distance(home, next) {
            page[free].store(entry, Ordering::Relaxed);
            free = next;
        }
        next = after(next);
    }
    page[free].store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::arena::Arena;

    fn take_page(pages: &mut Arena) -> u32 {
        pages.take(PAGE_ORDER).unwrap_or_else(|| {
            pages.grow(|version| version.store(1, Ordering::Relaxed));
            pages.take(PAGE_ORDER).unwrap()
        })
    }

    proptest! {
        #[test]
        fn a_table_is_a_map_of_bounded_size(
            steps in prop::collection::vec((0u8..10, 0u64..900, 1u32..9), 0..3000), removed in 2u8..7,
        ) {
            let (mut table, mut pages, mut versions) = (Table::new(), Arena::new(32), Versions::default());
            let mut model: BTreeMap<BlockHash, Seat> = BTreeMap::new();
            let mut taken = 0u64;
            for (what, key, node) in steps {
                let hash = BlockHash(key.wrapping_mul(0x0123_4567_89ab_cdef));
                let seat = Seat { node, offset: key as u32 & 127 };
                if what >= removed {
                    if let Some(old) = model.insert(hash, seat) {
                        let freed = table.remove(pages.lines(), hash, old, &mut versions);
                        if let Some(page) = freed {
                            pages.give_back(page);
                            taken -= 1;
                        }
                    }
                    {
                        if table.is_empty() {
                            let page = take_page(&mut pages);
                            table.start(&pages.lines().clone(), page, &mut versions);
                            taken += 1;
                        }
                        prop_assert_eq!(None, table.find(pages.lines(), hash, |_| false));
                        loop {
                            match table.room(pages.lines(), hash, taken) {
                                Room::Enough => break,
                                Room::Directory(_) => table.grow(),
                                Room::Page => {
                                    let page = take_page(&mut pages);
                                    table.split(&pages.lines().clone(), hash, page, &mut versions);
                                    taken += 1;
                                }
                                Room::Never => prop_assert!(false),
                            }
                        }
                        prop_assert_eq!(Inserted::Done, table.insert(pages.lines(), hash, seat, |_| false));
                    }
                } else if let Some(seat) = model.remove(&hash)
                    && let Some(page) = table.remove(pages.lines(), hash, seat, &mut versions)
                {
                    pages.give_back(page);
                    taken -= 1;
                    table.shrink(&pages.lines().clone(), taken);
                }
            }
            prop_assert!(taken <= 3 + model.len() as u64 / (MERGED_ENTRIES as u64 / 4), "{taken} pages, {}", model.len());
            for (hash, seat) in &model {
                prop_assert_eq!(Some(*seat), table.find(pages.lines(), *hash, |there| there == *seat));
                prop_assert_eq!(Found::Here(*seat), table.directory().find(pages.lines(), Tag::of(*hash), |there| there == *seat));
            }
            let absent = table.directory().find(pages.lines(), Tag::of(BlockHash(1)), |_| false);
            let is_absent = matches!(absent, Found::Nowhere { .. });
            prop_assert!(is_absent);
        }
    }
}
