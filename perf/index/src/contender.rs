//! What is measured: one interface for the index and for those of peers.

use std::{
    cell::RefCell,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use kvist_blocks::{Batch, BlockHash, Event, HashSeed, Incarnation, Namespace, Rank, SourceKey, Tier, block_hashes};
use kvist_index::{Index, IndexSettings};

/// Tokens of a block in all rows.
pub const BLOCK_TOKENS: usize = 16;

/// An index, with whatever a router has to keep beside it.
pub trait Contender: Sync + Send {
    /// The blocks of one prompt as this index wants to be asked and told about them.
    type Prompt: Sync + Send;

    const NAME: &'static str;
    /// Whether it is the one whose limits are checked.
    const IS_OWN: bool = false;

    fn new(sources: usize) -> Self;

    /// Makes all sources known, where [`Contender::new`] has not. What that costs counts as memory, not as time.
    fn open(&self) {}

    /// A prompt from the contents of its blocks.
    fn prompt(contents: &[u64]) -> Self::Prompt;

    /// A source holds some blocks of a prompt from here on; those before them it holds already.
    fn store(&self, source: usize, prompt: &Self::Prompt, blocks: Range<usize>);

    /// A source holds them no longer.
    fn remove(&self, source: usize, prompt: &Self::Prompt, blocks: Range<usize>);

    /// How many leading blocks of a prompt each source holds, added up.
    fn lookup(&self, prompt: &Self::Prompt) -> u64;

    /// Waits until everything that was told is visible.
    fn settle(&self) {}

    /// Hashes the tokens of a prompt for a look-up.
    fn hash(tokens: &[u32]) -> Self::Prompt;
}

thread_local! {
    static BATCH: RefCell<Batch> = const { RefCell::new(Batch { sequence: 0, recorded_at_unix_nanos: 0, events: Vec::new() }) };
}

/// This project's index.
pub struct Kvist {
    pub index: Index,
    keys: Vec<SourceKey>,
    sequences: Vec<AtomicU64>,
}

impl Kvist {
    pub fn key(&self, source: usize) -> &SourceKey {
        &self.keys[source]
    }

    /// One batch after the other is made in the same memory, so that an event costs one allocation, that of its hashes, as with peers.
    fn apply(&self, source: usize, event: Option<Event>) {
        BATCH.with_borrow_mut(|batch| {
            batch.sequence = self.sequences[source].fetch_add(1, Ordering::Relaxed);
            batch.events.clear();
            batch.events.extend(event);
            self.index.apply_batch(&self.keys[source], Incarnation(1), batch, 1);
        });
    }
}

impl Contender for Kvist {
    type Prompt = Vec<BlockHash>;

    const NAME: &'static str = "kvist-index";
    const IS_OWN: bool = true;

    fn new(sources: usize) -> Self {
        let key = |source: usize| SourceKey { worker: format!("worker-{source:04}").as_str().into(), rank: Rank(0) };
        Self {
            index: Index::new(IndexSettings { byte_budget: 16 << 30 }),
            keys: (0..sources).map(key).collect(),
            sequences: (0..sources).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn open(&self) {
        (0..self.keys.len()).for_each(|source| self.apply(source, None));
    }

    fn prompt(contents: &[u64]) -> Self::Prompt {
        let mut parent = 0;
        let hash = |content: &u64| {
            parent = crate::load::mix(parent, *content);
            BlockHash(parent)
        };
        contents.iter().map(hash).collect()
    }

    fn store(&self, source: usize, prompt: &Self::Prompt, blocks: Range<usize>) {
        let parent = blocks.start.checked_sub(1).map(|before| prompt[before]);
        let hashes = prompt[blocks].to_vec();
        self.apply(source, Some(Event::Stored { tier: Tier::Device, parent, hashes }));
    }

    fn remove(&self, source: usize, prompt: &Self::Prompt, blocks: Range<usize>) {
        let hashes = prompt[blocks].iter().rev().copied().collect();
        self.apply(source, Some(Event::Removed { tier: Tier::Device, hashes }));
    }

    fn lookup(&self, prompt: &Self::Prompt) -> u64 {
        self.index.lookup(prompt).iter().map(|(_, overlap)| u64::from(overlap.matched_blocks)).sum()
    }

    fn hash(tokens: &[u32]) -> Self::Prompt {
        block_hashes(Namespace::new("model", "", "").root(HashSeed(7)), tokens, BLOCK_TOKENS)
    }
}
