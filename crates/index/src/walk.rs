//! A look-up's way along a prompt.
//!
//! Nothing here waits, and nothing that is read is believed: a walk writes down which version each node had, and only
//! if all of them are the same later, it was a walk through one state.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use kvist_blocks::BlockHash;

use crate::{
    holders::{Entries, LaneKey, ones},
    node::{self, Node, Record},
    places::bits,
    table::{Found, Seat, Tag},
    view::View,
};

/// Why a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The prompt ended, or nobody holds more of it.
    Known,
    /// Nobody has the next block: true if nobody has it later either, in the same version of the page for it.
    Absent { hash: BlockHash, page: u32, version: u64 },
    /// What comes next changes at this moment.
    Changing,
}

/// A node that a walk has met.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Met {
    node: u32,
    /// Blocks of the prompt before it.
    depth: u32,
    version: u64,
}

/// How far everybody came.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    /// Blocks of the prompt so far.
    pub(crate) depth: u32,
    end: End,
    nodes: &'a mut Vec<Met>,
    /// The newest version of all that the walk has met.
    newest: u64,
    tiers: [Reach; 4],
    /// In any tier; unused while all that was seen is of one tier.
    any: Reach,
    /// A bit for each tier that was seen.
    seen: u8,
    shares: Vec<(u32, u128)>,
}

/// Leading blocks by slot: in the one tier that anybody has, or in each and in any.
#[derive(Clone, Debug)]
pub(crate) enum Reached {
    One(usize, Vec<u32>),
    More(Box<([Vec<u32>; 4], Vec<u32>)>),
}

impl Reached {
    /// Leading blocks of a slot by tier, and in any.
    #[inline]
    pub(crate) fn blocks_of(&self, slot: u32) -> ([u32; 4], u32) {
        let of = |ends: &Vec<u32>| ends.get(slot as usize).copied().unwrap_or(0);
        match self {
            Self::One(tier, ends) => {
                let blocks = of(ends);
                let mut of_tiers = [0; 4];
                of_tiers[tier & 3] = blocks;
                (of_tiers, blocks)
            }
            Self::More(ends) => (ends.0.each_ref().map(of), of(&ends.1)),
        }
    }
}

/// Who holds everything so far, and how far others came.
#[derive(Debug, Default)]
struct Reach {
    words: Vec<Word>,
    /// By slot.
    ends: Vec<u32>,
}

/// 64 slots, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    /// Who holds everything up to the node at hand.
    alive: u64,
    /// Who holds the node at hand to its end.
    next: u64,
    /// Whose end in the node at hand is known.
    ended: u64,
}

impl Reach {
    fn reserve(&mut self, word: usize) {
        if word >= self.words.len() {
            self.words.resize(word + 1, Word::default());
            self.ends.resize((word + 1) * 64, 0);
        }
    }

    /// Those that hold everything have come as far as the walk.
    fn finish(&mut self, depth: u32) {
        for (word, ends) in self.words.iter().zip(self.ends.chunks_mut(64)) {
            let mut alive = word.alive;
            while alive != 0 {
                ends[alive.trailing_zeros() as usize] = depth;
                alive &= alive - 1;
            }
        }
    }

    /// Some slots hold the node at hand to its end.
    #[inline]
    fn go_through(&mut self, key: LaneKey, slots: u64) {
        self.reserve(key.word());
        self.words[key.word()].next |= slots;
    }

    /// Some slots hold a little of the node at hand.
    #[inline]
    fn stay_behind(&mut self, key: LaneKey, slots: u64, is_first: bool, end: u32) {
        self.reserve(key.word());
        let word = &mut self.words[key.word()];
        let mut behind = if is_first { slots } else { slots & word.alive };
        word.ended |= behind;
        while behind != 0 {
            self.ends[key.word() * 64 + behind.trailing_zeros() as usize] = end;
            behind &= behind - 1;
        }
    }

    /// Leaves behind those that hold nothing of the node at hand, and goes on with the others.
    fn go_on(&mut self, stretch: Stretch) {
        for (number, word) in self.words.iter_mut().enumerate() {
            let mut died = if stretch.is_first { 0 } else { word.alive & !word.next & !word.ended };
            while died != 0 {
                self.ends[number * 64 + died.trailing_zeros() as usize] = stretch.depth;
                died &= died - 1;
            }
            let alive = if stretch.is_first { word.next } else { word.alive & word.next };
            *word = Word { alive, ..Word::default() };
        }
    }

    fn is_over(&self) -> bool {
        self.words.iter().all(|word| word.alive == 0)
    }
}

/// The part of a node that is part of the prompt.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    from: u32,
    to: u32,
    /// Blocks of the prompt before it.
    depth: u32,
    is_first: bool,
}

impl Stretch {
    /// Where somebody ends who holds so many places of the node from its part of the prompt on.
    fn end(self, places: u32) -> u32 {
        self.depth + places.min(self.to - self.from)
    }
}

impl<'n> Walk<'n> {
    /// With memory for the nodes that it meets.
    pub(crate) fn new(nodes: &'n mut Vec<Met>) -> Self {
        nodes.clear();
        Self {
            depth: 0,
            end: End::Known,
            nodes,
            newest: 0,
            tiers: Default::default(),
            any: Reach::default(),
            seen: 0,
            shares: Vec::new(),
        }
    }

    /// How far each slot came; the walk must be at its end.
    pub(crate) fn reached(self) -> Reached {
        let Self { seen, tiers, any, .. } = self;
        let [device, host, disk, external] = tiers.map(|reach| reach.ends);
        match seen {
            0 | 1 => Reached::One(0, device),
            2 => Reached::One(1, host),
            4 => Reached::One(2, disk),
            8 => Reached::One(3, external),
            _ => Reached::More(Box::new(([device, host, disk, external], any.ends))),
        }
    }

    /// Goes along a prompt as far as somebody holds it.
    pub(crate) fn go(&mut self, view: &View, prompt: &[BlockHash]) {
        self.go_along(view, prompt);
        let depth = self.depth;
        self.tiers.iter_mut().chain([&mut self.any]).for_each(|reach| reach.finish(depth));
    }

    fn go_along(&mut self, view: &View, prompt: &[BlockHash]) {
        let mut hint = 0;
        while let Some(hash) = prompt.get(self.depth as usize) {
            let found = self.enter_hinted(view, hint, *hash).or_else(|| self.enter(view, *hash));
            let Some((seat, record, node)) = found else { return };
            hint = node.next;
            node::touch(record);
            let hashes = &node.hashes(record, &view.words)[seat.offset as usize..];
            let rest = &prompt[self.depth as usize..];
            let Some(entries) = Entries::of(&node, &view.words) else {
                self.end = End::Changing;
                return;
            };
            let blocks = same_to_all(hashes, rest, entries.ends() >> seat.offset) as u32;
            let stretch = Stretch {
                from: seat.offset,
                to: seat.offset + blocks,
                depth: self.depth,
                is_first: self.nodes.len() == 1,
            };
            self.meet(&node, &entries, stretch);
            self.depth += blocks;
            if self.is_over() {
                return;
            }
        }
    }

    /// The newest version of all that the walk has met: nothing that has changed since would have been met as it was.
    pub(crate) fn newest(&self) -> u64 {
        match self.end {
            End::Known => self.newest,
            // Without pages there are no versions.
            End::Absent { page: u32::MAX, .. } | End::Changing => u64::MAX,
            End::Absent { version, .. } => self.newest.max(version),
        }
    }

    /// The first depth of which the walk is no longer true; none when all of it still is.
    pub(crate) fn spoiled_at(&self, view: &View) -> Option<u32> {
        fence(Ordering::Acquire);
        let is_same =
            |node: u32, version: u64| view.record(node).is_some_and(|record| node::version_of(record) == version);
        let changed = self.nodes.iter().find(|met| !is_same(met.node, met.version));
        if let Some(met) = changed {
            return Some(met.depth);
        }
        match self.end {
            End::Known => None,
            End::Changing => Some(self.depth),
            End::Absent { hash, page, version } => {
                let mut is_in_view = true;
                let found = view.directory.find(&view.pages, Tag::of(hash), |seat| {
                    let there = node::read_hash(&view.records, &view.words, seat);
                    is_in_view &= there.is_ok();
                    there == Ok(Some(hash))
                });
                (!is_in_view || found != Found::Nowhere { page, version }).then_some(self.depth)
            }
        }
    }

    /// Enters the node that followed when this way was gone before, if it is the one.
    fn enter_hinted<'a>(&mut self, view: &'a View, hint: u32, hash: BlockHash) -> Option<(Seat, &'a Record, Node)> {
        if hint == 0 {
            return None;
        }
        let seat = Seat { node: hint, offset: 0 };
        let record = view.record(hint)?;
        let version = node::version_of(record);
        let node = Node::load(record);
        let is_it = version & 1 == 0 && hash_at(&node, record, view, 0) == Some(hash);
        is_it.then(|| {
            self.note(hint, version);
            (seat, record, node)
        })
    }

    fn enter<'a>(&mut self, view: &'a View, hash: BlockHash) -> Option<(Seat, &'a Record, Node)> {
        let (mut here, mut is_changing) = (None, false);
        let found = view.directory.find(&view.pages, Tag::of(hash), |seat| {
            let Some(record) = view.record(seat.node) else {
                is_changing = true;
                return false;
            };
            let of_node = node::version_of(record);
            let node = Node::load(record);
            let there = hash_at(&node, record, view, seat.offset);
            let is_it = there == Some(hash);
            if of_node & 1 != 0 || (there.is_none() && seat.offset < node.len) {
                // Or its hashes lie in memory that came after the view.
                is_changing = true;
            } else if is_it {
                here = Some((seat, record, node, of_node));
            }
            is_it
        });
        if let Some((seat, record, node, version)) = here {
            self.note(seat.node, version);
            return Some((seat, record, node));
        }
        self.end = match found {
            Found::Nowhere { page, version } if !is_changing => End::Absent { hash, page, version },
            _ => End::Changing,
        };
        None
    }

    fn note(&mut self, node: u32, version: u64) {
        self.nodes.push(Met { node, depth: self.depth, version });
        self.newest = self.newest.max(version);
    }

    fn is_over(&self) -> bool {
        if self.seen.is_power_of_two() {
            self.tiers[self.seen.trailing_zeros() as usize].is_over()
        } else {
            self.any.is_over()
        }
    }

    /// Takes in the holders of a part of a node.
    fn meet(&mut self, node: &Node, entries: &Entries<'_>, stretch: Stretch) {
        let new = node.tiers & !self.seen;
        if new != 0 {
            if self.seen.is_power_of_two() {
                // Until here, any tier was that one.
                let one = &self.tiers[self.seen.trailing_zeros() as usize];
                self.any = Reach { words: one.words.clone(), ends: one.ends.clone() };
            }
            self.seen |= new;
        }
        let is_mixed = !self.seen.is_power_of_two();
        let Stretch { from, to, is_first, .. } = stretch;
        let places = node.full.saturating_sub(from);
        for (key, slots) in entries.lanes() {
            let reach = &mut self.tiers[key.tier()];
            if node.full >= to {
                reach.go_through(key, slots);
            } else {
                reach.stay_behind(key, slots, is_first, stretch.end(places));
            }
        }
        for (who, cut) in entries.cuts() {
            let (key, slot) = (who.lane(), who.bit());
            let reach = &mut self.tiers[key.tier()];
            if cut >= to {
                reach.go_through(key, slot);
            } else {
                reach.stay_behind(key, slot, is_first, stretch.end(cut.saturating_sub(from)));
            }
        }
        for (who, mask) in entries.holed() {
            let (key, slot) = (who.lane(), who.bit());
            let reach = &mut self.tiers[key.tier()];
            let places = (mask >> from).trailing_ones();
            if places >= to - from {
                reach.go_through(key, slot);
            } else {
                reach.stay_behind(key, slot, is_first, stretch.end(places));
            }
        }
        if is_mixed {
            self.meet_in_any(node, entries, stretch);
        }
        let seen = self.seen;
        (0..4).filter(|tier| seen >> tier & 1 != 0).for_each(|tier| self.tiers[tier].go_on(stretch));
    }

    /// Who holds the stretch in any tier. A slot whose tiers hold it only together is put together from all that it has here.
    fn meet_in_any(&mut self, node: &Node, entries: &Entries<'_>, stretch: Stretch) {
        let any = &mut self.any;
        for (number, word) in self.tiers.iter().flat_map(|reach| reach.words.iter().enumerate()) {
            if word.next != 0 {
                any.reserve(number);
                any.words[number].next |= word.next;
            }
        }
        let mut shares = std::mem::take(&mut self.shares);
        shares.clear();
        let mut add = |key: LaneKey, slots: u64, places: u128| {
            any.reserve(key.word());
            let word = any.words[key.word()];
            let open = if stretch.is_first { u64::MAX } else { word.alive };
            let mut behind = slots & open & !word.next;
            while behind != 0 {
                shares.push((key.word() as u32 * 64 + behind.trailing_zeros(), places));
                behind &= behind - 1;
            }
        };
        entries.lanes().for_each(|(key, slots)| add(key, slots, ones(node.full)));
        entries.cuts().for_each(|(who, cut)| add(who.lane(), who.bit(), ones(cut)));
        entries.holed().for_each(|(who, mask)| add(who.lane(), who.bit(), mask));
        shares.sort_unstable_by_key(|(slot, _)| *slot);
        for of_slot in shares.chunk_by(|left, right| left.0 == right.0) {
            let slot = of_slot[0].0;
            let places = of_slot.iter().fold(0, |places, (_, more)| places | more);
            let run = (places >> stretch.from).trailing_ones();
            let word = &mut any.words[slot as usize / 64];
            if run >= stretch.to - stretch.from {
                word.next |= 1 << (slot % 64);
            } else {
                word.ended |= 1 << (slot % 64);
                any.ends[slot as usize] = stretch.end(run);
            }
        }
        self.shares = shares;
        any.go_on(stretch);
    }
}

impl View {
    /// The record of a node.
    pub(crate) fn record(&self, node: u32) -> Option<&Record> {
        self.records.line(node.wrapping_sub(1))
    }
}

fn hash_at(node: &Node, record: &Record, view: &View, offset: u32) -> Option<BlockHash> {
    node.hashes(record, &view.words).get(offset as usize).map(|hash| BlockHash(hash.load(Ordering::Relaxed)))
}

/// How many leading blocks are the same, where some holders end after the blocks before these places.
///
/// Hashes are chained, so if one is the same, all before it are, as long as nobody has told blocks behind others than theirs. Who does may
/// have told what lies behind the end of an honest holder. So the last block of each holder is held against the prompt, and
/// so is the one behind it: the first makes its claim true, the second says that it ends there.
fn same_to_all(hashes: &[AtomicU64], prompt: &[BlockHash], ends: u128) -> usize {
    let same = same_blocks(hashes, prompt);
    let is_same = |at: usize| {
        hashes.get(at).zip(prompt.get(at)).is_some_and(|(hash, wanted)| hash.load(Ordering::Relaxed) == wanted.0)
    };
    let is_end_true = |end: usize| end == 0 || end >= same || (is_same(end - 1) && is_same(end));
    match bits(ends).map(|end| end as usize).find(|end| !is_end_true(*end)) {
        None => same,
        Some(end) if is_same(end - 1) => end,
        Some(end) => same_blocks(&hashes[..end], prompt),
    }
}

/// How many leading blocks are the same. If one is, all before it are.
fn same_blocks(hashes: &[AtomicU64], prompt: &[BlockHash]) -> usize {
    let most = hashes.len().min(prompt.len());
    let is_same = |position: usize| hashes[position].load(Ordering::Relaxed) == prompt[position].0;
    if most > 0 && is_same(most - 1) {
        return most;
    }
    // The first is known to be.
    let (mut same, mut too_many) = (1.min(most), most);
    while same + 1 < too_many {
        let middle = same + (too_many - same) / 2;
        if is_same(middle - 1) { same = middle } else { too_many = middle }
    }
    same
}

#[cfg(test)]
mod tests {
    use kvist_blocks::{Batch, Event, Incarnation, Rank, SourceKey, Tier};

    use super::*;
    use crate::{Index, IndexSettings};

    #[test]
    fn what_came_into_memory_after_the_view_is_not_taken_for_absent() {
        let key = SourceKey { worker: "w".into(), rank: Rank(0) };
        // Chunks of a few records, so that new ones are soon needed.
        let index = Index::new(IndexSettings { byte_budget: 1 << 20 });
        let mut missed = 0;
        for sequence in 0..200 {
            let hashes: Vec<BlockHash> = (0..20).map(|at| BlockHash((sequence << 32 | at) + 1)).collect();
            let view = index.published.get();
            let mut nodes = Vec::new();
            let mut walk = Walk::new(&mut nodes);
            walk.go(&view, &hashes);
            assert_eq!((0, None), (walk.depth, walk.spoiled_at(&view)));
            let events = vec![Event::Stored { tier: Tier::Device, parent: None, hashes }];
            index.apply_batch(&key, Incarnation(1), &Batch { sequence, recorded_at_unix_nanos: 0, events }, 1);
            assert_eq!(Some(0), walk.spoiled_at(&view));
            missed += u32::from(view.records.end() < index.published.get().records.end());
        }
        assert!(missed > 5, "{missed} times there was a new chunk");
    }
}
