//! The plainest replay of a trace: caches that fill at once and backlogs that drain, without routers, events or decoding.
//!
//! It gives the numbers that the traces are published with here, and so shows that trace, caches and account are read as
//! they were when those were measured; everything else in the twin is compared with them.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use crate::trace::{TRACE_BLOCK_TOKENS, TraceRequest};

/// Who gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayRule {
    /// Each in turn.
    RoundRobin,
    /// The least backlog.
    LeastBacklog,
    /// The most cached blocks; ties go to the least backlog. The bad example.
    MostOverlap,
    /// The least sum of backlog and uncached tokens.
    LowestSum,
}

/// What came of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayReport {
    /// Block references served by a cache, as a share of all.
    pub hit_rate: f64,
    /// The most work any worker ever had before it.
    pub worst_backlog_seconds: f64,
}

/// Blocks in the order of their last use.
#[derive(Debug, Default)]
struct Lru {
    last_use: HashMap<u32, u64>,
    by_use: BTreeMap<u64, u32>,
    clock: u64,
}

impl Lru {
    fn prefix(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|block| self.last_use.contains_key(*block)).count()
    }

    /// Uses a prompt's blocks, the last first, so that a prefix outlives what follows it.
    fn touch(&mut self, blocks: &[u32], capacity: usize) {
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.last_use.insert(*block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, *block);
        }
        while self.last_use.len() > capacity {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            self.last_use.remove(&oldest);
        }
    }
}

/// Replays a trace over workers with `blocks` blocks each, which compute `tokens_per_second` prompt tokens a second.
#[must_use]
pub fn replay(
    trace: &[TraceRequest],
    workers: usize,
    blocks: usize,
    tokens_per_second: f64,
    rule: ReplayRule,
) -> ReplayReport {
    let mut caches: Vec<Lru> = (0..workers).map(|_| Lru::default()).collect();
    let mut backlogs = vec![0.0f64; workers];
    let (mut hits, mut all, mut worst, mut before) = (0, 0, 0.0f64, 0.0);
    for (number, request) in trace.iter().enumerate() {
        let now = request.at.as_secs_f64();
        for backlog in &mut backlogs {
            *backlog = (*backlog - (now - before) * tokens_per_second).max(0.0);
        }
        before = now;
        let overlaps: Vec<usize> = caches.iter().map(|cache| cache.prefix(&request.blocks)).collect();
        let uncached =
            |worker: usize| request.prompt_tokens.saturating_sub(overlaps[worker] * TRACE_BLOCK_TOKENS) as f64;
        let least = |key: &dyn Fn(usize) -> f64| (0..workers).min_by(|left, right| key(*left).total_cmp(&key(*right)));
        let most = overlaps.iter().copied().max().unwrap_or(0);
        let chosen = match rule {
            ReplayRule::RoundRobin => number.checked_rem(workers),
            ReplayRule::LeastBacklog => least(&|worker| backlogs[worker]),
            ReplayRule::MostOverlap => {
                least(&|worker| if overlaps[worker] == most { backlogs[worker] } else { f64::INFINITY })
            }
            ReplayRule::LowestSum => least(&|worker| backlogs[worker] + uncached(worker)),
        };
        let Some(chosen) = chosen else { break };
        hits += overlaps[chosen];
        all += request.blocks.len();
        backlogs[chosen] += uncached(chosen);
        worst = worst.max(backlogs[chosen] / tokens_per_second);
        caches[chosen].touch(&request.blocks, blocks);
    }
    ReplayReport { hit_rate: if all == 0 { 0.0 } else { hits as f64 / all as f64 }, worst_backlog_seconds: worst }
}
