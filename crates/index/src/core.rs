//! What the writer keeps: the memory, the table, the accounts, and the order in which readers are told.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvist_blocks::{BlockHash, Incarnation, SourceKey, Tier, WorkerUid};

use crate::{
    arena::{Arena, Lines},
    holders::{Entries, Holders, Who, ones},
    loose::LooseEnd,
    node::{self, Node, Record},
    places::ranges,
    source::{Slot, SlotUse, Source, SourceStatus, TierSum},
    sources::{SourceList, Sources},
    table::{Seat, Table},
    versions::Versions,
    view::{Published, View},
};

/// Lines of a chunk: so many that the list of chunks stays short, and that a node's hashes fit. Up to 64 KiB, an
/// allocator adds hardly anything to a power of two.
fn chunk_lines(byte_budget: u64) -> u32 {
    let bytes = (byte_budget / 65_536).min(64 << 10).max(byte_budget / 262_144);
    (bytes / 64).clamp(16, 1 << 16) as u32
}

/// Numbers that are asked for without the writer's lock.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) blocks: AtomicU64,
    pub(crate) holders: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, more: u64, less: u64) {
        if more != less {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(more).wrapping_sub(less), Ordering::Relaxed);
        }
    }
}

/// The writer's side of the index.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) byte_budget: u64,
    pub(crate) records: Arena,
    pub(crate) words: Arena,
    pub(crate) lists: Arena,
    /// Of the table.
    pub(crate) pages: Arena,
    /// Of the heads of nodes.
    pub(crate) table: Table,
    /// Bytes of what says where the blocks of each slot stand.
    pub(crate) places_bytes: u64,
    /// The slot whose map has to keep its room until the end of the change.
    pub(crate) growing: Option<u32>,
    /// What the change at hand has still to put right.
    pub(crate) loose_ends: Vec<LooseEnd>,
    pub(crate) sources: Sources,
    pub(crate) slots: Vec<Slot>,
    /// Slots some of whose blocks were given up.
    pub(crate) truncated: Vec<bool>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) dead_slots: Vec<u32>,
    /// Slots that hold something.
    pub(crate) holding_slots: u64,
    pub(crate) published: Arc<Published>,
    pub(crate) counters: Arc<Counters>,
    /// Closed incarnations by worker: everything up to and including the value.
    pub(crate) closed: HashMap<WorkerUid, Incarnation>,
    /// Of nodes and of the table's pages.
    pub(crate) versions: Versions,
    /// Nodes that the change at hand is about: they stay.
    pub(crate) pinned: [u32; 3],
    pub(crate) holders: Holders,
    /// Where the search for what could be given up goes on.
    pub(crate) hand: u32,
    /// A node that no look-up reaches any more, and the block before it.
    pub(crate) unreachable: Option<(u32, BlockHash)>,
    /// Nodes below this are part of the sums of the scrub that runs.
    pub(crate) scrub_end: u32,
    pub(crate) scrub_part: u32,
    /// Nodes that were visited, so that a test can count.
    pub(crate) visits: u64,
}

impl Core {
    pub(crate) fn new(byte_budget: u64) -> Self {
        let chunk_lines = chunk_lines(byte_budget);
        let words = Arena::new(chunk_lines);
        let records = Arena::new((chunk_lines / 4).max(4));
        let lists = Arena::new((chunk_lines / 8).max(4));
        let (pages, table) = (Arena::new(chunk_lines), Table::new());
        let sources = Sources::default();
        let view = View {
            number: 0,
            records: Arc::clone(records.lines()),
            words: Arc::clone(words.lines()),
            pages: Arc::clone(pages.lines()),
            directory: Arc::clone(table.directory()),
            sources: Arc::clone(sources.list()),
        };
        Self {
            byte_budget,
            records,
            words,
            lists,
            pages,
            table,
            places_bytes: 0,
            growing: None,
            loose_ends: Vec::new(),
            sources,
            slots: Vec::new(),
            truncated: Vec::new(),
            free_slots: Vec::new(),
            dead_slots: Vec::new(),
            holding_slots: 0,
            published: Arc::new(Published::new(view)),
            counters: Arc::default(),
            closed: HashMap::new(),
            versions: Versions::default(),
            pinned: [0; 3],
            holders: Holders::default(),
            hand: 1,
            unreachable: None,
            scrub_end: 0,
            scrub_part: 0,
            visits: 0,
        }
    }

    // What readers know.

    pub(crate) fn count_bytes(&self) {
        self.counters.bytes.store(self.bytes(), Ordering::Relaxed);
    }

    pub(crate) fn publish(&mut self) {
        self.count_bytes();
        self.published.set(View {
            number: 0,
            records: Arc::clone(self.records.lines()),
            words: Arc::clone(self.words.lines()),
            pages: Arc::clone(self.pages.lines()),
            directory: Arc::clone(self.table.directory()),
            sources: Arc::clone(self.sources.list()),
        });
    }

    pub(crate) fn bytes(&self) -> u64 {
        let arenas = self.records.bytes() + self.words.bytes() + self.lists.bytes() + self.pages.bytes();
        arenas + self.table.bytes() + self.places_bytes
    }

    fn publish_sources(&mut self, old: &SourceList) {
        for position in 0..self.sources.list().len() {
            self.show(position);
        }
        self.publish();
        Sources::retire(old);
    }

    /// Shows look-ups a source as it is now.
    pub(crate) fn show(&mut self, position: usize) {
        if let Some(source) = self.sources.at(Some(position)) {
            let is_truncated = self.truncated[source.slot as usize];
            self.sources.show(position, is_truncated);
        }
    }

    /// Ends the change of a source.
    pub(crate) fn end(&mut self, position: usize) {
        if let Some(source) = self.sources.at(Some(position)) {
            let is_truncated = self.truncated[source.slot as usize];
            self.sources.end(position, is_truncated);
        }
    }

    // Sources and slots.

    pub(crate) fn is_worker_closed(&self, worker: &WorkerUid, incarnation: Incarnation) -> bool {
        self.closed.get(worker).is_some_and(|closed| incarnation <= *closed)
    }

    pub(crate) fn is_closed(&self, key: &SourceKey, incarnation: Incarnation) -> bool {
        self.is_worker_closed(&key.worker, incarnation)
            || self.sources.get(key).is_some_and(|source| incarnation < source.incarnation)
    }

    /// Whether a snapshot of this position tells nothing older than what is known.
    pub(crate) fn is_welcome(&self, key: &SourceKey, incarnation: Incarnation, next_sequence: u64) -> bool {
        let is_behind = |source: &Source| source.incarnation == incarnation && source.next_sequence > next_sequence;
        !self.is_closed(key, incarnation) && !self.sources.get(key).is_some_and(is_behind)
    }

    pub(crate) fn status(&self, key: &SourceKey, source: &Source) -> SourceStatus {
        source.status(key, &self.slots[source.slot as usize])
    }

    pub(crate) fn take_slot(&mut self, used_for: SlotUse) -> u32 {
        match self.free_slots.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Slot::new(used_for);
                self.truncated[slot as usize] = false;
                slot
            }
            None => {
                self.slots.push(Slot::new(used_for));
                self.truncated.push(false);
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// What a slot holds belongs to nobody from here on.
    pub(crate) fn bury(&mut self, slot: u32) {
        self.slots[slot as usize].used_for = SlotUse::Dead;
        self.drop_places(slot);
        self.dead_slots.push(slot);
    }

    /// Starts an empty account of a source.
    pub(crate) fn open(&mut self, key: &SourceKey, incarnation: Incarnation) {
        let slot = self.take_slot(SlotUse::Filling);
        self.open_with(key, slot, Source::new(slot, incarnation));
    }

    /// Starts the account of a source with what a slot holds; counters live on.
    pub(crate) fn open_with(&mut self, key: &SourceKey, slot: u32, mut source: Source) {
        self.slots[slot as usize].used_for = SlotUse::Live(key.clone());
        let position = self.sources.position(key);
        let Some(old) = self.sources.at(position) else {
            let old = self.sources.insert(key, source);
            return self.publish_sources(&old);
        };
        (source.gaps, source.mismatches) = (old.gaps, old.mismatches);
        source.snapshots += old.snapshots;
        source.unknown_removals = old.unknown_removals;
        source.heard_at_unix_nanos = source.heard_at_unix_nanos.max(old.heard_at_unix_nanos);
        let buried = old.slot;
        *old = source;
        if let Some(position) = position {
            self.show(position);
        }
        self.bury(buried);
    }

    /// Gives a source a new, empty slot.
    pub(crate) fn replace_slot(&mut self, key: &SourceKey) -> u32 {
        let slot = self.take_slot(SlotUse::Live(key.clone()));
        let position = self.sources.position(key);
        if let Some(source) = self.sources.at(position) {
            let old = std::mem::replace(&mut source.slot, slot);
            let used = self.slots[old as usize].applied.map(|sum| sum.used);
            for (sum, used) in self.slots[slot as usize].applied.iter_mut().zip(used) {
                sum.used = used;
            }
            if let Some(position) = position {
                self.show(position);
            }
            self.bury(old);
        }
        slot
    }

    pub(crate) fn drop_sources(&mut self, which: impl Fn(&SourceKey, Incarnation) -> bool) {
        let mut slots = Vec::new();
        let old = self.sources.retain(|key, source| {
            let goes = which(key, source.incarnation);
            if goes {
                slots.push(source.slot);
            }
            !goes
        });
        if let Some(old) = old {
            self.publish_sources(&old);
        }
        slots.into_iter().for_each(|slot| self.bury(slot));
    }

    // Nodes.

    pub(crate) fn record(&self, node: u32) -> Option<&Record> {
        self.records.lines().line(node.wrapping_sub(1))
    }

    /// A node that there is.
    pub(crate) fn node(&self, node: u32) -> Option<Node> {
        self.records.order_of(node.wrapping_sub(1))?;
        self.record(node).map(Node::load)
    }

    /// The hashes of a node.
    pub(crate) fn hashes(&self, number: u32, node: &Node) -> &[AtomicU64] {
        self.record(number).map_or(&[], |record| node.hashes(record, self.words.lines()))
    }

    pub(crate) fn hash_at(&self, seat: Seat) -> Option<BlockHash> {
        node::hash_at(self.records.lines(), self.words.lines(), seat)
    }

    /// The node that begins with a block.
    pub(crate) fn find_head(&self, hash: BlockHash) -> Option<Seat> {
        self.table.find(self.pages.lines(), hash, |seat| self.hash_at(seat) == Some(hash))
    }

    /// What a slot holds of a node, by tier.
    pub(crate) fn own(&self, number: u32, slot: u32) -> [u128; 4] {
        let node = self.node(number);
        let entries = node.as_ref().and_then(|node| Entries::of(node, self.words.lines()));
        entries.map_or([0; 4], |entries| entries.own(slot))
    }

    /// What a slot holds of a node in one tier.
    pub(crate) fn own_in(&self, number: u32, slot: u32, tier: Tier) -> u128 {
        let Some(node) = self.node(number) else { return 0 };
        if node.is_all_of(Who::new(slot, tier.position())) {
            return ones(node.len);
        }
        Entries::of(&node, self.words.lines()).map_or(0, |entries| entries.own(slot)[tier.position()])
    }

    /// Whether a slot holds a block in any tier.
    pub(crate) fn holds(&self, seat: Seat, slot: u32) -> bool {
        let Some(node) = self.node(seat.node) else { return false };
        let Some(entries) = Entries::of(&node, self.words.lines()) else { return false };
        if entries.are_in_record() {
            return node.is_first_lane_of(slot) && seat.offset < node.full;
        }
        entries.own(slot).into_iter().any(|places| places >> seat.offset & 1 != 0)
    }

    pub(crate) fn load_holders(&mut self, node: &Node) {
        self.visits += 1;
        self.holders.load(node, self.words.lines());
    }

    /// Changes a node's record.
    pub(crate) fn change(&mut self, number: u32, change: impl FnOnce(&Record, &Lines)) {
        let version = self.versions.next();
        if let Some(record) = self.record(number) {
            node::begin_change(record);
            change(record, self.words.lines());
            node::end_change(record, version);
        }
    }

    // Accounts.

    pub(crate) fn is_scrubbed(&self, node: u32) -> bool {
        node < self.scrub_end
    }

    pub(crate) fn note_truncation(&mut self, slot: u32) {
        let is_truncated = self.slots[slot as usize].given_up_blocks() > 0;
        if self.truncated[slot as usize] != is_truncated {
            self.truncated[slot as usize] = is_truncated;
            if let SlotUse::Live(key) = &self.slots[slot as usize].used_for
                && let Some(position) = self.sources.position(key)
            {
                self.show(position);
            }
        }
    }

    /// Enters a block that is not kept.
    pub(crate) fn give_up(&mut self, slot: u32, tier: Tier, hash: BlockHash) {
        let account = &mut self.slots[slot as usize];
        account.applied[tier.position()].add(hash);
        account.given_up[tier.position()].add(hash);
        self.note_truncation(slot);
    }

    /// Count and digest of some places of a node.
    pub(crate) fn sum(&self, number: u32, node: &Node, places: u128) -> TierSum {
        let hashes = self.hashes(number, node);
        let of_range = |range: std::ops::Range<usize>| hashes.get(range).unwrap_or_default().iter();
        TierSum::of(ranges(places).flat_map(of_range).map(|hash| BlockHash(hash.load(Ordering::Relaxed))))
    }

    /// Notes that a slot holds other places of a node than before.
    pub(crate) fn count_pairs(&mut self, slot: u32, old_any: u128, new_any: u128) {
        let (old, new) = (u64::from(old_any.count_ones()), u64::from(new_any.count_ones()));
        Counters::add(&self.counters.holders, new, old);
        let account = &mut self.slots[slot as usize];
        let held_before = account.pairs > 0;
        account.pairs = account.pairs + new - old;
        let holds_now = account.pairs > 0;
        account.nodes = account.nodes + u32::from(new_any != 0) - u32::from(old_any != 0);
        self.holding_slots = self.holding_slots + u64::from(holds_now) - u64::from(held_before);
    }

    pub(crate) fn count_blocks(&self, old: u128, new: u128) {
        Counters::add(&self.counters.blocks, u64::from(new.count_ones()), u64::from(old.count_ones()));
    }
}
