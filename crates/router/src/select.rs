//! The choice of a target for a tokenized prompt, and the reservation that goes with it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_blocks::{BlockHash, Namespace, Rank, SourceKey, block_hashes, usable_blocks};
use kvist_index::{Holder, Index, Overlaps, RecentDecisions, RecentOverlap};
use kvist_proto::engine::v1::WorkerDescription;
use kvist_proto::events::v1::LoadReport;
use kvist_schedule::{
    Book, Candidate, Draws, EngineReport, Load, Outcome, OverlapCursor, Request, ReservationId, Round, TargetId,
    TargetPromise, cached_prompt, expected_output_tokens, recent_is_valid_for,
};
use kvist_text::ModelText;
use parking_lot::Mutex;

use crate::{
    cluster::{ClusterView, ModelView},
    explain::{Claim, SeenCandidate},
    needs::Needs,
    parts::{About, Behind, Choice, Field, Intent, Parts, group_of},
    target::WorkerNode,
};

/// Bounds the memory of recent decisions: about 1,500 prompts of 100,000 tokens, or 20,000 of 200; some 13 MB.
const MOST_RECENT_MARKS: usize = 200_000;

/// What a prompt needs of a target.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub(crate) request_id: Arc<str>,
    pub(crate) tokens: Arc<Vec<u32>>,
    /// Tokens of other prompts that go to the same target with it, whose place in caches is not looked at.
    pub(crate) further_tokens: u64,
    pub(crate) adapter: String,
    pub(crate) cache_salt: String,
    pub(crate) max_tokens: Option<u32>,
    /// The text that the prompt was tokenized with.
    pub(crate) text: Option<Arc<ModelText>>,
    pub(crate) needs: Needs,
    /// Names a conversation; none when the client names none.
    pub(crate) session: Option<Arc<str>>,
    /// How long it has waited to be let in; none when it does not come by the door.
    pub(crate) queued_for: Option<Duration>,
}

impl Demand {
    /// Tokens that it is expected to need, prompt and answer.
    pub(crate) fn expected_tokens(&self) -> u64 {
        self.tokens.len() as u64 + expected_output_tokens(self.max_tokens)
    }
}

/// Where a request goes.
#[derive(Debug)]
pub(crate) struct Placement {
    pub(crate) node: Arc<WorkerNode>,
    pub(crate) rank: u32,
    pub(crate) reservation: Option<Reservation>,
    /// Prompt tokens expected in the cache; none when the index does not speak for the source.
    pub(crate) expected_cached_tokens: Option<u32>,
    /// Prompt tokens that may wait there; with more, another target is better.
    pub(crate) most_waiting_tokens: Option<u64>,
    /// When it was noted where the prompt goes.
    pub(crate) noted_at: Duration,
}

/// A promise that ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    book: Arc<Mutex<Book>>,
    id: ReservationId,
}

impl Reservation {
    /// The prompt has been computed; what is left is the answer.
    pub(crate) fn prefilled(&self) {
        self.book.lock().reservations.prefilled(self.id);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.book.lock().reservations.release(self.id);
    }
}

/// Chooses targets and keeps the book of promises.
#[derive(Debug)]
pub(crate) struct Selector {
    pub(crate) index: Arc<Index>,
    book: Arc<Mutex<Book>>,
    recent: Mutex<RecentDecisions>,
    /// From which `recent` and `book` count time.
    started: Instant,
}

/// What is known of a prompt in one block size and namespace.
#[derive(Default)]
pub(crate) struct Matches {
    hashes: Vec<BlockHash>,
    /// None for a prompt without a block that a cache can serve.
    overlaps: Option<Overlaps>,
    recent: Vec<RecentOverlap>,
}

impl Matches {
    /// Blocks that recent decisions have sent to a target; how old a decision may be depends on what the index knows.
    fn recent_blocks(&self, node: &WorkerNode, target: &TargetId, is_exact: bool) -> usize {
        let valid_for = recent_is_valid_for(is_exact);
        let is_of_target = |overlap: &&RecentOverlap| {
            let Holder { source, incarnation } = &*overlap.holder;
            source.worker == target.worker && source.rank == target.rank && *incarnation == node.incarnation
        };
        let found = self.recent.iter().filter(is_of_target).find(|overlap| overlap.age <= valid_for);
        found.map_or(0, |overlap| overlap.blocks as usize)
    }
}

impl Selector {
    pub(crate) fn new(index: Arc<Index>) -> Self {
        let recent = Mutex::new(RecentDecisions::new(MOST_RECENT_MARKS, recent_is_valid_for(false)));
        Self { index, book: Arc::default(), recent, started: Instant::now() }
    }

    /// Bytes of what is kept of recent decisions.
    pub(crate) fn recent_bytes(&self) -> usize {
        self.recent.lock().bytes()
    }

    /// Open reservations and their tokens at a target.
    pub(crate) fn promise(&self, target: &TargetId) -> TargetPromise {
        self.book.lock().reservations.of(target)
    }

    /// Open reservations.
    pub(crate) fn open_reservations(&self) -> usize {
        self.book.lock().reservations.len()
    }

    /// Requests that workers take before all of them are saturated; none when no worker takes any.
    pub(crate) fn room(&self, workers: &[Arc<WorkerNode>], threshold: f64) -> Option<u64> {
        let now = self.started.elapsed();
        let mut room: Option<u64> = None;
        let usable = workers.iter().filter(|node| node.excluded().is_none() && node.answers());
        for node in usable {
            let most_running = node.description().and_then(|description| most_running(&description));
            for rank in 0..node.ranks() {
                let report = self.report(node, rank);
                let target = node.target_id(rank);
                let saturation = self.book.lock().saturation(now, &target, report.as_ref(), most_running);
                room = Some(room.unwrap_or(0).saturating_add(saturation.room(threshold)));
            }
        }
        room
    }

    /// What an engine last said of itself.
    fn report(&self, node: &WorkerNode, rank: u32) -> Option<EngineReport> {
        let load = node.connection.as_ref()?.link.load(rank)?;
        Some(engine_report(&load.report, load.received_at.saturating_duration_since(self.started)))
    }

    /// Chooses a target; with `reserve` it also promises it the work, under one lock. The decision is returned in any
    /// case, so that a refusal can be explained too. A request that may be divided and is worth it gets a prefill target,
    /// and a decode target behind it.
    pub(crate) fn select(
        &self,
        view: &ClusterView,
        model: &ModelView,
        demand: &Demand,
        tried: &[TargetId],
        attempt: u32,
        intent: Intent,
    ) -> Choice {
        let reserve = intent != Intent::Explain;
        let started = Instant::now();
        let prompt_tokens = demand.tokens.len();
        // What generates needs room for a token.
        let room = usize::from(!demand.needs.embeddings);
        let mut lookups: Vec<(&str, usize, Matches)> = Vec::with_capacity(1);
        let mut positions = Vec::with_capacity(model.workers.len());
        for node in &model.workers {
            let (namespace, block_size) = (node.entry.namespace.as_str(), node.block_size());
            let known = lookups.iter().position(|(name, size, _)| *name == namespace && *size == block_size);
            positions.push(known.unwrap_or_else(|| {
                lookups.push((namespace, block_size, self.look_up(view, demand, namespace, block_size)));
                lookups.len() - 1
            }));
        }
        let mut cursors: Vec<Option<OverlapCursor<'_>>> =
            lookups.iter().map(|(_, _, matches)| matches.overlaps.as_ref().map(OverlapCursor::new)).collect();
        let mut candidates = Vec::with_capacity(model.workers.len());
        let mut seen = Vec::with_capacity(model.workers.len());
        let mut nodes = Vec::with_capacity(model.workers.len());
        let mut reports = Vec::with_capacity(model.workers.len());
        let mut missing = None;
        for (node, position) in model.workers.iter().zip(positions) {
            let unavailable = node.excluded().or_else(|| text_differs(node, demand));
            let description = node.description();
            let mut unsuitable = None;
            let mut most_running = None;
            if let Some(description) = &description {
                let limits = description.limits.unwrap_or_default();
                most_running = self::most_running(description);
                let lacks =
                    demand.needs.missing(&description.capabilities.unwrap_or_default(), limits.max_top_logprobs);
                if let Some(lacks) = lacks {
                    missing = missing.or_else(|| unavailable.is_none().then_some(lacks));
                    unsuitable = Some("lacks_capability");
                } else if limits.context_tokens > 0 && prompt_tokens + room > limits.context_tokens as usize {
                    unsuitable = Some("context_too_short");
                }
            }
            let block_size = node.block_size();
            let usable = usable_blocks(prompt_tokens, block_size);
            for rank in 0..node.ranks() {
                let target = TargetId { worker: node.uid.clone(), rank: Rank(rank) };
                let overlap = cursors
                    .get_mut(position)
                    .and_then(|cursor| cursor.as_mut()?.get(&target))
                    .filter(|overlap| overlap.incarnation == node.incarnation);
                let is_exact = overlap.is_some_and(|overlap| overlap.state.is_exact());
                let recent = lookups
                    .get(position)
                    .map_or(0, |(_, _, matches)| matches.recent_blocks(node, &target, is_exact).min(usable));
                let report = self.report(node, rank);
                seen.push(SeenCandidate {
                    target: target.clone(),
                    claim: overlap.map(|overlap| Claim {
                        incarnation: overlap.incarnation,
                        state: overlap.state,
                        applied_sequence: overlap.applied_sequence,
                        tier_blocks: overlap.tier_blocks,
                        matched_blocks: overlap.matched_blocks,
                    }),
                    recent_blocks: to_u32(recent),
                    uncached_tokens: 0,
                    promised_tokens: 0,
                    cost: None,
                    terms: None,
                    excluded: None,
                });
                let tried = tried.contains(&target).then_some("already_tried");
                candidates.push(Candidate {
                    unavailable: unavailable.or(tried),
                    unsuitable,
                    // Who hands nothing over is of no group.
                    group: if node.round() == Round::Aggregate { 0 } else { group_of(node, description.as_deref()) },
                    cached: cached_prompt(overlap, recent, usable, block_size),
                    block_size_tokens: block_size as u64,
                    most_running,
                    ..Candidate::new(target)
                });
                nodes.push((node, rank));
                reports.push(report);
            }
        }
        let request = Request {
            prompt_tokens: prompt_tokens as u64 + demand.further_tokens,
            expected_output_tokens: expected_output_tokens(demand.max_tokens),
            session: demand.session.clone(),
            ..Request::default()
        };
        let pipeline = model.state.pipeline();
        let now = self.started.elapsed();
        let field = Field { candidates, seen, nodes, reports };
        let about = About {
            model,
            demand,
            attempt,
            started,
            now,
            request,
            policy: pipeline.summary().into(),
            lookups: &lookups,
            missing,
            reserve,
        };
        let (health_now, mut breakers) = model.state.health.during_choice();
        let mut field = field;
        if !breakers.is_all_well() {
            for candidate in &mut field.candidates {
                candidate.is_broken = breakers.is_broken(health_now, &candidate.target);
            }
        }
        let parts = Parts::of(field, model, &about.request, intent != Intent::Whole);
        // Decided and promised under one lock: two requests at once do not both see an idle target, nor probe one.
        let mut book = self.book.lock();
        let mut sent = |target: &TargetId| {
            if reserve {
                breakers.sent(health_now, target);
            }
        };
        let mut draws = Draws::new(rand::random());
        let (mut whole, local_prefill_reason) = match parts {
            Parts::Whole { field, local_prefill_reason } => (field, local_prefill_reason),
            Parts::Pair { mut prefill, mut decode } => {
                book.describe(now, &mut prefill.candidates, &prefill.reports);
                book.describe(now, &mut decode.candidates, &decode.reports);
                let (first, second) = (&prefill.candidates, &decode.candidates);
                let (pair, ids) = book.decide_pair(now, &pipeline, &about.request, first, second, &mut draws, reserve);
                if let (Outcome::Selected, Some(behind)) = (pair.outcome, pair.decode) {
                    prefill.chosen(&pair.prefill).iter().for_each(&mut sent);
                    decode.chosen(&behind).iter().for_each(&mut sent);
                    drop((book, breakers));
                    let held = |id| Reservation { book: Arc::clone(&self.book), id };
                    let (first, second) = ids.map_or((None, None), |(one, two)| (Some(held(one)), Some(held(two))));
                    let of = |round| about.of_round(round);
                    let (decision, placement) = self.conclude(&of(Round::Prefill), prefill, pair.prefill, first, "");
                    let (behind, behind_placement) = self.conclude(&of(Round::Decode), decode, behind, second, "");
                    let behind = Some(Behind { decision: behind, placement: behind_placement });
                    return Choice { decision, placement, behind };
                }
                (decode.with(prefill), "no_pair")
            }
        };
        book.describe(now, &mut whole.candidates, &whole.reports);
        let (mut decision, id) = book.decide(now, &pipeline, &about.request, &whole.candidates, &mut draws, reserve);
        let lacks_decode = |one: &Candidate| one.unavailable == Some("no_matching_decode");
        if decision.outcome == Outcome::NoMatchingTarget && whole.candidates.iter().any(lacks_decode) {
            decision.outcome = Outcome::NoMatchingDecode;
        }
        whole.chosen(&decision).iter().for_each(&mut sent);
        drop((book, breakers));
        let reservation = id.map(|id| Reservation { book: Arc::clone(&self.book), id });
        let (decision, placement) = self.conclude(&about, whole, decision, reservation, local_prefill_reason);
        Choice { decision, placement, behind: None }
    }

    /// The target has refused the prompt, so nothing of it comes into its cache.
    pub(crate) fn take_back(&self, view: &ClusterView, demand: &Demand, placement: &Placement) {
        let node = &placement.node;
        let hashes = hashes(view, demand, &node.entry.namespace, node.block_size());
        let source = SourceKey { worker: node.uid.clone(), rank: Rank(placement.rank) };
        let holder = Holder { source, incarnation: node.incarnation };
        self.recent.lock().take_back(placement.noted_at, &holder, &hashes);
    }

    /// The prompt goes to the target now, and not when it was chosen.
    pub(crate) fn sent(&self, view: &ClusterView, demand: &Demand, placement: &mut Placement) {
        placement.noted_at = self.started.elapsed();
        let node = &placement.node;
        let hashes = hashes(view, demand, &node.entry.namespace, node.block_size());
        if !hashes.is_empty() {
            let source = SourceKey { worker: node.uid.clone(), rank: Rank(placement.rank) };
            let holder = Holder { source, incarnation: node.incarnation };
            self.recent.lock().note(placement.noted_at, holder, &hashes);
        }
    }

    fn look_up(&self, view: &ClusterView, demand: &Demand, namespace: &str, block_size: usize) -> Matches {
        let hashes = hashes(view, demand, namespace, block_size);
        if hashes.is_empty() {
            return Matches::default();
        }
        let overlaps = Some(self.index.lookup(&hashes));
        let recent = self.recent.lock().look_up(self.started.elapsed(), &hashes);
        Matches { hashes, overlaps, recent }
    }

    /// Remembers where a prompt was sent, until the events tell what came of it.
    pub(crate) fn note(&self, now: Duration, node: &WorkerNode, rank: u32, lookups: &[(&str, usize, Matches)]) {
        let known = lookups
            .iter()
            .find(|(namespace, size, _)| *namespace == node.entry.namespace && *size == node.block_size());
        if let Some((_, _, matches)) = known.filter(|(_, _, matches)| !matches.hashes.is_empty()) {
            let source = SourceKey { worker: node.uid.clone(), rank: Rank(rank) };
            let holder = Holder { source, incarnation: node.incarnation };
            self.recent.lock().note(now, holder, &matches.hashes);
        }
    }
}

/// Requests that a worker runs at once; none when it does not say.
fn most_running(description: &WorkerDescription) -> Option<u64> {
    let most = description.limits.unwrap_or_default().max_running_requests;
    (most > 0).then_some(u64::from(most))
}

/// Names of a prompt's blocks that a cache can serve.
fn hashes(view: &ClusterView, demand: &Demand, namespace: &str, block_size: usize) -> Vec<BlockHash> {
    let usable = usable_blocks(demand.tokens.len(), block_size);
    let root = Namespace::new(namespace, &demand.adapter, &demand.cache_salt).root(view.seed());
    block_hashes(root, demand.tokens.get(..usable * block_size).unwrap_or_default(), block_size)
}

fn engine_report(report: &LoadReport, received_at: Duration) -> EngineReport {
    let blocks = (report.total_blocks > 0).then_some(report.total_blocks);
    let load = Load {
        running: u64::from(report.running_requests),
        waiting: u64::from(report.waiting_requests),
        kv_usage: blocks.map(|blocks| report.used_blocks as f64 / blocks as f64),
        kv_blocks: blocks,
    };
    EngineReport {
        received_at,
        load,
        outstanding_prefill_tokens: report.outstanding_prefill_tokens,
        prefill_tokens_per_second: report.prefill_tokens_per_second,
    }
}

pub(crate) fn to_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// During a rollout to another tokenizer, a prompt fits only workers of the one it was encoded with.
fn text_differs(node: &WorkerNode, demand: &Demand) -> Option<&'static str> {
    let connection = node.connection.as_ref()?;
    let of_node = connection.text.load();
    match (of_node.as_ref(), &demand.text) {
        (Some(left), Some(right)) => {
            (!Arc::ptr_eq(left, right) && left.digest() != right.digest()).then_some("tokenizer_differs")
        }
        (None, Some(_)) | (Some(_), None) => Some("tokenizer_differs"),
        (None, None) => None,
    }
}
