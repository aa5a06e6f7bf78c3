//! The rows of the table.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use kvist_blocks::{BlockHash, Incarnation, Run, Tier};
use kvist_index::SourceState;
use serde_json::{Value, json};

use crate::{
    contender::{BLOCK_TOKENS, Contender, Kvist},
    facts,
    load::{self, Step, Trace},
};

/// Events that are applied in each second of a busy row.
const BUSY_EVENTS_PER_SECOND: u64 = 200_000;
/// Blocks of an event.
const EVENT_BLOCKS: usize = 4;
/// Blocks of a prompt that events are about.
const EVENT_PROMPT_BLOCKS: usize = 64;

/// How long and how large.
#[derive(Clone, Copy)]
pub struct Scale {
    pub seconds: f64,
    pub most_memberships: usize,
    pub other_blocks: usize,
    pub events: u64,
}

impl Scale {
    pub fn full() -> Self {
        Self { seconds: 1.5, most_memberships: 6_000_000, other_blocks: 1_000_000, events: 1_000_000 }
    }

    pub fn quick() -> Self {
        Self { seconds: 0.2, most_memberships: 1_000_000, other_blocks: 100_000, events: 100_000 }
    }
}

/// Durations in nanoseconds, in order.
struct Samples {
    undisturbed: Vec<u64>,
    /// Those in the middle of which, or near to which, the kernel gave the core to somebody else.
    disturbed: usize,
    most: u64,
}

impl Samples {
    /// None when all samples were disturbed.
    fn percentile(&self, percent: usize) -> Option<u64> {
        let rank = (self.undisturbed.len() * percent).div_ceil(100).max(1);
        self.undisturbed.get(rank - 1).copied()
    }

    /// Runs something again and again for some seconds, at least 200 times.
    fn take(seconds: f64, mut run: impl FnMut(usize)) -> Self {
        let started = Instant::now();
        let (mut undisturbed, mut disturbed, mut most, mut number) = (Vec::with_capacity(1 << 20), 0, 0, 0);
        let mut group = Vec::with_capacity(16);
        while number < 200 || (started.elapsed().as_secs_f64() < seconds && number < 1_000_000) {
            let preemptions = facts::preemptions();
            let of_group = Instant::now();
            while group.len() < 16 && of_group.elapsed() < Duration::from_micros(50) {
                let one = Instant::now();
                run(number);
                group.push(one.elapsed().as_nanos() as u64);
                number += 1;
            }
            most = group.iter().copied().fold(most, u64::max);
            if facts::preemptions() == preemptions {
                undisturbed.append(&mut group);
            } else {
                disturbed += group.len();
                group.clear();
            }
        }
        undisturbed.sort_unstable();
        Self { undisturbed, disturbed, most }
    }

    fn to_json(&self) -> Value {
        let micros = |nanos: u64| (nanos as f64 / 10.0).round() / 100.0;
        json!({
            "p50_us": self.percentile(50).map(micros),
            "p99_us": self.percentile(99).map(micros),
            "most_us": micros(self.most),
            "samples": self.undisturbed.len(),
            "left_out": self.disturbed,
        })
    }
}

/// A stream of events without end: each source stores two prompts, four blocks an event, and removes them.
struct Events<C: Contender> {
    prompts: Vec<[C::Prompt; 2]>,
    steps: Vec<usize>,
    blocks_of_event: usize,
    next: usize,
}

impl<C: Contender> Events<C> {
    fn new(sources: usize, blocks_of_event: usize) -> Self {
        let prompt = |seed: usize| C::prompt(&load::contents(seed as u64 + 1_000_000_000, EVENT_PROMPT_BLOCKS));
        let prompts = (0..sources).map(|source| [prompt(source * 2), prompt(source * 2 + 1)]).collect();
        Self { prompts, steps: vec![0; sources], blocks_of_event, next: 0 }
    }

    fn apply_next(&mut self, contender: &C) {
        let source = self.next;
        self.next = (self.next + 1) % self.steps.len();
        let step = self.steps[source];
        self.steps[source] += 1;
        let of_prompt = EVENT_PROMPT_BLOCKS / self.blocks_of_event;
        let (phase, part) = (step / of_prompt % 4, step % of_prompt);
        let prompt = &self.prompts[source][phase % 2];
        let part = if phase < 2 { part } else { of_prompt - 1 - part };
        let blocks = part * self.blocks_of_event..(part + 1) * self.blocks_of_event;
        if phase < 2 {
            contender.store(source, prompt, blocks);
        } else {
            contender.remove(source, prompt, blocks);
        }
    }
}

/// Runs something while events are applied at a fixed pace; says how many were applied in a second.
fn while_busy<C: Contender, T>(contender: &C, events: &mut Events<C>, run: impl FnOnce() -> T) -> (T, f64) {
    let (stop, applied) = (AtomicBool::new(false), AtomicU64::new(0));
    let started = Instant::now();
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            let mut done = 0;
            while !stop.load(Ordering::Relaxed) {
                let due = (started.elapsed().as_secs_f64() * BUSY_EVENTS_PER_SECOND as f64) as u64;
                // Who can not keep up does not work off the arrears for ever.
                let due = due.min(done + BUSY_EVENTS_PER_SECOND / 100);
                while done < due {
                    events.apply_next(contender);
                    done += 1;
                }
                applied.store(done, Ordering::Relaxed);
                thread::sleep(Duration::from_micros(50));
            }
        });
        let result = run();
        stop.store(true, Ordering::Relaxed);
        result
    });
    contender.settle();
    let rate = applied.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    (result, rate.round())
}

/// Each source holds a beginning of each prompt, from half of it to all of it, and other blocks besides.
fn filled<C: Contender>(scale: Scale, blocks: usize, sources: usize) -> (C, Vec<C::Prompt>) {
    let contender = C::new(sources);
    contender.open();
    let held = blocks * sources * 3 / 4;
    let prompts = (scale.most_memberships / held.max(1)).clamp(1, 16);
    let prompts: Vec<C::Prompt> = (0..prompts).map(|seed| C::prompt(&load::contents(seed as u64, blocks))).collect();
    for prompt in &prompts {
        for step in 0..sources {
            let share = step * 7919 % sources;
            contender.store(step, prompt, 0..blocks / 2 + (blocks - blocks / 2) * (share + 1) / sources);
        }
    }
    for other in 0..scale.other_blocks / EVENT_PROMPT_BLOCKS {
        let prompt = C::prompt(&load::contents(other as u64 + 2_000_000_000, EVENT_PROMPT_BLOCKS));
        contender.store(other % sources, &prompt, 0..EVENT_PROMPT_BLOCKS);
    }
    contender.settle();
    (contender, prompts)
}

/// Look-ups of prompts of some length among some sources, idle and busy; for the longest also with hashing.
pub fn lookup<C: Contender>(scale: Scale, tokens: usize, sources: usize) -> Value {
    let blocks = tokens / BLOCK_TOKENS;
    let (contender, prompts) = filled::<C>(scale, blocks, sources);
    let expected: u64 =
        (0..sources).map(|share| (blocks / 2 + (blocks - blocks / 2) * (share + 1) / sources) as u64).sum();
    for prompt in &prompts {
        assert_eq!(expected, contender.lookup(prompt), "{} finds what was told", C::NAME);
    }
    let idle = Samples::take(scale.seconds, |number| {
        black_box(contender.lookup(&prompts[number % prompts.len()]));
    });
    let mut events = Events::<C>::new(sources, EVENT_BLOCKS);
    let (busy, events_per_second) = while_busy(&contender, &mut events, || {
        Samples::take(scale.seconds, |number| {
            black_box(contender.lookup(&prompts[number % prompts.len()]));
        })
    });
    let text = load::tokens(1, tokens);
    let (hashed, _) = while_busy(&contender, &mut events, || {
        Samples::take(scale.seconds, |number| {
            black_box(C::hash(black_box(&text)));
            black_box(contender.lookup(&prompts[number % prompts.len()]));
        })
    });
    json!({
        "tokens": tokens,
        "sources": sources,
        "idle": idle.to_json(),
        "busy": busy.to_json(),
        "busy_with_hashing": hashed.to_json(),
        "busy_events_per_second": events_per_second,
    })
}

/// Hashing of a prompt of 100,000 tokens.
pub fn hashing<C: Contender>(scale: Scale) -> Value {
    let text = load::tokens(2, 100_000);
    let samples = Samples::take(scale.seconds, |_| {
        black_box(C::hash(black_box(&text)));
    });
    let nanos = samples.percentile(50).unwrap_or(0) as f64;
    json!({
        "mb_per_second": ((text.len() * 4) as f64 / nanos * 1000.0).round(),
        "ns_per_block": (nanos / (text.len() / BLOCK_TOKENS) as f64 * 10.0).round() / 10.0,
    })
}

/// Events as fast as one thread can tell them, about 1,000 sources: by the clock, and by the CPU time of all threads. As many go
/// before: at first most of the time goes into opening sources and into pages that the process touches for the first time, and
/// who comes later in the process has less of that.
pub fn apply<C: Contender>(scale: Scale) -> Value {
    let rates = |blocks_of_event: usize| {
        let contender = C::new(1000);
        contender.open();
        let mut events = Events::<C>::new(1000, blocks_of_event);
        (0..scale.events).for_each(|_| events.apply_next(&contender));
        contender.settle();
        let (started, cpu) = (Instant::now(), facts::cpu_seconds());
        (0..scale.events).for_each(|_| events.apply_next(&contender));
        contender.settle();
        let (seconds, cpu) = (started.elapsed().as_secs_f64(), facts::cpu_seconds() - cpu);
        json!({
            "events_per_second": (scale.events as f64 / seconds).round(),
            "events_per_cpu_second": (scale.events as f64 / cpu).round(),
        })
    };
    json!({ "events_of_1_block": rates(1), "events_of_4_blocks": rates(4) })
}

/// The steps of a trace's replay: on two threads, each with half of the sources, and on one. Reported is what comes after a
/// first replay: in that, most of the time goes into pages that the process touches for the first time, and who comes later
/// in it has less of that.
pub fn replay<C: Contender>(trace: &Trace, steps: &[Vec<Step>]) -> [(&'static str, Value); 2] {
    replay_once::<C>(trace, steps, 2);
    [("replay", replay_once::<C>(trace, steps, 2)), ("replay_on_one_thread", replay_once::<C>(trace, steps, 1))]
}

fn replay_once<C: Contender>(trace: &Trace, steps: &[Vec<Step>], threads: usize) -> Value {
    let prompts: Vec<C::Prompt> = trace.prompts.iter().map(|contents| C::prompt(contents)).collect();
    let contender = C::new(steps.len());
    contender.open();
    let (contender, prompts) = (&contender, &prompts);
    let (started, cpu) = (Instant::now(), facts::cpu_seconds());
    let results: Vec<(Vec<u64>, usize)> = thread::scope(|scope| {
        let work = |first: usize| {
            move || {
                let (mut samples, mut disturbed) = (Vec::new(), 0);
                for step in steps.iter().skip(first).step_by(threads).flatten() {
                    match step {
                        Step::Lookup { prompt } => {
                            let preemptions = facts::preemptions();
                            let one = Instant::now();
                            black_box(contender.lookup(&prompts[*prompt]));
                            let nanos = one.elapsed().as_nanos() as u64;
                            if facts::preemptions() == preemptions {
                                samples.push(nanos);
                            } else {
                                disturbed += 1;
                            }
                        }
                        Step::Store { source, prompt, blocks } => {
                            contender.store(*source, &prompts[*prompt], blocks.clone());
                        }
                        Step::Remove { source, prompt, blocks } => {
                            contender.remove(*source, &prompts[*prompt], blocks.clone());
                        }
                    }
                }
                (samples, disturbed)
            }
        };
        let running: Vec<_> = (0..threads).map(|first| scope.spawn(work(first))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    contender.settle();
    let (seconds, cpu) = (started.elapsed().as_secs_f64(), facts::cpu_seconds() - cpu);
    let disturbed = results.iter().map(|(_, disturbed)| disturbed).sum();
    let mut undisturbed: Vec<u64> = results.into_iter().flat_map(|(samples, _)| samples).collect();
    undisturbed.sort_unstable();
    let blocks = |step: &Step| match step {
        Step::Lookup { prompt } => trace.prompts[*prompt].len(),
        Step::Store { blocks, .. } | Step::Remove { blocks, .. } => blocks.len(),
    };
    let operations = steps.iter().map(Vec::len).sum::<usize>() as f64;
    let block_operations = steps.iter().flatten().map(blocks).sum::<usize>() as f64;
    let most = undisturbed.last().copied().unwrap_or(0);
    let mut row = Samples { undisturbed, disturbed, most }.to_json();
    row["operations_per_cpu_second"] = json!((operations / cpu).round());
    row["operations_per_second"] = json!((operations / seconds).round());
    row["block_operations_per_second"] = json!((block_operations / seconds).round());
    row
}

/// What is held in a memory row.
pub enum Held<'a> {
    /// 2,000 blocks for each of 1,000 sources that no prompt shares, in prompts of 125 blocks.
    Unique,
    /// What a replay of a trace leaves.
    Trace(&'a Trace, &'a [Vec<Step>]),
}

/// Resident bytes for each pair of a block and a holder, in this process, which must have done nothing else.
pub fn memory<C: Contender>(held: &Held<'_>, holders: usize) -> Value {
    const SOURCES: usize = 1000;
    let contender = C::new(SOURCES);
    contender.settle();
    let before = facts::resident_bytes();
    let mut memberships = 0;
    let mut store = |first: usize, prompt: &C::Prompt, blocks: std::ops::Range<usize>| {
        for holder in 0..holders {
            contender.store((first + holder * (SOURCES / holders)) % SOURCES, prompt, blocks.clone());
            memberships += blocks.len();
        }
    };
    match held {
        Held::Unique => {
            for prompt in 0..SOURCES * 16 / holders {
                store(prompt % SOURCES, &C::prompt(&load::contents(prompt as u64, 125)), 0..125);
            }
        }
        Held::Trace(trace, steps) => {
            for (number, (source, prompt, blocks)) in load::held_at_end(steps).into_iter().enumerate() {
                store(source, &C::prompt(&trace.prompts[prompt]), blocks);
                // So that what waits in a channel is not counted.
                if number % 64 == 0 {
                    contender.settle();
                }
            }
        }
    }
    contender.settle();
    let grown = facts::resident_bytes().saturating_sub(before);
    json!({
        "holders_a_block": holders,
        "memberships": memberships,
        "resident_bytes": grown,
        "bytes_per_membership": (grown as f64 / memberships as f64 * 10.0).round() / 10.0,
    })
}

/// 1,000 sources of 2,000 blocks from snapshots, in runs of 125; and look-ups of a long prompt that came with one.
pub fn snapshots() -> Value {
    const SOURCES: usize = 1000;
    let contender = Kvist::new(SOURCES);
    let snapshot = |seed: usize, blocks: usize| {
        let hashes: Vec<BlockHash> = Kvist::prompt(&load::contents(seed as u64, blocks));
        let run = |(number, run): (usize, &[BlockHash])| Run {
            parent: (number * 125).checked_sub(1).map(|before| hashes[before]),
            hashes: run.to_vec(),
        };
        [(Tier::Device, hashes.chunks(125).enumerate().map(run).collect())]
    };
    let sources: Vec<_> = (0..SOURCES).map(|source| snapshot(source, 2000)).collect();
    let started = Instant::now();
    for (source, blocks) in sources.iter().enumerate() {
        contender.index.apply_snapshot(contender.key(source), Incarnation(1), 5, blocks, true, 1);
    }
    let all = started.elapsed().as_secs_f64();
    let exact = contender.index.sources().iter().filter(|source| source.state == SourceState::Exact).count();
    assert_eq!(SOURCES, exact);

    contender.index.apply_snapshot(contender.key(0), Incarnation(1), 6, &snapshot(7_000, 6250), true, 1);
    let prompt = Kvist::prompt(&load::contents(7_000, 6250));
    let micros: Vec<f64> = (0..20)
        .map(|_| {
            let one = Instant::now();
            assert_eq!(6250, contender.lookup(&prompt));
            one.elapsed().as_nanos() as f64 / 1000.0
        })
        .collect();
    let started = Instant::now();
    contender.index.close(&contender.key(1).worker, Incarnation(1));
    let close = started.elapsed();
    let started = Instant::now();
    contender.index.collect_garbage();
    json!({
        "sources": SOURCES,
        "blocks_a_source": 2000,
        "seconds_until_all_exact": (all * 1000.0).round() / 1000.0,
        "blocks_per_second": ((SOURCES * 2000) as f64 / all).round(),
        "lookup_after_us": { "first": micros[0].round(), "twentieth": (micros[19] * 10.0).round() / 10.0 },
        "close_one_source_us": (close.as_nanos() as f64 / 100.0).round() / 10.0,
        "sweep_one_source_us": (started.elapsed().as_nanos() as f64 / 100.0).round() / 10.0,
    })
}
