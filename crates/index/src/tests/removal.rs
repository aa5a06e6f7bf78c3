//! Sources that go.

use super::*;

#[test]
fn the_dead_are_invisible_at_once_and_swept_later() {
    let index = index();
    index.apply_batch(&key(0), Incarnation(1), &stored(0, &[1, 2]), 1);
    index.apply_batch(&key(1), Incarnation(1), &stored(0, &[1]), 1);
    index.close(&key(0).worker, Incarnation(1));
    assert_eq!(1, index.lookup(&[BlockHash(1)]).iter().count());
    assert_eq!(2, index.memory().blocks);
    index.collect_garbage();
    assert_eq!((1, 1), (index.memory().blocks, index.memory().holders));
}

/// Resident bytes of this process; none where the kernel does not tell.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

#[test]
fn what_comes_and_goes_leaves_no_memory_behind() {
    let index = index();
    let mut sizes = Vec::new();
    for round in 0..60u64 {
        for worker in 0..8 {
            let mut sequence = 0;
            let mut apply = |events: Vec<Event>| {
                let batch = Batch { sequence, recorded_at_unix_nanos: 0, events };
                assert_eq!(Applied::Applied, index.apply_batch(&key(worker), Incarnation(round + 1), &batch, 1));
                sequence += 1;
            };
            // A namespace of its own each time: other hashes, some shared by two workers.
            for prompt in 0..12 {
                let hashes = chain(&[round * 1000 + prompt * 8 + worker as u64 / 2, 7, 7].repeat(30));
                apply(vec![Event::Stored { tier: Tier::Device, parent: None, hashes: hashes.clone() }]);
                let gone = hashes[hashes.len() - 9..].iter().rev().copied().collect();
                apply(vec![Event::Removed { tier: Tier::Device, hashes: gone }]);
            }
        }
        for worker in 0..8 {
            index.close(&key(worker).worker, Incarnation(round + 1));
        }
        index.collect_garbage();
        assert_eq!((0, 0), (index.memory().blocks, index.memory().holders));
        sizes.push((index.memory().bytes, resident_bytes()));
    }
    let (first, last) = (sizes[9], sizes[59]);
    assert!(last.0 <= first.0, "{first:?} {last:?}");
    match (first.1, last.1) {
        // Other tests run in this process at the same time, so this finds leaks of the size of a round and more only.
        (Some(before), Some(after)) => assert!(after < before + (64 << 20), "{before} {after}"),
        _ => println!("resident memory not checked: the kernel does not tell"),
    }
}

#[test]
fn the_way_out_of_a_source_is_as_long_as_what_it_held() {
    let steps_of = |others: u64| {
        let index = index();
        for worker in 0..others {
            let hashes = chain(&[worker + 10; 1_000]);
            let events = vec![Event::Stored { tier: Tier::Device, parent: None, hashes }];
            let batch = Batch { sequence: 0, recorded_at_unix_nanos: 0, events };
            index.apply_batch(&key(worker as usize + 1), Incarnation(1), &batch, 1);
        }
        let events = vec![Event::Stored { tier: Tier::Device, parent: None, hashes: chain(&[10; 500]) }];
        index.apply_batch(&key(0), Incarnation(1), &Batch { sequence: 0, recorded_at_unix_nanos: 0, events }, 1);
        let before = index.visits();
        index.close(&key(0).worker, Incarnation(1));
        index.collect_garbage();
        index.visits() - before
    };
    let (few, many) = (steps_of(2), steps_of(200));
    assert_eq!(few, many);
    assert!(few <= 16, "{few} nodes looked at for four");
}
