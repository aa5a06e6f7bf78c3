//! What has to follow blocks that got another place.
//!
//! A look-up comes from a head to what is behind it in the node, and by the next head to the next node. What a slot holds of
//! a prompt has to stand on that way as far as it is complete. It does while each run is stored behind its parent. It may not
//! when the parent comes later: then the run has a node of its own, though another slot has the same blocks behind the
//! parent elsewhere. So whenever a slot gets a block, what it holds of what comes next is looked at, and stored
//! anew behind it if it is not on the way.

use kvist_blocks::{BlockHash, Tier};

use crate::{
    core::Core,
    holders::{span, tier_of},
    node::Node,
    places::{bits, ranges, tracked},
    remove::Going,
    table::Seat,
};

/// Something that is to be put right at the end of a change.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LooseEnd {
    /// What the slot holds from a block on may have to stand behind another.
    Follow { before: BlockHash, hash: BlockHash },
    /// A block that got another place was held in this tier too.
    Also { tier: Tier, hash: BlockHash },
}

impl Core {
    /// Enters in a slot's map what it holds of a node beyond what it held, and takes it out of where it was before.
    pub(crate) fn enter_places(&mut self, slot: u32, number: u32, node: &Node, old_any: u128, new_any: u128) {
        let fresh = new_any & !old_any;
        for offset in bits(tracked(new_any) & !tracked(old_any) & !new_any) {
            // What is before a run and not held has its place here only if it has no better one.
            let seat = Seat { node: number, offset };
            if let Some(hash) = self.hash_in(number, node, offset)
                && self.place_of(slot, hash).is_none()
            {
                self.set_place(slot, hash, seat);
            }
        }
        let moved: Vec<(BlockHash, Seat)> =
            ranges(fresh).flat_map(|range| self.set_places(slot, number, node, range)).collect();
        moved.into_iter().for_each(|(hash, old)| self.leave(slot, hash, old));
    }

    fn hash_in(&self, number: u32, node: &Node, offset: u32) -> Option<BlockHash> {
        let hash = self.hashes(number, node).get(offset as usize)?;
        Some(BlockHash(hash.load(std::sync::atomic::Ordering::Relaxed)))
    }

    /// Takes a block out of a place that is no longer its own.
    #[cold]
    pub(crate) fn leave(&mut self, slot: u32, hash: BlockHash, old: Seat) {
        let Some(node) = self.node(old.node) else { return };
        self.load_holders(&node);
        let own = self.holders.shares(slot).own;
        let any = own.into_iter().fold(0, |any, mask| any | mask);
        if any >> old.offset & 2 != 0
            && let Some(next) = self.hash_in(old.node, &node, old.offset + 1)
        {
            self.loose_ends.push(LooseEnd::Follow { before: hash, hash: next });
        }
        let bit = 1 << old.offset;
        for (tier, own) in (0..).zip(own).filter(|(_, own)| own & bit != 0) {
            let Some(tier) = tier_of(tier) else { continue };
            let is_whole = self.take_out_going(slot, tier, Going { node: old.node, places: bit, own });
            self.loose_ends.push(LooseEnd::Also { tier, hash });
            if !is_whole {
                return;
            }
        }
    }

    /// Notes what a slot holds elsewhere of what stands behind one of its blocks.
    pub(crate) fn look_ahead(&mut self, slot: u32, last: Seat, node: &Node) {
        let next = Seat { offset: last.offset + 1, ..last };
        if let Some(hash) = self.hash_in(next.node, node, next.offset)
            && self.place_of(slot, hash).is_some_and(|seat| seat != next)
            && let Some(before) = self.hash_in(last.node, node, last.offset)
        {
            self.loose_ends.push(LooseEnd::Follow { before, hash });
        }
    }

    /// Puts right what a change has left. Ends, whatever was told: who tells blocks in orders that contradict each other may
    /// be said to hold less than that.
    #[cold]
    pub(crate) fn tie_loose_ends(&mut self, slot: u32) {
        let most = self.slots[slot as usize].pairs * 2 + 64;
        for _ in 0..most {
            match self.loose_ends.pop() {
                None => return,
                Some(LooseEnd::Also { tier, hash }) => self.store_part(slot, tier, None, &[hash]),
                Some(LooseEnd::Follow { before, hash }) => self.follow(slot, before, hash),
            }
        }
        self.loose_ends.clear();
    }

    /// Stores anew behind a block what a slot holds from another block on, if no look-up comes from the one to the other.
    fn follow(&mut self, slot: u32, before: BlockHash, hash: BlockHash) {
        let (Some(last), Some(from)) = (self.place_of(slot, before), self.place_of(slot, hash)) else { return };
        let next = Seat { offset: last.offset + 1, ..last };
        // Found by its head, unless the same block stands in the way.
        let is_on_the_way = from == next || (from.offset == 0 && self.hash_at(next) != Some(hash));
        let Some(node) = self.node(from.node).filter(|_| !is_on_the_way) else { return };
        self.load_holders(&node);
        let shares = self.holders.shares(slot);
        let blocks = (shares.own_any() >> from.offset).trailing_ones();
        let run = span(from.offset, from.offset + blocks);
        let hashes: Vec<BlockHash> =
            (from.offset..from.offset + blocks).filter_map(|offset| self.hash_in(from.node, &node, offset)).collect();
        let mut moved = Vec::new();
        for (tier, own) in (0..).zip(shares.own).filter(|(_, own)| own & run != 0) {
            let Some(tier) = tier_of(tier) else { continue };
            moved.push((tier, own & run));
            if !self.take_out_going(slot, tier, Going { node: from.node, places: own & run, own }) {
                // The rest of the node was given up, and is accounted for.
                break;
            }
        }
        for (tier, places) in moved {
            for start in bits(places & !(places << 1)) {
                let blocks = (places >> start).trailing_ones() as usize;
                let at = (start - from.offset) as usize;
                let parent = at.checked_sub(1).map_or(Some(before), |before| hashes.get(before).copied());
                self.store_part(slot, tier, parent, hashes.get(at..at + blocks).unwrap_or_default());
            }
        }
    }

    /// Puts what a slot holds on the way of look-ups, where it was told without parents.
    pub(crate) fn tie_all(&mut self, slot: u32) {
        for number in self.nodes_of(slot) {
            let Some(node) = self.node(number) else { continue };
            self.load_holders(&node);
            let any = self.holders.shares(slot).own_any();
            for offset in bits(any & !(any >> 1)) {
                self.look_ahead(slot, Seat { node: number, offset }, &node);
            }
            self.tie_loose_ends(slot);
        }
    }
}
