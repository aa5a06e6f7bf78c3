//! The blocks, who holds them, and the byte budget.

use kvist_blocks::{BlockHash, Tier};

use crate::{
    segments::{NEW, SEGMENT_BLOCKS, Seat, Segment, Segments},
    sets::{EMPTY, Holder, Keep, Lanes, SetId, Sets, tier_bit},
    source::TierSum,
    table::{SHARD_BITS, Table, spread},
};

/// Tables, so that growing and sweeping one of them is short.
pub(crate) const SHARDS: usize = 1 << SHARD_BITS;

/// Bytes of the pieces of a segment that has two sets.
const TWO_SETS_BYTES: u64 = 32;

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

/// What a look-up learns with one or two probes.
pub(crate) struct Stretch<'a> {
    /// Blocks of the prompt that it covers, at least one.
    pub(crate) blocks: usize,
    kind: StretchKind<'a>,
}

enum StretchKind<'a> {
    Lone(SetId),
    In(&'a Segment, u32),
}

impl Stretch<'_> {
    /// Whether it is a block of which it is not known how it follows others.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.kind, StretchKind::Lone(_))
    }

    /// The sets along the stretch: where each begins, and which.
    pub(crate) fn for_each_set(&self, mut each: impl FnMut(usize, SetId)) {
        match self.kind {
            StretchKind::Lone(set) => each(0, set),
            StretchKind::In(segment, offset) => {
                let sets = segment.sets_in(offset, offset + self.blocks as u32);
                sets.for_each(|(start, set)| each(start as usize, set));
            }
        }
    }
}

/// Probes of a look-up that were made before they are needed: on both sides of the boundaries of the next segments.
#[derive(Default)]
pub(crate) struct Ahead {
    /// Position of the first block behind the first boundary.
    boundary: usize,
    /// Boundaries that were probed.
    known: usize,
    values: [[Option<u32>; 2]; 8],
}

impl Ahead {
    fn get(&self, position: usize) -> Option<Option<u32>> {
        let behind = (position + 1).checked_sub(self.boundary)?;
        let (number, side) = (behind / SEGMENT_BLOCKS as usize, behind % SEGMENT_BLOCKS as usize);
        if number < self.known && side < 2 { Some(self.values[number][side]) } else { None }
    }
}

#[derive(Debug)]
pub(crate) struct Holdings {
    byte_budget: u64,
    shards: Vec<Table>,
    segments: Segments,
    sets: Sets,
    table_bytes: u64,
    blocks: u64,
}

impl Holdings {
    pub(crate) fn new(byte_budget: u64) -> Self {
        let shards = std::iter::repeat_with(Table::default).take(SHARDS).collect();
        Self { byte_budget, shards, segments: Segments::default(), sets: Sets::default(), table_bytes: 0, blocks: 0 }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn holders(&self) -> u64 {
        self.sets.holders()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.table_bytes + self.segments.bytes() + self.sets.bytes()
    }

    pub(crate) fn byte_budget(&self) -> u64 {
        self.byte_budget
    }

    pub(crate) fn lanes(&self, set: SetId) -> Lanes<'_> {
        self.sets.lanes(set)
    }

    /// Whether a slot holds a block in any tier.
    pub(crate) fn holds(&self, hash: BlockHash, slot: u32) -> bool {
        self.sets.tiers_of(self.set_of(hash), slot) != 0
    }

    /// What is known of a prompt from some position on, in one piece; none when nobody has that block.
    pub(crate) fn stretch(&self, prompt: &[BlockHash], from: usize, ahead: &mut Ahead) -> Option<Stretch<'_>> {
        let seat = Seat::decode(self.value_at(prompt, from, ahead)?);
        let Seat::In { segment: number, offset } = seat else {
            return Some(Stretch { blocks: 1, kind: StretchKind::Lone(self.segments.set_of(seat)) });
        };
        let segment = self.segments.get(number)?;
        let rest = u32::try_from(prompt.len() - from).unwrap_or(u32::MAX);
        let run = segment.run_from(offset);
        if offset + run == SEGMENT_BLOCKS {
            self.look_ahead(prompt, from + run as usize, ahead);
        }
        let is_at = |blocks: u32, ahead: &Ahead| {
            let value = self.value_at(prompt, from + blocks as usize, ahead);
            value == Some(Seat::In { segment: number, offset: offset + blocks }.encode())
        };
        let most = run.min(rest);
        // So many blocks are those of the prompt for certain.
        let mut same = 1;
        if most > 1 && is_at(most - 1, ahead) {
            same = most;
        } else if most > 1 {
            let mut too_many = most;
            while same + 1 < too_many {
                let middle = same + (too_many - same) / 2;
                if is_at(middle - 1, ahead) {
                    same = middle;
                } else {
                    too_many = middle;
                }
            }
        }
        Some(Stretch { blocks: same as usize, kind: StretchKind::In(segment, offset) })
    }

    /// Brings the places of blocks into the processor's caches. Probes that do not wait for each other take a fraction of
    /// the time of those of a change, each of which depends on the one before.
    pub(crate) fn touch(&self, hashes: &[BlockHash]) {
        let peek = |sum: u32, hash: &BlockHash| sum.wrapping_add(self.shards[shard_of(*hash)].peek(*hash));
        std::hint::black_box(hashes.iter().fold(0, peek));
    }

    /// Where the block at a position of a prompt is, as a value of the table.
    fn value_at(&self, prompt: &[BlockHash], position: usize, ahead: &Ahead) -> Option<u32> {
        let hash = *prompt.get(position)?;
        ahead.get(position).unwrap_or_else(|| self.shards[shard_of(hash)].get(hash))
    }

    /// Probes where the next segments end and begin, if they are full and follow each other. The probes do not wait for
    /// each other, which is most of what a probe costs in a table that is larger than the caches.
    fn look_ahead(&self, prompt: &[BlockHash], boundary: usize, ahead: &mut Ahead) {
        if ahead.get(boundary).is_some() {
            return;
        }
        ahead.boundary = boundary;
        ahead.known = 0;
        for (position, values) in (boundary..prompt.len()).step_by(SEGMENT_BLOCKS as usize).zip(&mut ahead.values) {
            let [last, first] = [prompt[position - 1], prompt[position]];
            *values = [self.shards[shard_of(last)].get(last), self.shards[shard_of(first)].get(first)];
            ahead.known += 1;
        }
    }

    /// Takes a block in, and says where it is if it is held then. `before` is the block before it in the prompt, if that
    /// is known and held.
    pub(crate) fn add(
        &mut self,
        hash: BlockHash,
        slot: u32,
        tier: Tier,
        before: Option<(BlockHash, Seat)>,
    ) -> (Added, Option<Seat>) {
        let before = before.filter(|(before, _)| *before != hash);
        let seat = self.seat_of(hash).map(|seat| self.in_order(hash, seat, before));
        let old = seat.map_or(EMPTY, |seat| self.segments.set_of(seat));
        let tiers = self.sets.tiers_of(old, slot);
        if tiers & tier_bit(tier) != 0 {
            return (Added::Present, seat);
        }
        let found = self.sets.find_with(old, slot, tiers | tier_bit(tier));
        let set_growth = if found.is_none() { self.sets.intern_bytes() } else { Some(0) };
        let Some(set_growth) = set_growth else { return (Added::NoRoom, None) };
        let table_growth = if seat.is_none() { self.shards[shard_of(hash)].growth_bytes() } else { 0 };
        let piece_growth = match seat {
            Some(Seat::In { segment, offset }) => self.segments.plan(segment, offset, found.unwrap_or(NEW)),
            _ => 0,
        };
        if !self.has_room(table_growth + set_growth + piece_growth) {
            return (Added::NoRoom, None);
        }
        let new = found.unwrap_or_else(|| self.sets.intern());
        self.sets.move_block(old, new);
        let seat = match seat {
            None => {
                self.blocks += 1;
                let behind = before.and_then(|(before, seat)| self.seat_behind(before, seat, new, table_growth));
                let seat = behind.unwrap_or(Seat::Lone(new));
                self.place_new(hash, seat);
                seat
            }
            Some(Seat::Lone(_)) => {
                let behind = before.and_then(|(before, seat)| self.seat_behind(before, seat, new, 0));
                let seat = behind.unwrap_or(Seat::Lone(new));
                self.place(hash, seat);
                seat
            }
            Some(Seat::In { segment, offset }) => {
                self.segments.commit(segment, offset, new);
                Seat::In { segment, offset }
            }
        };
        (Added::New, Some(seat))
    }

    pub(crate) fn remove(&mut self, hash: BlockHash, slot: u32, tier: Tier) -> Removed {
        let Some(seat) = self.seat_of(hash) else { return Removed::Absent };
        let old = self.segments.set_of(seat);
        let tiers = self.sets.tiers_of(old, slot);
        if tiers & tier_bit(tier) == 0 {
            return Removed::Absent;
        }
        let left = tiers & !tier_bit(tier);
        let found = self.sets.find_with(old, slot, left);
        if found == Some(EMPTY) {
            self.take_out(hash, seat, old);
            return Removed::Gone;
        }
        let set_growth = if found.is_none() { self.sets.intern_bytes() } else { Some(0) };
        let piece_growth = match seat {
            Seat::Lone(_) => 0,
            Seat::In { segment, offset } => self.segments.plan(segment, offset, found.unwrap_or(NEW)),
        };
        let growth = set_growth.map(|set_growth| set_growth + piece_growth);
        if growth.is_none_or(|growth| !self.has_room(growth)) {
            let mut others = self.sets.members(old);
            others.retain(|holder| holder.slot != slot);
            if left != 0 {
                others.push(Holder { slot, tiers: left });
            }
            self.take_out(hash, seat, old);
            return Removed::GivenUp(others);
        }
        let new = found.unwrap_or_else(|| self.sets.intern());
        match seat {
            Seat::Lone(_) => self.place(hash, Seat::Lone(new)),
            Seat::In { segment, offset } => {
                self.segments.commit(segment, offset, new);
            }
        }
        self.sets.move_block(old, new);
        Removed::Gone
    }

    /// Gives a block that stands alone the place behind the block before it, so that look-ups skip it. Does nothing when
    /// that place is taken, or there is no room.
    pub(crate) fn join(&mut self, before: BlockHash, hash: BlockHash) {
        if before != hash
            && let (Some(before_seat), Some(Seat::Lone(set))) = (self.seat_of(before), self.seat_of(hash))
            && let Some(seat) = self.seat_behind(before, before_seat, set, 0)
        {
            self.place(hash, seat);
        }
    }

    /// Where a block is.
    pub(crate) fn seat_of(&self, hash: BlockHash) -> Option<Seat> {
        self.shards[shard_of(hash)].get(hash).map(Seat::decode)
    }

    /// Makes a place with a set behind the block before; none when that place is taken, or there is no room for it and
    /// for `reserved_bytes`.
    fn seat_behind(&mut self, before: BlockHash, seat: Seat, set: SetId, reserved_bytes: u64) -> Option<Seat> {
        let (segment, offset) = match seat {
            Seat::In { segment, offset } => {
                let next = self.segments.next_place(segment, offset)?;
                let growth = self.segments.plan(segment, next, set);
                if growth > 0 && !self.has_room(growth + reserved_bytes) {
                    return None;
                }
                (segment, next)
            }
            Seat::Lone(of_first) => {
                let growth = self.segments.open_bytes()? + if of_first == set { 0 } else { TWO_SETS_BYTES };
                if growth > 0 && !self.has_room(growth + reserved_bytes) {
                    return None;
                }
                let segment = self.segments.open(of_first);
                self.segments.plan(segment, 1, set);
                self.place(before, Seat::In { segment, offset: 0 });
                (segment, 1)
            }
        };
        self.segments.commit(segment, offset, set);
        Some(Seat::In { segment, offset })
    }

    /// Sets that exist.
    pub(crate) fn sets(&self) -> usize {
        self.sets.len()
    }

    /// Blocks that nobody holds and that are still there.
    pub(crate) fn orphans(&self) -> u64 {
        self.sets.orphans()
    }

    /// Says that what a slot holds belongs to nobody.
    pub(crate) fn mark_dead(&mut self, slot: u32) {
        self.sets.mark_dead(slot);
    }

    /// Says that nothing carries a slot any more.
    pub(crate) fn forget_dead(&mut self, slot: u32) {
        self.sets.forget_dead(slot);
    }

    /// Slots of a word that are marked as dead.
    pub(crate) fn dead_mask(&self, word: u32) -> u64 {
        self.sets.dead_mask(word)
    }

    /// Takes holders out of some of the sets, for all blocks that have them.
    pub(crate) fn filter_sets(&mut self, range: std::ops::Range<usize>, keep: impl Keep) {
        self.sets.filter(range, keep);
    }

    /// Blocks of one shard that nobody holds.
    pub(crate) fn orphans_in(&self, shard: usize) -> Vec<BlockHash> {
        let orphans = self.in_shard(shard).filter(|(_, set)| self.sets.is_empty(*set));
        orphans.map(|(hash, _)| hash).collect()
    }

    /// Takes a block out if nobody holds it.
    pub(crate) fn sweep(&mut self, hash: BlockHash) {
        let Some(seat) = self.seat_of(hash) else { return };
        let set = self.segments.set_of(seat);
        if self.sets.is_empty(set) {
            self.take_out(hash, seat, set);
        }
    }

    /// All blocks of a shard with the sets of their holders.
    pub(crate) fn in_shard(&self, shard: usize) -> impl Iterator<Item = (BlockHash, SetId)> {
        self.shards[shard].iter().map(|(hash, value)| (hash, self.segments.set_of(Seat::decode(value))))
    }

    /// Whether a block belongs to a shard before some other.
    pub(crate) fn is_before(&self, hash: BlockHash, shard: usize) -> bool {
        shard_of(hash) < shard
    }

    /// Count and digest of a shard's blocks by holder: for each set of holders a slot, the position of a tier, and the sum
    /// over the blocks that have the set.
    pub(crate) fn sum_shard(&self, shard: usize, mut each: impl FnMut(u32, usize, &TierSum)) {
        let mut blocks: Vec<(SetId, BlockHash)> = self.in_shard(shard).map(|(hash, set)| (set, hash)).collect();
        blocks.sort_unstable();
        for of_set in blocks.chunk_by(|(left, _), (right, _)| left == right) {
            let mut sum = TierSum::default();
            of_set.iter().for_each(|(_, hash)| sum.add(*hash));
            for (key, mut mask) in self.sets.lanes(of_set[0].0).iter() {
                while mask != 0 {
                    each(key.word() * 64 + mask.trailing_zeros(), key.tier(), &sum);
                    mask &= mask - 1;
                }
            }
        }
    }

    /// What a slot has of a set: a bit for each tier.
    pub(crate) fn tiers_of(&self, set: SetId, slot: u32) -> u8 {
        self.sets.tiers_of(set, slot)
    }

    fn set_of(&self, hash: BlockHash) -> SetId {
        self.seat_of(hash).map_or(EMPTY, |seat| self.segments.set_of(seat))
    }

    /// The seat of a block that is told to follow another one. Blocks that follow each other do so in a segment: if
    /// another block has the place before this one, somebody told something else, and nobody can say who is right. The
    /// block stands alone from here on.
    fn in_order(&mut self, hash: BlockHash, seat: Seat, before: Option<(BlockHash, Seat)>) -> Seat {
        let (Seat::In { segment, offset }, Some((_, before))) = (seat, before) else { return seat };
        let is_behind_other = offset > 0
            && before != Seat::In { segment, offset: offset - 1 }
            && self.segments.get(segment).is_some_and(|segment| segment.has(offset - 1));
        if !is_behind_other {
            return seat;
        }
        let alone = Seat::Lone(self.segments.set_of(seat));
        self.segments.vacate(segment, offset);
        self.place(hash, alone);
        alone
    }

    /// Takes a block out for everybody; allocates nothing but the copy of a table that shrinks, if there is room.
    fn take_out(&mut self, hash: BlockHash, seat: Seat, old: SetId) {
        let table = &mut self.shards[shard_of(hash)];
        self.table_bytes -= table.bytes();
        table.remove(hash);
        if let Seat::In { segment, offset } = seat {
            self.segments.vacate(segment, offset);
        }
        self.blocks -= 1;
        // The set must go first: what it frees counts for the copy that shrinking makes.
        self.sets.move_block(old, EMPTY);
        let others = self.table_bytes + self.segments.bytes() + self.sets.bytes();
        let table = &mut self.shards[shard_of(hash)];
        table.shrink(self.byte_budget.saturating_sub(others + table.bytes()));
        self.table_bytes += table.bytes();
    }

    fn place(&mut self, hash: BlockHash, seat: Seat) {
        self.shards[shard_of(hash)].replace(hash, seat.encode());
    }

    fn place_new(&mut self, hash: BlockHash, seat: Seat) {
        let table = &mut self.shards[shard_of(hash)];
        self.table_bytes -= table.bytes();
        table.insert(hash, seat.encode());
        self.table_bytes += table.bytes();
    }

    fn has_room(&self, growth: u64) -> bool {
        growth == 0 || self.bytes() + growth <= self.byte_budget
    }
}

fn shard_of(hash: BlockHash) -> usize {
    (spread(hash) >> (u64::BITS - SHARD_BITS)) as usize
}
