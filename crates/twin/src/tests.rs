//! The simulated engine against its own ledger.

use std::{collections::HashMap, time::Duration};

use kvist_blocks::{BlockHash, HashSeed, Namespace, block_hashes, usable_blocks};
use kvist_ledger::{EngineEvent, EngineHash, Ledger, LedgerSettings};
use proptest::prelude::*;

use super::*;

fn settings(blocks: usize) -> SimSettings {
    SimSettings {
        block_size_tokens: 4,
        blocks,
        max_running: 3,
        prefill_chunk_tokens: 16,
        prefill_tokens_per_second: 1000.0,
        decode_step: Duration::from_millis(5),
        decode_step_per_request: Duration::from_millis(1),
        first_token: 10,
        token_range: 50,
    }
}

fn root() -> BlockHash {
    Namespace::new("sim", "", "").root(HashSeed(3))
}

fn ledger() -> Ledger {
    Ledger::new(LedgerSettings { ring_batches: 10, block_size_tokens: 4 })
}

fn usable(prompt: &[u32]) -> Vec<BlockHash> {
    let mut hashes = block_hashes(root(), prompt, 4);
    hashes.truncate(usable_blocks(prompt.len(), 4));
    hashes
}

/// Runs until idle; returns the ends by id. The ledger follows; each placement is held against its claim.
fn run(
    engine: &mut SimEngine,
    ledger: &mut Ledger,
    prompts: &HashMap<u64, Vec<u32>>,
) -> HashMap<u64, (Finished, Vec<u32>)> {
    let mut now = Duration::ZERO;
    let mut tokens: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut ends = HashMap::new();
    for _ in 0..10_000 {
        if engine.is_idle() {
            return ends;
        }
        let step = engine.step(now);
        now += step.duration.unwrap_or(Duration::from_millis(1));
        for event in &step.events {
            let EngineEvent::Stored(stored) = event else { continue };
            let parent = stored.parent.map_or(stored.root, |parent| BlockHash(parent.0));
            let names: Vec<EngineHash> =
                block_hashes(parent, &stored.tokens, 4).into_iter().map(|hash| EngineHash(hash.0)).collect();
            assert_eq!(names, stored.hashes, "the engine names its blocks by their content");
        }
        let (begin, end) = step.events.split_at(step.events_at_begin);
        ledger.apply(0, begin);
        for (id, cached_tokens) in &step.placed {
            let claimed = ledger.claimed_prefix_blocks(&usable(&prompts[id]));
            assert_eq!(
                claimed * 4,
                *cached_tokens as usize,
                "the engine finds what its ledger claims, no more, no less"
            );
        }
        ledger.apply(0, end);
        let counters = engine.counters();
        assert!(counters.used_blocks <= counters.total_blocks && ledger.block_count() <= counters.total_blocks as u64);
        for (id, token) in step.tokens {
            tokens.entry(id).or_default().push(token);
        }
        for finished in step.finished {
            assert!(prompts.contains_key(&finished.id));
            ends.insert(finished.id, (finished, tokens.remove(&finished.id).unwrap_or_default()));
        }
    }
    panic!("the engine does not come to an end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_request_alone_gets_exactly_what_the_ledger_claims(
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..24), 1u32..8), 1..40), blocks in 8usize..40,
    ) {
        let mut engine = SimEngine::new(settings(blocks));
        let mut ledger = ledger();
        for (id, (prompt, max_tokens)) in (0u64..).zip(prompts) {
            let claimed = ledger.claimed_prefix_blocks(&usable(&prompt));
            engine.submit(Duration::ZERO, SimRequest { id, prompt: prompt.clone(), max_tokens, root: root() });
            let ends = run(&mut engine, &mut ledger, &HashMap::from([(id, prompt.clone())]));
            let (finished, tokens) = &ends[&id];
            prop_assert_eq!(Finish::Length, finished.finish);
            prop_assert_eq!(claimed * 4, finished.cached_tokens as usize);
            prop_assert_eq!(max_tokens as usize, tokens.len());
            prop_assert!(ledger.block_count() <= blocks as u64);
            prop_assert_eq!(0, engine.counters().used_blocks);
            prop_assert_eq!(0, ledger.counters().unknown_removals + ledger.counters().unknown_parents);
        }
    }

    #[test]
    fn many_at_once_find_what_is_claimed_all_end_and_leave_nothing(
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..24), 1u32..8, any::<bool>()), 1..30),
        blocks in 8usize..30, stop_after_tokens in prop::option::of(1u32..8),
    ) {
        let mut engine = SimEngine::new(settings(blocks));
        if let Some(tokens) = stop_after_tokens {
            engine = engine.stop_after_tokens(tokens);
        }
        let mut ledger = ledger();
        let mut known = HashMap::new();
        for (id, (prompt, max_tokens, abort)) in (0u64..).zip(prompts) {
            known.insert(id, prompt.clone());
            engine.submit(Duration::ZERO, SimRequest { id, prompt, max_tokens, root: root() });
            if abort {
                engine.abort(id);
            }
        }
        let ends = run(&mut engine, &mut ledger, &known);
        prop_assert_eq!(known.len(), ends.len());
        prop_assert_eq!(known.len() as u64, engine.counters().finished_requests);
        for (finished, tokens) in ends.values() {
            prop_assert_eq!(finished.completion_tokens as usize, tokens.len());
        }
        prop_assert_eq!(0, engine.counters().used_blocks);
        prop_assert_eq!(0, ledger.counters().unknown_removals + ledger.counters().unknown_parents);
    }
}

#[test]
fn equal_prompts_give_equal_text_and_the_second_is_cached() {
    let mut engine = SimEngine::new(settings(40));
    let mut ledger = ledger();
    let prompt: Vec<u32> = (0..9).collect();
    let known = HashMap::from([(1, prompt.clone()), (2, prompt.clone())]);
    let mut texts = Vec::new();
    for id in [1, 2] {
        engine.submit(Duration::ZERO, SimRequest { id, prompt: prompt.clone(), max_tokens: 6, root: root() });
        let ends = run(&mut engine, &mut ledger, &known);
        assert_eq!(if id == 1 { 0 } else { 8 }, ends[&id].0.cached_tokens);
        texts.push(ends[&id].1.clone());
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut engine = SimEngine::new(settings(2));
    engine.submit(Duration::ZERO, SimRequest { id: 1, prompt: vec![1; 9], max_tokens: 1, root: root() });
    assert_eq!(Finish::TooLarge, engine.step(Duration::ZERO).finished[0].finish);
}

#[test]
fn settings_that_make_no_sense_still_come_to_an_end() {
    let nothing = SimSettings {
        block_size_tokens: 0,
        max_running: 0,
        prefill_chunk_tokens: 0,
        prefill_tokens_per_second: 0.0,
        token_range: 0,
        first_token: u32::MAX,
        ..settings(40)
    };
    let mut engine = SimEngine::new(nothing);
    let request = SimRequest { id: 1, prompt: vec![1; 3], max_tokens: 2, root: root() };
    engine.submit(Duration::from_secs(9), request);
    let mut ends = Vec::new();
    for _ in 0..10 {
        ends.extend(engine.step(Duration::ZERO).finished);
    }
    assert_eq!(1, ends.len());
    assert_eq!(Finish::Length, ends[0].finish);
}

#[test]
fn a_text_can_come_to_its_end_before_its_budget() {
    let mut engine = SimEngine::new(settings(40)).stop_after_tokens(3);
    let mut ledger = ledger();
    for (max_tokens, expected) in [(2, (Finish::Length, 2)), (3, (Finish::Length, 3)), (9, (Finish::Stop, 3))] {
        engine.submit(Duration::ZERO, SimRequest { id: 1, prompt: vec![1; 9], max_tokens, root: root() });
        let ends = run(&mut engine, &mut ledger, &HashMap::from([(1, vec![1; 9])]));
        assert_eq!(expected, (ends[&1].0.finish, ends[&1].0.completion_tokens));
    }
}

#[test]
fn a_reset_forgets_what_nobody_uses_and_says_so() {
    let mut engine = SimEngine::new(settings(40));
    let mut ledger = ledger();
    engine.submit(Duration::ZERO, SimRequest { id: 1, prompt: vec![1; 9], max_tokens: 1, root: root() });
    run(&mut engine, &mut ledger, &HashMap::from([(1, vec![1; 9])]));
    assert_eq!(2, ledger.block_count());
    assert_eq!(2, engine.reset_cache());
    run(&mut engine, &mut ledger, &HashMap::new());
    assert_eq!((0, 0), (ledger.block_count(), engine.counters().used_blocks));
}

fn request_of(id: u64, prompt: Vec<u32>) -> SimRequest {
    SimRequest { id, prompt, max_tokens: 1, root: root() }
}

#[test]
fn what_another_engine_sent_is_not_computed_and_is_in_the_cache_then() {
    let mut engine = SimEngine::new(settings(40));
    let mut ledger = ledger();
    let prompt: Vec<u32> = (0..23).collect();
    let known = HashMap::from([(1, prompt.clone()), (2, prompt.clone())]);
    // Three whole blocks and a part of a fourth.
    let transfer = SimTransfer { external_tokens: 14, keeps_blocks: false };
    engine.submit_with(Duration::ZERO, request_of(1, prompt.clone()), transfer);
    let sent = run(&mut engine, &mut ledger, &known)[&1].0;
    assert_eq!((12, 12), (sent.cached_tokens, sent.external_tokens));
    assert_eq!(12, engine.counters().external_tokens);
    // What it has itself it takes itself.
    let transfer = SimTransfer { external_tokens: 20, keeps_blocks: false };
    engine.submit_with(Duration::ZERO, request_of(2, prompt), transfer);
    let again = run(&mut engine, &mut ledger, &known)[&2].0;
    assert_eq!((20, 0), (again.cached_tokens, again.external_tokens));
}

proptest! {
    /// Kept blocks are not evicted, and are given back once, whenever that is asked for.
    #[test]
    fn what_is_kept_stays_until_it_is_released_and_nothing_is_left(
        requests in prop::collection::vec((prop::collection::vec(0u32..2, 1..24), any::<bool>(), 0u8..4, 0usize..24), 1..20),
        blocks in 12usize..40,
    ) {
        let mut engine = SimEngine::new(settings(blocks));
        let mut ledger = ledger();
        let mut kept: HashMap<u64, Vec<u32>> = HashMap::new();
        for (id, (prompt, keeps_blocks, releases, external_tokens)) in (0u64..).zip(requests) {
            let known = HashMap::from([(id, prompt.clone())]);
            let needed = (prompt.len() + 1).div_ceil(4);
            let pinned: usize = engine.counters().used_blocks;
            if needed > blocks - pinned {
                kept.drain().for_each(|(id, _)| engine.release(id));
            }
            let transfer = SimTransfer { external_tokens: external_tokens.min(prompt.len()), keeps_blocks };
            engine.submit_with(Duration::ZERO, request_of(id, prompt.clone()), transfer);
            match releases {
                0 => engine.release(id),
                1 => engine.abort(id),
                _ => {}
            }
            run(&mut engine, &mut ledger, &known);
            if keeps_blocks && releases > 1 {
                kept.insert(id, prompt);
            }
            for prompt in kept.values() {
                let whole = usable(prompt);
                prop_assert_eq!(whole.len(), ledger.claimed_prefix_blocks(&whole));
            }
            if releases == 3 {
                engine.release(id);
                engine.release(id);
                kept.remove(&id);
            }
            let counters = engine.counters();
            prop_assert_eq!(kept.values().map(|prompt| prompt.len() / 4).sum::<usize>(), counters.pinned_blocks);
            prop_assert!(counters.used_blocks <= counters.pinned_blocks);
        }
        kept.keys().for_each(|id| engine.release(*id));
        prop_assert_eq!((0, 0), (engine.counters().pinned_blocks, engine.counters().used_blocks));
    }
}
