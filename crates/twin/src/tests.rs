//! The simulated engine against its own ledger.

use std::{collections::HashMap, time::Duration};

use kvist_blocks::{BlockHash, HashSeed, Namespace, block_hashes, usable_blocks};
use kvist_ledger::{Ledger, LedgerSettings};
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
        ledger.apply(0, &step.events);
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
        let mut ledger = Ledger::new(LedgerSettings { ring_batches: 10, block_size_tokens: 4 });
        for (id, (prompt, max_tokens)) in (0u64..).zip(prompts) {
            let hashes = block_hashes(root(), &prompt, 4);
            let claimed = ledger.claimed_prefix_blocks(&hashes[..usable_blocks(prompt.len(), 4)]);
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
    fn many_at_once_all_end_and_leave_nothing(
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..24), 1u32..8, any::<bool>()), 1..30),
    ) {
        let mut engine = SimEngine::new(settings(20));
        let mut ledger = Ledger::new(LedgerSettings { ring_batches: 10, block_size_tokens: 4 });
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
        prop_assert_eq!(0, engine.counters().used_blocks);
        prop_assert_eq!(0, ledger.counters().unknown_removals + ledger.counters().unknown_parents);
    }
}

#[test]
fn equal_prompts_give_equal_text_and_the_second_is_cached() {
    let mut engine = SimEngine::new(settings(40));
    let mut ledger = Ledger::new(LedgerSettings { ring_batches: 10, block_size_tokens: 4 });
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
