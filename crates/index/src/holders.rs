//! Who holds which blocks of a node.
//!
//! Most of those that hold a node hold the same number of leading blocks: they are bits of lanes, 64 slots to a word. Others are
//! cuts, with a number of leading blocks of their own, or holed, with a bit for each block. So a thousand sources of a
//! thousand lengths cost sixteen words a node, and one more for each of the few that end in it.

use std::sync::atomic::{AtomicU64, Ordering};

use kvist_blocks::Tier;

use crate::{
    arena::Lines,
    node::{MAX_ENTRIES, NODE_BLOCKS, Node},
};

/// A slot, in the upper thirty bits, and a tier, in the lower two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Who(u32);

impl Who {
    pub(crate) fn new(slot: u32, tier: usize) -> Self {
        Self(slot << 2 | tier as u32)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 >> 2
    }

    pub(crate) fn tier(self) -> usize {
        (self.0 & 3) as usize
    }

    pub(crate) fn lane(self) -> LaneKey {
        LaneKey::new(self.slot() / 64, self.tier())
    }

    pub(crate) fn bit(self) -> u64 {
        1 << (self.slot() % 64)
    }
}

/// Which 64 slots, and in which tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneKey(pub(crate) u16);

impl LaneKey {
    pub(crate) fn new(word: u32, tier: usize) -> Self {
        Self((word << 2) as u16 | tier as u16)
    }

    pub(crate) fn word(self) -> usize {
        (self.0 >> 2) as usize
    }

    pub(crate) fn tier(self) -> usize {
        (self.0 & 3) as usize
    }

    fn who(self, bit: u32) -> Who {
        Who::new(self.word() as u32 * 64 + bit, self.tier())
    }
}

/// So many leading places.
pub(crate) fn ones(places: u32) -> u128 {
    if places >= NODE_BLOCKS { u128::MAX } else { (1 << places) - 1 }
}

/// Places from one to before another.
pub(crate) fn span(from: u32, to: u32) -> u128 {
    ones(to) & !ones(from)
}

fn is_leading(mask: u128) -> bool {
    mask & mask.wrapping_add(1) == 0
}

fn count(mask: u128) -> u32 {
    mask.count_ones()
}

/// Everything that is written of a node's holders, as a look-up reads it.
pub(crate) struct Entries<'a> {
    node: &'a Node,
    words: &'a [AtomicU64],
}

impl<'a> Entries<'a> {
    /// None when the holders are not there, as after a change.
    pub(crate) fn of(node: &'a Node, lines: &'a Lines) -> Option<Self> {
        let wanted = node.holder_words();
        let words = if wanted == 0 { &[] } else { lines.words(node.holders, wanted) };
        (words.len() == wanted).then_some(Self { node, words })
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneKey, u64)> {
        let first = (self.node.lanes > 0).then_some((LaneKey(self.node.first_key), self.node.first_mask));
        let (pairs, _) = self.words[..self.more_lanes()].as_chunks::<2>();
        let more = pairs.iter();
        let more = more.map(|[key, mask]| (LaneKey(key.load(Ordering::Relaxed) as u16), mask.load(Ordering::Relaxed)));
        first.into_iter().chain(more)
    }

    pub(crate) fn cuts(&self) -> impl Iterator<Item = (Who, u32)> {
        let cuts = self.words[self.more_lanes()..][..self.node.cuts as usize].iter();
        cuts.map(|cut| cut.load(Ordering::Relaxed)).map(|cut| (Who((cut >> 8) as u32), cut as u32 & 0xff))
    }

    pub(crate) fn holed(&self) -> impl Iterator<Item = (Who, u128)> {
        let (holed, _) = self.words[self.more_lanes() + self.node.cuts as usize..].as_chunks::<3>();
        holed.iter().map(|[who, low, high]| {
            let mask = u128::from(high.load(Ordering::Relaxed)) << 64 | u128::from(low.load(Ordering::Relaxed));
            (Who(who.load(Ordering::Relaxed) as u32), mask)
        })
    }

    /// Whether the record has all there is, as mostly.
    pub(crate) fn are_in_record(&self) -> bool {
        self.words.is_empty()
    }

    /// What a slot holds, by tier.
    pub(crate) fn own(&self, slot: u32) -> [u128; 4] {
        let mut own = [0; 4];
        if self.are_in_record() {
            if self.node.is_first_lane_of(slot) {
                own[LaneKey(self.node.first_key).tier()] = ones(self.node.full);
            }
            return own;
        }
        let bit = 1 << (slot % 64);
        for (key, mask) in self.lanes() {
            if key.word() as u32 == slot / 64 && mask & bit != 0 {
                own[key.tier()] = ones(self.node.full);
            }
        }
        let cuts = self.cuts().map(|(who, cut)| (who, ones(cut)));
        for (who, mask) in cuts.chain(self.holed()).filter(|(who, _)| who.slot() == slot) {
            own[who.tier()] = mask;
        }
        own
    }

    /// A bit for each place before which somebody ends who holds what is before it.
    pub(crate) fn ends(&self) -> u128 {
        let at = |place: u32| 1u128.checked_shl(place).unwrap_or(0);
        let full = if self.node.lanes > 0 { at(self.node.full) } else { 0 };
        let cuts = self.cuts().fold(full, |ends, (_, cut)| ends | at(cut));
        // Where a run of places ends.
        self.holed().fold(cuts, |ends, (_, mask)| ends | mask << 1 & !mask)
    }

    fn more_lanes(&self) -> usize {
        self.node.lanes.saturating_sub(1) as usize * 2
    }
}

impl Node {
    /// Whether a slot is in the first lane.
    pub(crate) fn is_first_lane_of(&self, slot: u32) -> bool {
        let word = LaneKey(self.first_key).word() as u32;
        self.lanes > 0 && word == slot / 64 && self.first_mask >> (slot % 64) & 1 != 0
    }
}

/// The places of one slot beside those of all others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shares {
    /// Of the slot, by tier.
    pub(crate) own: [u128; 4],
    /// Of anybody else.
    pub(crate) others: u128,
}

impl Shares {
    /// Of the slot in any tier.
    pub(crate) fn own_any(&self) -> u128 {
        self.own.iter().fold(0, |any, mask| any | mask)
    }
}

/// Holders of a node, taken out to be changed.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    full: u32,
    lanes: Vec<(LaneKey, u64)>,
    cuts: Vec<(Who, u32)>,
    holed: Vec<(Who, u128)>,
}

impl Holders {
    /// Reads those of a node.
    pub(crate) fn load(&mut self, node: &Node, lines: &Lines) {
        self.clear();
        self.full = node.full;
        if node.holder_words() == 0 {
            if node.lanes > 0 {
                self.lanes.push((LaneKey(node.first_key), node.first_mask));
            }
        } else if let Some(entries) = Entries::of(node, lines) {
            self.lanes.extend(entries.lanes());
            self.cuts.extend(entries.cuts());
            self.holed.extend(entries.holed());
        }
    }

    pub(crate) fn clear(&mut self) {
        self.full = 0;
        self.lanes.clear();
        self.cuts.clear();
        self.holed.clear();
    }

    /// Words beside the record.
    pub(crate) fn words(&self) -> usize {
        self.lanes.len().saturating_sub(1) * 2 + self.cuts.len() + self.holed.len() * 3
    }

    /// Whether they can be written down at all.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.len().max(self.cuts.len()).max(self.holed.len()) <= MAX_ENTRIES
    }

    /// Writes them, the node's own part into it and the rest into some words.
    pub(crate) fn store(&self, node: &mut Node, words: &[AtomicU64]) {
        node.full = self.full;
        (node.lanes, node.cuts, node.holed) =
            (self.lanes.len() as u32, self.cuts.len() as u32, self.holed.len() as u32);
        let (first_key, first_mask) = self.lanes.first().copied().unwrap_or((LaneKey(0), 0));
        (node.first_key, node.first_mask) = (first_key.0, first_mask);
        let lanes = self.lanes.iter().skip(1).flat_map(|(key, mask)| [u64::from(key.0), *mask]);
        let cuts = self.cuts.iter().map(|(who, cut)| u64::from(who.0) << 8 | u64::from(*cut));
        let holed = self.holed.iter().flat_map(|(who, mask)| [u64::from(who.0), *mask as u64, (mask >> 64) as u64]);
        let all = lanes.chain(cuts).chain(holed);
        words.iter().zip(all).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        node.tiers = self.tiers();
    }

    fn tiers(&self) -> u8 {
        let lanes = self.lanes.iter().fold(0, |tiers, (key, _)| tiers | 1 << key.tier());
        let cuts = self.cuts.iter().fold(lanes, |tiers, (who, _)| tiers | 1 << who.tier());
        self.holed.iter().fold(cuts, |tiers, (who, _)| tiers | 1 << who.tier())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty() && self.cuts.is_empty() && self.holed.is_empty()
    }

    /// What a slot holds, and what others do.
    pub(crate) fn shares(&self, slot: u32) -> Shares {
        let mut shares = Shares::default();
        for (key, mask) in &self.lanes {
            let own = if key.word() as u32 == slot / 64 { mask & 1 << (slot % 64) } else { 0 };
            if own != 0 {
                shares.own[key.tier()] = ones(self.full);
            }
            if *mask != own {
                shares.others |= ones(self.full);
            }
        }
        let cuts = self.cuts.iter().map(|(who, cut)| (*who, ones(*cut)));
        for (who, mask) in cuts.chain(self.holed.iter().copied()) {
            if who.slot() == slot {
                shares.own[who.tier()] = mask;
            } else {
                shares.others |= mask;
            }
        }
        shares
    }

    /// All of them, one by one.
    pub(crate) fn all(&self) -> impl Iterator<Item = (Who, u128)> {
        let lanes = self.lanes.iter().flat_map(|(key, mask)| {
            let bits = (0..64).filter(move |bit| mask >> bit & 1 != 0);
            bits.map(|bit| (key.who(bit), ones(self.full)))
        });
        let cuts = self.cuts.iter().map(|(who, cut)| (*who, ones(*cut)));
        lanes.chain(cuts).chain(self.holed.iter().copied())
    }

    /// The slot that alone holds all there is.
    pub(crate) fn only_slot(&self) -> Option<u32> {
        let mut all = self.all();
        let (first, _) = all.next()?;
        all.all(|(who, _)| who.slot() == first.slot()).then(|| first.slot())
    }

    /// Gives one of them other places than `old`, which are those it has.
    pub(crate) fn set(&mut self, who: Who, old: u128, new: u128) {
        if old == new {
            return;
        }
        if old != 0 {
            self.take_out(who, old);
        }
        if self.is_empty() && is_leading(new) {
            // Who is alone says what is full.
            self.full = count(new);
        }
        if new == 0 {
            return;
        }
        if new == ones(self.full) {
            self.join(who);
        } else if is_leading(new) {
            self.cuts.push((who, count(new)));
            self.balance();
        } else {
            self.holed.push((who, new));
        }
    }

    fn take_out(&mut self, who: Who, old: u128) {
        if old == ones(self.full)
            && let Some(at) = self.lanes.iter().position(|(key, mask)| *key == who.lane() && mask & who.bit() != 0)
        {
            self.lanes[at].1 &= !who.bit();
            if self.lanes[at].1 == 0 {
                self.lanes.swap_remove(at);
            }
        } else if let Some(at) = self.cuts.iter().position(|(one, _)| *one == who) {
            self.cuts.swap_remove(at);
        } else if let Some(at) = self.holed.iter().position(|(one, _)| *one == who) {
            self.holed.swap_remove(at);
        }
    }

    fn join(&mut self, who: Who) {
        match self.lanes.iter_mut().find(|(key, _)| *key == who.lane()) {
            Some((_, mask)) => *mask |= who.bit(),
            None => self.lanes.push((who.lane(), who.bit())),
        }
    }

    /// Chooses anew what is full, when the cuts have doubled or nobody is full.
    fn balance(&mut self) {
        let have_doubled = self.cuts.len() >= 2 && self.cuts.len().is_power_of_two();
        if !have_doubled && !self.lanes.is_empty() {
            return;
        }
        let mut by_cut = [0u32; NODE_BLOCKS as usize + 1];
        self.cuts.iter().for_each(|(_, cut)| by_cut[*cut as usize] += 1);
        let best = by_cut.iter().enumerate().max_by_key(|(_, holders)| **holders).map_or(0, |(cut, _)| cut as u32);
        let full: u32 = self.lanes.iter().map(|(_, mask)| mask.count_ones()).sum();
        if by_cut[best as usize] <= full {
            return;
        }
        let lanes = std::mem::take(&mut self.lanes);
        let old = std::mem::replace(&mut self.full, best);
        for (key, mask) in lanes {
            (0..64).filter(|bit| mask >> bit & 1 != 0).for_each(|bit| self.cuts.push((key.who(bit), old)));
        }
        let mut at = 0;
        while at < self.cuts.len() {
            if self.cuts[at].1 == best {
                let (who, _) = self.cuts.swap_remove(at);
                self.join(who);
            } else {
                at += 1;
            }
        }
    }
}

/// Position of a tier as a number of this module.
pub(crate) fn tier_of(position: usize) -> Option<Tier> {
    Tier::ALL.get(position).copied()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However they are written down, each keeps its places.
        #[test]
        fn holders_are_a_map_of_masks(
            steps in prop::collection::vec((0u32..150, 0usize..2, 0u32..129, 0u32..129, any::<bool>()), 0..300),
        ) {
            let mut holders = Holders::default();
            let mut model: BTreeMap<Who, u128> = BTreeMap::new();
            for (slot, tier, from, to, leading) in steps {
                let who = Who::new(slot, tier);
                let new = if leading { ones(to / 16 * 16) } else { span(from.min(to), to) };
                let old = model.get(&who).copied().unwrap_or(0);
                prop_assert_eq!(old, holders.shares(slot).own[tier]);
                holders.set(who, old, new);
                if new == 0 { model.remove(&who) } else { model.insert(who, new) };
                let mut node = Node::new(None);
                let words: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(holders.words()).collect();
                holders.store(&mut node, &words);
                let entries = Entries { node: &node, words: &words };
                let lanes = entries.lanes().flat_map(|(key, mask)| {
                    (0..64).filter(move |bit| mask >> bit & 1 != 0).map(move |bit| key.who(bit))
                });
                let read: BTreeMap<Who, u128> = lanes
                    .map(|who| (who, ones(node.full)))
                    .chain(entries.cuts().map(|(who, cut)| (who, ones(cut))))
                    .chain(entries.holed())
                    .collect();
                prop_assert_eq!(&model, &read);
                prop_assert_eq!(&model, &holders.all().collect());
                prop_assert_eq!(holders.shares(slot).own, entries.own(slot));
                let others = model.iter().filter(|(one, _)| one.slot() != slot).fold(0, |any, (_, mask)| any | mask);
                prop_assert_eq!(others, holders.shares(slot).others);
                prop_assert_eq!(node.tiers, model.keys().fold(0, |tiers, who| tiers | 1 << who.tier()));
            }
        }
    }
}
