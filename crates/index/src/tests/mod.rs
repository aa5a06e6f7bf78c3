//! The index as a whole. What several files need is here.

use std::{collections::BTreeSet, time::Duration};

use kvist_blocks::{Batch, BlockHash, Digest, Event, Incarnation, Rank, Run, SourceKey, Tier, TierDigest};
use proptest::prelude::*;

use crate::*;

mod budget;
mod history;
mod hooks;
mod places;
mod prompts;
mod readers;
mod removal;
mod snapshots;

fn key(worker: usize) -> SourceKey {
    SourceKey { worker: format!("w-{worker}").as_str().into(), rank: Rank(0) }
}

fn index() -> Index {
    Index::new(IndexSettings { byte_budget: 1 << 30 })
}

/// Cases of a property: as many as the environment says, or else so many.
fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig::with_cases(cases.unwrap_or(default))
}

/// The only source's share of a prompt.
fn overlap(index: &Index, prompt: &[BlockHash]) -> Overlap {
    index.lookup(prompt).iter().next().unwrap().1
}

fn stored(sequence: u64, hashes: &[u64]) -> Batch {
    let hashes = hashes.iter().copied().map(BlockHash).collect();
    Batch {
        sequence,
        recorded_at_unix_nanos: 0,
        events: vec![Event::Stored { tier: Tier::Device, parent: None, hashes }],
    }
}

/// Runs of which nothing is told but the blocks.
fn lone(hashes: impl IntoIterator<Item = BlockHash>) -> Vec<Run> {
    hashes.into_iter().map(|hash| Run { parent: None, hashes: vec![hash] }).collect()
}

/// The blocks of runs.
fn blocks_of(runs: Vec<Run>) -> impl Iterator<Item = BlockHash> {
    runs.into_iter().flat_map(|run| run.hashes)
}

/// Blocks of the one prompt whose blocks are all numbers, as runs in which every block is the parent of the next.
fn runs(tier: Tier, blocks: impl IntoIterator<Item = u64>) -> Vec<Event> {
    let blocks: Vec<u64> = blocks.into_iter().collect();
    let run = |run: &[u64]| Event::Stored {
        tier,
        parent: run[0].checked_sub(1).map(BlockHash),
        hashes: run.iter().copied().map(BlockHash).collect(),
    };
    blocks.chunk_by(|left, right| left + 1 == *right).map(run).collect()
}

/// A hash as real ones are: spread over all 64 bits.
fn real_hash(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 31).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// Hashes of a prompt that is given by what each of its blocks contains.
fn chain(contents: &[u64]) -> Vec<BlockHash> {
    let mut parent = 0;
    let hash = |content: &u64| {
        parent = real_hash(parent ^ (content + 1));
        BlockHash(parent)
    };
    contents.iter().map(hash).collect()
}

/// A prompt that shares a beginning with others: some blocks of the trunk, then some of one branch.
fn prompt_of((trunk, branch, tail): (usize, u64, usize)) -> Vec<BlockHash> {
    let contents: Vec<u64> = (0..trunk).map(|_| 0).chain((0..tail).map(|_| branch)).collect();
    chain(&contents)
}
