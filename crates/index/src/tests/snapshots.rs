//! Gaps, snapshots and scrubs.

use super::*;

#[test]
fn a_gap_is_reported_and_nothing_is_claimed_beyond_it() {
    let index = index();
    assert_eq!(Applied::Applied, index.apply_batch(&key(0), Incarnation(1), &stored(0, &[1]), 1));
    assert_eq!(Applied::Gap { expected: 1 }, index.apply_batch(&key(0), Incarnation(1), &stored(2, &[3]), 1));
    assert_eq!(SourceState::CatchingUp, index.source(&key(0)).unwrap().state);
    assert_eq!(0, overlap(&index, &[BlockHash(3)]).matched_blocks);
    assert_eq!(Applied::Duplicate, index.apply_batch(&key(0), Incarnation(1), &stored(0, &[1]), 1));
    assert_eq!(Applied::OldIncarnation, index.apply_batch(&key(0), Incarnation(0), &stored(1, &[1]), 1));
    assert_eq!(Applied::NewIncarnation, index.apply_batch(&key(0), Incarnation(2), &stored(7, &[1]), 1));
}

#[test]
fn a_snapshot_is_seen_whole_or_not_at_all() {
    let index = index();
    index.apply_batch(&key(0), Incarnation(1), &stored(0, &[1]), 1);
    let matched = |block: u64| overlap(&index, &[BlockHash(block)]).matched_blocks;

    let id = index.begin_snapshot(&key(0), Incarnation(1), 5, true).unwrap();
    assert!(index.snapshot_chunk(id, Tier::Device, &lone([BlockHash(2)])));
    index.collect_garbage();
    assert_eq!((1, 0), (matched(1), matched(2)));
    assert!(index.snapshot_chunk(id, Tier::Host, &lone([BlockHash(3)])));
    assert!(index.finish_snapshot(id, 1));
    assert_eq!((0, 1, 1), (matched(1), matched(2), matched(3)));
    assert_eq!(Applied::Applied, index.apply_batch(&key(0), Incarnation(1), &stored(5, &[4]), 1));
    assert!(!index.finish_snapshot(id, 1));

    let overtaken = index.begin_snapshot(&key(0), Incarnation(1), 6, true).unwrap();
    index.apply_batch(&key(0), Incarnation(1), &stored(6, &[5]), 1);
    assert!(!index.finish_snapshot(overtaken, 1));
    let replaced = index.begin_snapshot(&key(0), Incarnation(2), 0, true).unwrap();
    let closed = index.begin_snapshot(&key(0), Incarnation(2), 0, true).unwrap();
    assert!(!index.snapshot_chunk(replaced, Tier::Device, &lone([BlockHash(9)])));
    index.close(&key(0).worker, Incarnation(2));
    assert!(!index.finish_snapshot(closed, 1));
    assert!(index.begin_snapshot(&key(0), Incarnation(2), 9, true).is_none());
    index.collect_garbage();
    assert_eq!((0, 0), (index.memory().blocks, index.memory().holders));
}

#[test]
fn a_scrub_finds_what_no_batch_has_told() {
    let index = index();
    let hashes: Vec<u64> = (0..500).map(real_hash).collect();
    for worker in 0..2 {
        index.apply_batch(&key(worker), Incarnation(1), &stored(0, &hashes), 1);
    }
    assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
    index.lose_silently(&key(1), BlockHash(hashes[7]));
    let expected = Divergence { source: key(1), incarnation: Incarnation(1), blocks: 1 };
    assert_eq!(vec![expected], index.scrub(SCRUB_PERIOD));
    assert_eq!(vec![0, 1], index.sources().iter().map(|source| source.divergent_blocks).collect::<Vec<_>>());
    assert_eq!(SourceState::CatchingUp, index.source(&key(1)).unwrap().state);

    // The ledger's next digest does not match, and the snapshot that follows mends it.
    let mut digest = Digest::default();
    hashes.iter().for_each(|hash| digest.add(BlockHash(*hash)));
    let tiers = [TierDigest { tier: Tier::Device, block_count: 500, digest }];
    assert_eq!(DigestVerdict::Mismatch, index.apply_digest(&key(1), Incarnation(1), 1, &tiers, true, 1));
    let blocks = [(Tier::Device, lone(hashes.into_iter().map(BlockHash)))];
    assert!(index.apply_snapshot(&key(1), Incarnation(1), 1, &blocks, true, 1));
    assert_eq!(DigestVerdict::Equal, index.apply_digest(&key(1), Incarnation(1), 1, &tiers, true, 1));
    assert_eq!(0, index.source(&key(1)).unwrap().divergent_blocks);
    assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
}
