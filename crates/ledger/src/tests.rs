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

/// The engine's name for a prefix: any injective function of it and of the variant will do. Two variants stand for one
/// content, as when an engine's hash covers more than the content.
fn engine_hash(variant: u64, prefix: &[u32]) -> EngineHash {
    EngineHash(prefix.iter().fold(1 + variant, |value, token| value * 11 + u64::from(*token) + 1))
}

fn stored_as(variant: u64, prefix: &[u32], from_block: usize, tier: Tier) -> EngineEvent {
    let hashes =
        (from_block..prefix.len() / BLOCK).map(|block| engine_hash(variant, &prefix[..(block + 1) * BLOCK])).collect();
    let parent = (from_block > 0).then(|| engine_hash(variant, &prefix[..from_block * BLOCK]));
    let tokens = prefix[from_block * BLOCK..].to_vec();
    EngineEvent::Stored(StoredBlocks { hashes, parent, tokens, tier, root: root() })
}

fn stored(prefix: &[u32], from_block: usize, tier: Tier) -> EngineEvent {
    stored_as(0, prefix, from_block, tier)
}

fn removed(prefix: &[u32], tier: Tier) -> EngineEvent {
    EngineEvent::Removed { hashes: vec![engine_hash(0, prefix)], tier }
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
    Store { variant: u64, prefix: Vec<u32>, from_block: usize, tier: Tier },
    Mention { choice: usize, tier: Tier },
    Remove(usize),
    Clear,
    Lose,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = || prop_oneof![3 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let prefix = prop::collection::vec(0u32..2, 1..4)
        .prop_map(|half| half.into_iter().flat_map(|token| [token, token]).collect::<Vec<u32>>());
    let step = prop_oneof![
        12 => (0u64..2, prefix, 0usize..3, tier()).prop_map(|(variant, prefix, from_block, tier)| {
            let from_block = from_block.min(prefix.len() / BLOCK - 1);
            Step::Store { variant, prefix, from_block, tier }
        }),
        2 => (any::<usize>(), tier()).prop_map(|(choice, tier)| Step::Mention { choice, tier }),
        10 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Clear),
        1 => Just(Step::Lose),
    ];
    prop::collection::vec(step, 0..60)
}

type Key = (Tier, u64, Vec<u32>);

/// The naive account: copies by tier, variant and whole prefix, apart for blocks that were never described.
#[derive(Debug, Default)]
struct Model {
    copies: BTreeMap<Key, u32>,
    orphans: BTreeMap<Key, u32>,
    counting: bool,
}

impl Model {
    fn take(&mut self, tier: Tier, variant: u64, prefix: &[u32], is_described: bool) {
        let key = (tier, variant, prefix.to_vec());
        let counts = self.counting && tier == Tier::Device;
        let is_known = is_described || self.knows(variant, prefix);
        let copies = if is_known { &mut self.copies } else { &mut self.orphans };
        let count = copies.entry(key.clone()).or_insert(0);
        *count = if counts { *count + 1 } else { 1 };
        if is_known {
            for (orphan, copies) in std::mem::take(&mut self.orphans) {
                if (orphan.1, &orphan.2) != (variant, &key.2) {
                    self.orphans.insert(orphan, copies);
                } else if counts || orphan.0 != tier {
                    *self.copies.entry(orphan).or_insert(0) += copies;
                }
            }
        }
    }

    fn knows(&self, variant: u64, prefix: &[u32]) -> bool {
        Tier::ALL.into_iter().any(|tier| self.copies.contains_key(&(tier, variant, prefix.to_vec())))
    }

    fn choose(&self, choice: usize, with_orphans: bool) -> Option<Key> {
        let orphans = self.orphans.keys().filter(|_| with_orphans);
        let all: Vec<&Key> = self.copies.keys().chain(orphans).collect();
        all.get(choice % all.len().max(1)).copied().cloned()
    }

    fn give(&mut self, key: &Key) {
        let copies = if self.copies.contains_key(key) { &mut self.copies } else { &mut self.orphans };
        let count = copies.get_mut(key).unwrap();
        *count -= 1;
        copies.retain(|_, count| *count > 0);
    }

    fn clear(&mut self) {
        self.copies.clear();
        self.orphans.clear();
    }
}

proptest! {
    /// R4, R12, R13, R19.
    #[test]
    fn the_account_is_the_set_of_blocks_with_a_copy(steps in steps(), counting in any::<bool>()) {
        let mut ledger = ledger(1000).counting(counting);
        let mut model = Model { counting, ..Model::default() };
        let mut has_lost = false;
        for step in steps {
            let event = match step {
                Step::Store { variant, prefix, from_block, tier } => {
                    let is_described = from_block == 0 || model.knows(variant, &prefix[..from_block * BLOCK]);
                    for block in from_block + 1..=prefix.len() / BLOCK {
                        model.take(tier, variant, &prefix[..block * BLOCK], is_described);
                    }
                    stored_as(variant, &prefix, from_block, tier)
                }
                Step::Mention { choice, tier } => {
                    let Some((_, variant, prefix)) = model.choose(choice, false) else { continue };
                    model.take(tier, variant, &prefix, true);
                    let hashes = vec![engine_hash(variant, &prefix)];
                    EngineEvent::Stored(StoredBlocks { hashes, parent: None, tokens: Vec::new(), tier, root: root() })
                }
                Step::Remove(choice) => {
                    let Some(key) = model.choose(choice, true) else { continue };
                    model.give(&key);
                    EngineEvent::Removed { hashes: vec![engine_hash(key.1, &key.2)], tier: key.0 }
                }
                Step::Clear => {
                    model.clear();
                    has_lost = false;
                    EngineEvent::Cleared
                }
                Step::Lose => {
                    model.clear();
                    has_lost = true;
                    EngineEvent::Lost
                }
            };
            let before = ledger.snapshot();
            let batch = ledger.apply(0, &[event]);

            let expected: BTreeSet<(Tier, BlockHash)> = model
                .copies
                .keys()
                .map(|(tier, _, prefix)| (*tier, *block_hashes(root(), prefix, BLOCK).last().unwrap()))
                .collect();
            let held = |snapshot: Snapshot| -> BTreeSet<(Tier, BlockHash)> {
                let tiers = snapshot.sets().into_iter();
                tiers.flat_map(|(tier, hashes)| hashes.into_iter().map(move |hash| (tier, hash))).collect()
            };
            prop_assert_eq!(&expected, &held(ledger.snapshot()));
            prop_assert_eq!(&expected, &replay(&ledger.range_after(None).unwrap()));
            prop_assert_eq!(held(before) != expected, batch.is_some(), "a sequence stands for a visible change");
            for tier in ledger.digest().tiers {
                let mut digest = Digest::default();
                expected.iter().filter(|(of, _)| *of == tier.tier).for_each(|(_, hash)| digest.add(*hash));
                prop_assert_eq!(digest, tier.digest);
            }
            prop_assert_eq!(!has_lost && model.orphans.is_empty(), ledger.digest().complete);
        }
    }
}

/// R12.
#[test]
fn a_hole_in_the_stream_ends_all_claims() {
    let mut ledger = ledger(10);
    ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]);
    let batch = ledger.apply(0, &[EngineEvent::Lost]).unwrap();
    assert_eq!(vec![Event::Cleared { tier: None }], batch.events);
    assert_eq!((0, false), (ledger.block_count(), ledger.digest().complete));
    assert!(ledger.apply(0, &[EngineEvent::Cleared]).is_none());
    assert!(ledger.digest().complete);
}

/// R8.
#[test]
fn one_hash_for_two_contents_claims_neither() {
    let mut ledger = ledger(10);
    ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]);
    let mut event = StoredBlocks {
        hashes: vec![EngineHash(77), engine_hash(0, &[1, 2]), EngineHash(78)],
        parent: None,
        tokens: vec![5, 5, 6, 6, 7, 7],
        tier: Tier::Device,
        root: root(),
    };
    ledger.apply(0, &[EngineEvent::Stored(event.clone())]);
    let first = block_hashes(root(), &[5, 5], BLOCK);
    assert_eq!(vec![(Tier::Device, first.clone())], ledger.snapshot().sets());
    assert_eq!((2, false), (ledger.counters().conflicting_hashes, ledger.digest().complete));
    ledger.apply(0, &[removed(&[1, 2], Tier::Device), removed(&[1, 2], Tier::Device)]);
    assert_eq!(vec![(Tier::Device, first)], ledger.snapshot().sets());
    event.hashes.truncate(2);
    ledger.apply(0, &[EngineEvent::Stored(event)]);
    assert_eq!(1, ledger.counters().malformed_events);
}

/// R4.
#[test]
fn a_block_is_removed_with_its_last_copy() {
    let mut ledger = ledger(10);
    assert!(ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]).is_some());
    assert!(ledger.apply(0, &[stored(&[1, 2], 0, Tier::Device)]).is_none());
    let removal = removed(&[1, 2], Tier::Device);
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
