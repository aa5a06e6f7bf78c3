//! Nodes that one slot holds alone, all of them and in one tier.
//!
//! Most events are about such a node: a source goes on with a prompt that only it has, or lets go of the end of one. The record
//! says all there is to say of the holders then, and two numbers in it are all that changes; so nothing is taken out of it to
//! be looked at, and no other memory is needed. What is not that simple goes the way of all others.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Tier};

use crate::{
    arena::NO_LINE,
    core::{Core, Counters},
    holders::{Who, span},
    node::{NODE_BLOCKS, Node, copy_hashes, order_for},
    remove::Going,
    source::TierSum,
    table::Seat,
};

impl Node {
    /// Whether somebody holds all of it, and nobody else anything.
    pub(crate) fn is_all_of(&self, who: Who) -> bool {
        self.lanes == 1
            && self.cuts | self.holed == 0
            && self.full == self.len
            && self.first_key == who.lane().0
            && self.first_mask == who.bit()
    }
}

impl Core {
    /// Takes in a run behind the last block of a node that the slot holds alone, and says where its last block stands. None, and
    /// nothing done, when it is not such a node, when the run does not fit into what it has, or when others begin with the run.
    pub(crate) fn extend_alone(&mut self, slot: u32, tier: Tier, last: Seat, hashes: &[BlockHash]) -> Option<Seat> {
        let mut node = self.node(last.node)?;
        let start = node.len as usize;
        let end = start + hashes.len();
        let is_end = last.offset + 1 == node.len && node.is_all_of(Who::new(slot, tier.position()));
        let has_room = is_end
            && end <= NODE_BLOCKS as usize
            && node.hashes != NO_LINE
            && self.slots[slot as usize].places.has_room(hashes.len());
        if !has_room || self.find_head(*hashes.first()?).is_some() {
            return None;
        }
        let old = node.hashes;
        if end > node.capacity(|line| self.words.order_of(line)) as usize {
            node.hashes = self.words.take(order_for(end))?;
            copy_hashes(self.words.lines(), old, node.hashes, start);
        }
        // Behind those that readers know, so this is no change yet.
        let words = self.words.lines().words(node.hashes, end);
        words.get(start..)?.iter().zip(hashes).for_each(|(word, hash)| word.store(hash.0, Relaxed));
        (node.len, node.full) = (end as u32, end as u32);
        self.visits += 1;
        self.change(last.node, |record, _| node.store_blocks(record));
        if old != node.hashes {
            self.give_back(old);
        }

        let account = &mut self.slots[slot as usize];
        account.pairs += hashes.len() as u64;
        let sum = TierSum::of(hashes.iter().copied());
        account.enter(tier, &sum, self.scrub_end > last.node);
        Counters::add(&self.counters.holders, sum.count, 0);
        Counters::add(&self.counters.blocks, sum.count, 0);
        // What has to give up its place may need room.
        self.pinned[0] = last.node;
        let moved = self.set_places(slot, last.node, &node, start..end);
        moved.into_iter().for_each(|(hash, old)| self.leave(slot, hash, old));
        self.pinned[0] = 0;
        Some(Seat { offset: node.len - 1, ..last })
    }

    /// Takes the end of a node out that the slot holds alone, with its account. False, and nothing done, when it is not such a
    /// node, or when nothing would be left of it.
    pub(crate) fn cut_alone(&mut self, slot: u32, tier: Tier, going: Going, mut node: Node) -> bool {
        let start = going.places.trailing_zeros();
        let is_end = start > 0 && going.places == span(start, node.len);
        if !is_end || !node.is_all_of(Who::new(slot, tier.position())) {
            return false;
        }
        let range = start as usize..node.len as usize;
        let hashes = self.hashes(going.node, &node).get(range.clone()).unwrap_or_default();
        let sum = TierSum::of(hashes.iter().map(|hash| BlockHash(hash.load(Relaxed))));
        self.unset_places(slot, going.node, &node, range);
        (node.len, node.full) = (start, start);
        self.visits += 1;
        self.change(going.node, |record, _| node.store_blocks(record));

        let account = &mut self.slots[slot as usize];
        account.pairs -= sum.count;
        account.leave(tier, &sum, self.scrub_end > going.node);
        Counters::add(&self.counters.holders, 0, sum.count);
        Counters::add(&self.counters.blocks, 0, sum.count);
        if start < NODE_BLOCKS / 4 {
            self.shrink_hashes(going.node, node);
        }
        self.tidy_places(slot);
        true
    }
}
