//! Whatever is lost, doubled, reordered or restarted, each claim was true at its position.

use super::*;

/// The true history of one incarnation: what was held after each batch.
#[derive(Clone, Debug, Default)]
struct History {
    batches: Vec<Batch>,
    held: Vec<BTreeSet<u64>>,
}

impl History {
    fn from_choices(choices: &[(bool, u64)]) -> Self {
        let mut history = Self::default();
        let mut held = BTreeSet::new();
        for (store, block) in choices {
            let hashes = vec![BlockHash(*block)];
            let event = if *store && held.insert(*block) {
                Event::Stored { tier: Tier::Device, parent: None, hashes }
            } else if !*store && held.remove(block) {
                Event::Removed { tier: Tier::Device, hashes }
            } else if *block == 0 && !held.is_empty() {
                held.clear();
                Event::Cleared { tier: None }
            } else {
                continue;
            };
            let sequence = history.batches.len() as u64;
            history.batches.push(Batch { sequence, recorded_at_unix_nanos: 0, events: vec![event] });
            history.held.push(held.clone());
        }
        history
    }

    fn held_at(&self, next_sequence: u64) -> BTreeSet<u64> {
        next_sequence.checked_sub(1).map_or_else(BTreeSet::new, |last| self.held[last as usize].clone())
    }

    fn digest_at(&self, next_sequence: u64) -> Vec<TierDigest> {
        let held = self.held_at(next_sequence);
        let mut digest = Digest::default();
        held.iter().for_each(|block| digest.add(BlockHash(*block)));
        vec![TierDigest { tier: Tier::Device, block_count: held.len() as u64, digest }]
    }
}

#[derive(Clone, Copy, Debug)]
enum Delivery {
    Batch { incarnation: usize, position: usize },
    Snapshot { incarnation: usize, position: usize },
    Digest { incarnation: usize, position: usize },
    Close { incarnation: usize },
    Sweep,
}

fn deliveries() -> impl Strategy<Value = Vec<Delivery>> {
    let place = (0usize..3, 0usize..30);
    let delivery = prop_oneof![
        20 => place.clone().prop_map(|(incarnation, position)| Delivery::Batch { incarnation, position }),
        2 => place.clone().prop_map(|(incarnation, position)| Delivery::Snapshot { incarnation, position }),
        3 => place.prop_map(|(incarnation, position)| Delivery::Digest { incarnation, position }),
        1 => (0usize..3).prop_map(|incarnation| Delivery::Close { incarnation }),
        1 => Just(Delivery::Sweep),
    ];
    // Runs of consecutive batches, so that something is applied, with noise between them.
    (prop::collection::vec(delivery, 0..60), prop::collection::vec((0usize..3, 0usize..25, 1usize..25), 0..6)).prop_map(
        |(noise, runs)| {
            let mut all = noise;
            for (incarnation, start, length) in runs {
                all.extend((start..start + length).map(|position| Delivery::Batch { incarnation, position }));
            }
            all
        },
    )
}

proptest! {
    #![proptest_config(cases(1_000))]

    #[test]
    fn every_claim_was_true_at_its_stated_position(
        choices in prop::collection::vec(prop::collection::vec((any::<bool>(), 0u64..6), 30), 3),
        deliveries in deliveries(),
    ) {
        let histories: Vec<History> = choices.iter().map(|choices| History::from_choices(choices)).collect();
        let incarnation_of = |position: usize| Incarnation(10 + position as u64);
        let index = index();
        let mut closed = 0;
        for delivery in deliveries {
            match delivery {
                Delivery::Batch { incarnation, position } => {
                    let Some(batch) = histories[incarnation].batches.get(position) else { continue };
                    index.apply_batch(&key(0), incarnation_of(incarnation), batch, 1);
                }
                Delivery::Snapshot { incarnation, position } => {
                    let history = &histories[incarnation];
                    let next = (position as u64).min(history.batches.len() as u64);
                    let blocks = [(Tier::Device, lone(history.held_at(next).into_iter().map(BlockHash)))];
                    index.apply_snapshot(&key(0), incarnation_of(incarnation), next, &blocks, true, 1);
                }
                Delivery::Digest { incarnation, position } => {
                    let history = &histories[incarnation];
                    let next = (position as u64).min(history.batches.len() as u64);
                    let verdict =
                        index.apply_digest(&key(0), incarnation_of(incarnation), next, &history.digest_at(next), true, 1);
                    prop_assert_ne!(DigestVerdict::Mismatch, verdict);
                }
                Delivery::Close { incarnation } => {
                    index.close(&key(0).worker, incarnation_of(incarnation));
                    closed = closed.max(incarnation_of(incarnation).0);
                }
                Delivery::Sweep => index.collect_garbage(),
            }
            let Some(status) = index.source(&key(0)) else { continue };
            prop_assert!(status.incarnation.0 > closed);
            let history = &histories[(status.incarnation.0 - 10) as usize];
            let expected = history.held_at(status.next_sequence);
            let (_, blocks) = index.snapshot_of(&key(0)).unwrap();
            let held: BTreeSet<u64> = blocks.into_iter().flat_map(|(_, runs)| blocks_of(runs)).map(|hash| hash.0).collect();
            prop_assert_eq!(&expected, &held);
            for block in 0..6 {
                let overlap = overlap(&index, &[BlockHash(block)]);
                prop_assert_eq!(u32::from(expected.contains(&block)), overlap.matched_blocks);
                prop_assert_eq!(status.next_sequence.checked_sub(1), overlap.applied_sequence);
            }
        }
    }

    #[test]
    fn a_match_is_the_leading_run_of_each_source(
        held in prop::collection::vec(prop::collection::btree_set(0u64..8, 0..8), 1..12),
    ) {
        let index = index();
        for (worker, blocks) in held.iter().enumerate() {
            let events = runs(Tier::Device, blocks.iter().copied());
            let batch = Batch { sequence: 0, recorded_at_unix_nanos: 0, events };
            index.apply_batch(&key(worker), Incarnation(1), &batch, 1);
        }
        let prompt: Vec<BlockHash> = (0..8).map(BlockHash).collect();
        for (source, overlap) in index.lookup(&prompt).iter() {
            let worker: usize = source.worker.as_str()[2..].parse().unwrap();
            let expected = (0..8).take_while(|block| held[worker].contains(block)).count() as u32;
            prop_assert_eq!(expected, overlap.matched_blocks);
            prop_assert_eq!([expected, 0, 0, 0], overlap.tier_blocks);
        }
    }
}
