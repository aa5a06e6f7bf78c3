//! Random programs of an engine, told in vLLM's words, against a naive account: multisets of whole prefixes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "functions beside the tests")]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use kvist_blocks::{BlockHash, Event, HashSeed, Namespace, Tier, block_hashes};
use kvist_ledger::{
    Ledger, LedgerSettings, keyed_parent,
    vllm::{VllmDecoder, VllmSettings},
};
use proptest::prelude::*;
use support::{Field, Wire, cleared, removed, stored, with, write_batch, write_event};

/// Tokens of the ledger's blocks; those of the engine are once or twice as large.
const UNIT: usize = 2;
const MEDIA: [(&str, Tier); 2] = [("GPU", Tier::Device), ("cpu", Tier::Host)];
const IMAGE: &str = "picture";
/// Where a prompt's image begins, and its tokens.
const IMAGE_AT: usize = 3;
const IMAGE_TOKENS: usize = 3;

/// What a prompt is apart from its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    adapter: bool,
    salt: bool,
    image: bool,
}

/// A block of the engine: everything up to its end.
type Prefix = (Kind, Vec<u32>);
type Key = (usize, u64, Prefix);

#[derive(Clone, Debug)]
enum Step {
    /// A run of blocks is stored in a medium, in one group or in all.
    Store {
        kind: Kind,
        tokens: Vec<u32>,
        from: usize,
        medium: usize,
        groups: Groups,
        states_keys: bool,
    },
    /// Blocks that are in the device are named for another medium, without their tokens.
    Move(usize),
    Remove(usize),
    /// What is held of a prompt is reported again.
    Report(usize),
    Clear,
    ClearLate,
    Lose,
    /// The engine stores what nobody can read.
    StoreUnreadably {
        kind: Kind,
        tokens: Vec<u32>,
    },
    /// The engine removes what nobody can read.
    RemoveUnreadably(usize),
}

#[derive(Clone, Copy, Debug)]
enum Groups {
    First,
    All,
    /// The second one leaves out all but the last block, and speaks first.
    Window,
}

/// What is really there.
struct Truth {
    copies: BTreeMap<Key, u32>,
    groups: u64,
    /// Groups that were heard of, by medium.
    seen: [BTreeSet<u64>; 2],
    /// Tokens of a block, by group.
    blocks: [usize; 2],
}

fn name_of(prefix: &Prefix) -> u64 {
    let words = [prefix.0.adapter, prefix.0.salt, prefix.0.image].map(u32::from);
    let all: Vec<u32> = words.iter().chain(&prefix.1).copied().collect();
    block_hashes(BlockHash(0), &all, all.len()).remove(0).0
}

/// Kvist's blocks of a prefix, one at a time.
fn blocks_of((kind, tokens): &Prefix) -> Vec<BlockHash> {
    let part = |is_there, text| if is_there { text } else { "" };
    let namespace = Namespace::new("pool", part(kind.adapter, "lora"), part(kind.salt, "salty"));
    let mut parent = namespace.root(HashSeed(9));
    let mut blocks = Vec::new();
    for (number, unit) in tokens.chunks(UNIT).enumerate() {
        if kind.image && IMAGE_AT / UNIT == number {
            parent = keyed_parent(parent, IMAGE, IMAGE_AT % UNIT);
        }
        parent = block_hashes(parent, unit, UNIT)[0];
        blocks.push(parent);
    }
    blocks
}

/// The extra keys of the blocks of a prompt from one on, as the engine writes them.
fn keys_of(kind: Kind, block: usize, from: usize, to: usize) -> Field {
    let entry = |number: usize| {
        let mut keys = Vec::new();
        if kind.adapter {
            keys.push(Field::text("lora"));
        }
        let (start, end) = (number * block, (number + 1) * block);
        if kind.image && IMAGE_AT < end && IMAGE_AT + IMAGE_TOKENS > start {
            let offset = i64::try_from(IMAGE_AT).unwrap() - i64::try_from(start).unwrap();
            keys.push(Field::List(vec![Field::text(IMAGE), Field::Signed(offset)]));
        }
        if kind.salt && number == 0 {
            keys.push(Field::text("salty"));
        }
        if keys.is_empty() { Field::Nil } else { Field::List(keys) }
    };
    Field::List((from..to).map(entry).collect())
}

impl Truth {
    fn block(&self, group: u64) -> usize {
        self.blocks[usize::try_from(group).unwrap()]
    }

    /// The first blocks of a prompt, as a group counts them.
    fn prefix(&self, group: u64, kind: Kind, tokens: &[u32], blocks: usize) -> Prefix {
        let tokens = tokens[..blocks * self.block(group)].to_vec();
        // An image that comes later is no part of it.
        let image = kind.image && tokens.len() > IMAGE_AT;
        (Kind { image, ..kind }, tokens)
    }

    /// The event that stores blocks `from..to` of a prompt and names those from `named` on.
    fn told(
        &self,
        (kind, tokens): (Kind, &[u32]),
        (from, named): (usize, usize),
        medium: usize,
        group: u64,
    ) -> support::Event {
        let block = self.block(group);
        let to = tokens.len() / block;
        let names: Vec<u64> = (named..to).map(|block| name_of(&self.prefix(group, kind, tokens, block + 1))).collect();
        let parent = (from > 0).then(|| name_of(&self.prefix(group, kind, tokens, from)));
        let size = u64::try_from(block).unwrap();
        let event = stored(&names, parent, &tokens[from * block..to * block], size);
        let event = with(event, "medium", Field::text(MEDIA[medium].0));
        let event = with(event, "group_idx", Field::Int(group));
        let event = with(event, "extra_keys", keys_of(kind, block, named, to));
        if kind.adapter { with(event, "lora_name", Field::text("lora")) } else { event }
    }

    fn take(&mut self, medium: usize, group: u64, prefix: Prefix) {
        let copies = self.copies.entry((medium, group, prefix)).or_insert(0);
        *copies = if medium == 0 { *copies + 1 } else { 1 };
    }

    fn choose(&self, choice: usize, will_do: impl Fn(&Key) -> bool) -> Option<Key> {
        let all: Vec<&Key> = self.copies.keys().filter(|key| will_do(key)).collect();
        all.get(choice % all.len().max(1)).map(|key| (*key).clone())
    }

    fn give(&mut self, key: &Key) {
        *self.copies.get_mut(key).unwrap() -= 1;
        self.copies.retain(|_, copies| *copies > 0);
    }

    /// What may be claimed: what every group that uses the tier holds.
    fn held(&self) -> BTreeSet<(Tier, BlockHash)> {
        let mut held = BTreeSet::new();
        for (medium, (_, tier)) in MEDIA.iter().enumerate() {
            let of_group = |group: u64| -> BTreeSet<BlockHash> {
                let prefixes = self.copies.keys().filter(|key| (key.0, key.1) == (medium, group));
                let units = self.block(group) / UNIT;
                prefixes.flat_map(|key| blocks_of(&key.2).into_iter().rev().take(units)).collect()
            };
            let all = self.seen[medium].iter().map(|group| of_group(*group));
            let common = all.reduce(|left, right| left.intersection(&right).copied().collect());
            held.extend(common.unwrap_or_default().into_iter().map(|block| (*tier, block)));
        }
        held
    }
}

struct World {
    truth: Truth,
    wire: Wire,
    decoder: VllmDecoder,
    ledger: Ledger,
    told: BTreeSet<(Tier, BlockHash)>,
    /// Whether a copy may have been taken for a report: the account is then a lower bound.
    is_lower_bound: bool,
}

impl World {
    fn new(wire: Wire, groups: u64, units: [usize; 2], may_repeat: bool) -> Self {
        let mut settings = VllmSettings::new("pool", HashSeed(9));
        settings.may_repeat = may_repeat;
        Self {
            truth: Truth {
                copies: BTreeMap::new(),
                groups,
                seen: Default::default(),
                blocks: units.map(|units| units * UNIT),
            },
            wire,
            decoder: VllmDecoder::new(settings),
            ledger: Ledger::new(LedgerSettings { ring_batches: 1000, block_size_tokens: UNIT }),
            told: BTreeSet::new(),
            is_lower_bound: may_repeat,
        }
    }

    fn step(&mut self, step: &Step) {
        let mut events = Vec::new();
        match step {
            Step::Store { kind, tokens, from, medium, groups, states_keys } => {
                self.store((*kind, tokens), *from, *medium, *groups, &mut events);
                if !states_keys {
                    events = events.into_iter().map(|event| with(event, "extra_keys", Field::Nil)).collect();
                }
            }
            Step::Move(choice) => {
                let Some((_, group, prefix)) = self.truth.choose(*choice, |key| key.0 == 0) else { return };
                let event = with(stored(&[name_of(&prefix)], None, &[], 0), "extra_keys", Field::Nil);
                let event = with(event, "medium", Field::text(MEDIA[1].0));
                events.push(with(event, "group_idx", Field::Int(group)));
                self.truth.seen[1].insert(group);
                self.truth.take(1, group, prefix);
            }
            Step::Remove(choice) => {
                let Some(key) = self.truth.choose(*choice, |_| true) else { return };
                self.truth.give(&key);
                events.push(removed(&[name_of(&key.2)], MEDIA[key.0].0, key.1));
            }
            Step::Report(choice) => {
                let Some((_, _, (kind, tokens))) = self.truth.choose(*choice, |key| (key.0, key.1) == (0, 0)) else {
                    return;
                };
                let is_held =
                    |blocks| self.truth.copies.contains_key(&(0, 0, self.truth.prefix(0, kind, &tokens, blocks)));
                if !self.is_lower_bound || !(1..=tokens.len() / self.truth.block(0)).all(is_held) {
                    return;
                }
                events.push(self.truth.told((kind, &tokens), (0, 0), 0, 0));
                self.truth.seen[0].insert(0);
            }
            Step::Clear => {
                self.truth.copies.clear();
                events.push(cleared());
            }
            Step::ClearLate => {
                self.truth.copies.clear();
                self.apply(&[kvist_ledger::EngineEvent::ClearOrdered]);
                assert_eq!(0, self.ledger.block_count());
                // Sent before the engine obeyed.
                let kind = Kind { adapter: false, salt: false, image: false };
                let late = self.truth.told((kind, &[8; 4 * UNIT]), (0, 0), 0, 0);
                self.say(&[write_event(&late, self.wire)]);
                self.check();
                events.push(cleared());
            }
            Step::Lose => {
                self.apply(&[kvist_ledger::EngineEvent::Lost]);
                self.check();
                return;
            }
            Step::StoreUnreadably { kind, tokens } => {
                let prefix = self.truth.prefix(0, *kind, tokens, 1);
                let event = self.truth.told((*kind, &prefix.1), (0, 0), 0, 0);
                events.push(with(event, "token_ids", Field::text("?")));
                self.truth.take(0, 0, prefix);
            }
            Step::RemoveUnreadably(choice) => {
                let Some(key) = self.truth.choose(*choice, |_| true) else { return };
                self.truth.give(&key);
                let event = removed(&[name_of(&key.2)], MEDIA[key.0].0, key.1);
                events.push(with(event, "block_hashes", Field::List(vec![Field::text("?")])));
            }
        }
        let written: Vec<_> = events.iter().map(|event| write_event(event, self.wire)).collect();
        self.say(&written);
        self.check();
    }

    fn store(
        &mut self,
        (kind, tokens): (Kind, &[u32]),
        from: usize,
        medium: usize,
        groups: Groups,
        events: &mut Vec<support::Event>,
    ) {
        let everywhere = match groups {
            Groups::First => 0..1,
            Groups::All | Groups::Window => 0..self.truth.groups,
        };
        for group in everywhere.rev() {
            let block = self.truth.block(group);
            let to = tokens.len() / block;
            if to == 0 {
                continue;
            }
            let from = (from * self.truth.block(0) / block).min(to - 1);
            let named = if matches!(groups, Groups::Window) && group > 0 { to - 1 } else { from };
            events.push(self.truth.told((kind, &tokens[..to * block]), (from, named), medium, group));
            self.truth.seen[medium].insert(group);
            for block in named..to {
                let prefix = self.truth.prefix(group, kind, tokens, block + 1);
                self.truth.take(medium, group, prefix);
            }
        }
    }

    fn say(&mut self, events: &[Vec<u8>]) {
        let batch = self.decoder.decode(&write_batch(events, 0));
        self.apply(&batch.events);
    }

    fn apply(&mut self, events: &[kvist_ledger::EngineEvent]) {
        let Some(batch) = self.ledger.apply(0, events) else { return };
        for event in &batch.events {
            match event {
                Event::Stored { tier, hashes, .. } => {
                    hashes.iter().for_each(|hash| assert!(self.told.insert((*tier, *hash)), "stored twice"));
                }
                Event::Removed { tier, hashes } => {
                    hashes.iter().for_each(|hash| assert!(self.told.remove(&(*tier, *hash)), "was not held"));
                }
                Event::Cleared { tier } => self.told.retain(|(of, _)| tier.is_some_and(|tier| tier != *of)),
            }
        }
    }

    fn check(&self) {
        let snapshot = self.ledger.snapshot();
        let tiers = snapshot.sets().into_iter();
        let claimed: BTreeSet<_> =
            tiers.flat_map(|(tier, hashes)| hashes.into_iter().map(move |hash| (tier, hash))).collect();
        assert_eq!(self.told, claimed, "what was said is what is claimed");
        let held = self.truth.held();
        let false_claims: Vec<_> = claimed.difference(&held).collect();
        assert!(false_claims.is_empty(), "{false_claims:?}");
        if snapshot.complete && !self.is_lower_bound {
            assert_eq!(held, claimed, "complete");
        }
        let counts: u64 = self.ledger.digest().tiers.iter().map(|tier| tier.block_count).sum();
        assert_eq!(claimed.len() as u64, counts);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = || {
        (prop::bool::weighted(0.3), prop::bool::weighted(0.3), prop::bool::weighted(0.3))
            .prop_map(|(adapter, salt, image)| Kind { adapter, salt, image })
    };
    let tokens = || prop::collection::vec(0u32..2, 4..13);
    let groups = prop_oneof![2 => Just(Groups::First), 4 => Just(Groups::All), 1 => Just(Groups::Window)];
    let store = (
        kind(),
        tokens(),
        prop_oneof![3 => Just(0usize), 2 => 0usize..3],
        0..MEDIA.len(),
        groups,
        prop::bool::weighted(0.9),
    );
    let step = prop_oneof![
        14 => store.prop_map(|(kind, tokens, from, medium, groups, states_keys)| {
            Step::Store { kind, tokens, from, medium, groups, states_keys }
        }),
        3 => any::<usize>().prop_map(Step::Move),
        12 => any::<usize>().prop_map(Step::Remove),
        2 => any::<usize>().prop_map(Step::Report),
        1 => Just(Step::Clear),
        1 => Just(Step::ClearLate),
        1 => Just(Step::Lose),
        1 => (kind(), tokens()).prop_map(|(kind, tokens)| Step::StoreUnreadably { kind, tokens }),
        1 => any::<usize>().prop_map(Step::RemoveUnreadably),
    ];
    prop::collection::vec(step, 0..60)
}

/// A thousand programs, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: cases.unwrap_or(1000), failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// R1, R2, R4, R5, R6, R7, R10, R11, R12, R13, R19.
    #[test]
    fn every_claim_is_held_and_a_complete_account_misses_nothing(
        steps in steps(),
        (maps, digests, extras) in any::<(bool, bool, bool)>(),
        groups in 1u64..3,
        units in [1usize..3, 1usize..3],
        may_repeat in any::<bool>(),
    ) {
        let mut world = World::new(Wire { maps, digests, extras }, groups, units, may_repeat);
        for step in &steps {
            world.step(step);
        }
    }

    /// Programs of an engine that says everything: nothing is lost on the way.
    /// R13.
    #[test]
    fn an_engine_that_says_everything_is_understood_completely(
        steps in steps(),
        (maps, digests, extras) in any::<(bool, bool, bool)>(),
        units in 1usize..3,
    ) {
        let mut world = World::new(Wire { maps, digests, extras }, 1, [units; 2], false);
        for step in &steps {
            match step {
                Step::Lose | Step::StoreUnreadably { .. } | Step::RemoveUnreadably(_) => continue,
                // The clear of the pool leaves it open what became of the host's memory.
                Step::Clear | Step::ClearLate if !world.truth.seen[1].is_empty() => continue,
                Step::Store { kind, tokens, medium, groups, .. } => {
                    let (kind, tokens, medium, groups) = (*kind, tokens.clone(), *medium, *groups);
                    world.step(&Step::Store { kind, tokens, from: 0, medium, groups, states_keys: true });
                }
                step => world.step(step),
            }
            prop_assert!(world.ledger.is_complete());
        }
    }
}
