//! Look-ups beside writers.

use super::*;

#[test]
fn sweeps_and_look_ups_run_beside_batches() {
    let index = index();
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let index = &index;
            scope.spawn(move || {
                for incarnation in 1..40 {
                    for sequence in 0..20 {
                        let hashes: Vec<u64> = (0..=sequence).map(real_hash).collect();
                        let batch = stored(sequence, &hashes[sequence as usize..]);
                        index.apply_batch(&key(worker), Incarnation(incarnation), &batch, 1);
                        // A source holds a beginning of the prompt as long as its sequence says.
                        let prompt: Vec<BlockHash> = (0..20).map(real_hash).map(BlockHash).collect();
                        for (_, overlap) in index.lookup(&prompt).iter() {
                            assert_eq!(
                                overlap.applied_sequence.map_or(0, |last| last as u32 + 1),
                                overlap.matched_blocks
                            );
                        }
                    }
                    index.collect_garbage();
                }
            });
        }
    });
    index.collect_garbage();
    assert_eq!((20, 60), (index.memory().blocks, index.memory().holders));
}

#[test]
fn readers_see_a_source_only_as_it_was_at_its_stated_sequence() {
    // After batch n, the source holds the first blocks of the prompt, as many as n says.
    const BLOCKS: usize = 300;
    let held_after = |sequence: u64| (sequence as usize * 37 + 11) % BLOCKS;
    let prompt = chain(&[0; BLOCKS]);
    let index = index();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    for (_, overlap) in index.lookup(&prompt).iter() {
                        let expected = overlap.applied_sequence.map_or(0, held_after);
                        assert_eq!(expected, overlap.matched_blocks as usize);
                    }
                }
            });
        }
        let mut held = 0;
        for sequence in 0..3_000 {
            let now = held_after(sequence);
            let event = if now > held {
                let parent = held.checked_sub(1).map(|before| prompt[before]);
                Event::Stored { tier: Tier::Device, parent, hashes: prompt[held..now].to_vec() }
            } else {
                Event::Removed { tier: Tier::Device, hashes: prompt[now..held].iter().rev().copied().collect() }
            };
            held = now;
            for worker in 0..3 {
                let batch = Batch { sequence, recorded_at_unix_nanos: 0, events: vec![event.clone()] };
                assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(1), &batch, 1));
            }
            if sequence % 500 == 0 {
                index.collect_garbage();
            }
        }
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// What a source held of one prompt after each of its batches, kept for as long as readers check their claims against it.
struct Recorded {
    held: std::sync::Mutex<Vec<std::collections::HashMap<(u64, u64), u32>>>,
}

impl Recorded {
    fn note(&self, worker: usize, incarnation: u64, next_sequence: u64, leading: u32) {
        self.held.lock().unwrap()[worker].insert((incarnation, next_sequence), leading);
    }

    fn leading(&self, worker: usize, incarnation: u64, next_sequence: u64) -> Option<u32> {
        self.held.lock().unwrap()[worker].get(&(incarnation, next_sequence)).copied()
    }
}

/// Numbers that look random, from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A writer that changes its source in every way there is, and writes down what it holds before it says so.
fn change_at_random(index: &Index, recorded: &Recorded, prompt: &[BlockHash], worker: usize, batches: u64) {
    let mut random = Random(worker as u64 + 1);
    let (mut incarnation, mut next) = (1, 0);
    let mut held = vec![false; prompt.len()];
    recorded.note(worker, incarnation, next, 0);
    for _ in 0..batches {
        let from = random.below(prompt.len() as u64) as usize;
        let to = (from + 1 + random.below(150) as usize).min(prompt.len());
        let mut events = Vec::new();
        match random.below(40) {
            0 => {
                (incarnation, next) = (incarnation + 1, 0);
                held.fill(false);
                recorded.note(worker, incarnation, next, 0);
                index.close(&key(worker).worker, Incarnation(incarnation - 1));
                continue;
            }
            1 => {
                held.fill(false);
                events.push(Event::Cleared { tier: None });
            }
            2 => {
                let blocks: Vec<Run> = lone(prompt.iter().zip(&held).filter(|(_, held)| **held).map(|(hash, _)| *hash));
                index.apply_snapshot(&key(worker), Incarnation(incarnation), next, &[(Tier::Device, blocks)], true, 1);
                continue;
            }
            3 => {
                index.collect_garbage();
                continue;
            }
            // Mostly what follows what is held already, so that claims are long.
            4..20 => {
                let start = held.iter().position(|held| !held).unwrap_or(0);
                let end = (start + to - from).min(prompt.len());
                let new: Vec<BlockHash> = (start..end).take_while(|at| !held[*at]).map(|at| prompt[at]).collect();
                held[start..start + new.len()].fill(true);
                let parent = start.checked_sub(1).map(|before| prompt[before]);
                events.push(Event::Stored { tier: Tier::Device, parent, hashes: new });
            }
            20..28 => {
                let new: Vec<BlockHash> = (from..to).take_while(|at| !held[*at]).map(|at| prompt[at]).collect();
                held[from..from + new.len()].fill(true);
                let parent = from.checked_sub(1).map(|before| prompt[before]);
                events.push(Event::Stored { tier: Tier::Device, parent, hashes: new });
            }
            _ => {
                let gone: Vec<usize> = (from..to).rev().filter(|at| held[*at]).collect();
                gone.iter().for_each(|at| held[*at] = false);
                events.push(Event::Removed { tier: Tier::Device, hashes: gone.iter().map(|at| prompt[*at]).collect() });
            }
        }
        let leading = held.iter().take_while(|held| **held).count() as u32;
        recorded.note(worker, incarnation, next + 1, leading);
        let batch = Batch { sequence: next, recorded_at_unix_nanos: 0, events };
        assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(incarnation), &batch, 1));
        next += 1;
    }
}

#[test]
fn each_claim_among_racing_writers_is_in_the_record_of_its_source() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    const WORKERS: usize = 3;
    let prompt = chain(&[0; 500]);
    for byte_budget in [1 << 30, 24_000] {
        let index = Index::new(IndexSettings { byte_budget });
        let recorded = Recorded { held: vec![std::collections::HashMap::new(); WORKERS].into() };
        let (running, claims, checked) = (AtomicUsize::new(WORKERS), AtomicUsize::new(0), AtomicUsize::new(0));
        let is_failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                let (index, recorded, prompt, running) = (&index, &recorded, &prompt, &running);
                scope.spawn(move || {
                    change_at_random(index, recorded, prompt, worker, 6_000);
                    running.fetch_sub(1, Ordering::Relaxed);
                });
            }
            for reader in 0..2 {
                let (index, recorded, prompt, running) = (&index, &recorded, &prompt, &running);
                let (claims, checked, is_failed) = (&claims, &checked, &is_failed);
                scope.spawn(move || {
                    let mut random = Random(reader + 77);
                    while running.load(Ordering::Relaxed) > 0 && !is_failed.load(Ordering::Relaxed) {
                        let asked = 1 + random.below(prompt.len() as u64) as usize;
                        for (source, overlap) in index.lookup(&prompt[..asked]).iter() {
                            let worker: usize = source.worker.as_str()[2..].parse().unwrap();
                            let next = overlap.applied_sequence.map_or(0, |last| last + 1);
                            let held = recorded.leading(worker, overlap.incarnation.0, next);
                            let expected = held.map(|held| held.min(asked as u32));
                            let is_true = if overlap.state == SourceState::Truncated {
                                expected.is_some_and(|expected| overlap.matched_blocks <= expected)
                            } else {
                                expected == Some(overlap.matched_blocks)
                            };
                            if !is_true {
                                is_failed.store(true, Ordering::Relaxed);
                            }
                            assert!(is_true, "{overlap:?} of {asked}, held {held:?}");
                            claims.fetch_add(usize::from(overlap.matched_blocks > 0), Ordering::Relaxed);
                            checked.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        // A test of nothing is none.
        let (claims, checked) = (claims.into_inner(), checked.into_inner());
        assert!(checked > 2_000 && claims > checked / 20, "{claims} of {checked}");
    }
}

#[test]
fn a_look_up_passes_a_writer_that_stands_still() {
    let index = index();
    let prompts = [chain(&[0; 300]), chain(&[1; 300])];
    for worker in 0..4 {
        let events = prompts.iter().map(|prompt| Event::Stored {
            tier: Tier::Device,
            parent: None,
            hashes: prompt[..200 + 20 * worker].to_vec(),
        });
        let batch = Batch { sequence: 0, recorded_at_unix_nanos: 0, events: events.collect() };
        index.apply_batch(&key(worker), Incarnation(1), &batch, 1);
    }
    let look_up = |prompt: &[BlockHash]| -> Vec<(SourceState, u32)> {
        // In a thread of its own: were it to wait, it would wait for ever for the lock that this one holds.
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let overlaps = index.lookup(prompt);
                let found: Vec<_> = overlaps.iter().map(|(_, one)| (one.state, one.matched_blocks)).collect();
                let memory = index.memory();
                sender.send((found, memory)).unwrap();
            });
            receiver.recv_timeout(Duration::from_secs(20)).expect("a look-up waits for a writer").0
        })
    };
    let (exact, unknown) = (SourceState::Exact, (SourceState::CatchingUp, 0));
    let all = vec![(exact, 200), (exact, 220), (exact, 240), (exact, 260)];
    assert_eq!(all, look_up(&prompts[0]));
    // A source in the middle of a batch that has not come to the prompt yet: it is known as it was before.
    assert_eq!(all, index.while_stopped(Some(&key(1)), None, || look_up(&prompts[0])));
    // A node too: what ends before it is known, and so is all of another prompt.
    let (first, second) =
        index.while_stopped(Some(&key(1)), Some(prompts[0][210]), || (look_up(&prompts[0]), look_up(&prompts[1])));
    assert_eq!(vec![unknown; 4], first);
    assert_eq!(all, second);
    // A batch that has changed the prompt already: all is known of the others.
    let gone = [Event::Removed { tier: Tier::Device, hashes: vec![prompts[0][219]] }];
    let (first, second) = index.while_applying(&key(1), &gone, || (look_up(&prompts[0]), look_up(&prompts[1])));
    assert_eq!(vec![all[0], unknown, all[2], all[3]], first);
    assert_eq!(all, second);
    let all_but_one = vec![all[0], (exact, 219), all[2], all[3]];
    assert_eq!(all_but_one, look_up(&prompts[0]));
    let short = index.while_stopped(None, Some(prompts[0][210]), || look_up(&prompts[0][..100]));
    assert_eq!(vec![(exact, 100); 4], short);
    assert_eq!(all_but_one, look_up(&prompts[0]));
}

proptest! {
    #![proptest_config(cases(200))]

    /// Whatever a batch does, who looks in the middle of it sees its source as it was before or not at all, and the others as they are.
    #[test]
    fn in_the_middle_of_a_batch_all_is_as_before_or_unknown(
        pieces in places::pieces(3), byte_budget in prop_oneof![3 => Just(1u64 << 30), 1 => 3_000..60_000u64],
    ) {
        let index = Index::new(IndexSettings { byte_budget });
        for worker in 0..3 {
            index.apply_batch(&key(worker), Incarnation(1), &stored(0, &[]), 1);
        }
        for (step, piece) in pieces.iter().enumerate() {
            let prompt = piece.prompt();
            let (from, to) = (piece.from.min(prompt.len() - 1), (piece.from + piece.blocks).min(prompt.len()));
            let tier = if piece.what % 4 == 3 { Tier::Host } else { Tier::Device };
            let events = match piece.what {
                0..7 => {
                    let parent = from.checked_sub(1).map(|before| prompt[before]);
                    vec![Event::Stored { tier, parent, hashes: prompt[from..to].to_vec() }]
                }
                7..10 => vec![Event::Removed { tier, hashes: prompt[from..to].iter().rev().copied().collect() }],
                10 => vec![Event::Cleared { tier: (step % 2 == 0).then_some(tier) }],
                // There and gone again: what no state before or after the batch had.
                _ => vec![
                    Event::Stored { tier, parent: None, hashes: prompt[..to].to_vec() },
                    Event::Removed { tier, hashes: prompt[to / 2..to].to_vec() },
                ],
            };
            let asked: Vec<Vec<BlockHash>> =
                [&pieces[0], piece, &pieces[step / 2]].map(|piece| piece.prompt()).into_iter().collect();
            let look = || -> Vec<Vec<Overlap>> {
                asked.iter().map(|prompt| index.lookup(prompt).iter().map(|(_, one)| one).collect()).collect()
            };
            let before = look();
            let during = index.while_applying(&key(piece.worker), &events, look);
            let both = before.iter().flatten().zip(during.iter().flatten());
            for (worker, (before, during)) in (0..3).cycle().zip(both) {
                let is_unknown = during.state == SourceState::CatchingUp
                    && (during.applied_sequence, during.matched_blocks) == (None, 0);
                let is_same = during == before;
                // What is given up for a batch is so at once, and its source says so.
                let is_less = during.state == SourceState::Truncated
                    && during.applied_sequence == before.applied_sequence
                    && during.matched_blocks <= before.matched_blocks;
                prop_assert!(
                    is_same || (worker == piece.worker && is_unknown) || (byte_budget < 1 << 30 && is_less),
                    "worker {worker}, {before:?}, {during:?}"
                );
            }
        }
    }
}
