//! The blocks, who holds them, and the byte budget.

use kvist_blocks::{BlockHash, Tier};

use crate::{
    sets::{EMPTY, Holder, SetId, Sets, tier_bit},
    table::{Table, spread},
};

/// Tables, so that growing and sweeping one of them is short.
pub(crate) const SHARDS: usize = 256;

/// What became of a block that was to be taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// It is held from here on.
    New,
    /// It was held.
    Present,
    /// The budget has no room for it.
    NoRoom,
}

/// What became of a block that was to be taken out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It is no longer held.
    Gone,
    /// It was not held.
    Absent,
    /// It is no longer held, and neither by these others: the budget had no room for the set without it.
    GivenUp(Vec<Holder>),
}

#[derive(Debug)]
pub(crate) struct Holdings {
    byte_budget: u64,
    shards: Vec<Table>,
    sets: Sets,
    table_bytes: u64,
    blocks: u64,
    holders: u64,
}

impl Holdings {
    pub(crate) fn new(byte_budget: u64) -> Self {
        let shards = std::iter::repeat_with(Table::default).take(SHARDS).collect();
        Self { byte_budget, shards, sets: Sets::default(), table_bytes: 0, blocks: 0, holders: 0 }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn holders(&self) -> u64 {
        self.holders
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.table_bytes + self.sets.bytes()
    }

    pub(crate) fn byte_budget(&self) -> u64 {
        self.byte_budget
    }

    pub(crate) fn set_of(&self, hash: BlockHash) -> SetId {
        self.shards[shard_of(hash)].get(hash).unwrap_or(EMPTY)
    }

    pub(crate) fn holders_in(&self, set: SetId) -> &[Holder] {
        self.sets.get(set)
    }

    /// Whether a slot holds a block in any tier.
    pub(crate) fn holds(&self, hash: BlockHash, slot: u32) -> bool {
        self.sets.tiers_of(self.set_of(hash), slot) != 0
    }

    pub(crate) fn add(&mut self, hash: BlockHash, slot: u32, tier: Tier) -> Added {
        let old = self.set_of(hash);
        let tiers = self.sets.tiers_of(old, slot);
        if tiers & tier_bit(tier) != 0 {
            return Added::Present;
        }
        let found = self.sets.find_with(old, slot, tiers | tier_bit(tier));
        let growth = if old == EMPTY { self.shards[shard_of(hash)].growth_bytes() } else { 0 };
        let set_growth = if found.is_none() { self.sets.intern_bytes() } else { 0 };
        if growth + set_growth > 0 && self.bytes() + growth + set_growth > self.byte_budget {
            return Added::NoRoom;
        }
        let new = found.unwrap_or_else(|| self.sets.intern());
        self.replace(hash, old, new);
        self.holders += u64::from(tiers == 0);
        Added::New
    }

    pub(crate) fn remove(&mut self, hash: BlockHash, slot: u32, tier: Tier) -> Removed {
        let old = self.set_of(hash);
        let tiers = self.sets.tiers_of(old, slot);
        if tiers & tier_bit(tier) == 0 {
            return Removed::Absent;
        }
        let left = tiers & !tier_bit(tier);
        let found = self.sets.find_with(old, slot, left);
        if found.is_none() && self.bytes() + self.sets.intern_bytes() > self.byte_budget {
            let mut others = self.sets.get(old).to_vec();
            self.holders -= others.len() as u64;
            others.retain(|holder| holder.slot() != slot);
            if left != 0 {
                others.push(Holder::new(slot, left));
            }
            self.replace(hash, old, EMPTY);
            return Removed::GivenUp(others);
        }
        let new = found.unwrap_or_else(|| self.sets.intern());
        self.replace(hash, old, new);
        self.holders -= u64::from(left == 0);
        Removed::Gone
    }

    /// Takes the holders that `goes` names out of one shard. Blocks for which the budget has no room without them are
    /// given up by all; `give_up` hears of each.
    pub(crate) fn sweep(
        &mut self,
        shard: usize,
        goes: impl Fn(u32) -> bool,
        mut give_up: impl FnMut(BlockHash, Holder),
    ) {
        let changed: Vec<(BlockHash, SetId)> = self.shards[shard]
            .iter()
            .filter(|(_, set)| self.sets.get(*set).iter().any(|holder| goes(holder.slot())))
            .collect();
        for (hash, old) in changed {
            let before = self.sets.get(old).len() as u64;
            let found = self.sets.find_without(old, &goes);
            let new = match found {
                Some(set) => set,
                None if self.bytes() + self.sets.intern_bytes() <= self.byte_budget => self.sets.intern(),
                None => {
                    let stay = self.sets.get(old).iter().filter(|holder| !goes(holder.slot()));
                    stay.for_each(|holder| give_up(hash, *holder));
                    EMPTY
                }
            };
            self.holders -= before - self.sets.get(new).len() as u64;
            self.replace(hash, old, new);
        }
    }

    /// All blocks of a shard with their holders.
    pub(crate) fn in_shard(&self, shard: usize) -> impl Iterator<Item = (BlockHash, &[Holder])> {
        self.shards[shard].iter().map(|(hash, set)| (hash, self.sets.get(set)))
    }

    fn replace(&mut self, hash: BlockHash, old: SetId, new: SetId) {
        let table = &mut self.shards[shard_of(hash)];
        self.table_bytes -= table.bytes();
        if new == EMPTY {
            table.remove(hash);
            self.blocks -= u64::from(old != EMPTY);
        } else {
            table.set(hash, new);
            self.blocks += u64::from(old == EMPTY);
        }
        // The set must go first: what it frees counts for the copy that shrinking makes.
        self.sets.move_block(old, new);
        let table = &mut self.shards[shard_of(hash)];
        if new == EMPTY {
            let allowance = self.byte_budget.saturating_sub(self.table_bytes + table.bytes() + self.sets.bytes());
            table.shrink(allowance);
        }
        self.table_bytes += table.bytes();
    }
}

fn shard_of(hash: BlockHash) -> usize {
    (spread(hash) >> 56) as usize
}
