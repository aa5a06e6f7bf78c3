//! Interned sets of holders.
//!
//! Blocks that were computed together are held together, so there are far fewer sets than blocks. A block then costs
//! one number, however many sources hold it, and a look-up sees with one comparison that nothing has changed since the
//! block before. A set is a sorted list of bit masks over 64 slots each, so that comparing two sets of a thousand
//! holders takes sixteen steps.

use hashbrown::{HashTable, hash_table};
use kvist_blocks::Tier;

/// Which 64 slots, in the upper thirty bits, and in which tier, in the lower two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneKey(u32);

impl LaneKey {
    fn new(word: u32, tier: usize) -> Self {
        Self(word << 2 | tier as u32)
    }

    /// Which 64 slots.
    pub(crate) fn word(self) -> u32 {
        self.0 >> 2
    }

    /// Position of the tier in [`Tier::ALL`].
    pub(crate) fn tier(self) -> usize {
        (self.0 & 3) as usize
    }
}

/// Holders as bit masks, by key, none of them without bits. Keys and masks are apart, so that sets of the same keys,
/// as those along a prompt mostly are, compare by masks alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lanes<'a> {
    pub(crate) keys: &'a [LaneKey],
    pub(crate) masks: &'a [u64],
}

impl<'a> Lanes<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = (LaneKey, u64)> + Clone + 'a {
        self.keys.iter().copied().zip(self.masks.iter().copied())
    }

    fn tiers_of(self, slot: u32) -> u8 {
        let (word, bit) = (slot / 64, 1u64 << (slot % 64));
        let start = self.keys.partition_point(|key| key.word() < word);
        let of_word = self.iter().skip(start).take_while(|(key, _)| key.word() == word);
        of_word.filter(|(_, mask)| mask & bit != 0).fold(0, |tiers, (key, _)| tiers | 1 << key.tier())
    }

    /// For each word, which of its slots are in the set in any tier.
    fn words(self) -> impl Iterator<Item = (u32, u64)> + 'a {
        let mut rest = self.iter().peekable();
        std::iter::from_fn(move || {
            let (key, mut any) = rest.next()?;
            while let Some((_, mask)) = rest.next_if(|(next, _)| next.word() == key.word()) {
                any |= mask;
            }
            Some((key.word(), any))
        })
    }

    fn count_holders(self) -> u32 {
        self.words().map(|(_, any)| any.count_ones()).sum()
    }

    fn hash(self) -> u64 {
        let mix = |hash: u64, part: u64| {
            let hash = (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^ hash >> 29
        };
        self.iter().fold(0x2545_f491_4f6c_dd1d, |hash, (key, mask)| mix(mix(hash, u64::from(key.0)), mask))
    }
}

/// Lanes that are being put together.
#[derive(Clone, Debug, Default)]
struct OwnLanes {
    keys: Vec<LaneKey>,
    masks: Vec<u64>,
}

impl OwnLanes {
    fn as_lanes(&self) -> Lanes<'_> {
        Lanes { keys: &self.keys, masks: &self.masks }
    }

    fn clear(&mut self) {
        self.keys.clear();
        self.masks.clear();
    }

    fn push(&mut self, key: LaneKey, mask: u64) {
        if mask != 0 {
            self.keys.push(key);
            self.masks.push(mask);
        }
    }
}

/// A slot and a bit for each tier in which it holds a block, by [`Tier::position`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) slot: u32,
    pub(crate) tiers: u8,
}

pub(crate) fn tier_bit(tier: Tier) -> u8 {
    1 << tier.position()
}

/// Number of a set; 0 is the empty one, which is never stored.
pub(crate) type SetId = u32;

/// The empty set.
pub(crate) const EMPTY: SetId = 0;

/// Most sets there may be: a place of the table has 31 bits for one.
const MAX_SETS: usize = (1 << 31) - 1;

/// A set or its free place.
#[derive(Debug, Default)]
struct Entry {
    lanes: StoredLanes,
    /// Blocks that have this set.
    blocks: u32,
    /// Slots in it.
    holders: u32,
}

/// Most sets of a small mesh, and all that one source holds alone, have one lane: it lies where the set is, so that a
/// look-up does not wait for memory a second time.
#[derive(Debug)]
enum StoredLanes {
    One([LaneKey; 1], [u64; 1]),
    Other(Box<[LaneKey]>, Box<[u64]>),
}

impl Default for StoredLanes {
    fn default() -> Self {
        Self::Other(Box::default(), Box::default())
    }
}

impl StoredLanes {
    fn new(lanes: Lanes<'_>) -> Self {
        match (lanes.keys, lanes.masks) {
            ([key], [mask]) => Self::One([*key], [*mask]),
            (keys, masks) => Self::Other(keys.into(), masks.into()),
        }
    }

    fn as_lanes(&self) -> Lanes<'_> {
        match self {
            Self::One(keys, masks) => Lanes { keys, masks },
            Self::Other(keys, masks) => Lanes { keys, masks },
        }
    }
}

impl Entry {
    fn lanes(&self) -> Lanes<'_> {
        self.lanes.as_lanes()
    }
}

/// What a change of many sets at once does to a mask: word, position of the tier, mask.
pub(crate) trait Keep: Fn(u32, usize, u64) -> u64 {}

impl<F: Fn(u32, usize, u64) -> u64> Keep for F {}

#[derive(Debug, Default)]
pub(crate) struct Sets {
    /// The first is the empty set.
    entries: Vec<Entry>,
    free: Vec<SetId>,
    /// One set of each content. A set whose holders went with [`Sets::filter`] may be the twin of another and is not
    /// found here then.
    by_content: HashTable<SetId>,
    lane_bytes: u64,
    /// Pairs of a block and a holder.
    holders: u64,
    /// Blocks whose set was emptied by [`Sets::filter`].
    orphans: u64,
    /// Slots that no new set may contain, by word.
    dead: Vec<u64>,
    /// The last answer of [`Sets::find_with`]: runs of blocks ask the same again and again.
    last: Option<((SetId, u32, u8), SetId)>,
    /// The set that was last asked for, with its change applied.
    scratch: OwnLanes,
}

impl Sets {
    pub(crate) fn lanes(&self, set: SetId) -> Lanes<'_> {
        self.entries.get(set as usize).map_or(Lanes::default(), Entry::lanes)
    }

    /// What a slot has of a set: a bit for each tier.
    pub(crate) fn tiers_of(&self, set: SetId, slot: u32) -> u8 {
        self.lanes(set).tiers_of(slot)
    }

    /// The members of a set, by slot.
    pub(crate) fn members(&self, set: SetId) -> Vec<Holder> {
        let lanes = self.lanes(set);
        let mut members = Vec::new();
        for (word, mut any) in lanes.words() {
            while any != 0 {
                let slot = word * 64 + any.trailing_zeros();
                members.push(Holder { slot, tiers: lanes.tiers_of(slot) });
                any &= any - 1;
            }
        }
        members
    }

    /// Whether nobody is in it.
    pub(crate) fn is_empty(&self, set: SetId) -> bool {
        self.lanes(set).keys.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Pairs of a block and a holder.
    pub(crate) fn holders(&self) -> u64 {
        self.holders
    }

    /// Blocks that have a set with nobody in it.
    pub(crate) fn orphans(&self) -> u64 {
        self.orphans
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<Entry>() + self.free.capacity() * size_of::<SetId>()) as u64
            + self.by_content.allocation_size() as u64
            + self.lane_bytes
    }

    /// Says that no set that is made from here on may contain a slot.
    pub(crate) fn mark_dead(&mut self, slot: u32) {
        let word = slot as usize / 64;
        if self.dead.len() <= word {
            self.dead.resize(word + 1, 0);
        }
        self.dead[word] |= 1 << (slot % 64);
        self.last = None;
    }

    /// Says that no set contains a slot any more, so that it may be used again.
    pub(crate) fn forget_dead(&mut self, slot: u32) {
        if let Some(mask) = self.dead.get_mut(slot as usize / 64) {
            *mask &= !(1 << (slot % 64));
        }
    }

    /// Slots of a word that were marked as dead.
    pub(crate) fn dead_mask(&self, word: u32) -> u64 {
        self.dead.get(word as usize).copied().unwrap_or(0)
    }

    /// The set that differs from `set` in that `slot` has exactly `tiers` and no dead slot is in it; none when there is
    /// no such set yet, and then [`Sets::intern`] makes it.
    pub(crate) fn find_with(&mut self, set: SetId, slot: u32, tiers: u8) -> Option<SetId> {
        if let Some((question, answer)) = self.last
            && question == (set, slot, tiers)
        {
            return Some(answer);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        let (word, bit) = (slot / 64, 1u64 << (slot % 64));
        let mut wanted =
            (0..4).map(|tier| (LaneKey::new(word, tier), if tiers >> tier & 1 == 0 { 0 } else { bit })).peekable();
        for (key, mask) in self.lanes(set).iter() {
            while let Some((key, bit)) = wanted.next_if(|(wanted, _)| *wanted < key) {
                scratch.push(key, bit);
            }
            let mut mask = mask & !self.dead_mask(key.word());
            if let Some((_, has)) = wanted.next_if(|(wanted, _)| *wanted == key) {
                mask = mask & !bit | has;
            }
            scratch.push(key, mask);
        }
        wanted.for_each(|(key, bit)| scratch.push(key, bit));
        self.scratch = scratch;
        let found = self.find_scratch();
        if let Some(answer) = found {
            self.last = Some(((set, slot, tiers), answer));
        }
        found
    }

    /// Most bytes that [`Sets::intern`] allocates after a search that found nothing, old and new places together; none
    /// when there may be no more sets.
    pub(crate) fn intern_bytes(&self) -> Option<u64> {
        let mut bytes = lane_bytes(self.scratch.keys.len());
        if self.free.is_empty() && self.entries.len() == self.entries.capacity() {
            if self.entries.capacity() * 2 > MAX_SETS {
                return None;
            }
            bytes += (self.entries.capacity() * 2).max(4) as u64 * size_of::<Entry>() as u64;
            bytes += (self.free.capacity() * 2).max(4) as u64 * size_of::<SetId>() as u64;
        }
        if self.by_content.len() == self.by_content.capacity() {
            bytes += (self.by_content.allocation_size() as u64 * 2 + 16).max(64);
        }
        Some(bytes)
    }

    /// Makes the set that was last searched for in vain.
    pub(crate) fn intern(&mut self) -> SetId {
        if self.entries.is_empty() {
            self.entries.push(Entry::default());
        }
        let lanes = self.scratch.as_lanes();
        let entry = Entry { lanes: StoredLanes::new(lanes), blocks: 0, holders: lanes.count_holders() };
        self.lane_bytes += lane_bytes(lanes.keys.len());
        let set = match self.free.pop() {
            Some(set) => {
                self.entries[set as usize] = entry;
                set
            }
            None => {
                self.entries.push(entry);
                // Freeing a set never allocates.
                self.free.reserve_exact(self.entries.capacity());
                (self.entries.len() - 1) as SetId
            }
        };
        let entries = &self.entries;
        self.by_content
            .insert_unique(self.scratch.as_lanes().hash(), set, |other| entries[*other as usize].lanes().hash());
        set
    }

    /// Says that a block has gone from one set to another.
    pub(crate) fn move_block(&mut self, from: SetId, to: SetId) {
        if from == to {
            return;
        }
        if to != EMPTY {
            let entry = &mut self.entries[to as usize];
            entry.blocks += 1;
            self.holders += u64::from(entry.holders);
            self.orphans += u64::from(entry.holders == 0);
        }
        if from == EMPTY {
            return;
        }
        let entry = &mut self.entries[from as usize];
        entry.blocks -= 1;
        self.holders -= u64::from(entry.holders);
        self.orphans -= u64::from(entry.holders == 0);
        if entry.blocks == 0 {
            let lanes = std::mem::take(&mut entry.lanes);
            self.lane_bytes -= lane_bytes(lanes.as_lanes().keys.len());
            self.drop_content(from, lanes.as_lanes());
            self.free.push(from);
            // Its number may come to mean another set.
            self.last = None;
        }
    }

    /// Changes what some of the sets contain, where they are: every block that has one of them loses those holders, and
    /// no block is touched. Allocates nothing. Masks can only lose bits.
    pub(crate) fn filter(&mut self, range: std::ops::Range<usize>, keep: impl Keep) {
        self.last = None;
        for set in range.start..range.end.min(self.entries.len()) {
            let is_kept = |(key, mask): (LaneKey, u64)| keep(key.word(), key.tier(), mask) == mask;
            if self.entries[set].lanes().iter().all(is_kept) {
                continue;
            }
            let old = std::mem::take(&mut self.entries[set].lanes);
            self.drop_content(set as SetId, old.as_lanes());
            self.lane_bytes -= lane_bytes(old.as_lanes().keys.len());
            // A copy without those that go, which is never larger than what it replaces.
            let mut kept = OwnLanes::default();
            for (key, mask) in old.as_lanes().iter() {
                kept.push(key, keep(key.word(), key.tier(), mask));
            }
            drop(old);
            let lanes = kept.as_lanes();
            self.lane_bytes += lane_bytes(lanes.keys.len());
            let (holders, hash) = (lanes.count_holders(), lanes.hash());
            let has_twin = self.by_content.find(hash, |other| self.entries[*other as usize].lanes() == lanes).is_some();
            let entry = &mut self.entries[set];
            self.holders -= u64::from(entry.holders - holders) * u64::from(entry.blocks);
            if holders == 0 && entry.holders != 0 {
                self.orphans += u64::from(entry.blocks);
            }
            (entry.lanes, entry.holders) = (StoredLanes::new(lanes), holders);
            if holders != 0 && !has_twin && self.by_content.len() < self.by_content.capacity() {
                let entries = &self.entries;
                self.by_content.insert_unique(hash, set as SetId, |other| entries[*other as usize].lanes().hash());
            }
        }
    }

    fn drop_content(&mut self, set: SetId, lanes: Lanes<'_>) {
        if let Ok(found) = self.by_content.find_entry(lanes.hash(), |other| *other == set) {
            hash_table::OccupiedEntry::remove(found);
        }
    }

    fn find_scratch(&self) -> Option<SetId> {
        let lanes = self.scratch.as_lanes();
        if lanes.keys.is_empty() {
            return Some(EMPTY);
        }
        self.by_content.find(lanes.hash(), |set| self.entries[*set as usize].lanes() == lanes).copied()
    }
}

/// Bytes of a set's lanes with the allocator's rounding.
fn lane_bytes(lanes: usize) -> u64 {
    if lanes <= 1 {
        return 0;
    }
    let rounded = |bytes: usize| bytes.next_multiple_of(16) as u64;
    rounded(lanes * size_of::<LaneKey>()) + rounded(lanes * size_of::<u64>())
}
