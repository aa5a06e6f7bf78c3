//! The block pool of the simulated engine.

use std::collections::{BTreeMap, HashMap};

use kvist_blocks::{BlockHash, Tier};
use kvist_ledger::{EngineEvent, EngineHash, StoredBlocks};

#[derive(Debug)]
struct Cached {
    /// Running requests that use it.
    users: u32,
    /// Place in the order of last use, when nobody uses it.
    last_use: u64,
}

/// Blocks with a name can be shared and stay after use until their place is needed; blocks without one are private to
/// a running request.
#[derive(Debug)]
pub(crate) struct Pool {
    total: usize,
    private: usize,
    cached: HashMap<BlockHash, Cached>,
    /// Unused cached blocks by last use.
    unused: BTreeMap<u64, BlockHash>,
    clock: u64,
}

impl Pool {
    pub(crate) fn new(total: usize) -> Self {
        Self { total, private: 0, cached: HashMap::new(), unused: BTreeMap::new(), clock: 0 }
    }

    /// Blocks of running requests.
    pub(crate) fn used(&self) -> usize {
        self.private + self.cached.len() - self.unused.len()
    }

    /// Blocks that are free or could be.
    pub(crate) fn available(&self) -> usize {
        self.total - self.used()
    }

    /// How many leading blocks are cached, and how many of those nobody uses.
    pub(crate) fn prefix(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let cached = hashes.iter().map_while(|hash| self.cached.get(hash));
        cached.fold((0, 0), |(all, unused), block| (all + 1, unused + usize::from(block.users == 0)))
    }

    /// Takes cached blocks into use.
    pub(crate) fn pin(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            if let Some(block) = self.cached.get_mut(hash) {
                if block.users == 0 {
                    self.unused.remove(&block.last_use);
                }
                block.users += 1;
            }
        }
    }

    /// Gives blocks back; they stay cached until their place is needed. Last blocks first, so that a prefix outlives
    /// what follows it.
    pub(crate) fn unpin(&mut self, hashes: &[BlockHash]) {
        for hash in hashes.iter().rev() {
            if let Some(block) = self.cached.get_mut(hash) {
                block.users -= 1;
                if block.users == 0 {
                    self.clock += 1;
                    block.last_use = self.clock;
                    self.unused.insert(self.clock, *hash);
                }
            }
        }
    }

    /// Takes `count` nameless blocks, evicting what is unused longest. The caller has looked at `available`.
    pub(crate) fn take(&mut self, count: usize, events: &mut Vec<EngineEvent>) {
        self.private += count;
        let mut evicted = Vec::new();
        while self.private + self.cached.len() > self.total {
            let Some((_, hash)) = self.unused.pop_first() else { break };
            self.cached.remove(&hash);
            evicted.push(EngineHash(hash.0));
        }
        if !evicted.is_empty() {
            events.push(EngineEvent::Removed { hashes: evicted, tier: Tier::Device });
        }
    }

    /// Gives nameless blocks back.
    pub(crate) fn give_back(&mut self, count: usize) {
        self.private -= count;
    }

    /// Names a computed block of a running request. One that another request has named before is shared; its own copy
    /// becomes free.
    pub(crate) fn name(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        root: BlockHash,
        tokens: &[u32],
        events: &mut Vec<EngineEvent>,
    ) {
        self.private -= 1;
        if self.cached.contains_key(&hash) {
            self.pin(&[hash]);
            return;
        }
        self.cached.insert(hash, Cached { users: 1, last_use: 0 });
        // A prompt's blocks become whole one after the other; they are told as one run.
        if let (Some(EngineEvent::Stored(run)), Some(parent)) = (events.last_mut(), parent)
            && run.root == root
            && run.hashes.last() == Some(&EngineHash(parent.0))
        {
            run.hashes.push(EngineHash(hash.0));
            run.tokens.extend_from_slice(tokens);
            return;
        }
        events.push(EngineEvent::Stored(StoredBlocks {
            hashes: vec![EngineHash(hash.0)],
            parent: parent.map(|parent| EngineHash(parent.0)),
            tokens: tokens.to_vec(),
            tier: Tier::Device,
            root,
        }));
    }

    /// Forgets what nobody uses; returns how many blocks that were.
    pub(crate) fn reset(&mut self, events: &mut Vec<EngineEvent>) -> usize {
        let unused = std::mem::take(&mut self.unused);
        let hashes: Vec<EngineHash> = unused.values().map(|hash| EngineHash(hash.0)).collect();
        for hash in unused.values() {
            self.cached.remove(hash);
        }
        let count = hashes.len();
        if count > 0 {
            events.push(EngineEvent::Removed { hashes, tier: Tier::Device });
        }
        count
    }
}
