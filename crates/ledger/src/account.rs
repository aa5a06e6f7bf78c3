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

/// The exact account of the blocks that one rank holds.
#[derive(Debug)]
pub struct Ledger {
    settings: LedgerSettings,
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
            tiers: Default::default(),
            ring: Ring::new(settings.ring_batches),
            next_sequence: 0,
            complete: true,
            counters: LedgerCounters::default(),
        }
    }

    /// Takes what the engine said and returns the batch that says so, if anything visible changed. A batch is made for
    /// nothing else, so that sequences stand for changes.
    pub fn apply(&mut self, now_unix_nanos: u64, events: &[EngineEvent]) -> Option<Arc<Batch>> {
        let mut visible = Vec::new();
        for event in events {
            match event {
                EngineEvent::Stored(stored) => self.store(stored, &mut visible),
                EngineEvent::Removed { hashes, tier } => self.remove(hashes, *tier, &mut visible),
                EngineEvent::Cleared => self.clear(&mut visible),
                EngineEvent::Lost => {
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
        if block_size == 0 || stored.tokens.len() != stored.hashes.len() * block_size {
            self.counters.malformed_events += 1;
            self.complete = false;
            return;
        }
        let account = &mut self.tiers[stored.tier.position()];
        let parent = match stored.parent {
            None => None,
            Some(parent) => match account.by_engine_hash.get(&parent) {
                Some(held) => Some(held.block),
                None => {
                    // Without the parent the content is not known; claiming nothing is sound.
                    self.counters.unknown_parents += stored.hashes.len() as u64;
                    self.complete = false;
                    return;
                }
            },
        };
        account.used = true;
        let mut blocks = Vec::with_capacity(stored.hashes.len());
        BlockHasher::new(parent.unwrap_or(stored.root), block_size).push(&stored.tokens, &mut blocks);
        // Runs of blocks that were not held before; each run is one event.
        let mut run: Vec<BlockHash> = Vec::new();
        let mut run_parent = parent;
        let mut previous = parent;
        for (engine_hash, block) in stored.hashes.iter().zip(blocks) {
            match account.by_engine_hash.entry(*engine_hash) {
                Entry::Occupied(mut entry) => entry.get_mut().copies += 1,
                Entry::Vacant(entry) => {
                    entry.insert(Held { block, copies: 1 });
                }
            }
            let copies = account.copies.entry(block).or_insert(0);
            *copies += 1;
            if *copies == 1 {
                account.digest.add(block);
                if run.is_empty() {
                    run_parent = previous;
                }
                run.push(block);
            } else if !run.is_empty() {
                let hashes = std::mem::take(&mut run);
                visible.push(Event::Stored { tier: stored.tier, parent: run_parent, hashes });
            }
            previous = Some(block);
        }
        if !run.is_empty() {
            visible.push(Event::Stored { tier: stored.tier, parent: run_parent, hashes: run });
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
            if let Entry::Occupied(mut copies) = account.copies.entry(block) {
                *copies.get_mut() -= 1;
                if *copies.get() == 0 {
                    copies.remove();
                    account.digest.remove(block);
                    gone.push(block);
                }
            }
        }
        if !gone.is_empty() {
            visible.push(Event::Removed { tier, hashes: gone });
        }
    }

    fn clear(&mut self, visible: &mut Vec<Event>) {
        let held_any = self.tiers.iter().any(|account| !account.copies.is_empty());
        for account in &mut self.tiers {
            account.by_engine_hash.clear();
            account.copies.clear();
            account.digest = Digest::default();
        }
        // An empty cache is known whatever was missed before.
        self.complete = true;
        if held_any {
            visible.push(Event::Cleared { tier: None });
        }
    }
}
