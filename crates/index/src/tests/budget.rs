//! What a byte budget does: who gives up what, and what it costs to hold a block.

use super::*;

#[test]
fn what_the_budget_refuses_is_given_up_and_the_digest_still_proves_the_rest() {
    let index = Index::new(IndexSettings { byte_budget: 28 * 10 });
    let hashes: Vec<u64> = (0..100).collect();
    index.apply_batch(&key(0), Incarnation(1), &stored(0, &hashes), 1);
    assert_eq!(SourceState::Truncated, index.source(&key(0)).unwrap().state);
    assert!(index.memory().bytes <= index.memory().byte_budget);
    let mut digest = Digest::default();
    hashes.iter().for_each(|hash| digest.add(BlockHash(*hash)));
    let tiers = [TierDigest { tier: Tier::Device, block_count: 100, digest }];
    assert_eq!(DigestVerdict::Equal, index.apply_digest(&key(0), Incarnation(1), 1, &tiers, true, 1));
}

/// What one worker truly holds, and how far its history has come.
#[derive(Clone, Debug)]
struct Truth {
    incarnation: u64,
    next_sequence: u64,
    held: BTreeSet<(Tier, u64)>,
}

impl Truth {
    fn digests(&self) -> Vec<TierDigest> {
        let digest_of = |tier: Tier| {
            let (mut digest, mut block_count) = (Digest::default(), 0);
            for (_, block) in self.held.iter().filter(|(of, _)| *of == tier) {
                digest.add(BlockHash(*block));
                block_count += 1;
            }
            TierDigest { tier, block_count, digest }
        };
        Tier::ALL.into_iter().map(digest_of).collect()
    }

    fn snapshot(&self) -> Vec<(Tier, Vec<Run>)> {
        let of = |tier: Tier| self.held.iter().filter(move |(of, _)| *of == tier).map(|(_, block)| BlockHash(*block));
        [Tier::Device, Tier::Host].into_iter().map(|tier| (tier, lone(of(tier)))).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Store { first: u64, blocks: u64, tier: Tier },
    Remove { choice: usize, blocks: usize },
    Clear(Option<Tier>),
    Snapshot,
    Restart,
    Sweep,
    Scrub(u64),
}

fn happenings() -> impl Strategy<Value = Vec<(usize, Happening)>> {
    let tier = || prop_oneof![2 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let happening = prop_oneof![
        12 => (0u64..30, 1u64..12, tier()).prop_map(|(first, blocks, tier)| Happening::Store { first, blocks, tier }),
        8 => (any::<usize>(), 1usize..8).prop_map(|(choice, blocks)| Happening::Remove { choice, blocks }),
        1 => prop::option::of(tier()).prop_map(Happening::Clear),
        2 => Just(Happening::Snapshot),
        1 => Just(Happening::Restart),
        1 => Just(Happening::Sweep),
        2 => (1u64..150).prop_map(Happening::Scrub),
    ];
    prop::collection::vec((0usize..5, happening), 0..80)
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn within_any_budget_claims_are_true_and_digests_prove_the_whole(
        happenings in happenings(), byte_budget in prop_oneof![Just(0u64), 200..1500u64, 1500..6000u64, Just(1 << 20)],
    ) {
        let index = Index::new(IndexSettings { byte_budget });
        let mut truths = vec![Truth { incarnation: 1, next_sequence: 0, held: BTreeSet::new() }; 5];
        let steps = happenings.len();
        for (step, (worker, happening)) in happenings.into_iter().enumerate() {
            let truth = &mut truths[worker];
            let mut events = Vec::new();
            match happening {
                Happening::Store { first, blocks, tier } => {
                    let new = (first..first + blocks).filter(|block| truth.held.insert((tier, *block)));
                    events.extend(runs(tier, new));
                }
                Happening::Remove { choice, blocks } => {
                    for step in 0..blocks {
                        let position = choice.wrapping_add(step * 7) % truth.held.len().max(1);
                        let Some((tier, block)) = truth.held.iter().nth(position).copied() else { break };
                        truth.held.remove(&(tier, block));
                        events.push(Event::Removed { tier, hashes: vec![BlockHash(block)] });
                    }
                }
                Happening::Clear(tier) => {
                    truth.held.retain(|(of, _)| tier.is_some_and(|tier| tier != *of));
                    events.push(Event::Cleared { tier });
                }
                Happening::Snapshot => {
                    let (incarnation, next) = (Incarnation(truth.incarnation), truth.next_sequence);
                    prop_assert!(index.apply_snapshot(&key(worker), incarnation, next, &truth.snapshot(), true, 1));
                }
                Happening::Restart => {
                    index.close(&key(worker).worker, Incarnation(truth.incarnation));
                    *truth = Truth { incarnation: truth.incarnation + 1, next_sequence: 0, held: BTreeSet::new() };
                }
                Happening::Sweep => index.collect_garbage(),
                // Some parts of a round, so that it goes on beside all that happens.
                Happening::Scrub(seconds) => {
                    prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(Duration::from_secs(seconds)));
                }
            }
            if !events.is_empty() {
                let batch = Batch { sequence: truth.next_sequence, recorded_at_unix_nanos: 0, events };
                prop_assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(truth.incarnation), &batch, 1));
                truth.next_sequence += 1;
            }
            prop_assert!(index.memory().bytes <= byte_budget);

            let prompt: Vec<BlockHash> = (0..45).map(BlockHash).collect();
            let overlaps = index.lookup(&prompt);
            prop_assert_eq!(index.sources().len(), overlaps.iter().count());
            // All sources at the end; before that the one that changed, since a snapshot walks the whole map.
            let is_last = step + 1 == steps;
            for (source, overlap) in overlaps.iter() {
                prop_assert_eq!(Some(overlap), overlaps.get(&source.worker, source.rank));
                let of: usize = source.worker.as_str()[2..].parse().unwrap();
                if of != worker && !is_last {
                    continue;
                }
                let worker = of;
                let truth = &truths[worker];
                let (status, blocks) = index.snapshot_of(&key(worker)).unwrap();
                let kept: BTreeSet<(Tier, u64)> =
                    blocks.into_iter().flat_map(|(tier, runs)| blocks_of(runs).map(move |hash| (tier, hash.0))).collect();
                prop_assert!(kept.is_subset(&truth.held), "{kept:?} of {truth:?}");
                prop_assert_eq!(truth.held.len() as u64, kept.len() as u64 + status.given_up_blocks);
                prop_assert_eq!(0, status.unknown_removals);
                let expected = if status.given_up_blocks > 0 { SourceState::Truncated } else { SourceState::Exact };
                prop_assert_eq!(expected, status.state);
                let (incarnation, next) = (Incarnation(truth.incarnation), truth.next_sequence);
                let verdict = index.apply_digest(&key(worker), incarnation, next, &truth.digests(), true, 1);
                prop_assert_eq!(DigestVerdict::Equal, verdict);

                let run = |holds: &dyn Fn(u64) -> bool| (0..45).take_while(|block| holds(*block)).count() as u32;
                prop_assert_eq!(run(&|block| Tier::ALL.iter().any(|tier| kept.contains(&(*tier, block)))), overlap.matched_blocks);
                prop_assert_eq!(Tier::ALL.map(|tier| run(&|block| kept.contains(&(tier, block)))), overlap.tier_blocks);
            }
        }
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
        index.collect_garbage();
        let kept = |key: &SourceKey| -> BTreeSet<u64> {
            index.snapshot_of(key).unwrap().1.into_iter().flat_map(|(_, runs)| blocks_of(runs)).map(|hash| hash.0).collect()
        };
        let held: Vec<BTreeSet<u64>> = index.sources().iter().map(|status| kept(&status.source)).collect();
        let holders: usize = held.iter().map(BTreeSet::len).sum();
        let blocks = held.into_iter().flatten().collect::<BTreeSet<u64>>().len();
        prop_assert_eq!(holders as u64, index.memory().holders);
        prop_assert!((blocks as u64..=holders as u64).contains(&index.memory().blocks), "{blocks} {:?}", index.memory());
    }
}

#[test]
fn a_block_and_holder_cost_at_most_32_bytes_while_growing_and_under_churn() {
    const BLOCKS: u64 = 40_000;
    for holders in [1, 8] {
        let index = index();
        let mut sequences = [0; 8];
        let mut apply = |worker: usize, event: Event| {
            let batch = Batch { sequence: sequences[worker], recorded_at_unix_nanos: 0, events: vec![event] };
            assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(1), &batch, 1));
            sequences[worker] += 1;
            let memory = index.memory();
            if memory.holders > 4_000 * holders as u64 {
                assert!(memory.bytes <= 32 * memory.holders, "{memory:?}");
            }
        };
        let hashes = |from: u64, to: u64| (from..to).map(|number| BlockHash(real_hash(number))).collect::<Vec<_>>();
        for from in (0..BLOCKS).step_by(1000) {
            for worker in 0..holders {
                apply(worker, Event::Stored { tier: Tier::Device, parent: None, hashes: hashes(from, from + 1000) });
            }
        }
        // The oldest make room for new ones, and then fewer and fewer are left.
        for from in (0..BLOCKS).step_by(500) {
            for worker in 0..holders {
                if from < BLOCKS / 2 {
                    let hashes = hashes(BLOCKS + from, BLOCKS + from + 500);
                    apply(worker, Event::Stored { tier: Tier::Device, parent: None, hashes });
                }
            }
            for worker in 0..holders {
                apply(worker, Event::Removed { tier: Tier::Device, hashes: hashes(from, from + 500) });
            }
        }
        assert_eq!(BLOCKS / 2 * holders as u64, index.memory().holders);
    }
}

#[test]
fn the_dead_make_room_before_the_living_give_up() {
    let index = Index::new(IndexSettings { byte_budget: 20_000 });
    for incarnation in 1..200 {
        let hashes: Vec<u64> = (0..400).map(|number| real_hash(incarnation * 1000 + number)).collect();
        index.apply_batch(&key(0), Incarnation(incarnation), &stored(0, &hashes), 1);
        assert_eq!(SourceState::Exact, index.source(&key(0)).unwrap().state, "incarnation {incarnation}");
    }
}

#[test]
fn a_newcomer_finds_room_beside_a_giant_that_keeps_what_is_used() {
    let index = Index::new(IndexSettings { byte_budget: 200_000 });
    let apply = |worker: usize, sequence: u64, hashes: Vec<BlockHash>| {
        let events = vec![Event::Stored { tier: Tier::Device, parent: None, hashes }];
        let batch = Batch { sequence, recorded_at_unix_nanos: 0, events };
        assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(1), &batch, 1));
    };
    let held = |worker: usize, prompt: &[BlockHash]| {
        index.lookup(prompt).get(&key(worker).worker, Rank(0)).map_or(0, |overlap| overlap.matched_blocks)
    };
    // A giant fills the budget several times over. One of its prompts is asked for all the while.
    let used = chain(&[1; 120]);
    apply(0, 0, used.clone());
    for sequence in 1..400 {
        apply(0, sequence, chain(&[sequence + 10; 120]));
        held(0, &used);
    }
    assert_eq!(SourceState::Truncated, index.source(&key(0)).unwrap().state);
    assert_eq!(120, held(0, &used), "what is used stays");
    assert_eq!(120, held(0, &chain(&[399 + 10; 120])), "what is new is let in");
    assert_eq!(0, held(0, &chain(&[1 + 10; 120])), "what is old and unused goes");
    // A newcomer with much less than its share gets all of it in.
    let few: Vec<Vec<BlockHash>> = (0..10).map(|prompt| chain(&[1_000 + prompt; 120])).collect();
    for (sequence, prompt) in few.iter().enumerate() {
        apply(1, sequence as u64, prompt.clone());
        held(0, &used);
    }
    assert_eq!(SourceState::Exact, index.source(&key(1)).unwrap().state);
    assert_eq!(120, held(0, &used));
    // And keeps it, however much the giant goes on storing.
    for sequence in 400..800 {
        apply(0, sequence, chain(&[sequence + 10; 120]));
    }
    assert_eq!(SourceState::Exact, index.source(&key(1)).unwrap().state);
    few.iter().for_each(|prompt| assert_eq!(120, held(1, prompt)));
    // Nobody loses track of what was given up.
    assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
    assert!(index.memory().bytes <= index.memory().byte_budget);
}
