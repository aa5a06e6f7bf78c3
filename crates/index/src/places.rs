//! Where the blocks of one slot stand.
//!
//! Look-ups go from the head of a node to that of the next, so the table that they share has heads alone. Who stores behind a
//! block or removes one names it by its hash, and finds it here: each slot has a map of its own, from hash to seat, at about
//! seven bytes a block, which stays in a processor's caches for as long as a source is busy. The hash of an entry is that
//! of its place.
//!
//! A slot's map has the places that it holds in any tier, and the place before each run of them that does not begin with
//! its node: who stores that one later finds what he holds behind it. A hash has one entry. So a slot holds a block in one
//! place at most, and when it is removed there, it is held nowhere.

use std::{ops::Range, sync::atomic::Ordering::Relaxed};

use hashbrown::{HashTable, hash_table::Entry};
use kvist_blocks::BlockHash;

use crate::{
    core::Core,
    memory::MOST_VICTIMS,
    node::{self, Node},
    table::Seat,
};

/// A map of so many bytes is kept when it is empty, if so little of the budget.
const MOST_SMALL_BYTES: u64 = 2 << 10;
const SMALL_BUDGET_SHIFT: u32 = 20;

/// Places that the map of a slot has of a node of which it holds some.
pub(crate) fn tracked(held: u128) -> u128 {
    held | held >> 1
}

/// Positions of the bits of a mask.
pub(crate) fn bits(mut mask: u128) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < u128::BITS).then_some(bit)
    })
}

/// Positions of the bits of a mask as ranges, which are few where bits stand beside each other.
pub(crate) fn ranges(mut mask: u128) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        let from = mask.trailing_zeros();
        let to = from + mask.checked_shr(from)?.trailing_ones();
        mask &= u128::MAX.checked_shl(to).unwrap_or(0);
        Some(from as usize..to as usize)
    })
}

fn key(hash: BlockHash) -> u64 {
    let mixed = hash.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

/// A slot's map.
#[derive(Debug, Default)]
pub(crate) struct Places {
    seats: HashTable<u32>,
}

impl Places {
    /// Bytes allocated.
    pub(crate) fn bytes(&self) -> u64 {
        self.seats.allocation_size() as u64
    }

    /// Bytes of a map that has room for so many: seven eighths of a power of two of buckets, each with a seat and a byte
    /// of its hash, of which a group of sixteen more ends the row.
    fn bytes_for(places: usize) -> u64 {
        let buckets = if places < 15 { 16 } else { (places * 8 / 7).next_power_of_two() };
        buckets as u64 * 5 + 16
    }

    pub(crate) fn has_room(&self, more: usize) -> bool {
        self.seats.len() + more <= self.seats.capacity()
    }

    /// Room with which a map that is too small or too large is made anew: a quarter more than there are, since what
    /// was removed takes room until then.
    fn wanted(&self, more: usize) -> usize {
        self.seats.len() + more.max(self.seats.len() / 4)
    }

    fn is_sparse(&self) -> bool {
        self.seats.capacity() >= 64 && self.seats.len() * 8 < self.seats.capacity()
    }

    /// All seats.
    #[cfg(test)]
    pub(crate) fn seats(&self) -> impl Iterator<Item = Seat> {
        self.seats.iter().map(|seat| Seat::decode(*seat))
    }
}

impl Core {
    /// Where a block stands of which the slot holds it or what follows it.
    pub(crate) fn place_of(&self, slot: u32, hash: BlockHash) -> Option<Seat> {
        let (records, words) = (self.records.lines(), self.words.lines());
        let is_it = |seat: &u32| node::hash_at(records, words, Seat::decode(*seat)) == Some(hash);
        self.slots[slot as usize].places.seats.find(key(hash), is_it).map(|seat| Seat::decode(*seat))
    }

    /// The same for a block that the slot holds, without its map where it was changed last: who goes on there need not wait
    /// for memory that is in no cache.
    pub(crate) fn recent_place_of(&self, slot: u32, hash: BlockHash) -> Option<Seat> {
        let recent = self.slots[slot as usize].recent;
        // What it holds, it holds once, so this is the place that its map has.
        let is_it = self.hash_at(recent) == Some(hash) && self.holds(recent, slot);
        if is_it { Some(recent) } else { self.place_of(slot, hash) }
    }

    /// Makes room in a slot's map for all the blocks of a run at once, if nothing has to be given up for them: node by node, the map
    /// of a source that begins would be made anew again and again.
    pub(crate) fn reserve_places_ahead(&mut self, slot: u32, more: usize) {
        let places = &self.slots[slot as usize].places;
        if places.has_room(more) {
            return;
        }
        let wanted = places.wanted(more);
        let of_hashes = (more * size_of::<BlockHash>()) as u64;
        if self.has_room(Places::bytes_for(wanted) + of_hashes * 2) {
            self.rebuild_places(slot, wanted);
        }
    }

    /// Makes sure that a slot's map has room for so many more places, and keeps it until the end of the change.
    pub(crate) fn reserve_places(&mut self, slot: u32, more: usize) -> bool {
        self.growing = Some(slot);
        let mut victims = 0;
        loop {
            let places = &self.slots[slot as usize].places;
            if places.has_room(more) {
                return true;
            }
            let wanted = places.wanted(more);
            let bytes = Places::bytes_for(wanted);
            if self.has_room(bytes) {
                self.rebuild_places(slot, wanted);
                return true;
            }
            // Of a full node there comes a kibibyte or more.
            if victims > MOST_VICTIMS as u64 + bytes / 512 || !self.make_room(slot) {
                return false;
            }
            victims += 1;
        }
    }

    fn rebuild_places(&mut self, slot: u32, wanted: usize) {
        let (records, words) = (self.records.lines(), self.words.lines());
        let key_of = |seat: &u32| node::hash_at(records, words, Seat::decode(*seat)).map_or(0, key);
        let old = std::mem::take(&mut self.slots[slot as usize].places.seats);
        self.places_bytes -= old.allocation_size() as u64;
        let mut seats = HashTable::with_capacity(wanted);
        for seat in old {
            seats.insert_unique(key_of(&seat), seat, key_of);
        }
        self.places_bytes += seats.allocation_size() as u64;
        self.slots[slot as usize].places.seats = seats;
        self.count_bytes();
    }

    /// Enters where a block stands that has no place yet; there has to be room.
    pub(crate) fn set_place(&mut self, slot: u32, hash: BlockHash, seat: Seat) {
        let (records, words) = (self.records.lines(), self.words.lines());
        let key_of = |seat: &u32| node::hash_at(records, words, Seat::decode(*seat)).map_or(0, key);
        self.slots[slot as usize].places.seats.insert_unique(key(hash), seat.encode(), key_of);
    }

    /// Enters places of a node that stand beside each other; there has to be room. Returned are those of these blocks that had
    /// another place.
    pub(crate) fn set_places(
        &mut self,
        slot: u32,
        number: u32,
        node: &Node,
        range: Range<usize>,
    ) -> Vec<(BlockHash, Seat)> {
        let mut moved = Vec::new();
        let (records, words) = (self.records.lines(), self.words.lines());
        let Some(record) = records.line(number.wrapping_sub(1)) else { return moved };
        let seats = &mut self.slots[slot as usize].places.seats;
        let hash_at = |seat: &u32| node::hash_at(records, words, Seat::decode(*seat));
        let first = Seat { node: number, offset: range.start as u32 }.encode();
        for (seat, hash) in (first..).zip(node.hashes(record, words).get(range).unwrap_or_default()) {
            let hash = BlockHash(hash.load(Relaxed));
            let is_it = |there: &u32| hash_at(there) == Some(hash);
            match seats.entry(key(hash), is_it, |there| hash_at(there).map_or(0, key)) {
                Entry::Vacant(entry) => {
                    entry.insert(seat);
                }
                Entry::Occupied(mut entry) => {
                    let old = std::mem::replace(entry.get_mut(), seat);
                    if old != seat {
                        moved.push((hash, Seat::decode(old)));
                    }
                }
            }
        }
        moved
    }

    /// Takes places of a node that stand beside each other out of a slot's map, those of them that are in it.
    pub(crate) fn unset_places(&mut self, slot: u32, number: u32, node: &Node, range: Range<usize>) {
        let seats = &mut self.slots[slot as usize].places.seats;
        let Some(record) = self.records.lines().line(number.wrapping_sub(1)) else { return };
        if seats.is_empty() {
            return;
        }
        let first = Seat { node: number, offset: range.start as u32 }.encode();
        for (seat, hash) in (first..).zip(node.hashes(record, self.words.lines()).get(range).unwrap_or_default()) {
            let hash = BlockHash(hash.load(Relaxed));
            if let Ok(entry) = seats.find_entry(key(hash), |there| *there == seat) {
                entry.remove();
            }
        }
    }

    /// A smaller map, if that is enough and there is room to make it.
    pub(crate) fn tidy_places(&mut self, slot: u32) {
        if self.growing == Some(slot) {
            return;
        }
        let places = &self.slots[slot as usize].places;
        let wanted = places.wanted(0);
        if places.bytes() <= (self.byte_budget >> SMALL_BUDGET_SHIFT).min(MOST_SMALL_BYTES) {
            // It would soon be made again.
        } else if places.seats.is_empty() {
            self.drop_places(slot);
        } else if places.is_sparse() && self.has_room(Places::bytes_for(wanted)) {
            self.rebuild_places(slot, wanted);
        }
    }

    /// Lets go of a slot's map.
    pub(crate) fn drop_places(&mut self, slot: u32) {
        let places = std::mem::take(&mut self.slots[slot as usize].places);
        if places.bytes() > 0 {
            self.places_bytes -= places.bytes();
            self.count_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_bytes_of_a_map_are_known_before_it_is_made(places in 1usize..100_000) {
            let seats: HashTable<u32> = HashTable::with_capacity(places);
            prop_assert!(seats.allocation_size() as u64 <= Places::bytes_for(places));
            prop_assert!(places < 15 || seats.allocation_size() as u64 == Places::bytes_for(places));
        }

        #[test]
        fn bits_are_those_of_the_mask(mask in prop_oneof![Just(0), Just(u128::MAX), any::<u128>()]) {
            prop_assert_eq!(mask, bits(mask).fold(0, |all, bit| all | 1 << bit));
            prop_assert_eq!(mask.count_ones() as usize, bits(mask).count());
            let of_ranges: Vec<u32> = ranges(mask).flatten().map(|bit| bit as u32).collect();
            prop_assert_eq!(bits(mask).collect::<Vec<u32>>(), of_ranges);
            prop_assert_eq!((mask & !(mask << 1)).count_ones() as usize, ranges(mask).count());
        }
    }
}
