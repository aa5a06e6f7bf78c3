//! The scorers by name. Each is a pure function of the candidates and of what was picked before.

use std::collections::VecDeque;

use kvist_blocks::Tier;

use crate::{
    Candidate, CostTerms, Request, Round, Score, TargetId,
    cost::{CostParameters, Neutral},
    draws::mix,
    score::{locality, tier_rank},
};

/// A scorer with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scorer {
    Cost(CostParameters),
    KvLeastLoaded,
    LeastLoaded,
    Uniform,
    QueueDepth,
    RunningRequest,
    KvCacheUtilization,
    ActiveRequest { idle_threshold: f64, max_busy_score: f64 },
    TokenLoad { threshold: f64 },
    Prefix { length_weight: f64, length_scale: f64 },
    NoHitLru { size: usize },
    LoadAware { threshold: f64 },
    TwoTier { cache_threshold: f64, absolute: f64, relative: f64 },
    Session { load_bound: f64 },
    RoundRobin,
}

/// What scorers remember of earlier picks. It outlives a change of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Targets of cold prompts, longest unused first.
    cold: VecDeque<TargetId>,
    /// Targets of all prompts, longest unused first.
    all: VecDeque<TargetId>,
}

/// Targets that `round_robin` remembers.
const ROTATION_SIZE: usize = 4096;

impl Memory {
    fn note(list: &mut VecDeque<TargetId>, target: &TargetId, size: usize) {
        if let Some(position) = list.iter().position(|known| known == target) {
            list.remove(position);
        }
        list.push_back(target.clone());
        while list.len() > size {
            list.pop_front();
        }
    }
}

/// Scores of all candidates, in their order.
pub(crate) struct Scored {
    pub(crate) scores: Vec<Score>,
    /// In the same order; empty for other scorers than `cost`.
    pub(crate) terms: Vec<CostTerms>,
}

impl Scorer {
    pub(crate) fn new(name: &str, values: &[f64]) -> Option<Self> {
        Some(match (name, values) {
            ("cost", &[recompute_weight, decode_weight, pressure_seconds]) => {
                Self::Cost(CostParameters { recompute_weight, decode_weight, pressure_seconds })
            }
            ("kv_least_loaded", []) => Self::KvLeastLoaded,
            ("least_loaded", []) => Self::LeastLoaded,
            ("uniform", []) => Self::Uniform,
            ("queue_depth", []) => Self::QueueDepth,
            ("running_request", []) => Self::RunningRequest,
            ("kv_cache_utilization", []) => Self::KvCacheUtilization,
            ("active_request", &[idle_threshold, max_busy_score]) => {
                Self::ActiveRequest { idle_threshold, max_busy_score }
            }
            ("token_load", &[threshold]) => Self::TokenLoad { threshold },
            ("prefix", &[length_weight, length_scale]) => Self::Prefix { length_weight, length_scale },
            ("no_hit_lru", &[size]) => Self::NoHitLru { size: size as usize },
            ("load_aware", &[threshold]) => Self::LoadAware { threshold },
            ("two_tier", &[cache_threshold, absolute, relative]) => {
                Self::TwoTier { cache_threshold, absolute, relative }
            }
            ("session", &[load_bound]) => Self::Session { load_bound },
            ("round_robin", []) => Self::RoundRobin,
            _ => return None,
        })
    }

    pub(crate) fn score(&self, request: &Request, candidates: &[&Candidate], memory: &Memory) -> Scored {
        let of = |values: Vec<f64>| Scored { scores: values.into_iter().map(Score::of).collect(), terms: Vec::new() };
        let each = |value: &dyn Fn(&Candidate) -> f64| of(candidates.iter().map(|one| value(one)).collect());
        match *self {
            Self::Cost(parameters) => cost(parameters, request, candidates),
            Self::KvLeastLoaded => Scored {
                scores: candidates.iter().map(|one| kv_least_loaded(request, one)).collect(),
                terms: Vec::new(),
            },
            Self::LeastLoaded => Scored {
                scores: candidates
                    .iter()
                    .map(|one| Score { load: one.active_requests(), ..Score::default() })
                    .collect(),
                terms: Vec::new(),
            },
            Self::Uniform => each(&|_| 1.0),
            Self::QueueDepth => of(by_spread(candidates.iter().map(|one| one.load.map(|load| load.waiting)))),
            Self::RunningRequest => of(by_spread(candidates.iter().map(|one| one.load.map(|load| load.running)))),
            Self::KvCacheUtilization => {
                each(&|one| one.load.and_then(|load| load.kv_usage).map_or(0.5, |usage| 1.0 - usage.clamp(0.0, 1.0)))
            }
            Self::ActiveRequest { idle_threshold, max_busy_score } => {
                let most = candidates.iter().map(|one| one.promise.count).max().unwrap_or(0) as f64;
                each(&|one| {
                    let count = one.promise.count as f64;
                    if count <= idle_threshold { 1.0 } else { (most - count) / most * max_busy_score }
                })
            }
            Self::TokenLoad { threshold } => each(&|one| {
                let tokens = (one.promise.tokens + one.uncached_tokens(request)) as f64;
                1.0 - tokens.min(threshold) / threshold
            }),
            Self::Prefix { length_weight, length_scale } => {
                each(&|one| prefix(request, one, length_weight, length_scale))
            }
            Self::NoHitLru { .. } => {
                if candidates.iter().any(|one| one.matched_tokens() > 0) {
                    each(&|_| 0.5)
                } else {
                    of(by_last_use(candidates, &memory.cold))
                }
            }
            Self::LoadAware { threshold } => each(&|one| match one.load.map(|load| load.waiting) {
                None => -1.0,
                Some(0) => 0.5,
                Some(waiting) => 0.5 * (1.0 - (waiting as f64).min(threshold) / threshold),
            }),
            Self::TwoTier { cache_threshold, absolute, relative } => {
                of(two_tier(request, candidates, cache_threshold, absolute, relative))
            }
            Self::Session { load_bound } => of(session(request, candidates, load_bound)),
            Self::RoundRobin => {
                let present: VecDeque<TargetId> = memory
                    .all
                    .iter()
                    .filter(|known| candidates.iter().any(|one| one.target == **known))
                    .cloned()
                    .collect();
                of(by_last_use(candidates, &present))
            }
        }
    }

    /// Remembers what was picked of which candidates. An encoder round leaves no trace.
    pub(crate) fn picked(&self, request: &Request, was_cold: bool, target: &TargetId, memory: &mut Memory) {
        if request.round == Round::Encoder {
            return;
        }
        match *self {
            Self::NoHitLru { size } if was_cold => Memory::note(&mut memory.cold, target, size),
            Self::RoundRobin => Memory::note(&mut memory.all, target, ROTATION_SIZE),
            _ => {}
        }
    }
}

fn cost(parameters: CostParameters, request: &Request, candidates: &[&Candidate]) -> Scored {
    let neutral = Neutral::of(candidates.iter().copied());
    let terms: Vec<CostTerms> = candidates.iter().map(|one| parameters.terms(request, one, &neutral)).collect();
    // A barrier that is infinite everywhere separates nobody; then the rest of the cost does.
    let are_all_full = terms.iter().all(|terms| terms.pressure.is_infinite());
    let seconds = |terms: &CostTerms| if are_all_full { terms.without_pressure() } else { terms.total() };
    Scored { scores: terms.iter().map(|terms| Score::of(-seconds(terms))).collect(), terms }
}

fn kv_least_loaded(request: &Request, candidate: &Candidate) -> Score {
    let load = candidate.active_requests();
    match request.round {
        Round::Decode => return Score { load, ..Score::default() },
        Round::Prefill | Round::Aggregate | Round::Encoder => {}
    }
    let load = if request.round == Round::Prefill { load + candidate.load_behind } else { load };
    let Some(cached) = candidate.cached.filter(|cached| cached.matched_tokens > 0) else {
        return Score { load, ..Score::default() };
    };
    // The fastest tier that holds all of the match; of a mixed match, the tier that holds most of it.
    let longest = cached.tier_tokens.iter().copied().max().unwrap_or(0);
    let tier =
        Tier::ALL.into_iter().find(|tier| cached.tier_tokens[tier.position()] == longest).unwrap_or(Tier::External);
    Score {
        preference: 0.0,
        matched_tokens: cached.matched_tokens,
        tier: tier_rank(tier),
        locality: locality(tier),
        load,
    }
}

/// (max − x)/(max − min); all 1 when equal. What is unknown is in the middle.
fn by_spread(values: impl Iterator<Item = Option<u64>> + Clone) -> Vec<f64> {
    let known = values.clone().flatten();
    let (least, most) = (known.clone().min().unwrap_or(0), known.max().unwrap_or(0));
    let score = |value: Option<u64>| match value {
        None => 0.5,
        Some(_) if most == least => 1.0,
        Some(value) => (most - value) as f64 / (most - least) as f64,
    };
    values.map(score).collect()
}

fn prefix(request: &Request, candidate: &Candidate, length_weight: f64, length_scale: f64) -> f64 {
    let block_size = candidate.block_size_tokens;
    let blocks = request.prompt_tokens.checked_div(block_size).unwrap_or(0);
    let is_computed_here = matches!(request.round, Round::Aggregate | Round::Prefill);
    let (Some(cached), true) = (candidate.cached, is_computed_here && blocks > 0) else { return 0.0 };
    let matched = (cached.matched_tokens / block_size).min(blocks);
    let length = ((matched * block_size) as f64 / length_scale).min(1.0);
    length_weight * length * length + (1.0 - length_weight) * matched as f64 / blocks as f64
}

/// 1 − rank/(n − 1), but at least 0: those never used in the order of the candidates, then the longest unused. The rank
/// counts the whole history, targets that are absent at the moment included.
fn by_last_use(candidates: &[&Candidate], history: &VecDeque<TargetId>) -> Vec<f64> {
    if candidates.len() <= 1 {
        return vec![1.0; candidates.len()];
    }
    let place = |candidate: &Candidate| history.iter().position(|known| *known == candidate.target);
    let never_used = candidates.iter().filter(|one| place(one).is_none()).count();
    let mut fresh = 0;
    let mut score = |candidate: &Candidate| {
        let rank = place(candidate).map_or_else(
            || {
                fresh += 1;
                fresh - 1
            },
            |place| never_used + place,
        );
        (1.0 - rank as f64 / (candidates.len() - 1) as f64).max(0.0)
    };
    candidates.iter().map(|one| score(one)).collect()
}

fn two_tier(
    request: &Request,
    candidates: &[&Candidate],
    cache_threshold: f64,
    absolute: f64,
    relative: f64,
) -> Vec<f64> {
    let load = |one: &Candidate| one.active_requests();
    let (least, most) =
        candidates.iter().fold((u64::MAX, 0), |(least, most), one| (least.min(load(one)), most.max(load(one))));
    let least_loaded = || candidates.iter().map(|one| f64::from(u8::from(load(one) == least))).collect();
    let is_imbalanced = (most.saturating_sub(least)) as f64 > absolute && most as f64 > relative * least as f64;
    let block_size = candidates.first().map_or(0, |one| one.block_size_tokens);
    let is_comparable = block_size > 0 && candidates.iter().all(|one| one.block_size_tokens == block_size);
    if is_imbalanced || !is_comparable {
        return least_loaded();
    }
    let overlap =
        |one: &Candidate| one.cached.map_or(0, |cached| cached.tier_tokens[Tier::Device.position()] / block_size);
    let best = candidates.iter().map(|one| overlap(one)).max().unwrap_or(0);
    let blocks = request.prompt_tokens.div_ceil(block_size).max(1);
    if best == 0 || best as f64 / blocks as f64 <= cache_threshold {
        return least_loaded();
    }
    let fewest = candidates.iter().filter(|one| overlap(one) == best).map(|one| load(one)).min().unwrap_or(0);
    candidates.iter().map(|one| f64::from(u8::from(overlap(one) == best && load(one) == fewest))).collect()
}

/// Rendezvous hashing: every session has an order of all targets of its own, and a target that comes or goes moves only
/// its own sessions.
fn session(request: &Request, candidates: &[&Candidate], load_bound: f64) -> Vec<f64> {
    let Some(session) = &request.session else { return vec![0.5; candidates.len()] };
    let total: u64 = candidates.iter().map(|one| one.active_requests()).sum();
    let room = (load_bound * (total + 1) as f64 / candidates.len() as f64).ceil();
    let hash = |one: &Candidate| {
        let bytes = session.bytes().chain([0]).chain(one.target.worker.as_str().bytes());
        let named =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        mix(named ^ mix(u64::from(one.target.rank.0)))
    };
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|position| std::cmp::Reverse(hash(candidates[*position])));
    let mut scores = vec![0.0; candidates.len()];
    for (rank, position) in order.into_iter().enumerate() {
        if (candidates[position].active_requests() + 1) as f64 <= room {
            scores[position] = 1.0 - rank as f64 / candidates.len() as f64;
        }
    }
    scores
}
