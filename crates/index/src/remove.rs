//! Taking blocks out, and whole nodes.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Tier};

use crate::{
    arena::NO_LINE,
    core::Core,
    holders::{Who, ones, span, tier_of},
    node::{self, NODE_BLOCKS, Node, copy_hashes, order_for},
    places::{ranges, tracked},
    source::SlotUse,
    table::Seat,
};

/// Blocks of one node that are to go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Going {
    pub(crate) node: u32,
    pub(crate) places: u128,
    /// What the slot holds of it in the tier.
    pub(crate) own: u128,
}

impl Core {
    /// Takes blocks out; says how many of them were neither held nor, as far as can be known, given up.
    pub(crate) fn remove_all(&mut self, slot: u32, tier: Tier, hashes: &[BlockHash]) -> u64 {
        let (mut going, mut last, mut unknown) = (Going::default(), None, 0);
        let mut rest = hashes;
        while let Some((hash, behind)) = rest.split_first() {
            rest = behind;
            last = self.recent_place_of(slot, *hash);
            let Some(seat) = last else {
                unknown += u64::from(!self.remove_given_up(slot, tier, *hash));
                continue;
            };
            if going.node != seat.node {
                self.take_out_going(slot, tier, going);
                // The node at hand may have gone with what was given up.
                if self.hash_at(seat) != Some(*hash) {
                    (going, last) = (Going::default(), None);
                    unknown += u64::from(!self.remove_given_up(slot, tier, *hash));
                    continue;
                }
                going = Going { node: seat.node, places: 0, own: self.own_in(seat.node, slot, tier) };
            }
            let bit = 1 << seat.offset;
            if going.own & !going.places & bit == 0 {
                unknown += u64::from(!self.remove_given_up(slot, tier, *hash));
            } else {
                going.places |= bit;
                let (along, end) = self.take_along(&mut going, seat, rest);
                (rest, last) = (&rest[along..], Some(end));
            }
        }
        if let Some(last) = last {
            self.slots[slot as usize].recent = Seat { offset: last.offset.saturating_sub(1), ..last };
        }
        self.take_out_going(slot, tier, going);
        unknown
    }

    /// Blocks that go together mostly stood beside each other, and the last of them goes first. Says how many follow a place in
    /// this way, and which is the last place of them.
    fn take_along(&self, going: &mut Going, seat: Seat, rest: &[BlockHash]) -> (usize, Seat) {
        let Some(node) = self.node(going.node).filter(|_| !rest.is_empty()) else { return (0, seat) };
        let hashes = self.hashes(going.node, &node);
        let held = going.own & !going.places;
        let is_it = |(hash, offset): &(&BlockHash, u32)| {
            let there = hashes.get(*offset as usize);
            held >> offset & 1 != 0 && there.is_some_and(|there| there.load(Relaxed) == hash.0)
        };
        let before = rest.iter().zip((0..seat.offset).rev()).take_while(is_it).count() as u32;
        if before > 0 {
            going.places |= span(seat.offset - before, seat.offset);
            return (before as usize, Seat { offset: seat.offset - before, ..seat });
        }
        let behind = rest.iter().zip(seat.offset + 1..NODE_BLOCKS).take_while(is_it).count() as u32;
        going.places |= span(seat.offset + 1, seat.offset + 1 + behind);
        (behind as usize, Seat { offset: seat.offset + behind, ..seat })
    }

    fn remove_given_up(&mut self, slot: u32, tier: Tier, hash: BlockHash) -> bool {
        let account = &mut self.slots[slot as usize];
        let given_up = &mut account.given_up[tier.position()];
        if given_up.count == 0 {
            return false;
        }
        given_up.remove(hash);
        account.applied[tier.position()].remove(hash);
        self.note_truncation(slot);
        true
    }

    /// Takes blocks out with their account. False when the rest of the node had to be given up.
    pub(crate) fn take_out_going(&mut self, slot: u32, tier: Tier, going: Going) -> bool {
        let Some(node) = self.node(going.node).filter(|_| going.places != 0) else { return true };
        if self.cut_alone(slot, tier, going, node) {
            return true;
        }
        let sum = self.sum(going.node, &node, going.places);
        let is_scrubbed = self.is_scrubbed(going.node);
        let is_given_up = !self.take_out(going.node, slot, tier, going.places);
        let account = &mut self.slots[slot as usize];
        account.leave(tier, &sum, is_scrubbed && !is_given_up);
        if is_given_up {
            account.given_up[tier.position()].subtract(&sum);
            self.note_truncation(slot);
        }
        !is_given_up
    }

    /// Takes places of a node from a slot, without its account. False when the whole node had to be given up, since there
    /// was no room to write down who holds the rest.
    pub(crate) fn take_out(&mut self, number: u32, slot: u32, tier: Tier, places: u128) -> bool {
        let Some(node) = self.node(number) else { return true };
        self.load_holders(&node);
        let shares = self.holders.shares(slot);
        let own = shares.own[tier.position()];
        let mut left = shares.own;
        left[tier.position()] = own & !places;
        self.holders.set(Who::new(slot, tier.position()), own, own & !places);
        self.write_left(number, node, slot, shares.own_any(), left, shares.others)
    }

    /// Takes all places of a node from a slot, without its account.
    pub(crate) fn take_out_all(&mut self, number: u32, slot: u32) -> bool {
        let Some(node) = self.node(number) else { return true };
        self.load_holders(&node);
        let shares = self.holders.shares(slot);
        if shares.own_any() == 0 {
            return true;
        }
        for (tier, own) in shares.own.into_iter().enumerate() {
            self.holders.set(Who::new(slot, tier), own, 0);
        }
        self.write_left(number, node, slot, shares.own_any(), [0; 4], shares.others)
    }

    /// Writes down the holders at hand, and lets go of what nobody holds.
    fn write_left(
        &mut self,
        number: u32,
        mut node: Node,
        slot: u32,
        old_any: u128,
        left: [u128; 4],
        others: u128,
    ) -> bool {
        let new_any = left.into_iter().fold(0, |any, mask| any | mask);
        let (before, after) = (others | old_any, others | new_any);
        self.leave_places(slot, number, &node, tracked(old_any) & !tracked(new_any));
        let head = self.hashes(number, &node).first().map(|hash| BlockHash(hash.load(Relaxed)));
        let len = NODE_BLOCKS - after.leading_zeros();
        if len > 0 {
            let pinned = std::mem::replace(&mut self.pinned[2], number);
            node.len = len;
            let is_written = self.commit(slot, number, &mut node, |_| {});
            self.pinned[2] = pinned;
            if !is_written {
                self.give_up_node(number);
                return false;
            }
        }
        self.count_pairs(slot, old_any, new_any);
        self.count_blocks(before, after);
        if len == 0 {
            self.free_node(number, &node, head);
        } else {
            self.shrink_hashes(number, node);
        }
        if new_any == 0 {
            self.tidy_list(slot);
        }
        self.tidy_places(slot);
        true
    }

    /// Takes places of a node out of a slot's map.
    fn leave_places(&mut self, slot: u32, number: u32, node: &Node, places: u128) {
        ranges(places).for_each(|range| self.unset_places(slot, number, node, range));
    }

    /// A smaller place for the hashes, if a quarter of it is enough and there is one.
    pub(crate) fn shrink_hashes(&mut self, number: u32, mut node: Node) {
        if node.hashes == NO_LINE || node.capacity(|line| self.words.order_of(line)) < node.len * 4 {
            return;
        }
        let order = order_for(node.len as usize);
        if self.words.order_of(node.hashes).is_none_or(|has| has <= order) {
            return;
        }
        let Some(piece) = self.words.take(order) else { return };
        let old = node.hashes;
        copy_hashes(self.words.lines(), old, piece, node.len as usize);
        node.hashes = piece;
        self.change(number, |record, _| node.store(record));
        self.give_back(old);
    }

    /// Lets go of a node; its accounts are done.
    fn free_node(&mut self, number: u32, node: &Node, head: Option<BlockHash>) {
        if let Some(record) = self.record(number) {
            node::begin_change(record);
        }
        if let Some(head) = head {
            self.forget(head, Seat { node: number, offset: 0 });
        }
        self.give_back(node.hashes);
        self.give_back(node.holders);
        self.free_record(number);
    }

    /// Gives up all blocks of a node, for all its holders.
    pub(crate) fn give_up_node(&mut self, number: u32) {
        let Some(node) = self.node(number) else { return };
        self.load_holders(&node);
        let mut all: Vec<(Who, u128)> = self.holders.all().collect();
        all.sort_unstable_by_key(|(who, _)| *who);
        let is_scrubbed = self.is_scrubbed(number);
        let hashes: Vec<u64> = self.hashes(number, &node).iter().map(|hash| hash.load(Relaxed)).collect();
        let mut present = 0;
        // First readers learn that less is known, then less is.
        for (who, mask) in &all {
            let sum = self.sum(number, &node, *mask);
            let account = &mut self.slots[who.slot() as usize];
            account.given_up[who.tier()] = account.given_up[who.tier()].plus(&sum);
            if is_scrubbed {
                account.scrubbed[who.tier()].subtract(&sum);
            }
            self.note_truncation(who.slot());
            present |= mask;
        }
        for of_slot in all.chunk_by(|(left, _), (right, _)| left.slot() == right.slot()) {
            let any = of_slot.iter().fold(0, |any, (_, mask)| any | mask);
            let slot = of_slot[0].0.slot();
            self.count_pairs(slot, any, 0);
            self.leave_places(slot, number, &node, tracked(any));
            self.tidy_places(slot);
        }
        self.count_blocks(present, 0);
        let next = node.next;
        if let Some(parent) = self.node(next).and_then(|next| next.parent).filter(|parent| hashes.contains(&parent.0)) {
            self.unreachable = Some((next, parent));
        }
        self.free_node(number, &node, hashes.first().map(|hash| BlockHash(*hash)));
        all.dedup_by_key(|(who, _)| who.slot());
        all.into_iter().for_each(|(who, _)| self.tidy_list(who.slot()));
    }

    /// Takes all blocks of one tier from a slot.
    pub(crate) fn clear_tier(&mut self, slot: u32, tier: Tier) {
        for number in self.nodes_of(slot) {
            let own = self.own_in(number, slot, tier);
            if own != 0 {
                self.take_out(number, slot, tier, own);
            }
        }
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()].clear();
        account.given_up[tier.position()].clear();
        account.scrubbed[tier.position()].clear();
        self.note_truncation(slot);
    }

    /// Takes some of what a dead slot left out of its nodes; true when nothing is left and the slot is free.
    pub(crate) fn sweep(&mut self, slot: u32, most_nodes: usize) -> bool {
        for _ in 0..most_nodes {
            let Some(number) = self.pop_listed(slot) else {
                self.dead_slots.retain(|dead| *dead != slot);
                self.slots[slot as usize].used_for = SlotUse::Free;
                self.free_slots.push(slot);
                return true;
            };
            self.take_out_all(number, slot);
        }
        false
    }

    /// What a slot holds of a node, as pairs of a tier and places.
    pub(crate) fn held(&self, number: u32, slot: u32) -> Vec<(Tier, u128)> {
        let Some(node) = self.node(number) else { return Vec::new() };
        let own = self.own(number, slot);
        let of_tier = |(tier, places): (usize, u128)| Some((tier_of(tier)?, places & ones(node.len)));
        own.into_iter().enumerate().filter(|(_, places)| *places != 0).filter_map(of_tier).collect()
    }

    /// Makes room for what a slot wants to hold by giving something up; false when there is nothing to give up.
    pub(crate) fn make_room(&mut self, slot: u32) -> bool {
        if self.release_spares() {
            return true;
        }
        // Nobody gives up a block while the dead take room. Nodes that are in use for the change at hand stay as they are.
        for dead in self.dead_slots.clone() {
            let is_in_use = self.pinned.into_iter().any(|number| number != 0 && self.is_in(number, dead));
            if !is_in_use {
                self.sweep(dead, usize::MAX);
                return true;
            }
        }
        self.evict(slot)
    }
}
