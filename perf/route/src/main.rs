//! What a routing decision costs: 100,000 prompt tokens in blocks of 16, 64 targets that hold deep beginnings of the
//! prompt, policy `cost`; and choice, reservation and release alone.

// The facts that bench:index states, from the same source.
#[allow(dead_code)]
#[path = "../../index/src/facts.rs"]
mod facts;

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvist_blocks::{
    Batch, BlockHash, Event, HashSeed, Incarnation, Namespace, Rank, SourceKey, Tier, block_hashes, usable_blocks,
};
use kvist_index::{Index, IndexSettings};
use kvist_schedule::{
    Book, Candidate, Draws, EngineReport, Load, OverlapCursor, Pipeline, Request, ReservationId, TargetId,
    cached_prompt,
};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PROMPT_TOKENS: usize = 100_000;
const BLOCK_TOKENS: usize = 16;
const TARGETS: u64 = 64;
const EVENTS_PER_SECOND: u64 = 200_000;
const BLOCKS_A_BATCH: u64 = 20;
/// Of the 99th percentile.
const DECISION_LIMIT_US: f64 = 200.0;
const SELECT_LIMIT_US: f64 = 20.0;

fn key(target: u64) -> SourceKey {
    SourceKey { worker: format!("worker-{target:02}").as_str().into(), rank: Rank(0) }
}

/// A prompt whose last block is one of many, so that no two decisions hash the same.
fn prompt(number: u32) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|token| token.wrapping_mul(2_654_435_761) >> 12).collect();
    if let Some(last) = tokens.last_mut() {
        *last = number;
    }
    tokens
}

fn filled_index(root: BlockHash) -> Index {
    let index = Index::new(IndexSettings { byte_budget: 1 << 30 });
    let hashes = block_hashes(root, &prompt(0), BLOCK_TOKENS);
    for target in 0..TARGETS {
        // From a half of the prompt to all of it, each ending elsewhere.
        let depth = hashes.len() / 2 + (target as usize * hashes.len() / 2) / TARGETS as usize;
        let stored = Event::Stored { tier: Tier::Device, parent: None, hashes: hashes[..depth].to_vec() };
        let batch = Batch { sequence: 0, recorded_at_unix_nanos: 1, events: vec![stored] };
        index.apply_batch(&key(target), Incarnation(1), &batch, 1);
    }
    index
}

struct Desk {
    book: Book,
    pipeline: Pipeline,
    targets: Vec<TargetId>,
    draws: Draws,
}

impl Desk {
    fn new() -> Self {
        let targets = (0..TARGETS).map(|target| TargetId { worker: key(target).worker, rank: Rank(0) }).collect();
        Self { book: Book::default(), pipeline: Pipeline::standard(), targets, draws: Draws::new(1) }
    }

    /// What a router does behind the look-up: describe, choose, reserve.
    fn choose(
        &mut self,
        now: Duration,
        mut cached: impl FnMut(&TargetId) -> Option<kvist_schedule::Cached>,
    ) -> ReservationId {
        let request =
            Request { prompt_tokens: PROMPT_TOKENS as u64, expected_output_tokens: 128, ..Request::default() };
        let report = EngineReport {
            // A report serves the decisions of some 20 ms.
            received_at: Duration::from_millis(now.as_millis() as u64 / 20 * 20),
            load: Load { running: 5, waiting: 1, kv_usage: Some(0.4), kv_blocks: Some(100_000) },
            outstanding_prefill_tokens: 4000,
            prefill_tokens_per_second: Some(9000.0),
        };
        let mut candidates = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            candidates.push(Candidate {
                cached: cached(target),
                block_size_tokens: BLOCK_TOKENS as u64,
                ..Candidate::new(target.clone())
            });
        }
        self.book.describe(now, &mut candidates, &vec![Some(report); TARGETS as usize]);
        let (decision, reservation) =
            self.book.decide(now, &self.pipeline, &request, &candidates, &mut self.draws, true);
        black_box(decision);
        reservation.expect("one of the targets can serve")
    }
}

/// Samples, without those in the middle of which the kernel took the core away.
#[derive(Default)]
struct Samples {
    kept: Vec<Duration>,
    left_out: usize,
}

impl Samples {
    fn add(&mut self, took: Duration, is_whole: bool) {
        if is_whole { self.kept.push(took) } else { self.left_out += 1 }
    }
}

fn percentiles(samples: Samples) -> serde_json::Value {
    let Samples { kept: mut samples, left_out } = samples;
    samples.sort();
    let at = |share: f64| {
        let position = ((share * samples.len() as f64).ceil() as usize).clamp(1, samples.len()) - 1;
        samples[position].as_secs_f64() * 1e6
    };
    json!({"p50_us": at(0.5), "p95_us": at(0.95), "p99_us": at(0.99), "samples": samples.len(), "left_out": left_out})
}

fn main() -> std::process::ExitCode {
    let machine = facts::machine();
    let quick = std::env::args().any(|argument| argument == "--quick");
    let decisions = if quick { 500 } else { 5000 };
    let root = Namespace::new("bench", "", "").root(HashSeed(1));
    let index = Arc::new(filled_index(root));

    // Other sources change all the time, as they do live.
    let stop = Arc::new(AtomicBool::new(false));
    let applied = Arc::new(AtomicU64::new(0));
    let writer = {
        let (index, stop, applied) = (Arc::clone(&index), Arc::clone(&stop), Arc::clone(&applied));
        std::thread::spawn(move || {
            let started = Instant::now();
            let source = key(TARGETS);
            let mut next = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let due = (started.elapsed().as_secs_f64() * EVENTS_PER_SECOND as f64) as u64;
                if next * BLOCKS_A_BATCH >= due {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                }
                let name = |batch: u64| {
                    (0..BLOCKS_A_BATCH).map(move |block| BlockHash((batch << 8 | block) ^ 0x5bd1_e995 << 32))
                };
                let stored = Event::Stored { tier: Tier::Device, parent: None, hashes: name(next).collect() };
                let mut events = vec![stored];
                // What is stored is removed again a while later: half of the events are removals.
                if next >= 10_000 {
                    events.push(Event::Removed { tier: Tier::Device, hashes: name(next - 10_000).collect() });
                }
                let batch = Batch { sequence: next, recorded_at_unix_nanos: 1, events };
                index.apply_batch(&source, Incarnation(1), &batch, 1);
                next += 1;
                applied.store(next * BLOCKS_A_BATCH, Ordering::Relaxed);
            }
            started.elapsed()
        })
    };

    let mut desk = Desk::new();
    let started = Instant::now();
    let prompts: Vec<Vec<u32>> = (0..16).map(prompt).collect();
    let usable = usable_blocks(PROMPT_TOKENS, BLOCK_TOKENS);
    let (mut whole, mut look_ups) = (Samples::default(), Samples::default());
    for number in 0..decisions {
        let tokens = &prompts[number % prompts.len()];
        let preempted = facts::preemptions();
        let before = Instant::now();
        let hashes = block_hashes(root, &tokens[..usable * BLOCK_TOKENS], BLOCK_TOKENS);
        let looked_up = Instant::now();
        let overlaps = index.lookup(&hashes);
        let look_up = looked_up.elapsed();
        let mut cursor = OverlapCursor::new(&overlaps);
        let cached = |target: &TargetId| cached_prompt(cursor.get(target), 0, usable, BLOCK_TOKENS);
        let reservation = desk.choose(started.elapsed(), cached);
        let took = before.elapsed();
        let is_whole = preempted == facts::preemptions();
        look_ups.add(look_up, is_whole);
        whole.add(took, is_whole);
        desk.book.reservations.release(reservation);
    }

    let hashes = block_hashes(root, &prompts[0][..usable * BLOCK_TOKENS], BLOCK_TOKENS);
    let overlaps = index.lookup(&hashes);
    let mut alone = Samples::default();
    // A router that is in use: 20 requests at each target.
    for _ in 0..20 * TARGETS {
        desk.choose(started.elapsed(), |_| None);
    }
    for _ in 0..10 * decisions {
        let preempted = facts::preemptions();
        let before = Instant::now();
        let mut cursor = OverlapCursor::new(&overlaps);
        let cached = |target: &TargetId| cached_prompt(cursor.get(target), 0, usable, BLOCK_TOKENS);
        let reservation = desk.choose(started.elapsed(), cached);
        desk.book.reservations.release(reservation);
        let took = before.elapsed();
        alone.add(took, preempted == facts::preemptions());
    }
    stop.store(true, Ordering::Relaxed);
    let wrote_for = writer.join().expect("the writer ends");
    let (whole, look_ups, alone) = (percentiles(whole), percentiles(look_ups), percentiles(alone));
    let mut is_met = true;
    for (what, figures, limit) in [
        ("decision, 100,000 tokens hashed, 64 targets", &whole, Some(DECISION_LIMIT_US)),
        ("of which look-up", &look_ups, None),
        ("select, reserve, release, nothing hashed", &alone, Some(SELECT_LIMIT_US)),
    ] {
        let us = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
        let verdict = match limit {
            None => String::new(),
            Some(limit) if us("p99_us") < limit => format!("   below {limit} us"),
            Some(limit) => {
                is_met = false;
                format!("   NOT below {limit} us")
            }
        };
        println!("{what:45} p50 {:6.1} us   p99 {:6.1} us{verdict}", us("p50_us"), us("p99_us"));
    }
    let report = json!({
        "prompt_tokens": PROMPT_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "targets": TARGETS,
        "policy": Pipeline::standard().summary(),
        "stored_blocks_per_second": applied.load(Ordering::Relaxed) as f64 / wrote_for.as_secs_f64(),
        "decision_with_hashing": whole,
        "look_up": look_ups,
        "select_reserve_release": alone,
        "machine": machine,
        "build": facts::build(),
    });
    let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../results"));
    let kept = serde_json::to_string_pretty(&report).unwrap_or_default();
    if let Err(error) =
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join("bench-route.json"), kept))
    {
        eprintln!("bench:route: results/bench-route.json: {error}");
    }
    println!("RESULT {report}");
    if is_met { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
