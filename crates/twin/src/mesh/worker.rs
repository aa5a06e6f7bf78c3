//! A worker in virtual time: an engine and its ledger.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kvist_blocks::{Batch, BlockHash, Incarnation, Rank};
use kvist_ledger::{EngineEvent, Ledger, LedgerDigest, LedgerSettings};
use kvist_schedule::{EngineReport, Load, TargetId};

use super::settings::{EngineSettings, duration};
use crate::{SimEngine, SimRequest, SimSettings, Step, pool::Pool, trace::TRACE_BLOCK_TOKENS};

/// Batches that a ledger keeps: all of any trace, so that catching up never needs a snapshot.
const RING_BATCHES: usize = 1 << 20;

/// A prompt as an engine and an index see it.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    /// Names of the blocks that a cache can serve.
    pub(super) hashes: Arc<Vec<BlockHash>>,
    /// One token a block for the plain engine, real tokens for the full one.
    pub(super) tokens: Vec<u32>,
    pub(super) root: BlockHash,
}

/// Computes nothing by steps: what arrives is cached at once, and its computing is a backlog.
#[derive(Debug)]
struct PlainEngine {
    pool: Pool,
    /// When everything that was accepted is computed.
    free_at: Duration,
    /// Ends of the prompts that are not computed, in order.
    ends: VecDeque<Duration>,
}

#[derive(Debug)]
enum Engine {
    Plain(PlainEngine),
    Full(Box<SimEngine>),
}

/// A worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) target: TargetId,
    pub(super) incarnation: Incarnation,
    pub(super) is_alive: bool,
    pub(super) is_stepping: bool,
    pub(super) ledger: Ledger,
    pub(super) reported_at: Duration,
    /// Prompt tokens computed since the start.
    pub(super) computed_tokens: u64,
    engine: Engine,
    tokens_per_second: f64,
    blocks: usize,
}

impl Worker {
    pub(super) fn new(number: usize, settings: &EngineSettings, slowness: f64) -> Self {
        let tokens_per_second = settings.prefill_tokens_per_second / slowness;
        let engine = if settings.is_full {
            Engine::Full(Box::new(SimEngine::new(SimSettings {
                block_size_tokens: TRACE_BLOCK_TOKENS,
                blocks: settings.blocks,
                max_running: settings.max_running,
                prefill_chunk_tokens: settings.prefill_chunk_tokens,
                prefill_tokens_per_second: tokens_per_second,
                decode_step: duration(settings.decode_step_seconds * slowness),
                decode_step_per_request: duration(settings.decode_step_seconds_per_request * slowness),
                first_token: 0,
                token_range: u32::MAX,
            })))
        } else {
            Engine::Plain(PlainEngine {
                pool: Pool::new(settings.blocks),
                free_at: Duration::ZERO,
                ends: VecDeque::new(),
            })
        };
        let block_size_tokens = if settings.is_full { TRACE_BLOCK_TOKENS } else { 1 };
        Self {
            target: TargetId { worker: format!("worker-{number:03}").as_str().into(), rank: Rank(0) },
            incarnation: Incarnation(number as u64 + 1),
            is_alive: true,
            is_stepping: false,
            ledger: Ledger::new(LedgerSettings { ring_batches: RING_BATCHES, block_size_tokens }),
            reported_at: Duration::ZERO,
            computed_tokens: 0,
            engine,
            tokens_per_second,
            blocks: settings.blocks,
        }
    }

    pub(super) fn digest(&self) -> LedgerDigest {
        self.ledger.digest()
    }

    pub(super) fn apply(&mut self, now: Duration, events: &[EngineEvent]) -> Option<Arc<Batch>> {
        if events.is_empty() {
            return None;
        }
        self.ledger.apply(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), events)
    }

    /// Takes a prompt by the plain engine: what it finds, what changes, and when it will be computed. None for the full
    /// engine, which is asked by steps.
    pub(super) fn serve_plainly(
        &mut self,
        now: Duration,
        prompt: &Prompt,
        prompt_tokens: usize,
    ) -> Option<(usize, Vec<EngineEvent>, Duration)> {
        let Engine::Plain(engine) = &mut self.engine else { return None };
        let mut events = Vec::new();
        let (hits, _) = engine.pool.prefix(&prompt.hashes);
        if prompt.hashes.len() <= self.blocks {
            engine.pool.pin(&prompt.hashes[..hits]);
            engine.pool.take(prompt.hashes.len() - hits, &mut events);
            for position in hits..prompt.hashes.len() {
                let parent = position.checked_sub(1).map(|before| prompt.hashes[before]);
                let tokens = &prompt.tokens[position..=position];
                engine.pool.name(prompt.hashes[position], parent, prompt.root, tokens, &mut events);
            }
            engine.pool.unpin(&prompt.hashes);
        }
        let uncached = prompt_tokens.saturating_sub(hits * TRACE_BLOCK_TOKENS);
        self.computed_tokens += uncached as u64;
        engine.free_at = engine.free_at.max(now) + duration(uncached as f64 / self.tokens_per_second);
        engine.ends.push_back(engine.free_at);
        Some((hits, events, engine.free_at))
    }

    pub(super) fn submit(&mut self, now: Duration, request: SimRequest) {
        if let Engine::Full(engine) = &mut self.engine {
            engine.submit(now, request);
        }
    }

    /// Begins a step of the full engine; none when there is nothing to do.
    pub(super) fn step(&mut self, now: Duration) -> Option<Step> {
        let Engine::Full(engine) = &mut self.engine else { return None };
        if engine.is_idle() {
            return None;
        }
        Some(engine.step(now))
    }

    /// Seconds of prompts that are not computed.
    pub(super) fn backlog_seconds(&mut self, now: Duration) -> f64 {
        self.outstanding_tokens(now) as f64 / self.tokens_per_second
    }

    fn outstanding_tokens(&mut self, now: Duration) -> u64 {
        match &mut self.engine {
            Engine::Plain(engine) => (engine.free_at.saturating_sub(now).as_secs_f64() * self.tokens_per_second) as u64,
            Engine::Full(engine) => engine.counters().outstanding_prefill_tokens,
        }
    }

    /// What it says of itself; the time is that of sending.
    pub(super) fn report(&mut self, now: Duration) -> EngineReport {
        let outstanding_prefill_tokens = self.outstanding_tokens(now);
        let load = match &mut self.engine {
            Engine::Plain(engine) => {
                while engine.ends.front().is_some_and(|end| *end <= now) {
                    engine.ends.pop_front();
                }
                let running = u64::from(!engine.ends.is_empty());
                let waiting = (engine.ends.len() as u64).saturating_sub(1);
                Load { running, waiting, kv_usage: None, kv_blocks: None }
            }
            Engine::Full(engine) => {
                let counters = engine.counters();
                Load {
                    running: counters.running as u64,
                    waiting: counters.waiting as u64,
                    kv_usage: Some(counters.used_blocks as f64 / counters.total_blocks.max(1) as f64),
                    kv_blocks: Some(counters.total_blocks as u64),
                }
            }
        };
        EngineReport {
            received_at: now,
            load,
            outstanding_prefill_tokens,
            prefill_tokens_per_second: Some(self.tokens_per_second),
        }
    }
}
