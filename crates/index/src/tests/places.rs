//! Where blocks stand, when sources tell the same prompts in pieces and in different orders.

use super::*;
use crate::{core::Core, places::tracked, source::SlotUse};

/// Holds the map of each slot against the nodes: every place that is held is there once, and nothing else but what is before it.
fn check_places(core: &mut Core) {
    for slot in 0..core.slots.len() as u32 {
        if matches!(core.slots[slot as usize].used_for, SlotUse::Free | SlotUse::Dead) {
            assert_eq!(0, core.slots[slot as usize].places.seats().count());
            continue;
        }
        let mut most = 0;
        for number in core.nodes_of(slot) {
            let any = core.held(number, slot).into_iter().fold(0, |any, (_, places)| any | places);
            most += tracked(any).count_ones() as usize;
            for offset in (0..128).filter(|offset| any >> offset & 1 != 0) {
                let seat = crate::table::Seat { node: number, offset };
                let hash = core.hash_at(seat).unwrap();
                assert_eq!(Some(seat), core.place_of(slot, hash), "slot {slot}, {hash:?}");
            }
        }
        let seats: Vec<_> = core.slots[slot as usize].places.seats().collect();
        assert!(seats.len() <= most, "{} of {most}", seats.len());
        assert!(seats.iter().all(|seat| core.hash_at(*seat).is_some()), "{seats:?}");
    }
    let bytes: u64 = core.slots.iter().map(|slot| slot.places.bytes()).sum();
    assert_eq!(bytes, core.places_bytes);
}

/// A piece of a prompt of one of three branches, which begin at some block of the trunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) worker: usize,
    branch: u64,
    fork: usize,
    pub(super) from: usize,
    pub(super) blocks: usize,
    pub(super) what: u8,
}

pub(super) fn pieces(workers: usize) -> impl Strategy<Value = Vec<Piece>> {
    let fork = prop_oneof![Just(0usize), Just(3), Just(40), Just(130), 0usize..200];
    let piece = (0..workers, 0u64..3, fork, 0usize..260, prop_oneof![1usize..6, 1usize..150], 0u8..12);
    let piece =
        piece.prop_map(|(worker, branch, fork, from, blocks, what)| Piece { worker, branch, fork, from, blocks, what });
    prop::collection::vec(piece, 1..60)
}

impl Piece {
    pub(super) fn prompt(&self) -> Vec<BlockHash> {
        let contents: Vec<u64> = (0..270).map(|at| if at < self.fork { 0 } else { self.branch }).collect();
        chain(&contents)
    }
}

proptest! {
    #![proptest_config(cases(160))]

    /// Each piece is told behind its parent, held or not, and whatever the order, a source holds the beginning that it was told.
    #[test]
    fn pieces_that_come_in_any_order_are_put_together(
        pieces in pieces(4), byte_budget in prop_oneof![3 => Just(1u64 << 30), 1 => 3_000..60_000u64],
    ) {
        let index = Index::new(IndexSettings { byte_budget });
        let mut held: Vec<BTreeSet<(Tier, BlockHash)>> = vec![BTreeSet::new(); 4];
        let mut next = [0; 4];
        for piece in &pieces {
            let (prompt, own) = (piece.prompt(), &mut held[piece.worker]);
            let tier = if piece.what % 4 == 3 { Tier::Host } else { Tier::Device };
            let (from, to) = (piece.from.min(prompt.len() - 1), (piece.from + piece.blocks).min(prompt.len()));
            let event = match piece.what {
                0..8 => {
                    let new: Vec<BlockHash> =
                        prompt[from..to].iter().take_while(|hash| own.insert((tier, **hash))).copied().collect();
                    Event::Stored { tier, parent: from.checked_sub(1).map(|before| prompt[before]), hashes: new }
                }
                8..11 => {
                    let gone = prompt[from..to].iter().rev().filter(|hash| own.remove(&(tier, **hash)));
                    Event::Removed { tier, hashes: gone.copied().collect() }
                }
                _ => {
                    let of = |tier| (tier, lone(own.iter().filter(|(of, _)| *of == tier).map(|(_, hash)| *hash)));
                    let blocks = [of(Tier::Host), of(Tier::Device)];
                    prop_assert!(index.apply_snapshot(&key(piece.worker), Incarnation(1), next[piece.worker], &blocks, true, 1));
                    continue;
                }
            };
            let batch = Batch { sequence: next[piece.worker], recorded_at_unix_nanos: 0, events: vec![event] };
            prop_assert_eq!(Applied::Applied, index.apply_batch(&key(piece.worker), Incarnation(1), &batch, 1));
            next[piece.worker] += 1;
            index.with_core(check_places);
            prop_assert!(index.memory().bytes <= byte_budget);
            for (source, overlap) in index.lookup(&prompt).iter() {
                let worker: usize = source.worker.as_str()[2..].parse().unwrap();
                let holds = |tier: Tier, hash: &BlockHash| held[worker].contains(&(tier, *hash));
                let any = prompt.iter().take_while(|hash| Tier::ALL.iter().any(|tier| holds(*tier, hash))).count() as u32;
                let tiers = Tier::ALL.map(|tier| prompt.iter().take_while(|hash| holds(tier, hash)).count() as u32);
                if overlap.state == SourceState::Truncated {
                    prop_assert!(overlap.matched_blocks <= any);
                } else {
                    prop_assert_eq!((any, tiers), (overlap.matched_blocks, overlap.tier_blocks));
                }
            }
        }
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
        for worker in 0..4 {
            index.close(&key(worker).worker, Incarnation(1));
        }
        index.collect_garbage();
        index.with_core(check_places);
        prop_assert_eq!((0, 0), (index.memory().blocks, index.memory().holders));
    }

    /// Who tells blocks behind others than theirs may lose what it said. What honest sources hold is known all the same.
    #[test]
    fn a_liar_spoils_no_claim_of_others(
        pieces in pieces(3), lies in prop::collection::vec((any::<usize>(), 1usize..4, any::<usize>()), 60),
    ) {
        let index = index();
        let mut held: Vec<BTreeSet<BlockHash>> = vec![BTreeSet::new(); 3];
        let mut next = [0; 3];
        for (piece, lie) in pieces.iter().zip(lies) {
            let (mut prompt, own) = (piece.prompt(), &mut held[piece.worker]);
            let (from, to) = (piece.from.min(prompt.len() - 1), (piece.from + piece.blocks).min(prompt.len()));
            if piece.worker == 0 {
                // Some blocks of the piece change places, or are those of another branch.
                let other = Piece { branch: (piece.branch + 1) % 3, ..*piece }.prompt();
                for step in 0..lie.1 {
                    let (one, two) = (from + (lie.0 + step) % (to - from), from + lie.2 % (to - from));
                    if step % 2 == 0 { prompt.swap(one, two) } else { prompt[one] = other[one] }
                }
            }
            let event = if piece.what < 9 {
                let new: Vec<BlockHash> = prompt[from..to].iter().take_while(|hash| own.insert(**hash)).copied().collect();
                let parent = from.checked_sub(1).map(|before| prompt[before]);
                Event::Stored { tier: Tier::Device, parent, hashes: new }
            } else {
                let gone = prompt[from..to].iter().rev().filter(|hash| own.remove(*hash)).copied().collect();
                Event::Removed { tier: Tier::Device, hashes: gone }
            };
            let batch = Batch { sequence: next[piece.worker], recorded_at_unix_nanos: 0, events: vec![event] };
            prop_assert_eq!(Applied::Applied, index.apply_batch(&key(piece.worker), Incarnation(1), &batch, 1));
            next[piece.worker] += 1;
            index.with_core(check_places);
            prop_assert_eq!(0, index.sources().iter().map(|source| source.unknown_removals).sum::<u64>());
            let prompt = piece.prompt();
            for (source, overlap) in index.lookup(&prompt).iter() {
                let worker: usize = source.worker.as_str()[2..].parse().unwrap();
                let leading = prompt.iter().take_while(|hash| held[worker].contains(hash)).count() as u32;
                if worker > 0 {
                    prop_assert_eq!(leading, overlap.matched_blocks, "worker {}", worker);
                }
            }
        }
        prop_assert_eq!(Vec::<Divergence>::new(), index.scrub(SCRUB_PERIOD));
    }
}
