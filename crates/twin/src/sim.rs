//! The simulated engine.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use kvist_blocks::{BlockHash, BlockHasher, block_hashes, usable_blocks};
use kvist_ledger::EngineEvent;

use crate::pool::Pool;

/// How fast and how large the engine is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimSettings {
    /// Tokens a block.
    pub block_size_tokens: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Requests that run at once.
    pub max_running: usize,
    /// Prompt tokens computed in one step at most.
    pub prefill_chunk_tokens: usize,
    /// Prompt tokens computed a second.
    pub prefill_tokens_per_second: f64,
    /// Time of a step that decodes one request.
    pub decode_step: Duration,
    /// What each further request adds to it.
    pub decode_step_per_request: Duration,
    /// Generated tokens are drawn from `first_token..first_token + token_range`.
    pub first_token: u32,
    /// See `first_token`.
    pub token_range: u32,
}

impl SimSettings {
    /// The nearest settings that an engine can run with: nothing is zero that has to advance.
    fn sane(self) -> Self {
        Self {
            block_size_tokens: self.block_size_tokens.max(1),
            max_running: self.max_running.max(1),
            prefill_chunk_tokens: self.prefill_chunk_tokens.max(1),
            ..self
        }
    }

    /// Time of a step that computes prompt tokens and decodes requests. A rate that is no positive number costs nothing.
    fn step_duration(&self, prefill_tokens: usize, decoding: usize) -> Duration {
        let prefill = Duration::try_from_secs_f64(prefill_tokens as f64 / self.prefill_tokens_per_second);
        let decode = match decoding.checked_sub(1) {
            None => Duration::ZERO,
            Some(further) => {
                let further = self.decode_step_per_request.saturating_mul(u32::try_from(further).unwrap_or(u32::MAX));
                self.decode_step.saturating_add(further)
            }
        };
        prefill.unwrap_or_default().saturating_add(decode)
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimRequest {
    /// Chosen by the caller, unique while it runs.
    pub id: u64,
    /// Prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Tokens to generate; at least one.
    pub max_tokens: u32,
    /// What the first block of its namespace follows.
    pub root: BlockHash,
}

/// What a request has to do with other engines; by default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimTransfer {
    /// Leading prompt tokens whose KV another engine has computed and sent. Whole blocks of them are used.
    pub external_tokens: usize,
    /// Its blocks stay pinned after its end, until [`SimEngine::release`].
    pub keeps_blocks: bool,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The token budget is used up.
    Length,
    /// The text came to its end; see [`SimEngine::stop_after_tokens`].
    Stop,
    /// It was aborted.
    Aborted,
    /// It can never run: prompt and completion need more blocks than the pool has.
    TooLarge,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which.
    pub id: u64,
    /// Why.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that had not to be computed: found in the cache, or sent by another engine.
    pub cached_tokens: u32,
    /// Of these, the ones that another engine sent.
    pub external_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// From submission to the first step that worked on it.
    pub queue: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// From the first to the last token.
    pub decode: Duration,
}

/// What one step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// How long it took; none when there was nothing to do.
    pub duration: Option<Duration>,
    /// New tokens, at most one for each request.
    pub tokens: Vec<(u64, u32)>,
    /// Requests that were placed, with the tokens that the cache had of them; what other engines sent is not among these.
    pub placed: Vec<(u64, u32)>,
    /// Requests that ended.
    pub finished: Vec<Finished>,
    /// What changed in the cache, in order.
    pub events: Vec<EngineEvent>,
    /// How many of `events` happened before the step computed anything: evictions and resets, true from its beginning.
    /// With these applied, a ledger claims for each request in `placed` exactly its cached tokens. The other events are
    /// true at the end of the step.
    pub events_at_begin: usize,
}

/// Numbers of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounters {
    /// Requests with a place.
    pub running: usize,
    /// Requests without.
    pub waiting: usize,
    /// Prompt tokens not yet computed, without those of waiting requests that were cached at their submission.
    pub outstanding_prefill_tokens: u64,
    /// Tokens that running requests hold.
    pub active_tokens: u64,
    /// Blocks of running requests, and pinned ones.
    pub used_blocks: usize,
    /// Blocks of ended requests that are kept for other engines; each once for each request.
    pub pinned_blocks: usize,
    /// Blocks of the pool.
    pub total_blocks: usize,
    /// Steps since the start.
    pub steps: u64,
    /// Tokens generated since the start.
    pub generated_tokens: u64,
    /// Requests ended since the start.
    pub finished_requests: u64,
    /// Prompt tokens that other engines sent, since the start.
    pub external_tokens: u64,
}

#[derive(Debug)]
struct Waiting {
    request: SimRequest,
    transfer: SimTransfer,
    submitted: Duration,
    /// Names of the prompt's blocks that a cache can serve.
    usable: Vec<BlockHash>,
    /// Prompt tokens that the cache could not have served at submission.
    uncached_tokens: u64,
}

impl Waiting {
    fn end(&self, now: Duration, finish: Finish) -> Finished {
        Finished {
            id: self.request.id,
            finish,
            prompt_tokens: u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: 0,
            external_tokens: 0,
            completion_tokens: 0,
            queue: now.saturating_sub(self.submitted),
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        }
    }
}

#[derive(Debug)]
struct Running {
    request: SimRequest,
    keeps_blocks: bool,
    /// Prompt tokens that another engine sent and that the next step takes in.
    arriving: usize,
    external_tokens: usize,
    submitted: Duration,
    placed: Duration,
    first_token: Option<Duration>,
    cached_tokens: usize,
    /// Prompt tokens computed, found or taken in.
    computed: usize,
    generated: u32,
    /// Names of the blocks that are whole.
    named: Vec<BlockHash>,
    /// Nameless blocks it holds.
    private: usize,
    hasher: BlockHasher,
    block_size_tokens: usize,
    /// Tokens of the block that is not whole yet.
    open: Vec<u32>,
    seed: u64,
}

/// The engine: submit, step, read.
#[derive(Debug)]
pub struct SimEngine {
    settings: SimSettings,
    stop_after_tokens: Option<u32>,
    pool: Pool,
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    aborted: HashSet<u64>,
    /// Pinned blocks of ended requests.
    kept: HashMap<u64, Vec<BlockHash>>,
    counters: SimCounters,
    pending_events: Vec<EngineEvent>,
}

impl SimEngine {
    /// An idle engine with an empty cache.
    #[must_use]
    pub fn new(settings: SimSettings) -> Self {
        let settings = settings.sane();
        Self {
            settings,
            stop_after_tokens: None,
            pool: Pool::new(settings.blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            aborted: HashSet::new(),
            kept: HashMap::new(),
            counters: SimCounters::default(),
            pending_events: Vec::new(),
        }
    }

    /// Ends every request that may generate more after so many tokens, with [`Finish::Stop`]. Without it all texts go on
    /// to their budget. To be said before the first request.
    #[must_use]
    pub fn stop_after_tokens(mut self, tokens: u32) -> Self {
        self.stop_after_tokens = Some(tokens.max(1));
        self
    }

    /// Takes a request; it is placed by a later step.
    pub fn submit(&mut self, now: Duration, request: SimRequest) {
        self.submit_with(now, request, SimTransfer::default());
    }

    /// The same for a request of which other engines compute a part.
    pub fn submit_with(&mut self, now: Duration, request: SimRequest, transfer: SimTransfer) {
        let block_size = self.settings.block_size_tokens;
        let mut usable = block_hashes(request.root, &request.prompt, block_size);
        usable.truncate(usable_blocks(request.prompt.len(), block_size));
        let (hits, _) = self.pool.prefix(&usable);
        let given = (hits * block_size).max(transfer.external_tokens / block_size * block_size);
        let uncached_tokens = request.prompt.len().saturating_sub(given) as u64;
        self.waiting.push_back(Waiting { request, transfer, submitted: now, usable, uncached_tokens });
    }

    /// Gives back what is kept of an ended request; one that still runs will keep nothing. An unknown id is ignored.
    pub fn release(&mut self, id: u64) {
        if let Some(kept) = self.kept.remove(&id) {
            self.pool.unpin(&kept);
        }
        self.running.iter_mut().filter(|one| one.request.id == id).for_each(|one| one.keeps_blocks = false);
        self.waiting.iter_mut().filter(|one| one.request.id == id).for_each(|one| one.transfer.keeps_blocks = false);
    }

    /// Ends a request with the next step. An unknown id is ignored.
    pub fn abort(&mut self, id: u64) {
        let known = self.running.iter().any(|running| running.request.id == id)
            || self.waiting.iter().any(|waiting| waiting.request.id == id);
        if known {
            self.aborted.insert(id);
        }
    }

    /// Whether a step would do anything.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.pending_events.is_empty()
    }

    /// Forgets all blocks that no running request uses; returns how many.
    pub fn reset_cache(&mut self) -> usize {
        self.pool.reset(&mut self.pending_events)
    }

    /// Numbers as of the last step.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        let running: u64 = self.running.iter().map(|one| (one.request.prompt.len() - one.computed) as u64).sum();
        let waiting: u64 = self.waiting.iter().map(|waiting| waiting.uncached_tokens).sum();
        SimCounters {
            running: self.running.len(),
            waiting: self.waiting.len(),
            outstanding_prefill_tokens: running + waiting,
            active_tokens: self.running.iter().map(|one| one.computed as u64 + u64::from(one.generated)).sum(),
            used_blocks: self.pool.used(),
            pinned_blocks: self.kept.values().map(Vec::len).sum(),
            total_blocks: self.settings.blocks,
            ..self.counters
        }
    }

    /// One step that begins at `now`: places what fits, computes a chunk of prompts, decodes one token for each request
    /// whose prompt is computed. Tokens and ends are valid at `now + duration`.
    pub fn step(&mut self, now: Duration) -> Step {
        let mut step = Step { events: std::mem::take(&mut self.pending_events), ..Step::default() };
        self.end_aborted(now, &mut step);
        self.place(now, &mut step);
        step.events_at_begin = step.events.len();
        if self.running.is_empty() {
            return step;
        }
        let mut budget = self.settings.prefill_chunk_tokens;
        let mut prefilled = 0usize;
        let mut decoding = Vec::new();
        for (position, running) in self.running.iter_mut().enumerate() {
            let arriving = std::mem::take(&mut running.arriving);
            if arriving > 0 {
                let from = running.computed;
                running.computed += arriving;
                running.keep_prompt(from, &mut self.pool, &mut step.events);
                self.counters.external_tokens += arriving as u64;
            }
            let missing = running.request.prompt.len() - running.computed;
            let chunk = missing.min(budget);
            if chunk > 0 {
                let from = running.computed;
                running.computed += chunk;
                (budget, prefilled) = (budget - chunk, prefilled + chunk);
                running.keep_prompt(from, &mut self.pool, &mut step.events);
            }
            if running.computed == running.request.prompt.len() {
                decoding.push(position);
            }
        }
        let duration = self.settings.step_duration(prefilled, decoding.len());
        let end = now.saturating_add(duration);
        for position in decoding {
            let running = &mut self.running[position];
            let offset = next_token(running.seed, running.generated) % self.settings.token_range.max(1);
            let token = self.settings.first_token.saturating_add(offset);
            running.first_token.get_or_insert(end);
            running.generated += 1;
            self.counters.generated_tokens += 1;
            step.tokens.push((running.request.id, token));
            // The last token is never computed on, so its KV does not exist.
            if running.finish(self.stop_after_tokens).is_none() {
                running.keep(token, &mut self.pool, &mut step.events);
            }
        }
        let stop_after_tokens = self.stop_after_tokens;
        let (pool, kept, counters) = (&mut self.pool, &mut self.kept, &mut self.counters);
        self.running.retain_mut(|running| {
            let Some(finish) = running.finish(stop_after_tokens) else { return true };
            if running.keeps_blocks {
                // Pinned once more, so that they stay in use when the request gives them back.
                pool.pin(&running.named);
                kept.insert(running.request.id, running.named.clone());
            }
            step.finished.push(running.end(finish, end, pool));
            counters.finished_requests += 1;
            false
        });
        self.counters.steps += 1;
        step.duration = Some(duration);
        step
    }

    fn end_aborted(&mut self, now: Duration, step: &mut Step) {
        if self.aborted.is_empty() {
            return;
        }
        let aborted = std::mem::take(&mut self.aborted);
        let (pool, counters) = (&mut self.pool, &mut self.counters);
        self.waiting.retain(|waiting| {
            let ends = aborted.contains(&waiting.request.id);
            if ends {
                step.finished.push(waiting.end(now, Finish::Aborted));
                counters.finished_requests += 1;
            }
            !ends
        });
        self.running.retain_mut(|running| {
            let ends = aborted.contains(&running.request.id);
            if ends {
                step.finished.push(running.end(Finish::Aborted, now, pool));
                counters.finished_requests += 1;
            }
            !ends
        });
    }

    fn place(&mut self, now: Duration, step: &mut Step) {
        let block_size = self.settings.block_size_tokens;
        while self.running.len() < self.settings.max_running {
            let Some(first) = self.waiting.front() else { return };
            // Everything the request can need is taken now, so that a running one never waits for blocks.
            let most_tokens = first.request.max_tokens.min(self.stop_after_tokens.unwrap_or(u32::MAX));
            let needed = (first.request.prompt.len() + most_tokens as usize).div_ceil(block_size);
            if needed > self.settings.blocks {
                step.finished.push(first.end(now, Finish::TooLarge));
                self.counters.finished_requests += 1;
                self.waiting.pop_front();
                continue;
            }
            let (hits, unused_hits) = self.pool.prefix(&first.usable);
            if needed - hits + unused_hits > self.pool.available() {
                return;
            }
            let Some(Waiting { request, transfer, submitted, mut usable, .. }) = self.waiting.pop_front() else {
                return;
            };
            let sent = (transfer.external_tokens / block_size).min(usable.len());
            let arriving = sent.saturating_sub(hits) * block_size;
            usable.truncate(hits);
            self.pool.pin(&usable);
            self.pool.take(needed - hits, &mut step.events);
            let cached_tokens = hits * block_size + arriving;
            let parent = usable.last().copied().unwrap_or(request.root);
            step.placed.push((request.id, u32::try_from(hits * block_size).unwrap_or(u32::MAX)));
            self.running.push(Running {
                submitted,
                placed: now,
                first_token: None,
                keeps_blocks: transfer.keeps_blocks,
                arriving,
                external_tokens: arriving,
                cached_tokens,
                computed: hits * block_size,
                generated: 0,
                named: usable,
                private: needed - hits,
                hasher: BlockHasher::new(parent, block_size),
                block_size_tokens: block_size,
                open: Vec::with_capacity(block_size),
                seed: seed_of(&request.prompt),
                request,
            });
        }
    }
}

impl Running {
    /// Keeps the prompt tokens that were computed since there were `from`.
    fn keep_prompt(&mut self, from: usize, pool: &mut Pool, events: &mut Vec<EngineEvent>) {
        let prompt = std::mem::take(&mut self.request.prompt);
        self.keep_all(&prompt[from..self.computed], pool, events);
        self.request.prompt = prompt;
    }

    /// Takes a computed token into the request's blocks.
    fn keep(&mut self, token: u32, pool: &mut Pool, events: &mut Vec<EngineEvent>) {
        self.keep_all(&[token], pool, events);
    }

    /// Takes computed tokens into the request's blocks and names each block that became whole.
    fn keep_all(&mut self, mut tokens: &[u32], pool: &mut Pool, events: &mut Vec<EngineEvent>) {
        let mut whole = Vec::new();
        while !tokens.is_empty() {
            let missing = self.block_size_tokens - self.open.len();
            let (now, later) = tokens.split_at(missing.min(tokens.len()));
            tokens = later;
            self.open.extend_from_slice(now);
            self.hasher.push(now, &mut whole);
            if let Some(hash) = whole.pop() {
                pool.name(hash, self.named.last().copied(), self.request.root, &self.open, events);
                self.private -= 1;
                self.named.push(hash);
                self.open.clear();
            }
        }
    }

    /// Why the request ends now; none while it goes on.
    fn finish(&self, stop_after_tokens: Option<u32>) -> Option<Finish> {
        if self.generated >= self.request.max_tokens {
            Some(Finish::Length)
        } else if stop_after_tokens.is_some_and(|tokens| self.generated >= tokens) {
            Some(Finish::Stop)
        } else {
            None
        }
    }

    fn end(&mut self, finish: Finish, now: Duration, pool: &mut Pool) -> Finished {
        pool.give_back(self.private);
        pool.unpin(&self.named);
        let first_token = self.first_token.unwrap_or(now);
        Finished {
            id: self.request.id,
            finish,
            prompt_tokens: u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: u32::try_from(self.cached_tokens).unwrap_or(u32::MAX),
            external_tokens: u32::try_from(self.external_tokens).unwrap_or(u32::MAX),
            completion_tokens: self.generated,
            queue: self.placed.saturating_sub(self.submitted),
            prefill: first_token.saturating_sub(self.placed),
            decode: now.saturating_sub(first_token),
        }
    }
}

/// FNV-1a over the prompt: all that generated tokens depend on.
fn seed_of(prompt: &[u32]) -> u64 {
    prompt.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3))
}

/// SplitMix64 of the seed and the position.
fn next_token(seed: u64, position: u32) -> u32 {
    let mut value = seed.wrapping_add(u64::from(position).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((value ^ (value >> 31)) >> 33) as u32
}
