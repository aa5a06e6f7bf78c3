//! Block hash to a small number, at 12 bytes a place.
//!
//! A general map pays for control bytes, padding and doubling: up to 57 bytes an entry of this size. Here linear
//! probing with backward-shift deletion keeps no tombstones, places grow by a quarter, and shrinking keeps at least two
//! fifths of them filled, so that an entry costs 15 to 19 bytes while a table grows and 30 at most. Probes are O(1) expected; the keys
//! are hashes already.

use kvist_blocks::BlockHash;

/// Bytes of one place.
const PLACE_BYTES: u64 = size_of::<Place>() as u64;
/// Fewest places of a table that holds anything.
const MIN_PLACES: usize = 4;

/// The hash in halves, so that a place needs no padding. A value of 0 marks a free place.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    high: u32,
    low: u32,
    value: u32,
}

impl Place {
    fn new(hash: BlockHash, value: u32) -> Self {
        Self { high: (hash.0 >> 32) as u32, low: hash.0 as u32, value }
    }

    fn hash(self) -> BlockHash {
        BlockHash(u64::from(self.high) << 32 | u64::from(self.low))
    }
}

/// Bits of a spread hash that choose the table.
pub(crate) const SHARD_BITS: u32 = 10;

/// Spreads a hash over all bits; the top ones choose the table, the rest the place.
pub(crate) fn spread(hash: BlockHash) -> u64 {
    hash.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    places: Vec<Place>,
    len: usize,
}

impl Table {
    pub(crate) fn bytes(&self) -> u64 {
        self.places.len() as u64 * PLACE_BYTES
    }

    /// Bytes that the next new entry allocates, while the old places are still there.
    pub(crate) fn growth_bytes(&self) -> u64 {
        self.grown_places().map_or(0, |places| places as u64 * PLACE_BYTES)
    }

    /// Loads the place where a hash is or nearly is. Nothing is decided by what is found, so that a processor does not wait
    /// for one place before it asks for the next.
    pub(crate) fn peek(&self, hash: BlockHash) -> u32 {
        if self.places.is_empty() { 0 } else { self.places[self.home(hash)].value }
    }

    pub(crate) fn get(&self, hash: BlockHash) -> Option<u32> {
        let place = self.places.get(self.find(hash)?)?;
        (place.value != 0).then_some(place.value)
    }

    /// Sets the value, which must not be 0, of a hash that has none.
    pub(crate) fn insert(&mut self, hash: BlockHash, value: u32) {
        if let Some(places) = self.grown_places() {
            self.resize(places);
        }
        if let Some(position) = self.find(hash) {
            self.places[position] = Place::new(hash, value);
            self.len += 1;
        }
    }

    /// Sets the value, which must not be 0, of a hash that has one.
    pub(crate) fn replace(&mut self, hash: BlockHash, value: u32) {
        if let Some(position) = self.find(hash) {
            self.places[position].value = value;
        }
    }

    pub(crate) fn remove(&mut self, hash: BlockHash) {
        if let Some(position) = self.find(hash)
            && self.places[position].value != 0
        {
            self.remove_at(position);
        }
    }

    /// Gives back places that are too many for the entries, if `allowance_bytes` permit the copy.
    pub(crate) fn shrink(&mut self, allowance_bytes: u64) {
        if self.len == 0 {
            self.places = Vec::new();
        } else if self.places.len() > MIN_PLACES && self.len * 5 < self.places.len() * 2 {
            let places = (self.len * 5 / 3).max(MIN_PLACES);
            if places as u64 * PLACE_BYTES <= allowance_bytes {
                self.resize(places);
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, u32)> {
        self.places.iter().filter(|place| place.value != 0).map(|place| (place.hash(), place.value))
    }

    /// More places, if another entry would fill more than four fifths of them.
    fn grown_places(&self) -> Option<usize> {
        let places = self.places.len();
        ((self.len + 1) * 5 > places * 4).then(|| (places + (places / 4).max(2)).max(MIN_PLACES))
    }

    fn home(&self, hash: BlockHash) -> usize {
        // Maps the bits below the table's evenly onto any number of places.
        ((u128::from(spread(hash) << SHARD_BITS) * self.places.len() as u128) >> 64) as usize
    }

    fn after(&self, position: usize) -> usize {
        if position + 1 == self.places.len() { 0 } else { position + 1 }
    }

    /// The place of a hash, or the free place where it belongs; none in a table without places.
    fn find(&self, hash: BlockHash) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let mut position = self.home(hash);
        loop {
            let place = self.places[position];
            if place.value == 0 || place.hash() == hash {
                return Some(position);
            }
            position = self.after(position);
        }
    }

    /// Frees a place and moves up the entries behind it that would not be found past a free place.
    fn remove_at(&mut self, position: usize) {
        let places = self.places.len();
        let distance = |from: usize, to: usize| if to >= from { to - from } else { to + places - from };
        let (mut free, mut next) = (position, self.after(position));
        while self.places[next].value != 0 {
            let home = self.home(self.places[next].hash());
            if distance(home, free) < distance(home, next) {
                self.places[free] = self.places[next];
                free = next;
            }
            next = self.after(next);
        }
        self.places[free] = Place::default();
        self.len -= 1;
    }

    fn resize(&mut self, places: usize) {
        let old = std::mem::replace(&mut self.places, vec![Place::default(); places]);
        for place in old.into_iter().filter(|place| place.value != 0) {
            if let Some(position) = self.find(place.hash()) {
                self.places[position] = place;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_table_is_a_map_of_bounded_size(
            steps in prop::collection::vec((0u8..8, 0u64..40, 1u32..9), 0..400), wide in any::<bool>(),
        ) {
            let mut table = Table::default();
            let mut model = BTreeMap::new();
            for (what, key, value) in steps {
                // Neighbors share a home when only the lowest bits of their spread differ.
                let hash = BlockHash(if wide { key.wrapping_mul(0x0123_4567_89ab_cdef) } else { key });
                match what {
                    0..4 => {
                        let (growth, before) = (table.growth_bytes(), table.bytes());
                        if model.insert(hash, value).is_none() {
                            table.insert(hash, value);
                            prop_assert!(table.bytes() == before || table.bytes() == growth);
                        } else {
                            table.replace(hash, value);
                        }
                    }
                    _ => {
                        table.remove(hash);
                        model.remove(&hash);
                        table.shrink(u64::MAX);
                    }
                }
                prop_assert_eq!(&model, &table.iter().collect::<BTreeMap<_, _>>());
                prop_assert_eq!(model.get(&hash).copied(), table.get(hash));
                prop_assert!(table.bytes() <= (30 * model.len() as u64).max(MIN_PLACES as u64 * PLACE_BYTES));
            }
        }
    }
}
