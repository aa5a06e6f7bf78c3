//! Interned sets of holders.
//!
//! Blocks that were computed together are held together, so there are far fewer sets than blocks. A block then costs
//! one number, however many sources hold it, and a look-up sees with one comparison that nothing has changed since the
//! block before.

use hashbrown::{HashTable, hash_table};
use kvist_blocks::Tier;

/// A slot and the tiers in which it holds a block: four bits of tiers, the slot above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder(u32);

impl Holder {
    pub(crate) fn new(slot: u32, tiers: u8) -> Self {
        Self(slot << 4 | u32::from(tiers & 0xF))
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 >> 4
    }

    /// A bit for each tier, by [`Tier::position`].
    pub(crate) fn tiers(self) -> u8 {
        (self.0 & 0xF) as u8
    }
}

pub(crate) fn tier_bit(tier: Tier) -> u8 {
    1 << tier.position()
}

/// Number of a set; 0 is the empty one, which is never stored.
pub(crate) type SetId = u32;

/// The empty set.
pub(crate) const EMPTY: SetId = 0;

/// A set or its free place.
#[derive(Debug, Default)]
struct Entry {
    /// By slot.
    holders: Box<[Holder]>,
    /// Blocks that have this set.
    blocks: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Sets {
    /// The first is the empty set.
    entries: Vec<Entry>,
    free: Vec<SetId>,
    by_content: HashTable<SetId>,
    holder_bytes: u64,
    /// The last answer of [`Sets::find_with`]: runs of blocks ask the same again and again.
    last: Option<((SetId, u32, u8), SetId)>,
    /// The set that was last asked for, with its change applied.
    scratch: Vec<Holder>,
}

impl Sets {
    pub(crate) fn get(&self, set: SetId) -> &[Holder] {
        self.entries.get(set as usize).map_or(&[], |entry| &entry.holders)
    }

    /// What a slot has of a set: a bit for each tier.
    pub(crate) fn tiers_of(&self, set: SetId, slot: u32) -> u8 {
        let holders = self.get(set);
        holders.binary_search_by_key(&slot, |holder| holder.slot()).map_or(0, |position| holders[position].tiers())
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<Entry>() + self.free.capacity() * size_of::<SetId>()) as u64
            + self.by_content.allocation_size() as u64
            + self.holder_bytes
    }

    /// The set that differs from `set` in that `slot` has exactly `tiers`; none when there is no such set yet, and then
    /// [`Sets::intern`] makes it.
    pub(crate) fn find_with(&mut self, set: SetId, slot: u32, tiers: u8) -> Option<SetId> {
        if let Some((question, answer)) = self.last
            && question == (set, slot, tiers)
        {
            return Some(answer);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.extend_from_slice(self.get(set));
        match scratch.binary_search_by_key(&slot, |holder| holder.slot()) {
            Ok(position) if tiers == 0 => {
                scratch.remove(position);
            }
            Ok(position) => scratch[position] = Holder::new(slot, tiers),
            Err(_) if tiers == 0 => {}
            Err(position) => scratch.insert(position, Holder::new(slot, tiers)),
        }
        self.scratch = scratch;
        let found = self.find_scratch();
        if let Some(found) = found {
            self.last = Some(((set, slot, tiers), found));
        }
        found
    }

    /// The set without the slots that `goes` names; none when there is no such set yet, as in [`Sets::find_with`].
    pub(crate) fn find_without(&mut self, set: SetId, goes: impl Fn(u32) -> bool) -> Option<SetId> {
        if !self.get(set).iter().any(|holder| goes(holder.slot())) {
            return Some(set);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.extend(self.get(set).iter().copied().filter(|holder| !goes(holder.slot())));
        self.scratch = scratch;
        self.find_scratch()
    }

    /// Most bytes that [`Sets::intern`] allocates after a search that found nothing, old and new places together.
    pub(crate) fn intern_bytes(&self) -> u64 {
        let mut bytes = holder_bytes(self.scratch.len());
        if self.free.is_empty() && self.entries.len() == self.entries.capacity() {
            bytes += (self.entries.capacity() * 2).max(4) as u64 * size_of::<Entry>() as u64;
            bytes += (self.free.capacity() * 2).max(4) as u64 * size_of::<SetId>() as u64;
        }
        if self.by_content.len() == self.by_content.capacity() {
            bytes += (self.by_content.allocation_size() as u64 * 2 + 16).max(64);
        }
        bytes
    }

    /// Makes the set that was last searched for in vain.
    pub(crate) fn intern(&mut self) -> SetId {
        if self.entries.is_empty() {
            self.entries.push(Entry::default());
        }
        let entry = Entry { holders: self.scratch.as_slice().into(), blocks: 0 };
        self.holder_bytes += holder_bytes(entry.holders.len());
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
            .insert_unique(content_hash(&self.scratch), set, |other| content_hash(&entries[*other as usize].holders));
        set
    }

    /// Says that a block has gone from one set to another.
    pub(crate) fn move_block(&mut self, from: SetId, to: SetId) {
        if from == to {
            return;
        }
        if to != EMPTY {
            self.entries[to as usize].blocks += 1;
        }
        if from == EMPTY {
            return;
        }
        let entry = &mut self.entries[from as usize];
        entry.blocks -= 1;
        if entry.blocks == 0 {
            let holders = std::mem::take(&mut entry.holders);
            self.holder_bytes -= holder_bytes(holders.len());
            if let Ok(found) = self.by_content.find_entry(content_hash(&holders), |other| *other == from) {
                hash_table::OccupiedEntry::remove(found);
            }
            self.free.push(from);
            // Its number may come to mean another set.
            self.last = None;
        }
    }

    fn find_scratch(&self) -> Option<SetId> {
        if self.scratch.is_empty() {
            return Some(EMPTY);
        }
        let is_same = |set: &SetId| *self.entries[*set as usize].holders == *self.scratch;
        self.by_content.find(content_hash(&self.scratch), is_same).copied()
    }
}

/// Bytes of a set's holders with the allocator's rounding.
fn holder_bytes(holders: usize) -> u64 {
    (holders * size_of::<Holder>()).next_multiple_of(16) as u64 + 16
}

fn content_hash(holders: &[Holder]) -> u64 {
    let mix = |hash: u64, holder: &Holder| {
        let hash = (hash ^ u64::from(holder.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ hash >> 29
    };
    holders.iter().fold(0x2545_f491_4f6c_dd1d, mix)
}
