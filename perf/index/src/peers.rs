//! The index crates that peers publish, driven as their own benchmarks and gateways drive them.

use std::{ops::Range, sync::Mutex};

use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, SyncIndexer, ThreadPoolIndexer,
    nested_map::PositionalIndexer,
    protocols::{
        BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
        KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_block_hash_for_seq,
        compute_seq_hash_for_block,
    },
};
use kv_index::{
    ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock, chain_prefix_hash,
    compute_request_content_hashes,
};

use crate::contender::{BLOCK_TOKENS, Contender};

/// SMG's chain index. A lane map for each worker belongs to it: a gateway needs one to apply removals.
pub struct Smg {
    index: ChainIndex,
    lanes: Vec<(u32, Mutex<ChainBlockMap>)>,
}

/// Hashes of contents for look-ups, chained ones for events; the latter are empty for a prompt that is only asked for.
pub struct SmgPrompt {
    contents: Vec<ContentHash>,
    chain: Vec<SequenceHash>,
}

impl Contender for Smg {
    type Prompt = SmgPrompt;

    const NAME: &'static str = "kv-index 2.0.0 (SMG) ChainIndex";

    fn new(sources: usize) -> Self {
        let index = ChainIndex::with_max_workers(sources.max(1024));
        let lane = |source| (index.intern_worker(&format!("worker-{source:04}")).unwrap(), Mutex::default());
        let lanes = (0..sources).map(lane).collect();
        Self { index, lanes }
    }

    fn prompt(contents: &[u64]) -> SmgPrompt {
        let contents: Vec<ContentHash> = contents.iter().copied().map(ContentHash).collect();
        let mut chain: Vec<SequenceHash> = Vec::with_capacity(contents.len());
        for content in &contents {
            chain.push(chain.last().map_or(SequenceHash(content.0), |last| chain_prefix_hash(*last, *content)));
        }
        SmgPrompt { contents, chain }
    }

    fn store(&self, source: usize, prompt: &SmgPrompt, blocks: Range<usize>) {
        let parent = blocks.start.checked_sub(1).map(|before| prompt.chain[before]);
        let block = |at: usize| StoredBlock { seq_hash: prompt.chain[at], content_hash: prompt.contents[at] };
        let blocks: Vec<StoredBlock> = blocks.map(block).collect();
        let (worker, lane) = &self.lanes[source];
        self.index.apply_stored(*worker, &blocks, parent, &mut lane.lock().unwrap()).unwrap();
    }

    fn remove(&self, source: usize, prompt: &SmgPrompt, blocks: Range<usize>) {
        let hashes: Vec<SequenceHash> = prompt.chain[blocks].iter().rev().copied().collect();
        let (worker, lane) = &self.lanes[source];
        self.index.apply_removed(*worker, &hashes, &mut lane.lock().unwrap());
    }

    fn lookup(&self, prompt: &SmgPrompt) -> u64 {
        self.index.find_matches(&prompt.contents, false).scores.values().map(|blocks| u64::from(*blocks)).sum()
    }

    fn hash(tokens: &[u32]) -> SmgPrompt {
        SmgPrompt { contents: compute_request_content_hashes(tokens, BLOCK_TOKENS), chain: Vec::new() }
    }
}

/// One of Dynamo's indexers behind its pool of one event thread; look-ups run on the caller's thread.
struct Dynamo<T: SyncIndexer> {
    pool: ThreadPoolIndexer<T>,
    runtime: tokio::runtime::Runtime,
}

pub struct DynamoPrompt {
    contents: Vec<LocalBlockHash>,
    chain: Vec<ExternalSequenceBlockHash>,
}

impl<T: SyncIndexer> Dynamo<T> {
    fn new(backend: T) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let pool = {
            let _entered = runtime.enter();
            ThreadPoolIndexer::new(backend, 1, BLOCK_TOKENS as u32)
        };
        Self { pool, runtime }
    }

    fn apply(&self, source: usize, data: KvCacheEventData) {
        let event = KvCacheEvent { event_id: 0, data, dp_rank: 0 };
        self.pool.enqueue_event(RouterEvent::new(source as u64, event)).unwrap();
    }

    fn store(&self, source: usize, prompt: &DynamoPrompt, blocks: Range<usize>) {
        let parent_hash = blocks.start.checked_sub(1).map(|before| prompt.chain[before]);
        let block = |at: usize| KvCacheStoredBlockData {
            block_hash: prompt.chain[at],
            tokens_hash: prompt.contents[at],
            mm_extra_info: None,
        };
        let start_position = u32::try_from(blocks.start).ok();
        let blocks = blocks.map(block).collect();
        self.apply(source, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position, blocks }));
    }

    fn remove(&self, source: usize, prompt: &DynamoPrompt, blocks: Range<usize>) {
        let block_hashes = prompt.chain[blocks].iter().rev().copied().collect();
        self.apply(source, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
    }

    fn lookup(&self, prompt: &DynamoPrompt) -> u64 {
        let found = self.pool.backend().find_matches(&prompt.contents, false);
        found.scores.values().map(|blocks| u64::from(*blocks)).sum()
    }

    fn settle(&self) {
        self.runtime.block_on(self.pool.flush_and_wait()).unwrap();
    }
}

fn dynamo_prompt(contents: &[u64]) -> DynamoPrompt {
    let contents: Vec<LocalBlockHash> = contents.iter().copied().map(LocalBlockHash).collect();
    let chain = compute_seq_hash_for_block(&contents).into_iter().map(ExternalSequenceBlockHash).collect();
    DynamoPrompt { contents, chain }
}

fn dynamo_hash(tokens: &[u32]) -> DynamoPrompt {
    let contents = compute_block_hash_for_seq(tokens, BLOCK_TOKENS as u32, BlockHashOptions::default());
    DynamoPrompt { contents, chain: Vec::new() }
}

/// Dynamo's default: the compressed concurrent radix tree.
pub struct DynamoTree(Dynamo<ConcurrentRadixTreeCompressed>);

/// Dynamo's positional index with its default jump.
pub struct DynamoPositional(Dynamo<PositionalIndexer>);

macro_rules! dynamo {
    ($type:ident, $name:literal, $backend:expr) => {
        impl Contender for $type {
            type Prompt = DynamoPrompt;

            const NAME: &'static str = $name;

            fn new(_sources: usize) -> Self {
                Self(Dynamo::new($backend))
            }

            fn prompt(contents: &[u64]) -> DynamoPrompt {
                dynamo_prompt(contents)
            }

            fn store(&self, source: usize, prompt: &DynamoPrompt, blocks: Range<usize>) {
                self.0.store(source, prompt, blocks);
            }

            fn remove(&self, source: usize, prompt: &DynamoPrompt, blocks: Range<usize>) {
                self.0.remove(source, prompt, blocks);
            }

            fn lookup(&self, prompt: &DynamoPrompt) -> u64 {
                self.0.lookup(prompt)
            }

            fn settle(&self) {
                self.0.settle();
            }

            fn hash(tokens: &[u32]) -> DynamoPrompt {
                dynamo_hash(tokens)
            }
        }
    };
}

dynamo!(DynamoTree, "dynamo-kv-router 1.6.1 radix tree", ConcurrentRadixTreeCompressed::new());
dynamo!(DynamoPositional, "dynamo-kv-router 1.6.1 positional", PositionalIndexer::new(64));
