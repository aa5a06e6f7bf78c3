//! The ledger against a naive account: a multiset of (tier, token prefix).

use std::collections::{BTreeMap, BTreeSet};

use kvist_blocks::{BlockHash, Digest, Event, HashSeed, Namespace, Tier, block_hashes};
use proptest::prelude::*;

use super::*;

const BLOCK: usize = 2;

fn root() -> BlockHash {
    Namespace::new("model", "", "").root(HashSeed(1))
}

fn ledger(ring_batches: usize) -> Ledger {
    Ledger::new(LedgerSettings { ring_batches, block_size_tokens: BLOCK })
}

/// The engine's name for a prefix: any injective function of it will do.
fn engine_hash(prefix: &[u32]) -> EngineHash {
    EngineHash(prefix.iter().fold(1, |value, token| value * 11 + u64::from(*token) + 1))
}

fn stored(prefix: &[u32], from_block: usize, tier: Tier) -> EngineEvent {
    let hashes = (from_block..prefix.len() / BLOCK).map(|block| engine_hash(&prefix[..(block + 1) * BLOCK])).collect();
    let parent = (from_block > 0).then(|| engine_hash(&prefix[..from_block * BLOCK]));
    let tokens = prefix[from_block * BLOCK..].to_vec();
    EngineEvent::Stored(StoredBlocks { hashes, parent, tokens, tier, root: root() })
}

fn replay(batches: &[std::sync::Arc<kvist_blocks::Batch>]) -> BTreeSet<(Tier, BlockHash)> {
    let mut held = BTreeSet::new();
    for event in batches.iter().flat_map(|batch| &batch.events) {
        match event {
            Event::Stored { tier, hashes, .. } => {
                for hash in hashes {
                    assert!(held.insert((*tier, *hash)), "a held block is not stored again");
                }
            }
            Event::Removed { tier, hashes } => {
                for hash in hashes {
                    assert!(held.remove(&(*tier, *hash)), "only held blocks are removed");
                }
            }
            Event::Cleared { .. } => held.clear(),
        }
    }
    held
}

#[derive(Clone, Debug)]
enum Step {
    Store(Vec<u32>, Tier),
    Remove(usize),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![Just(Tier::Device), Just(Tier::Host)];
    let prefix = prop::collection::vec(0u32..2, 1..4).prop_map(|half| half.into_iter().flat_map(|t| [t, t]).collect());
    let step = prop_oneof![
        6 => (prefix, tier).prop_map(|(prefix, tier)| Step::Store(prefix, tier)),
        5 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn the_account_is_the_set_of_blocks_with_a_copy(steps in steps()) {
        let mut ledger = ledger(1000);
        let mut copies: BTreeMap<(Tier, Vec<u32>), u32> = BTreeMap::new();
        for step in steps {
            let event = match step {
                Step::Store(prefix, tier) => {
                    for block in 1..=prefix.len() / BLOCK {
                        *copies.entry((tier, prefix[..block * BLOCK].to_vec())).or_insert(0) += 1;
                    }
                    stored(&prefix, 0, tier)
                }
                Step::Remove(choice) => {
                    let Some((tier, prefix)) = copies.keys().nth(choice % copies.len().max(1)).cloned() else { continue };
                    let count = copies.get_mut(&(tier, prefix.clone())).unwrap();
                    *count -= 1;
                    if *count == 0 {
                        copies.remove(&(tier, prefix.clone()));
                    }
                    EngineEvent::Removed { hashes: vec![engine_hash(&prefix)], tier }
                }
                Step::Clear => {
                    copies.clear();
                    EngineEvent::Cleared
                }
            };
            ledger.apply(0, &[event]);

            let expected: BTreeSet<(Tier, BlockHash)> = copies
                .keys()
                .map(|(tier, prefix)| (*tier, *block_hashes(root(), prefix, BLOCK).last().unwrap()))
                .collect();
            let snapshot: BTreeSet<(Tier, BlockHash)> = ledger
                .snapshot()
                .blocks
                .into_iter()
                .flat_map(|(tier, hashes)| hashes.into_iter().map(move |hash| (tier, hash)))
                .collect();
            prop_assert_eq!(&expected, &snapshot);
            prop_assert_eq!(&expected, &replay(&ledger.range_after(None).unwrap()));
            for tier in ledger.digest().tiers {
                let mut digest = Digest::default();
                expected.iter().filter(|(of, _)| *of == tier.tier).for_each(|(_, hash)| digest.add(*hash));
                prop_assert_eq!(digest, tier.digest);
            }
            prop_assert!(ledger.digest().complete);
        }
    }
}

#[test]
fn a_block_is_removed_with_its_last_copy() {
    let mut ledger = ledger(10);
    assert!(ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]).is_some());
    assert!(ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]).is_none());
    let removal = EngineEvent::Removed { hashes: vec![engine_hash(&[1, 2])], tier: Tier::Device };
    assert!(ledger.apply(0, std::slice::from_ref(&removal)).is_none());
    assert!(ledger.apply(0, std::slice::from_ref(&removal)).is_some());
    assert!(ledger.apply(0, &[removal]).is_none());
    assert_eq!(1, ledger.counters().unknown_removals);
}

#[test]
fn a_block_of_unknown_parent_is_not_claimed() {
    let mut ledger = ledger(10);
    assert!(ledger.apply(0, &[stored(&[1, 2, 3, 4], 1, Tier::Device)]).is_none());
    assert_eq!((1, false), (ledger.counters().unknown_parents, ledger.digest().complete));
}

#[test]
fn the_ring_forgets_the_oldest() {
    let mut ledger = ledger(3);
    for token in 0..5 {
        ledger.apply(0, &[stored(&[token, token], 0, Tier::Device)]);
    }
    assert_eq!(Err(RangeLost { oldest_sequence: 2 }), ledger.range_after(Some(0)));
    let sequences = |after| ledger.range_after(after).unwrap().iter().map(|batch| batch.sequence).collect::<Vec<_>>();
    assert_eq!(vec![2, 3, 4], sequences(Some(1)));
    assert_eq!(Vec::<u64>::new(), sequences(Some(4)));
    assert!(ledger.range_after(Some(5)).is_err());
}

#[test]
fn a_claim_is_the_run_of_leading_blocks() {
    let mut ledger = ledger(10);
    ledger.apply(0, &[stored(&[1, 1, 2, 2, 3, 3], 0, Tier::Device)]);
    let prompt = block_hashes(root(), &[1, 1, 2, 2, 9, 9], BLOCK);
    assert_eq!(2, ledger.claimed_prefix_blocks(&prompt));
}
