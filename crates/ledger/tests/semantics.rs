//! What each thing that engines do comes to: sound, defined, and seen in a counter.
#![allow(clippy::unwrap_used, clippy::panic, reason = "functions beside the tests")]

mod support;

use kvist_blocks::{BlockHash, Event, HashSeed, Namespace, Tier, block_hashes};
use kvist_ledger::{
    BlockKeys, EngineEvent, EngineHash, Ledger, LedgerCounters, LedgerSettings, keyed_parent,
    vllm::{Refusal, VllmDecoder, VllmSettings},
};
use support::{Field, Wire, cleared, removed, stored, with, write_batch, write_event};

const UNIT: usize = 2;
const WIRES: [Wire; 3] = [
    Wire { maps: true, digests: false, extras: true },
    Wire { maps: false, digests: true, extras: true },
    Wire { maps: false, digests: false, extras: false },
];

struct Engine {
    wire: Wire,
    decoder: VllmDecoder,
    ledger: Ledger,
    now: u64,
}

impl Engine {
    fn new(wire: Wire, change: impl FnOnce(&mut VllmSettings)) -> Self {
        let mut settings = VllmSettings::new("pool", HashSeed(3));
        settings.may_repeat = false;
        change(&mut settings);
        let ledger = Ledger::new(LedgerSettings { ring_batches: 100, block_size_tokens: UNIT }).hints(1000, 4);
        Self { wire, decoder: VllmDecoder::new(settings), ledger, now: 1 }
    }

    fn says(&mut self, events: &[support::Event]) -> Vec<Event> {
        let written: Vec<_> = events.iter().map(|event| write_event(event, self.wire)).collect();
        self.says_bytes(&written)
    }

    fn says_bytes(&mut self, events: &[Vec<u8>]) -> Vec<Event> {
        let batch = self.decoder.decode(&write_batch(events, 3));
        assert_eq!(Some(3), batch.rank);
        self.ledger.apply(self.now, &batch.events).map_or(Vec::new(), |batch| batch.events.clone())
    }

    fn held(&self, root: BlockHash, tokens: &[u32]) -> usize {
        self.ledger.claimed_prefix_blocks(&block_hashes(root, tokens, UNIT))
    }
}

fn root(adapter: &str, salt: &str) -> BlockHash {
    Namespace::new("pool", adapter, salt).root(HashSeed(3))
}

fn plain() -> BlockHash {
    root("", "")
}

fn in_all_wires(change: impl Fn(&mut VllmSettings), check: impl Fn(&mut Engine)) {
    for wire in WIRES {
        check(&mut Engine::new(wire, &change));
    }
}

fn keys(entries: &[Option<Vec<Field>>]) -> Field {
    Field::List(entries.iter().map(|entry| entry.clone().map_or(Field::Nil, Field::List)).collect())
}

/// R4.
#[test]
fn a_report_of_what_is_held_adds_no_copies() {
    in_all_wires(
        |settings| settings.may_repeat = true,
        |engine| {
            engine.says(&[stored(&[1, 2], None, &[1, 1, 2, 2], 2)]);
            engine.says(&[stored(&[1, 2, 3], None, &[1, 1, 2, 2, 3, 3], 2)]);
            assert_eq!((3, 2), (engine.ledger.block_count(), engine.ledger.counters().repeated_blocks));
            engine.says(&[removed(&[2], "GPU", 0)]);
            assert_eq!(1, engine.held(plain(), &[1, 1, 2, 2, 3, 3]));
            // A copy after a parent is one: reports start at the beginning.
            let copy = stored(&[2], Some(1), &[2, 2], 2);
            engine.says(&[copy.clone(), copy, removed(&[2], "GPU", 0)]);
            assert_eq!((2, 3), (engine.ledger.counters().repeated_blocks, engine.ledger.block_count()));
        },
    );
}

/// R7.
#[test]
fn a_block_follows_its_parent_wherever_that_lies() {
    in_all_wires(
        |_| {},
        |engine| {
            engine.says(&[with(stored(&[1], None, &[1, 1], 2), "medium", Field::text("cpu"))]);
            engine.says(&[stored(&[2], Some(1), &[2, 2], 2)]);
            let blocks = block_hashes(plain(), &[1, 1, 2, 2], UNIT);
            let expected = vec![(Tier::Device, vec![blocks[1]]), (Tier::Host, vec![blocks[0]])];
            assert_eq!((expected, true), (engine.ledger.snapshot().sets(), engine.ledger.is_complete()));
        },
    );
}

/// R3.
#[test]
fn a_block_of_unknown_parent_makes_the_account_incomplete_for_as_long_as_it_is_held() {
    in_all_wires(
        |_| {},
        |engine| {
            engine.says(&[stored(&[2, 3], Some(1), &[2, 2, 3, 3], 2)]);
            assert_eq!((2, 0, false), state(engine, |counters| counters.unknown_parents));
            // Its child is as unknown.
            engine.says(&[stored(&[4], Some(3), &[4, 4], 2)]);
            assert_eq!((3, 0, false), state(engine, |counters| counters.unknown_parents));
            engine.says(&[removed(&[2], "GPU", 0), removed(&[3], "GPU", 0)]);
            assert!(!engine.ledger.is_complete());
            engine.says(&[removed(&[4], "GPU", 0)]);
            assert_eq!((0, 0, true), state(engine, |counters| counters.unknown_removals));
        },
    );
}

fn state(engine: &Engine, counter: impl Fn(&LedgerCounters) -> u64) -> (u64, u64, bool) {
    (counter(&engine.ledger.counters()), engine.ledger.block_count(), engine.ledger.is_complete())
}

/// R7.
#[test]
fn a_placeholder_moves_a_known_block_and_waits_for_an_unknown_one() {
    in_all_wires(
        |_| {},
        |engine| {
            let placeholder = |hash| {
                let event = with(stored(&[hash], None, &[], 0), "medium", Field::text("CPU"));
                with(event, "extra_keys", Field::Nil)
            };
            engine.says(&[stored(&[1], None, &[1, 1], 2), placeholder(1), placeholder(2)]);
            let blocks = block_hashes(plain(), &[1, 1, 2, 2], UNIT);
            let expected = vec![(Tier::Device, vec![blocks[0]]), (Tier::Host, vec![blocks[0]])];
            assert_eq!((expected, false), (engine.ledger.snapshot().sets(), engine.ledger.is_complete()));
            assert_eq!(1, engine.ledger.counters().unknown_contents);
            engine.says(&[stored(&[2], Some(1), &[2, 2], 2), removed(&[1], "GPU", 0)]);
            assert_eq!(3, engine.ledger.block_count());
            assert_eq!((true, 0), (engine.ledger.is_complete(), engine.held(plain(), &[1, 1, 2, 2])));
        },
    );
}

/// R5.
#[test]
fn a_block_is_held_when_all_groups_hold_it() {
    in_all_wires(
        |_| {},
        |engine| {
            let tokens = [1, 1, 2, 2, 3, 3];
            let window = |hashes: &[u64]| {
                let event = with(stored(hashes, None, &tokens, 2), "group_idx", Field::Int(1));
                with(event, "kv_cache_spec_kind", Field::text("sliding_window"))
            };
            engine.says(&[stored(&[1, 2, 3], None, &tokens, 2)]);
            assert_eq!(3, engine.held(plain(), &tokens));
            // The window's group has left out the first block, and names the others before anybody could know them.
            let events = engine.says(&[window(&[2, 3])]);
            assert_eq!(Event::Cleared { tier: Some(Tier::Device) }, events[0]);
            assert_eq!((0, 2), (engine.held(plain(), &tokens), engine.ledger.block_count()));
            assert_eq!(3, engine.ledger.counters().hidden_by_groups);
            engine.says(&[window(&[1])]);
            assert_eq!((3, true), (engine.held(plain(), &tokens), engine.ledger.is_complete()));
            // The hit ends at the shortest group.
            engine.says(&[removed(&[2], "GPU", 1)]);
            assert_eq!(1, engine.held(plain(), &tokens));
            engine.says(&[removed(&[2], "GPU", 0)]);
            assert_eq!((2, 0), (engine.ledger.block_count(), engine.ledger.counters().unknown_removals));
        },
    );
}

/// R5, R7.
#[test]
fn a_group_that_speaks_before_its_blocks_are_described_is_understood_afterwards() {
    in_all_wires(
        |_| {},
        |engine| {
            let tokens = [1, 1, 2, 2];
            let early = with(stored(&[2], None, &tokens, 2), "group_idx", Field::Int(1));
            engine.says(&[early, stored(&[1, 2], None, &tokens, 2)]);
            assert_eq!((1, 1, true), state(engine, |counters| counters.unknown_contents));
            let blocks = block_hashes(plain(), &tokens, UNIT);
            assert_eq!(vec![(Tier::Device, vec![blocks[1]])], engine.ledger.snapshot().sets());
        },
    );
}

/// R3, R6.
#[test]
fn a_block_of_several_units_is_held_as_several_blocks() {
    in_all_wires(
        |_| {},
        |engine| {
            let tokens: Vec<u32> = (0..12).collect();
            engine.says(&[stored(&[1, 2], None, &tokens[..8], 4), stored(&[3], Some(2), &tokens[8..], 4)]);
            assert_eq!((0, 6, true), state(engine, |counters| counters.odd_block_sizes));
            assert_eq!(6, engine.held(plain(), &tokens));
            engine.says(&[removed(&[2], "GPU", 0)]);
            assert_eq!((2, 4), (engine.held(plain(), &tokens), engine.ledger.block_count()));
            engine.says(&[stored(&[9], None, &tokens[..3], 3)]);
            assert_eq!((1, 4, false), state(engine, |counters| counters.odd_block_sizes));
        },
    );
}

/// R1, R2.
#[test]
fn adapters_salts_and_images_keep_prefixes_apart() {
    in_all_wires(
        |_| {},
        |engine| {
            let tokens = [1, 1, 2, 2, 3, 3];
            let adapter = || vec![Field::text("a")];
            let both = || vec![Field::text("a"), Field::text("s")];
            let image = |offset| vec![Field::List(vec![Field::text("picture"), Field::Signed(offset)])];
            let named = |event, entries: &[Option<Vec<Field>>]| {
                with(with(event, "lora_name", Field::text("a")), "extra_keys", keys(entries))
            };
            engine.says(&[
                named(stored(&[1, 2], None, &tokens[..4], 2), &[Some(adapter()), Some(adapter())]),
                named(stored(&[11, 12], None, &tokens[..4], 2), &[Some(both()), Some(adapter())]),
                with(stored(&[21], None, &tokens[..2], 2), "extra_keys", keys(&[Some(vec![Field::text("s")])])),
                with(
                    stored(&[31, 32, 33], None, &tokens, 2),
                    "extra_keys",
                    keys(&[None, Some(image(1)), Some(image(-1))]),
                ),
            ]);
            let held = [root("a", ""), root("a", "s"), root("", "s"), plain()].map(|root| engine.held(root, &tokens));
            assert_eq!([2, 2, 1, 1], held);
            // The image is part of the block in which it begins and of all that follow.
            let first = block_hashes(plain(), &tokens[..2], UNIT);
            let rest = block_hashes(keyed_parent(first[0], "picture", 1), &tokens[2..], UNIT);
            let prompt: Vec<_> = first.into_iter().chain(rest).collect();
            assert_eq!(3, engine.ledger.claimed_prefix_blocks(&prompt));
            assert!(engine.ledger.is_complete());
        },
    );
}

/// R2.
#[test]
fn an_image_taints_the_same_block_whatever_the_size_of_the_engines_blocks() {
    let image = |offset| Some(vec![Field::List(vec![Field::text("picture"), Field::Signed(offset)])]);
    let tokens: Vec<u32> = (0..8).collect();
    let small = with(stored(&[1, 2, 3, 4], None, &tokens, 2), "extra_keys", keys(&[None, image(1), image(-1), None]));
    let large = with(stored(&[5, 6], None, &tokens, 4), "extra_keys", keys(&[image(3), image(-1)]));
    let blocks = [small, large].map(|event| {
        let mut engine = Engine::new(WIRES[0], |_| {});
        engine.says(&[event]);
        let mut blocks = engine.ledger.snapshot().sets().remove(0).1;
        blocks.sort();
        blocks
    });
    assert_eq!(4, blocks[0].len());
    assert_eq!(blocks[0], blocks[1]);
}

/// R3.
#[test]
fn an_adapter_that_only_has_a_number_is_known_by_the_callers_word() {
    let numbered = || with(stored(&[1], None, &[1, 1], 2), "lora_id", Field::Int(4));
    in_all_wires(
        |_| {},
        |engine| {
            engine.says(&[numbered()]);
            assert_eq!((1, 0, false), state(engine, |counters| counters.unknown_namespaces));
        },
    );
    in_all_wires(
        |settings| drop(settings.adapters.insert(4, "a".to_owned())),
        |engine| {
            engine.says(&[numbered()]);
            assert_eq!((1, true), (engine.held(root("a", ""), &[1, 1]), engine.ledger.is_complete()));
        },
    );
}

/// R9.
#[test]
fn a_medium_without_removals_gives_hints_that_age_and_no_claims() {
    in_all_wires(
        |_| {},
        |engine| {
            let hinted =
                |hash, token| with(stored(&[hash], None, &[token, token], 2), "medium", Field::text("LMCache:disk"));
            assert!(engine.says(&[hinted(1, 1)]).is_empty());
            assert_eq!((1, 0, true), state(engine, |counters| counters.hinted_blocks));
            let prompt = block_hashes(plain(), &[1, 1], UNIT);
            let hints = |engine: &Engine, now| engine.ledger.hinted_prefix_blocks(now, &prompt);
            assert_eq!([1, 1, 0], [1, 1000, 1001].map(|now| hints(engine, now)));
            // Told again it lives on, and the oldest make room.
            engine.now = 900;
            engine.says(&[hinted(1, 1)]);
            engine.now = 1500;
            engine.says(&[hinted(2, 2), hinted(3, 3), hinted(4, 4)]);
            assert_eq!((1, 4), (hints(engine, 1500), engine.ledger.hint_count()));
            engine.says(&[hinted(5, 5)]);
            assert_eq!((0, 4), (hints(engine, 1500), engine.ledger.hint_count()));
            engine.now = 3000;
            engine.says(&[]);
            assert_eq!(0, engine.ledger.hint_count());
        },
    );
}

/// R10.
#[test]
fn a_late_clear_ends_the_wait_that_the_order_began() {
    in_all_wires(
        |_| {},
        |engine| {
            engine.says(&[stored(&[1], None, &[1, 1], 2)]);
            let batch = engine.ledger.apply(0, &[EngineEvent::ClearOrdered]).unwrap();
            assert_eq!(vec![Event::Cleared { tier: None }], batch.events);
            // Still on the way when the order was given.
            assert!(engine.says(&[stored(&[2], Some(1), &[2, 2], 2)]).is_empty());
            assert_eq!((1, 0, false), state(engine, |counters| counters.events_before_clear));
            engine.says(&[cleared(), stored(&[3], None, &[3, 3], 2)]);
            assert_eq!((1, 1, true), state(engine, |counters| counters.empty_clears));
            // Late without an order: nothing to undo, nothing to say.
            engine.says(&[removed(&[3], "GPU", 0)]);
            assert!(engine.says(&[cleared()]).is_empty());
        },
    );
}

/// R10.
#[test]
fn a_clear_of_the_pool_leaves_lower_tiers_unknown() {
    in_all_wires(
        |_| {},
        |engine| {
            engine.says(&[with(stored(&[1], None, &[1, 1], 2), "medium", Field::text("STORAGE"))]);
            engine.says(&[cleared()]);
            assert_eq!((0, 0, false), state(engine, |counters| counters.empty_clears));
            engine.ledger.apply(0, &[EngineEvent::ClearOrdered]);
            engine.says(&[cleared()]);
            assert_eq!((1, 0, false), state(engine, |counters| counters.empty_clears));
            engine.ledger.apply(0, &[EngineEvent::Cleared]);
            assert!(engine.ledger.is_complete());
        },
    );
}

/// R11.
#[test]
fn what_is_refused_costs_that_event_and_is_counted_by_its_reason() {
    in_all_wires(
        |_| {},
        |engine| {
            let good = write_event(&stored(&[1], None, &[1, 1], 2), engine.wire);
            let bad = |event: support::Event, wire| write_event(&event, wire);
            let refused = |engine: &Engine, reason| engine.decoder.counters().refused(reason);
            let wire = engine.wire;
            let negative = with(stored(&[2], None, &[1, 1], 2), "token_ids", Field::List(vec![Field::Signed(-1)]));
            engine.says_bytes(&[bad(negative, wire), good.clone()]);
            assert_eq!((1, 1, false), state(engine, |counters| counters.unreadable_events));
            assert_eq!(1, refused(engine, Refusal::WrongType));
            let no_tokens = with(stored(&[2], None, &[1, 1], 2), "token_ids", Field::Nil);
            let unknown = ("BlockPolished", vec![("block_hashes", Field::hashes(&[1]))]);
            let crowded = with(stored(&[2], None, &[1, 1], 2), "group_idx", Field::Int(64));
            engine.says_bytes(&[bad(no_tokens, wire), bad(unknown, wire), bad(crowded, wire)]);
            assert_eq!((4, 1, false), state(engine, |counters| counters.unreadable_events));
            let reasons = [Refusal::MissingField, Refusal::UnknownKind, Refusal::TooLarge];
            assert_eq!([1, 1, 1], reasons.map(|reason| refused(engine, reason)));
            // What a removal took nobody knows when it cannot be read; what follows it is new.
            let unreadable = with(removed(&[1], "GPU", 0), "block_hashes", Field::Int(1));
            let other = write_event(&stored(&[5], None, &[5, 5], 2), wire);
            engine.says_bytes(&[bad(unreadable, wire), other]);
            assert_eq!((1, 1, false), state(engine, |counters| counters.lost_events));
            assert_eq!((0, 1), (engine.held(plain(), &[1, 1]), engine.held(plain(), &[5, 5])));
            engine.says_bytes(&[vec![5], good]);
            assert_eq!((1, 2), (refused(engine, Refusal::NotAnEvent), engine.ledger.counters().lost_events));
            assert_eq!(1, engine.held(plain(), &[1, 1]));
        },
    );
}

/// R11.
#[test]
fn what_announces_more_than_it_has_is_refused_before_anything_is_allocated() {
    let mut decoder = VllmDecoder::new(VllmSettings::new("pool", HashSeed(3)));
    let huge = [0xdd, 0xff, 0xff, 0xff, 0xff];
    let batch: Vec<u8> = [&[0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0][..], &huge].concat();
    assert_eq!(vec![EngineEvent::Lost], decoder.decode(&batch).events);
    // Nested a million times.
    let nested: Vec<u8> = [vec![0x92], vec![0x91; 1_000_000]].concat();
    assert_eq!(vec![EngineEvent::Lost], decoder.decode(&nested).events);
    let large = vec![0x91; (16 << 20) + 1];
    assert_eq!(vec![EngineEvent::Lost], decoder.decode(&large).events);
    let many: Vec<u8> = [vec![0x92, 0xc0, 0xdd, 0, 1, 0, 1], vec![0xc0; 65_537]].concat();
    assert_eq!(vec![EngineEvent::Lost], decoder.decode(&many).events);
    let counters = decoder.counters();
    assert_eq!([2, 2], [Refusal::Truncated, Refusal::TooLarge].map(|reason| counters.refused(reason)));
}

#[test]
fn hashes_are_read_as_integers_of_either_sign_and_as_digests() {
    let mut decoder = VllmDecoder::new(VllmSettings::new("pool", HashSeed(3)));
    let hash = 0xfedc_ba98_7654_3210_u64;
    let expected = vec![EngineHash(hash)];
    for (digests, field) in
        [(false, Field::Hash(hash)), (true, Field::Hash(hash)), (false, Field::Signed(hash.cast_signed()))]
    {
        let event = with(removed(&[0], "GPU", 0), "block_hashes", Field::List(vec![field]));
        let bytes = write_event(&event, Wire { maps: false, digests, extras: false });
        let batch = decoder.decode(&write_batch(&[bytes], 0));
        assert!(matches!(&batch.events[..], [EngineEvent::RemovedFrom { hashes, .. }] if *hashes == expected));
    }
}

#[test]
fn arrays_of_older_versions_end_where_their_versions_did() {
    let mut decoder = VllmDecoder::new(VllmSettings::new("pool", HashSeed(3)));
    for fields in 4..=12 {
        let mut event = stored(&[1], None, &[1, 1], 2);
        event.1.truncate(fields);
        let bytes = write_event(&event, Wire { maps: false, digests: false, extras: false });
        let batch = decoder.decode(&write_batch(&[bytes], 0));
        let [EngineEvent::Described(blocks)] = &batch.events[..] else { panic!("{fields}: {batch:?}") };
        assert_eq!((Tier::Device, 0), (blocks.place.tier, blocks.place.group));
        assert_eq!(fields > 7, matches!(blocks.keys, BlockKeys::Stated(_)), "{fields}");
    }
}
