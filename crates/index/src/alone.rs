//! Nodes that one slot holds alone, all of them and in one tier.
//!
//! Most events are about such a node: a source goes on with a prompt that only it has, or lets go of the end of one. The record
//! says all there is to say of the holders then, and two numbers in it are all that changes; so nothing is taken out of it to
//! be looked at, and no other memory is needed. What is not that simple goes the way of all others.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Tier};

use crate::{
    core::{Core, Counters},
    holders::{Who, span},
    node::{NODE_BLOCKS, Node},
    remove::Going,
    source::TierSum,
    store::Entered,
    table::Seat,
};

impl Node {
    /// Whether somebody holds all of it, and nobody else anything.
    fn is_all_of(&self, who: Who) -> bool {
        self.lanes == 1
            && self.cuts | self.holed == 0
            && self.full == self.len
            && self.first_key == who.lane().0
            && self.first_mask == who.bit()
    }
}

impl Core {
    /// Takes in blocks behind the last of a node that the slot holds alone, as many as may stand in it. None, and nothing done,
    /// when it is not such a node, or when there is not yet room for them.
    pub(crate) fn extend_alone(
        &mut self,
        slot: u32,
        tier: Tier,
        last: Seat,
        mut node: Node,
        rest: &[BlockHash],
    ) -> Option<Entered> {
        let start = node.len;
        if last.offset + 1 != start || !node.is_all_of(Who::new(slot, tier.position())) {
            return None;
        }
        let blocks = rest.len().min((NODE_BLOCKS - start) as usize);
        let end = start + blocks as u32;
        let capacity = node.capacity(|line| self.words.order_of(line));
        if end > capacity || !self.slots[slot as usize].places.has_room(blocks) {
            return None;
        }
        let rest = &rest[..blocks];
        // Behind those that readers know, so this is no change yet.
        let words = self.words.lines().words(node.hashes, end as usize);
        words.get(start as usize..)?.iter().zip(rest).for_each(|(word, hash)| word.store(hash.0, Relaxed));
        (node.len, node.full) = (end, end);
        self.visits += 1;
        self.change(last.node, |record, _| node.store_shape(record));

        let account = &mut self.slots[slot as usize];
        account.pairs += blocks as u64;
        let sum = TierSum::of(rest.iter().copied());
        account.enter(tier, &sum, self.scrub_end > last.node);
        Counters::add(&self.counters.holders, blocks as u64, 0);
        Counters::add(&self.counters.blocks, blocks as u64, 0);
        let moved = self.set_places(slot, last.node, &node, span(start, end));
        moved.into_iter().for_each(|(hash, old)| self.leave(slot, hash, old));
        Some(Entered { blocks, last: Some(Seat { offset: end - 1, ..last }) })
    }

    /// Takes the end of a node out that the slot holds alone, with its account. False, and nothing done, when it is not such a
    /// node, or when nothing would be left of it.
    pub(crate) fn cut_alone(&mut self, slot: u32, tier: Tier, going: Going, mut node: Node) -> bool {
        let start = going.places.trailing_zeros();
        let is_end = start > 0 && going.places == span(start, node.len);
        if !is_end || !node.is_all_of(Who::new(slot, tier.position())) {
            return false;
        }
        let sum = self.sum(going.node, &node, going.places);
        self.unset_places(slot, going.node, &node, going.places);
        (node.len, node.full) = (start, start);
        self.visits += 1;
        self.change(going.node, |record, _| node.store_shape(record));

        let account = &mut self.slots[slot as usize];
        account.pairs -= sum.count;
        account.leave(tier, &sum, self.scrub_end > going.node);
        Counters::add(&self.counters.holders, 0, sum.count);
        Counters::add(&self.counters.blocks, 0, sum.count);
        self.shrink_hashes(going.node, node);
        self.tidy_places(slot);
        true
    }
}
