//! Long prompts with branches and holes.

use super::*;

#[derive(Clone, Debug)]
enum Turn {
    /// Stores what is missing of a prompt, as far as some block.
    Store {
        worker: usize,
        prompt: (usize, u64, usize),
        tier: Tier,
    },
    /// Evicts some blocks from the end, or from anywhere.
    Evict {
        worker: usize,
        prompt: (usize, u64, usize),
        from: usize,
        blocks: usize,
    },
    /// A snapshot says which blocks there are, but not how they follow each other.
    Snapshot {
        worker: usize,
    },
    Clear {
        worker: usize,
        tier: Option<Tier>,
    },
    Sweep,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let prompt = || (0usize..400, 1u64..4, 0usize..300);
    let tier = || prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Disk)];
    let turn = prop_oneof![
        8 => (0usize..70, prompt(), tier()).prop_map(|(worker, prompt, tier)| Turn::Store { worker, prompt, tier }),
        5 => (0usize..70, prompt(), 0usize..700, 1usize..200)
            .prop_map(|(worker, prompt, from, blocks)| Turn::Evict { worker, prompt, from, blocks }),
        1 => (0usize..70).prop_map(|worker| Turn::Snapshot { worker }),
        1 => (0usize..70, prop::option::of(tier())).prop_map(|(worker, tier)| Turn::Clear { worker, tier }),
        1 => Just(Turn::Sweep),
    ];
    prop::collection::vec(turn, 1..40)
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn long_prompts_with_branches_and_holes_are_looked_up_exactly(
        turns in turns(), asked in prop::collection::vec((0usize..400, 1u64..4, 0usize..300), 4),
        byte_budget in prop_oneof![3 => Just(1u64 << 30), 1 => 4_000..40_000u64],
    ) {
        let index = Index::new(IndexSettings { byte_budget });
        let mut truths: Vec<(u64, BTreeSet<(Tier, BlockHash)>)> = vec![(0, BTreeSet::new()); 70];
        for turn in turns {
            let (worker, events) = match turn {
                Turn::Store { worker, prompt, tier } => {
                    let (held, hashes) = (&mut truths[worker].1, prompt_of(prompt));
                    // One event for each run of blocks that are new, as a ledger tells it.
                    let mut runs: Vec<(Option<BlockHash>, Vec<BlockHash>)> = Vec::new();
                    let mut was_new = false;
                    for (position, hash) in hashes.iter().enumerate() {
                        let is_new = held.insert((tier, *hash));
                        match runs.last_mut() {
                            Some((_, run)) if is_new && was_new => run.push(*hash),
                            _ if is_new => {
                                runs.push((position.checked_sub(1).map(|before| hashes[before]), vec![*hash]));
                            }
                            _ => {}
                        }
                        was_new = is_new;
                    }
                    let event = |(parent, hashes)| Event::Stored { tier, parent, hashes };
                    (worker, runs.into_iter().map(event).collect::<Vec<_>>())
                }
                Turn::Evict { worker, prompt, from, blocks } => {
                    let held = &mut truths[worker].1;
                    let gone = prompt_of(prompt).into_iter().skip(from).take(blocks).rev();
                    let gone: Vec<BlockHash> = gone.filter(|hash| held.remove(&(Tier::Device, *hash))).collect();
                    (worker, vec![Event::Removed { tier: Tier::Device, hashes: gone }])
                }
                Turn::Snapshot { worker } => {
                    let (next, held) = &truths[worker];
                    let of = |tier: Tier| {
                        (tier, lone(held.iter().filter(|(of, _)| *of == tier).map(|(_, hash)| *hash)))
                    };
                    let blocks: Vec<_> = Tier::ALL.into_iter().map(of).collect();
                    prop_assert!(index.apply_snapshot(&key(worker), Incarnation(1), *next, &blocks, true, 1));
                    continue;
                }
                Turn::Clear { worker, tier } => {
                    truths[worker].1.retain(|(of, _)| tier.is_some_and(|tier| tier != *of));
                    (worker, vec![Event::Cleared { tier }])
                }
                Turn::Sweep => {
                    index.collect_garbage();
                    prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD / 3));
                    continue;
                }
            };
            let batch = Batch { sequence: truths[worker].0, recorded_at_unix_nanos: 0, events };
            prop_assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(1), &batch, 1));
            truths[worker].0 += 1;
            prop_assert!(index.memory().bytes <= byte_budget);
        }
        // Asked twice, since a look-up tells what it has seen.
        for asked in asked.iter().chain(&asked) {
            let prompt = prompt_of(*asked);
            for (source, overlap) in index.lookup(&prompt).iter() {
                let worker: usize = source.worker.as_str()[2..].parse().unwrap();
                let held = &truths[worker].1;
                let run = |holds: &dyn Fn(&BlockHash) -> bool| prompt.iter().take_while(|hash| holds(hash)).count() as u32;
                let tiers = Tier::ALL.map(|tier| run(&|hash| held.contains(&(tier, *hash))));
                let any = run(&|hash| Tier::ALL.iter().any(|tier| held.contains(&(*tier, *hash))));
                if overlap.state == SourceState::Truncated {
                    prop_assert!(overlap.matched_blocks <= any);
                    prop_assert!(overlap.tier_blocks.iter().zip(tiers).all(|(claimed, held)| *claimed <= held));
                } else {
                    prop_assert_eq!((any, tiers), (overlap.matched_blocks, overlap.tier_blocks));
                }
            }
        }
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
    }
}

#[test]
fn who_tells_a_wrong_order_does_not_spoil_what_others_hold() {
    let index = index();
    let run = |parent: Option<u64>, blocks: &[u64]| Event::Stored {
        tier: Tier::Device,
        parent: parent.map(BlockHash),
        hashes: blocks.iter().copied().map(BlockHash).collect(),
    };
    let apply = |worker: usize, event: Event| {
        let batch = Batch { sequence: 0, recorded_at_unix_nanos: 0, events: vec![event] };
        index.apply_batch(&key(worker), Incarnation(1), &batch, 1);
    };
    apply(0, run(None, &[1, 9, 3, 4]));
    apply(1, run(None, &[1, 2, 3, 4, 5]));
    let prompt: Vec<BlockHash> = (1..6).map(BlockHash).collect();
    let overlaps = index.lookup(&prompt);
    assert_eq!(vec![1, 5], overlaps.iter().map(|(_, overlap)| overlap.matched_blocks).collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn a_snapshot_in_runs_is_what_was_held_and_parents_come_first(
        turns in turns(), cut in 1usize..200, backward in any::<bool>(),
    ) {
        let index = index();
        let mut sequences = [0; 70];
        for turn in turns {
            let (worker, event) = match turn {
                Turn::Store { worker, prompt, tier } => {
                    (worker, Event::Stored { tier, parent: None, hashes: prompt_of(prompt) })
                }
                Turn::Evict { worker, prompt, from, blocks } => {
                    let hashes = prompt_of(prompt).into_iter().skip(from).take(blocks).rev().collect();
                    (worker, Event::Removed { tier: Tier::Device, hashes })
                }
                _ => continue,
            };
            let batch = Batch { sequence: sequences[worker], recorded_at_unix_nanos: 0, events: vec![event] };
            index.apply_batch(&key(worker), Incarnation(1), &batch, 1);
            sequences[worker] += 1;
        }
        let taker = self::index();
        for status in index.sources() {
            let (status, tiers) = index.snapshot_of(&status.source).unwrap();
            let mut parts: Vec<(Tier, Vec<Run>)> = Vec::new();
            for (tier, runs) in &tiers {
                let own: BTreeSet<BlockHash> = runs.iter().flat_map(|run| run.hashes.iter().copied()).collect();
                let mut told = BTreeSet::new();
                for run in runs {
                    let is_told = run.parent.is_none_or(|parent| !own.contains(&parent) || told.contains(&parent));
                    prop_assert!(is_told, "{:?}", run.parent);
                    told.extend(run.hashes.iter().copied());
                }
                prop_assert_eq!(own.len(), runs.iter().map(|run| run.hashes.len()).sum::<usize>());
                // In any other order, and cut anywhere, it means the same.
                let mut pieces: Vec<Run> = runs.iter().flat_map(|run| {
                    run.hashes.chunks(cut).enumerate().map(|(number, hashes)| Run {
                        parent: (number * cut).checked_sub(1).map_or(run.parent, |before| Some(run.hashes[before])),
                        hashes: hashes.to_vec(),
                    })
                }).collect();
                if backward {
                    pieces.reverse();
                }
                parts.push((*tier, pieces));
            }
            prop_assert!(taker.apply_snapshot(&status.source, Incarnation(1), status.next_sequence, &parts, true, 1));
            prop_assert_eq!(DigestVerdict::Equal, taker.apply_digest(
                &status.source, Incarnation(1), status.next_sequence, &status.tiers, true, 1,
            ));
        }
        for asked in [(399, 1, 250), (200, 2, 299), (0, 3, 299)] {
            let prompt = prompt_of(asked);
            let claims = |index: &Index| -> Vec<_> {
                index.lookup(&prompt).iter().map(|(key, one)| (key.clone(), one.tier_blocks, one.matched_blocks)).collect()
            };
            prop_assert_eq!(claims(&index), claims(&taker));
        }
        prop_assert_eq!(index.memory().holders, taker.memory().holders);
    }
}
