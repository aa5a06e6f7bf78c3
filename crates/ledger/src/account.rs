//! The account of one rank of one incarnation.

use std::sync::Arc;

use hashbrown::{HashMap, hash_map::Entry};
use kvist_blocks::{Batch, BlockHash, BlockHasher, Digest, Event, Tier, TierDigest};

use crate::{EngineEvent, EngineHash, RangeLost, StoredBlocks, ring::Ring};

/// How a ledger is kept.
#[derive(Clone, Copy, Debug)]
pub struct LedgerSettings {
    /// Batches that the ring holds.
    pub ring_batches: usize,
    /// Tokens a block.
    pub block_size_tokens: usize,
}

/// What went wrong, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounters {
    /// Blocks left out because their parent was not known.
    pub unknown_parents: u64,
    /// Blocks left out because the engine named them without their tokens, and they were not known from another tier.
    pub unknown_contents: u64,
    /// Blocks left out because the engine used one hash for two contents.
    pub conflicting_hashes: u64,
    /// Removals of blocks that were not held.
    pub unknown_removals: u64,
    /// Events whose tokens did not fill their blocks.
    pub malformed_events: u64,
    /// Holes in the engine's own stream.
    pub lost_events: u64,
}

/// All that a rank holds, at a position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The sequence the batch after it will carry.
    pub next_sequence: u64,
    /// Blocks by tier; tiers without blocks are left out.
    pub blocks: Vec<(Tier, Vec<BlockHash>)>,
    /// Whether the engine's history was seen without a hole.
    pub complete: bool,
}

/// The account in a few bytes, at a position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerDigest {
    /// The sequence the next batch will carry.
    pub next_sequence: u64,
    /// One for each tier that was ever used.
    pub tiers: Vec<TierDigest>,
    /// Whether the engine's history was seen without a hole.
    pub complete: bool,
}

/// Kvist's block behind an engine's hash, and how many times the engine holds it.
#[derive(Clone, Copy, Debug)]
struct Held {
    block: BlockHash,
    copies: u32,
}

#[derive(Debug, Default)]
struct TierAccount {
    by_engine_hash: HashMap<EngineHash, Held>,
    /// Copies over all engine hashes; several may stand for one block.
    copies: HashMap<BlockHash, u32>,
    digest: Digest,
    used: bool,
}

/// What became of a stored block.
enum Taken {
    /// Its first copy: it is held from here on.
    First,
    /// It was held before.
    Further,
    /// The engine's hash stands for another block.
    Conflict,
}

impl TierAccount {
    fn take(&mut self, engine_hash: EngineHash, block: BlockHash, counting: bool) -> Taken {
        match self.by_engine_hash.entry(engine_hash) {
            Entry::Occupied(entry) if entry.get().block != block => return Taken::Conflict,
            Entry::Occupied(_) if !counting => return Taken::Further,
            Entry::Occupied(mut entry) => entry.get_mut().copies += 1,
            Entry::Vacant(entry) => {
                entry.insert(Held { block, copies: 1 });
            }
        }
        self.used = true;
        let copies = self.copies.entry(block).or_insert(0);
        *copies += 1;
        if *copies > 1 {
            return Taken::Further;
        }
        self.digest.add(block);
        Taken::First
    }

    /// Takes copies of a block out; true when the last one is gone.
    fn give(&mut self, block: BlockHash, copies: u32) -> bool {
        let Entry::Occupied(mut entry) = self.copies.entry(block) else { return false };
        *entry.get_mut() = entry.get().saturating_sub(copies);
        let is_last = *entry.get() == 0;
        if is_last {
            entry.remove();
            self.digest.remove(block);
        }
        is_last
    }
}

/// Collects newly held blocks into events, one for each run in which every block is the parent of the next.
struct Runs<'a> {
    tier: Tier,
    parent: Option<BlockHash>,
    hashes: Vec<BlockHash>,
    visible: &'a mut Vec<Event>,
}

impl<'a> Runs<'a> {
    fn new(tier: Tier, visible: &'a mut Vec<Event>) -> Self {
        Self { tier, parent: None, hashes: Vec::new(), visible }
    }

    fn push(&mut self, parent: Option<BlockHash>, block: BlockHash) {
        if self.hashes.is_empty() {
            self.parent = parent;
        }
        self.hashes.push(block);
    }

    fn close(&mut self) {
        if !self.hashes.is_empty() {
            let hashes = std::mem::take(&mut self.hashes);
            self.visible.push(Event::Stored { tier: self.tier, parent: self.parent, hashes });
        }
    }
}

/// The exact account of the blocks that one rank holds.
#[derive(Debug)]
pub struct Ledger {
    settings: LedgerSettings,
    counting: bool,
    tiers: [TierAccount; 4],
    ring: Ring,
    next_sequence: u64,
    complete: bool,
    counters: LedgerCounters,
}

impl Ledger {
    /// An empty account at sequence 0.
    #[must_use]
    pub fn new(settings: LedgerSettings) -> Self {
        Self {
            settings,
            counting: true,
            tiers: Default::default(),
            ring: Ring::new(settings.ring_batches),
            next_sequence: 0,
            complete: true,
            counters: LedgerCounters::default(),
        }
    }

    /// Whether copies in the device tier are counted, which is the default: right for an engine of which every event is
    /// seen. Without it a block is gone with its first removal, which may claim too little and never too much. The other
    /// tiers are sets in either case, since what fills them may announce one copy twice.
    ///
    /// To be said before the first event.
    #[must_use]
    pub fn counting(mut self, counting: bool) -> Self {
        self.counting = counting;
        self
    }

    /// Takes what the engine said and returns the batch that says so, if anything visible changed. A batch is made for
    /// nothing else, so that sequences stand for changes.
    pub fn apply(&mut self, now_unix_nanos: u64, events: &[EngineEvent]) -> Option<Arc<Batch>> {
        let mut visible = Vec::new();
        for event in events {
            match event {
                EngineEvent::Stored(stored) => self.store(stored, &mut visible),
                EngineEvent::Removed { hashes, tier } => self.remove(hashes, *tier, &mut visible),
                EngineEvent::Cleared => {
                    self.forget_all(&mut visible);
                    // An empty cache is known whatever was missed before.
                    self.complete = true;
                }
                EngineEvent::Lost => {
                    // What was missed may have been removals, and then claims would be false: start over.
                    self.forget_all(&mut visible);
                    self.complete = false;
                    self.counters.lost_events += 1;
                }
            }
        }
        if visible.is_empty() {
            return None;
        }
        let batch =
            Arc::new(Batch { sequence: self.next_sequence, recorded_at_unix_nanos: now_unix_nanos, events: visible });
        self.next_sequence += 1;
        self.ring.push(Arc::clone(&batch));
        Some(batch)
    }

    /// Batches after `last_applied`, or from 0 when none was applied.
    ///
    /// # Errors
    /// The ring no longer holds them, or the position is in the future.
    pub fn range_after(&self, last_applied: Option<u64>) -> Result<Vec<Arc<Batch>>, RangeLost> {
        self.ring.from(last_applied.map_or(0, |sequence| sequence.saturating_add(1)), self.next_sequence)
    }

    /// The sequence the next batch will carry.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// All blocks.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let blocks = Tier::ALL
            .into_iter()
            .map(|tier| (tier, self.tiers[tier.position()].copies.keys().copied().collect::<Vec<_>>()))
            .filter(|(_, hashes)| !hashes.is_empty())
            .collect();
        Snapshot { next_sequence: self.next_sequence, blocks, complete: self.complete }
    }

    /// Count and digest of each tier.
    #[must_use]
    pub fn digest(&self) -> LedgerDigest {
        let tiers = Tier::ALL
            .into_iter()
            .zip(&self.tiers)
            .filter(|(_, account)| account.used)
            .map(|(tier, account)| TierDigest {
                tier,
                block_count: account.copies.len() as u64,
                digest: account.digest,
            })
            .collect();
        LedgerDigest { next_sequence: self.next_sequence, tiers, complete: self.complete }
    }

    /// How many leading blocks of a prompt the device tier holds.
    #[must_use]
    pub fn claimed_prefix_blocks(&self, prompt: &[BlockHash]) -> usize {
        let held = &self.tiers[Tier::Device.position()].copies;
        prompt.iter().take_while(|hash| held.contains_key(*hash)).count()
    }

    /// Distinct blocks over all tiers.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.tiers.iter().map(|account| account.copies.len() as u64).sum()
    }

    /// What went wrong since the start.
    #[must_use]
    pub fn counters(&self) -> LedgerCounters {
        self.counters
    }

    fn store(&mut self, stored: &StoredBlocks, visible: &mut Vec<Event>) {
        let block_size = self.settings.block_size_tokens;
        if stored.tokens.is_empty() && !stored.hashes.is_empty() {
            self.store_known(&stored.hashes, stored.tier, visible);
            return;
        }
        if block_size == 0 || stored.tokens.len() != stored.hashes.len() * block_size {
            self.counters.malformed_events += 1;
            self.complete = false;
            return;
        }
        let parent = match stored.parent {
            None => None,
            Some(parent) => match self.block_of(parent, stored.tier) {
                Some(block) => Some(block),
                None => {
                    // Without the parent the content is not known; claiming nothing is sound.
                    self.counters.unknown_parents += stored.hashes.len() as u64;
                    self.complete = false;
                    return;
                }
            },
        };
        let mut blocks = Vec::with_capacity(stored.hashes.len());
        BlockHasher::new(parent.unwrap_or(stored.root), block_size).push(&stored.tokens, &mut blocks);
        let counting = self.counts_copies(stored.tier);
        let account = &mut self.tiers[stored.tier.position()];
        let mut runs = Runs::new(stored.tier, visible);
        let mut previous = parent;
        let mut conflict = None;
        for (position, (engine_hash, block)) in stored.hashes.iter().zip(blocks).enumerate() {
            match account.take(*engine_hash, block, counting) {
                Taken::First => runs.push(previous, block),
                Taken::Further => runs.close(),
                Taken::Conflict => {
                    conflict = Some((position, *engine_hash));
                    break;
                }
            }
            previous = Some(block);
        }
        runs.close();
        if let Some((position, engine_hash)) = conflict {
            // Neither content can be claimed, nor anything that follows the block of two contents.
            self.counters.conflicting_hashes += (stored.hashes.len() - position) as u64;
            self.complete = false;
            self.forget(engine_hash, visible);
        }
    }

    /// Stores blocks of which the engine gives no tokens, as when they move to another tier.
    fn store_known(&mut self, hashes: &[EngineHash], tier: Tier, visible: &mut Vec<Event>) {
        let counting = self.counts_copies(tier);
        for engine_hash in hashes {
            let Some(block) = self.block_of(*engine_hash, tier) else {
                self.counters.unknown_contents += 1;
                self.complete = false;
                continue;
            };
            match self.tiers[tier.position()].take(*engine_hash, block, counting) {
                // The order of the hashes says nothing about parents here, so each block is a run of its own.
                Taken::First => visible.push(Event::Stored { tier, parent: None, hashes: vec![block] }),
                Taken::Further | Taken::Conflict => {}
            }
        }
    }

    fn remove(&mut self, hashes: &[EngineHash], tier: Tier, visible: &mut Vec<Event>) {
        let account = &mut self.tiers[tier.position()];
        let mut gone = Vec::new();
        for engine_hash in hashes {
            let Entry::Occupied(mut entry) = account.by_engine_hash.entry(*engine_hash) else {
                self.counters.unknown_removals += 1;
                continue;
            };
            let block = entry.get().block;
            entry.get_mut().copies -= 1;
            if entry.get().copies == 0 {
                entry.remove();
            }
            if account.give(block, 1) {
                gone.push(block);
            }
        }
        if !gone.is_empty() {
            visible.push(Event::Removed { tier, hashes: gone });
        }
    }

    /// Takes an engine's hash out of all tiers, with all its copies.
    fn forget(&mut self, engine_hash: EngineHash, visible: &mut Vec<Event>) {
        for (tier, account) in Tier::ALL.into_iter().zip(&mut self.tiers) {
            let Some(held) = account.by_engine_hash.remove(&engine_hash) else { continue };
            if account.give(held.block, held.copies) {
                visible.push(Event::Removed { tier, hashes: vec![held.block] });
            }
        }
    }

    fn forget_all(&mut self, visible: &mut Vec<Event>) {
        let held_any = self.tiers.iter().any(|account| !account.copies.is_empty());
        for account in &mut self.tiers {
            account.by_engine_hash.clear();
            account.copies.clear();
            account.digest = Digest::default();
        }
        if held_any {
            visible.push(Event::Cleared { tier: None });
        }
    }

    fn counts_copies(&self, tier: Tier) -> bool {
        self.counting && tier == Tier::Device
    }

    /// The block behind an engine's hash. A hash means the same in every tier, and a block that moves down may follow
    /// one that is only above.
    fn block_of(&self, engine_hash: EngineHash, tier: Tier) -> Option<BlockHash> {
        std::iter::once(tier)
            .chain(Tier::ALL)
            .find_map(|tier| self.tiers[tier.position()].by_engine_hash.get(&engine_hash))
            .map(|held| held.block)
    }
}
