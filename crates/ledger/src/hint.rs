//! What media hold that never report removals: perhaps still there, for some time.

use std::collections::VecDeque;

use hashbrown::HashMap;
use kvist_blocks::BlockHash;

use crate::{EngineHash, tier::Content};

#[derive(Debug)]
struct Hint {
    content: Content,
    expires_at: u64,
}

/// Hints, bounded in age and number; the oldest go first.
#[derive(Debug)]
pub(crate) struct Hints {
    pub(crate) time_to_live_nanos: u64,
    pub(crate) most: usize,
    by_engine_hash: HashMap<EngineHash, Hint>,
    expires_at: HashMap<BlockHash, u64>,
    order: VecDeque<(u64, EngineHash)>,
}

impl Hints {
    pub(crate) fn new(time_to_live_nanos: u64, most: usize) -> Self {
        Self {
            time_to_live_nanos,
            most,
            by_engine_hash: HashMap::new(),
            expires_at: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    pub(crate) fn content(&self, engine_hash: EngineHash) -> Option<&Content> {
        self.by_engine_hash.get(&engine_hash).map(|hint| &hint.content)
    }

    pub(crate) fn take(&mut self, engine_hash: EngineHash, content: Content, now: u64) {
        if content.is_unknown() {
            return;
        }
        let expires_at = now.saturating_add(self.time_to_live_nanos);
        for block in content.blocks() {
            self.expires_at.insert(*block, expires_at);
        }
        self.by_engine_hash.insert(engine_hash, Hint { content, expires_at });
        self.order.push_back((expires_at, engine_hash));
        while self.order.len() > self.most {
            self.drop_oldest();
        }
    }

    pub(crate) fn remove(&mut self, engine_hash: EngineHash) -> bool {
        let Some(hint) = self.by_engine_hash.remove(&engine_hash) else { return false };
        for block in hint.content.blocks() {
            self.expires_at.remove(block);
        }
        true
    }

    pub(crate) fn clear(&mut self) {
        self.by_engine_hash.clear();
        self.expires_at.clear();
        self.order.clear();
    }

    pub(crate) fn expire(&mut self, now: u64) {
        while self.order.front().is_some_and(|(expires_at, _)| *expires_at <= now) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let Some((expires_at, engine_hash)) = self.order.pop_front() else { return };
        // One that was told again lives longer, under its later entry.
        if self.by_engine_hash.get(&engine_hash).is_some_and(|hint| hint.expires_at == expires_at) {
            self.remove(engine_hash);
        }
    }

    pub(crate) fn contains(&self, block: BlockHash, now: u64) -> bool {
        self.expires_at.get(&block).is_some_and(|expires_at| *expires_at > now)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_engine_hash.len()
    }
}
