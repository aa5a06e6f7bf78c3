//! Taking blocks in.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Tier};

use crate::{
    arena::NO_LINE,
    core::{Core, Kind},
    holders::{Who, ones, span},
    node::{self, NODE_BLOCKS, Node, set_only_hash},
    table::{Inserted, Seat},
};

/// The block before the next one, and where it is.
type Before = Option<(BlockHash, Option<Seat>)>;

/// Hashes whose places in the table are loaded together, before they are needed one by one.
pub(crate) const TOUCHED_AT_ONCE: usize = 32;

/// What became of the beginning of a run.
struct Entered {
    /// So many blocks.
    blocks: usize,
    /// Where the last of them is; none when it was given up.
    last: Option<Seat>,
}

/// Order of a piece for so many words.
pub(crate) fn order_for(words: usize) -> u32 {
    words.div_ceil(8).next_power_of_two().ilog2()
}

impl Core {
    /// Takes in blocks each of which is the parent of the next.
    pub(crate) fn store_run(&mut self, slot: u32, tier: Tier, parent: Option<BlockHash>, hashes: &[BlockHash]) {
        let mut before: Before = parent.map(|parent| (parent, self.find(parent)));
        // A block behind one that was given up can not be reached; its place is better used for another.
        let is_truncated = self.slots[slot as usize].given_up_blocks() > 0;
        let mut is_reached = !is_truncated
            || match before {
                None => true,
                Some((_, seat)) => seat.is_some_and(|seat| self.holds(seat, slot)),
            };
        let mut at = 0;
        while at < hashes.len() {
            let rest = &hashes[at..];
            if !is_reached && !self.find(rest[0]).is_some_and(|seat| self.holds(seat, slot)) {
                self.give_up(slot, tier, rest[0]);
                before = Some((rest[0], None));
                at += 1;
                continue;
            }
            self.pinned[0] = before.and_then(|(_, seat)| seat).map_or(0, |seat| seat.node);
            let entered = self.enter(slot, tier, before, rest);
            before = Some((rest[entered.blocks - 1], entered.last));
            is_reached = entered.last.is_some();
            at += entered.blocks;
        }
        self.pinned = [0; 3];
    }

    /// Takes in as many blocks as go into one node, at least one.
    fn enter(&mut self, slot: u32, tier: Tier, before: Before, rest: &[BlockHash]) -> Entered {
        let seat_before = before.and_then(|(_, seat)| seat);
        if let Some(seat) = seat_before
            && let Some(node) = self.node(seat.node)
            && seat.offset + 1 < node.len
        {
            let blocks = self.same(seat.node, &node, seat.offset + 1, rest);
            if blocks > 0 {
                return self.put(slot, tier, Seat { offset: seat.offset + 1, ..seat }, &rest[..blocks]);
            }
        }
        if let Some(mut seat) = self.find(rest[0]) {
            let is_in_order = |before: BlockHash| {
                seat.offset == 0 || self.hash_at(Seat { offset: seat.offset - 1, ..seat }) == Some(before)
            };
            let mut is_there = true;
            if let Some((before, _)) = before
                && !is_in_order(before)
            {
                // Somebody has told another order. What is behind is its own from here on.
                self.pinned[1] = seat.node;
                match self.split(seat, slot) {
                    Some(new) => seat = new,
                    None => {
                        self.give_up_node(seat.node);
                        is_there = false;
                    }
                }
            }
            if is_there && let Some(node) = self.node(seat.node) {
                self.link(before, seat);
                let blocks = self.same(seat.node, &node, seat.offset, rest).max(1);
                return self.put(slot, tier, seat, &rest[..blocks]);
            }
        }
        match self.append(slot, tier, before, rest) {
            Some(entered) => entered,
            None => {
                self.give_up(slot, tier, rest[0]);
                Entered { blocks: 1, last: None }
            }
        }
    }

    /// How many of some blocks stand in a node from a place on.
    fn same(&self, number: u32, node: &Node, from: u32, rest: &[BlockHash]) -> usize {
        let hashes = self.hashes(number, node).get(from as usize..).unwrap_or_default();
        hashes.iter().zip(rest).take_while(|(hash, wanted)| hash.load(Relaxed) == wanted.0).count()
    }

    /// Notes what comes before a node, and that it comes next.
    fn link(&mut self, before: Before, seat: Seat) {
        let Some((hash, seat_before)) = before else { return };
        if seat.offset > 0 {
            return;
        }
        if let Some(record) = self.record(seat.node) {
            node::set_parent(record, hash);
        }
        if let Some(record) = seat_before.and_then(|seat| self.record(seat.node)) {
            node::set_next(record, seat.node);
        }
    }

    /// Lets a slot hold blocks that stand in a node, from a place on.
    fn put(&mut self, slot: u32, tier: Tier, seat: Seat, blocks: &[BlockHash]) -> Entered {
        self.pinned[1] = seat.node;
        let (from, to) = (seat.offset, seat.offset + blocks.len() as u32);
        let last = Seat { offset: to - 1, ..seat };
        let all = Entered { blocks: blocks.len(), last: Some(last) };
        let Some(mut node) = self.node(seat.node) else { return Entered { last: None, ..all } };
        self.load_holders(&node);
        let mut shares = self.holders.shares(slot);
        let new = span(from, to) & !shares.own[tier.position()];
        if new == 0 {
            return all;
        }
        let mut is_kept = true;
        if shares.own_any() == 0 {
            is_kept = self.enlist(slot, seat.node);
            // Others may have been given up for that, but not this node.
            self.load_holders(&node);
            shares = self.holders.shares(slot);
        }
        let old_any = shares.own_any();
        let old = shares.own[tier.position()];
        if is_kept {
            self.holders.set(Who::new(slot, tier.position()), old, old | new);
            is_kept = self.commit(slot, seat.node, &mut node, |_| {});
        }
        if !is_kept {
            for (position, hash) in (from..).zip(blocks) {
                if new >> position & 1 != 0 {
                    self.give_up(slot, tier, *hash);
                }
            }
            let is_held = old_any >> (to - 1) & 1 != 0;
            return Entered { last: is_held.then_some(last), ..all };
        }
        self.count_pairs(slot, old_any, old_any | new);
        self.count_blocks(shares.others | old_any, shares.others | old_any | new);
        self.account(slot, tier, seat.node, &node, new);
        all
    }

    fn account(&mut self, slot: u32, tier: Tier, number: u32, node: &Node, new: u128) {
        let sum = self.sum(number, node, new);
        let is_scrubbed = self.is_scrubbed(number);
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()] = account.applied[tier.position()].plus(&sum);
        if is_scrubbed {
            account.scrubbed[tier.position()] = account.scrubbed[tier.position()].plus(&sum);
        }
    }

    /// Writes the holders at hand to a node, and whatever else is to change with them. False, and nothing done, when
    /// there is no room for it.
    pub(crate) fn commit(&mut self, slot: u32, number: u32, node: &mut Node, also: impl FnOnce(&node::Record)) -> bool {
        if !self.holders.fits() {
            return false;
        }
        let words = self.holders.words();
        let order = order_for(words.max(1));
        let old = node.holders;
        let has_order = if old == NO_LINE { None } else { self.words.order_of(old) };
        if words == 0 {
            node.holders = NO_LINE;
        } else if has_order.is_some_and(|has| has >= order) {
            // Much too large a piece is replaced if that costs nothing.
            if has_order.is_some_and(|has| has > order + 1) {
                node.holders = self.words.take(order).unwrap_or(old);
            }
        } else {
            let holders = std::mem::take(&mut self.holders);
            let line = self.take(Kind::Words, order, slot);
            self.holders = holders;
            let Some(line) = line else { return false };
            node.holders = line;
        }
        let holders = std::mem::take(&mut self.holders);
        self.change(number, |record, lines| {
            let place = if words == 0 { &[] } else { lines.words(node.holders, words) };
            holders.store(node, place);
            node.store(record);
            also(record);
        });
        self.holders = holders;
        if old != node.holders {
            self.give_back(old);
        }
        true
    }

    /// Takes in blocks that are not known, behind the one before them if that is the last of its node. None when there is
    /// no room for the first of them.
    fn append(&mut self, slot: u32, tier: Tier, before: Before, rest: &[BlockHash]) -> Option<Entered> {
        let tail = before.and_then(|(_, seat)| seat).and_then(|seat| Some((seat, self.node(seat.node)?)));
        let tail = tail.filter(|(seat, node)| seat.offset + 1 == node.len && node.len < NODE_BLOCKS);
        let is_new = tail.is_none();
        let (number, mut node) = match tail {
            Some((seat, node)) => (seat.node, node),
            None => (self.take_record(slot)?, Node::new(before.map(|(hash, _)| hash))),
        };
        self.pinned[1] = number;
        let start = node.len;
        let most = ((NODE_BLOCKS - start) as usize).min(rest.len());
        let undo = |core: &mut Self, piece: u32| {
            core.give_back(piece);
            if is_new {
                core.free_record(number);
            }
        };
        // The hashes first, behind those that readers know.
        let capacity = node.capacity(|line| self.words.order_of(line));
        let needed = start + most as u32;
        let old_piece = node.hashes;
        let mut new_piece = NO_LINE;
        if needed > capacity {
            let Some(piece) = self.take(Kind::Words, order_for(needed as usize), slot) else {
                undo(self, NO_LINE);
                return None;
            };
            new_piece = piece;
        }
        let piece = if new_piece == NO_LINE { old_piece } else { new_piece };
        if piece != NO_LINE {
            let into = self.words.lines().words(piece, needed as usize);
            if piece == new_piece {
                into.iter()
                    .zip(self.hashes(number, &node))
                    .for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
            }
            let behind = into.get(start as usize..).unwrap_or_default();
            behind.iter().zip(rest).for_each(|(word, hash)| word.store(hash.0, Relaxed));
        }
        let mut old_any = 0;
        if !is_new {
            self.load_holders(&node);
            old_any = self.holders.shares(slot).own_any();
        }
        if old_any == 0 && !self.enlist(slot, number) {
            undo(self, new_piece);
            return None;
        }
        let blocks = self.enter_in_table(slot, number, start, &rest[..most]);
        let hold = |core: &mut Self, node: &mut Node| {
            if blocks == 0 {
                return false;
            }
            core.holders.clear();
            if !is_new {
                core.load_holders(node);
            }
            let own = core.holders.shares(slot).own[tier.position()];
            let end = start + blocks as u32;
            core.holders.set(Who::new(slot, tier.position()), own, own | span(start, end));
            node.hashes = piece;
            node.len = end;
            core.commit(slot, number, node, |record| {
                if piece == NO_LINE {
                    set_only_hash(record, rest[0].0);
                }
                if is_new {
                    node::set_touched(record, false);
                }
            })
        };
        if !hold(self, &mut node) {
            for (offset, hash) in (start..).zip(&rest[..blocks]) {
                self.forget(*hash, Seat { node: number, offset });
            }
            undo(self, new_piece);
            return None;
        }
        if new_piece != NO_LINE && old_piece != new_piece {
            self.give_back(old_piece);
        }
        let new = span(start, start + blocks as u32);
        self.count_pairs(slot, old_any, old_any | new);
        self.count_blocks(0, new);
        self.account(slot, tier, number, &node, new);
        if is_new {
            self.link(before, Seat { node: number, offset: 0 });
        }
        Some(Entered { blocks, last: Some(Seat { node: number, offset: start + blocks as u32 - 1 }) })
    }

    /// A record without blocks, which readers do not look at yet.
    fn take_record(&mut self, slot: u32) -> Option<u32> {
        let number = self.take(Kind::Records, 0, slot)? + 1;
        if let Some(record) = self.record(number) {
            Node::new(None).store(record);
        }
        Some(number)
    }

    /// Enters blocks in the table, up to the first that is there or has no room; says how many.
    fn enter_in_table(&mut self, slot: u32, number: u32, start: u32, blocks: &[BlockHash]) -> usize {
        let mut position = 0;
        while let Some(hash) = blocks.get(position) {
            if position.is_multiple_of(TOUCHED_AT_ONCE) && blocks.len() > 1 {
                self.touch(blocks[position..].iter().take(TOUCHED_AT_ONCE).copied());
            }
            let seat = Seat { node: number, offset: start + position as u32 };
            // One of those just entered is not part of its node yet.
            let (records, words) = (self.records.lines(), self.words.lines());
            let is_there = |seat: Seat| {
                let new = (seat.node == number).then(|| seat.offset.checked_sub(start)).flatten();
                new.and_then(|new| blocks.get(new as usize)) == Some(hash)
                    || node::hash_at(records, words, seat) == Some(*hash)
            };
            match self.table.insert(self.pages.lines(), *hash, seat, is_there) {
                Inserted::Done => position += 1,
                Inserted::IsThere => return position,
                Inserted::NoRoom if self.make_table_room(*hash, slot) => {}
                Inserted::NoRoom => return position,
            }
        }
        blocks.len()
    }

    /// Makes a node of its own of what stands in a node from a place on.
    fn split(&mut self, seat: Seat, slot: u32) -> Option<Seat> {
        let mut node = self.node(seat.node)?;
        let (number, moved) = (self.take_record(slot)?, node.len - seat.offset);
        self.pinned[2] = number;
        let mut new = Node::new(None);
        new.len = moved;
        if moved > 1 {
            let Some(piece) = self.take(Kind::Words, order_for(moved as usize), slot) else {
                self.free_record(number);
                return None;
            };
            new.hashes = piece;
        }
        self.load_holders(&node);
        let mut all: Vec<(Who, u128)> = self.holders.all().collect();
        all.sort_unstable_by_key(|(who, _)| *who);
        let hashes: Vec<u64> = self.hashes(seat.node, &node).iter().map(|hash| hash.load(Relaxed)).collect();
        let behind = hashes.get(seat.offset as usize..).unwrap_or_default();
        self.words.lines().words(new.hashes, moved as usize).iter().zip(behind).for_each(|(word, hash)| {
            word.store(*hash, Relaxed);
        });
        // The lists first: an entry that turns out to be wrong does no harm.
        for (who, mask) in &all {
            if mask >> seat.offset != 0 && !self.enlist(who.slot(), number) {
                self.give_back(new.hashes);
                self.free_record(number);
                return None;
            }
        }
        self.holders.clear();
        all.iter().for_each(|(who, mask)| self.holders.set(*who, 0, mask >> seat.offset));
        let only = behind.first().copied().unwrap_or(0);
        if !self.commit(slot, number, &mut new, |record| set_only_hash(record, only)) {
            self.give_back(new.hashes);
            self.free_record(number);
            return None;
        }
        node.len = seat.offset;
        self.holders.clear();
        all.iter().for_each(|(who, mask)| self.holders.set(*who, 0, mask & ones(seat.offset)));
        if !self.commit(slot, seat.node, &mut node, |_| {}) {
            self.give_back(new.hashes);
            self.give_back(new.holders);
            self.change(number, |_, _| {});
            if let Some(record) = self.record(number) {
                node::begin_change(record);
            }
            self.free_record(number);
            return None;
        }
        for (offset, hash) in (0..).zip(behind) {
            let old = Seat { offset: seat.offset + offset, ..seat };
            self.table.replace(self.pages.lines(), BlockHash(*hash), old, Seat { node: number, offset });
        }
        self.note_move(seat, number, &all, &new);
        Some(Seat { node: number, offset: 0 })
    }

    /// Accounts of those that hold blocks of a node that became another.
    fn note_move(&mut self, seat: Seat, number: u32, all: &[(Who, u128)], new: &Node) {
        for of_slot in all.chunk_by(|(left, _), (right, _)| left.slot() == right.slot()) {
            let any = of_slot.iter().fold(0, |any, (_, mask)| any | mask);
            let (stays, goes) = (any & ones(seat.offset), any >> seat.offset);
            let account = &mut self.slots[of_slot[0].0.slot() as usize];
            account.nodes += u32::from(stays != 0 && goes != 0);
        }
        let (was, is) = (self.is_scrubbed(seat.node), self.is_scrubbed(number));
        if was != is {
            for (who, mask) in all {
                let sum = self.sum(number, new, mask >> seat.offset);
                let scrubbed = &mut self.slots[who.slot() as usize].scrubbed[who.tier()];
                if is { *scrubbed = scrubbed.plus(&sum) } else { scrubbed.subtract(&sum) }
            }
        }
    }
}
