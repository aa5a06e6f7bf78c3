//! Which targets a choice is between: all that answer, or prefill targets and the decode targets behind them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_errors::KvistError;
use kvist_proto::engine::v1::WorkerDescription;
use kvist_schedule::{Candidate, Decision, EngineReport, Request, Round, RoundSettings, TargetId, plan_rounds};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    cluster::ModelView,
    explain::{SeenCandidate, SeenDecision},
    select::{Demand, Matches, Placement},
    target::WorkerNode,
};

/// What a choice is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// To send the request, in two parts where that is better.
    Send,
    /// To let somebody else send it, who knows nothing of parts.
    Whole,
    /// To say what would be done: nothing is promised.
    Explain,
}

/// What was chosen.
#[derive(Debug)]
pub(crate) struct Choice {
    /// The decision, of the prompt where the request is divided.
    pub(crate) decision: Arc<SeenDecision>,
    /// Where it goes.
    pub(crate) placement: Result<Placement, KvistError>,
    /// Who answers then; none where the request is not divided.
    pub(crate) behind: Option<Behind>,
}

/// The decode target behind a prefill target.
#[derive(Debug)]
pub(crate) struct Behind {
    pub(crate) decision: Arc<SeenDecision>,
    pub(crate) placement: Result<Placement, KvistError>,
}

impl Choice {
    /// The decisions, in order.
    pub(crate) fn decisions(&self) -> impl Iterator<Item = &Arc<SeenDecision>> {
        std::iter::once(&self.decision).chain(self.behind.as_ref().map(|behind| &behind.decision))
    }
}

/// What all parts of a choice have in common.
pub(crate) struct About<'a> {
    pub(crate) model: &'a ModelView,
    pub(crate) demand: &'a Demand,
    pub(crate) attempt: u32,
    pub(crate) started: Instant,
    /// On the clock of the selector's book.
    pub(crate) now: Duration,
    pub(crate) request: Request,
    pub(crate) policy: Arc<str>,
    pub(crate) lookups: &'a [(&'a str, usize, Matches)],
    /// What no engine that takes requests can do: the field, and why.
    pub(crate) missing: Option<(&'static str, &'static str)>,
    pub(crate) reserve: bool,
}

impl About<'_> {
    /// The same for a part of the request.
    pub(crate) fn of_round(&self, round: Round) -> Self {
        let request = Request { round, ..self.request.clone() };
        Self { request, policy: Arc::clone(&self.policy), ..*self }
    }
}

/// Candidates with all that is known of them; the lists are of one length.
#[derive(Default)]
pub(crate) struct Field<'a> {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) seen: Vec<SeenCandidate>,
    pub(crate) nodes: Vec<(&'a Arc<WorkerNode>, u32)>,
    pub(crate) reports: Vec<Option<EngineReport>>,
}

impl<'a> Field<'a> {
    fn push(&mut self, one: (Candidate, SeenCandidate, (&'a Arc<WorkerNode>, u32), Option<EngineReport>)) {
        self.candidates.push(one.0);
        self.seen.push(one.1);
        self.nodes.push(one.2);
        self.reports.push(one.3);
    }

    fn into_each(
        self,
    ) -> impl Iterator<Item = (Candidate, SeenCandidate, (&'a Arc<WorkerNode>, u32), Option<EngineReport>)> {
        let lists = self.candidates.into_iter().zip(self.seen).zip(self.nodes).zip(self.reports);
        lists.map(|(((candidate, seen), node), report)| (candidate, seen, node, report))
    }

    /// Adds candidates of another role, to be shown and not to be chosen.
    pub(crate) fn with(mut self, others: Self) -> Self {
        for (candidate, seen, node, report) in others.into_each() {
            let unavailable = candidate.unavailable.or(Some("role"));
            self.push((Candidate { unavailable, ..candidate }, seen, node, report));
        }
        self
    }

    /// The target that a decision chose.
    pub(crate) fn chosen(&self, decision: &Decision) -> Option<TargetId> {
        let candidate = decision.chosen.and_then(|chosen| self.candidates.get(chosen))?;
        Some(candidate.target.clone())
    }

    /// Those of some roles, and the others.
    fn divided(self, is_in: impl Fn(Round) -> bool) -> (Self, Self) {
        let (mut inside, mut outside) = (Self::default(), Self::default());
        for one in self.into_each() {
            if is_in(one.2.0.round()) { &mut inside } else { &mut outside }.push(one);
        }
        (inside, outside)
    }
}

/// The candidates by what they are wanted for.
pub(crate) enum Parts<'a> {
    /// One target does all of it.
    Whole {
        field: Field<'a>,
        /// Why there are not two although there are prefill targets; empty otherwise.
        local_prefill_reason: &'static str,
    },
    /// One computes the prompt and another one answers.
    Pair { prefill: Field<'a>, decode: Field<'a> },
}

impl<'a> Parts<'a> {
    /// Plans the rounds of a request by who is there and how much of the prompt is nowhere cached.
    pub(crate) fn of(field: Field<'a>, model: &ModelView, request: &Request, may_divide: bool) -> Self {
        let usable = |one: &Candidate| one.unavailable.is_none() && one.unsuitable.is_none() && !one.is_broken;
        let with_rounds = || field.candidates.iter().zip(field.nodes.iter().map(|(node, _)| node.round()));
        if with_rounds().all(|(_, round)| round == Round::Aggregate) {
            return Self::Whole { field, local_prefill_reason: "" };
        }
        let roles: Vec<Round> = with_rounds().filter(|(one, _)| usable(one)).map(|(_, round)| round).collect();
        let decoders = with_rounds().filter(|(one, round)| *round == Round::Decode && usable(one));
        let uncached = decoders.map(|(one, _)| one.uncached_tokens(request)).min().unwrap_or(request.prompt_tokens);
        let has_prefill = with_rounds().any(|(_, round)| round == Round::Prefill);
        let Some(plan) = plan_rounds(&roles, false, uncached, settings_of(model)) else {
            // Nobody answers. Those that could are named first, and why they do not.
            let (mut answering, mut others) = field.divided(|round| matches!(round, Round::Aggregate | Round::Decode));
            for one in others.candidates.iter_mut().filter(|one| usable(one)) {
                one.unavailable = Some("no_matching_decode");
            }
            answering = answering.with(others);
            return Self::Whole { field: answering, local_prefill_reason: "" };
        };
        if plan.is_split && may_divide {
            let (prefill, others) = field.divided(|round| round == Round::Prefill);
            let (decode, others) = others.divided(|round| round == Round::Decode);
            return Self::Pair { prefill, decode: decode.with(others) };
        }
        let local_prefill_reason = match (plan.whole, has_prefill) {
            (Round::Decode, true) if !may_divide => "not_asked",
            (Round::Decode, true) if !roles.contains(&Round::Prefill) => "no_prefill",
            (Round::Decode, true) => "short",
            _ => "",
        };
        let (whole, others) = field.divided(|round| round == plan.whole);
        Self::Whole { field: whole.with(others), local_prefill_reason }
    }
}

fn settings_of(model: &ModelView) -> RoundSettings {
    let stated = model.model.hand_over.as_ref().map(|hand_over| hand_over.prefill_from_tokens).filter(|from| *from > 0);
    stated.map_or_else(RoundSettings::default, |from| RoundSettings { prefill_from_uncached_tokens: from.into() })
}

/// Prefill and decode targets of equal groups can hand KV to each other: what the controller groups, of one connector, one
/// block size, and the same division of contexts. Whether tensor parallelism fits is checked where pools are applied.
pub(crate) fn group_of(node: &WorkerNode, description: Option<&WorkerDescription>) -> u64 {
    let mut hasher = Xxh3::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(node.target.group.as_bytes());
    add(&node.entry.block_size_tokens.to_le_bytes());
    if let Some(layout) = description.and_then(|description| description.kv_layout.as_ref()) {
        add(layout.connector.as_bytes());
        add(&layout.prefill_context_parallel_size.to_le_bytes());
        add(&layout.decode_context_parallel_size.to_le_bytes());
    }
    hasher.digest()
}
