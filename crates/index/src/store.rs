//! Taking blocks in.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Tier};

use crate::{
    arena::NO_LINE,
    core::Core,
    holders::{Who, span},
    memory::Kind,
    node::{self, NODE_BLOCKS, Node, order_for, set_only_hash},
    table::{Inserted, Seat},
};

/// The block before the next one, and where it is.
type Before = Option<(BlockHash, Option<Seat>)>;

/// What became of the beginning of a run.
struct Entered {
    /// So many blocks.
    blocks: usize,
    /// Where the last of them is; none when it was given up.
    last: Option<Seat>,
}

impl Core {
    /// Takes in blocks each of which is the parent of the next.
    pub(crate) fn store_run(&mut self, slot: u32, tier: Tier, parent: Option<BlockHash>, hashes: &[BlockHash]) {
        self.store_part(slot, tier, parent, hashes);
        if !self.loose_ends.is_empty() {
            self.tie_loose_ends(slot);
        }
    }

    /// Takes in blocks and notes what else has to follow them.
    pub(crate) fn store_part(&mut self, slot: u32, tier: Tier, parent: Option<BlockHash>, hashes: &[BlockHash]) {
        let mut before: Before = parent.map(|parent| (parent, self.recent_place_of(slot, parent)));
        if let Some((_, Some(seat))) = before
            && let Some(last) = self.extend_alone(slot, tier, seat, hashes)
        {
            self.slots[slot as usize].recent = last;
            return;
        }
        // A block behind one that was given up can not be reached; its place is better used for another.
        let is_truncated = self.truncated[slot as usize];
        let mut is_reached = !is_truncated
            || match before {
                None => true,
                Some((_, seat)) => seat.is_some_and(|seat| self.holds(seat, slot)),
            };
        self.reserve_places_ahead(slot, hashes.len() + 1);
        let mut at = 0;
        while at < hashes.len() {
            let rest = &hashes[at..];
            if !is_reached && !self.place_of(slot, rest[0]).is_some_and(|seat| self.holds(seat, slot)) {
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
        if let Some((_, Some(last))) = before {
            self.slots[slot as usize].recent = last;
        }
        self.pinned = [0; 3];
        self.growing = None;
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
        // Where nothing is said of what comes before, the slot's own place is as good as any.
        let own = if seat_before.is_none() { self.place_of(slot, rest[0]) } else { None };
        if let Some(seat) = own.or_else(|| self.find_head(rest[0]))
            && let Some(node) = self.node(seat.node)
        {
            self.link(before, seat);
            let blocks = self.same(seat.node, &node, seat.offset, rest).max(1);
            return self.put(slot, tier, seat, &rest[..blocks]);
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
        let mut is_kept = self.reserve_places(slot, blocks.len() + 1);
        // Others may have been given up for that and later, but not this node.
        let Some(mut node) = self.node(seat.node) else { return Entered { last: None, ..all } };
        self.load_holders(&node);
        let mut shares = self.holders.shares(slot);
        let new = span(from, to) & !shares.own[tier.position()];
        if new == 0 {
            return all;
        }
        if is_kept && shares.own_any() == 0 {
            is_kept = self.enlist(slot, seat.node);
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
        self.enter_places(slot, seat.node, &node, old_any, old_any | new);
        self.look_ahead(slot, last, &node);
        all
    }

    fn account(&mut self, slot: u32, tier: Tier, number: u32, node: &Node, new: u128) {
        let sum = self.sum(number, node, new);
        let is_scrubbed = self.is_scrubbed(number);
        self.slots[slot as usize].enter(tier, &sum, is_scrubbed);
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

    /// Takes in blocks the first of which no look-up finds, behind the one before them if that is the last of its node. None
    /// when there is no room for them.
    ///
    /// Others may hold some of the later ones elsewhere, in a node of its own each. They do not hold the first, so no
    /// look-up comes to these for them, and when they get it, what they hold follows.
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
        let most = rest.len().min((NODE_BLOCKS - start) as usize);
        let undo = |core: &mut Self, piece: u32| {
            core.give_back(piece);
            if is_new {
                core.free_record(number);
            }
        };
        if !self.reserve_places(slot, most) {
            undo(self, NO_LINE);
            return None;
        }
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
        let old_any = if is_new { 0 } else { self.own(number, slot).into_iter().fold(0, |any, own| any | own) };
        if old_any == 0 && !self.enlist(slot, number) {
            undo(self, new_piece);
            return None;
        }
        let head = Seat { node: number, offset: 0 };
        if is_new && !self.enter_head(slot, rest[0], head) {
            undo(self, new_piece);
            return None;
        }
        // A new node has none.
        self.load_holders(&node);
        let own = self.holders.shares(slot).own[tier.position()];
        let end = start + most as u32;
        let new = span(start, end);
        self.holders.set(Who::new(slot, tier.position()), own, own | new);
        node.hashes = piece;
        node.len = end;
        let is_kept = self.commit(slot, number, &mut node, |record| {
            if piece == NO_LINE {
                set_only_hash(record, rest[0].0);
            }
            if is_new {
                node::set_touched(record, false);
            }
        });
        if !is_kept {
            if is_new {
                self.forget(rest[0], head);
            }
            undo(self, new_piece);
            return None;
        }
        if new_piece != NO_LINE && old_piece != new_piece {
            self.give_back(old_piece);
        }
        self.count_pairs(slot, old_any, old_any | new);
        self.count_blocks(0, new);
        self.account(slot, tier, number, &node, new);
        if is_new {
            self.link(before, head);
        }
        self.enter_places(slot, number, &node, old_any, old_any | new);
        Some(Entered { blocks: most, last: Some(Seat { node: number, offset: end - 1 }) })
    }

    /// A record without blocks, which readers do not look at yet.
    fn take_record(&mut self, slot: u32) -> Option<u32> {
        let number = self.take(Kind::Records, 0, slot)? + 1;
        if let Some(record) = self.record(number) {
            Node::new(None).store(record);
        }
        Some(number)
    }

    /// Enters a node in the table, by its first block.
    fn enter_head(&mut self, slot: u32, hash: BlockHash, seat: Seat) -> bool {
        loop {
            let (records, words) = (self.records.lines(), self.words.lines());
            let is_there = |there: Seat| node::hash_at(records, words, there) == Some(hash);
            match self.table.insert(self.pages.lines(), hash, seat, is_there) {
                Inserted::Done => return true,
                Inserted::IsThere => return false,
                Inserted::NoRoom if self.make_table_room(hash, slot) => {}
                Inserted::NoRoom => return false,
            }
        }
    }
}
