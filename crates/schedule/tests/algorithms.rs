//! Each algorithm with numbers computed by hand. `F-nn` names the row of the feature list whose semantics they follow.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use kvist_blocks::Rank;
use kvist_schedule::{
    Cached, Candidate, Decision, Draws, Load, Memory, Outcome, Pipeline, PipelineConfig, PrefillRate, Rates, Request,
    Round, Score, Step, TargetId, TargetPromise,
};

fn target(name: &str) -> TargetId {
    TargetId { worker: name.into(), rank: Rank(0) }
}

fn candidate(name: &str) -> Candidate {
    Candidate::new(target(name))
}

/// Requests in flight from this router.
fn with_flight(name: &str, count: u64, tokens: u64) -> Candidate {
    Candidate { promise: TargetPromise { count, tokens, prefill_tokens: tokens }, ..candidate(name) }
}

fn with_load(name: &str, running: u64, waiting: u64) -> Candidate {
    Candidate { load: Some(Load { running, waiting, ..Load::default() }), ..candidate(name) }
}

/// Tokens held in device, host, disk and external store.
fn with_cache(name: &str, tier_tokens: [u64; 4]) -> Candidate {
    let matched_tokens = tier_tokens.into_iter().max().unwrap_or(0);
    Candidate { cached: Some(Cached { tier_tokens, matched_tokens, is_complete: true }), ..candidate(name) }
}

fn request(prompt_tokens: u64) -> Request {
    Request { prompt_tokens, ..Request::default() }
}

fn decide(scorer: Step, request: &Request, candidates: &[Candidate]) -> Decision {
    let pipeline = Pipeline::new(PipelineConfig::best_by(scorer)).unwrap();
    pipeline.decide(request, candidates, &Memory::default(), &mut Draws::new(7))
}

fn scores(scorer: Step, request: &Request, candidates: &[Candidate]) -> Vec<Score> {
    decide(scorer, request, candidates).verdicts.into_iter().map(|verdict| verdict.score.unwrap()).collect()
}

fn values(scorer: Step, request: &Request, candidates: &[Candidate]) -> Vec<f64> {
    scores(scorer, request, candidates).into_iter().map(|score| score.preference).collect()
}

fn assert_close(expected: &[f64], actual: &[f64]) {
    let is_close = expected.len() == actual.len() && expected.iter().zip(actual).all(|(e, a)| (e - a).abs() < 1e-9);
    assert!(is_close, "{expected:?} is not {actual:?}");
}

// F-07: longest prefix, then device 4 > host 3 > disk 2 > external 1, then local 2 > remote 1, then lower load.
#[test]
fn kv_least_loaded_compares_prefix_then_tier_then_locality_then_load() {
    let mut busy = with_cache("busy", [320, 0, 0, 0]);
    busy.promise.count = 5;
    let list = [
        busy,
        with_cache("host", [0, 320, 0, 0]),
        with_cache("external", [0, 0, 0, 320]),
        with_cache("longer", [0, 0, 336, 0]),
        candidate("unknown"),
    ];
    let score = |matched_tokens, tier, locality, load| Score { preference: 0.0, matched_tokens, tier, locality, load };
    let expected =
        vec![score(320, 4, 2, 5), score(320, 3, 2, 0), score(320, 1, 1, 0), score(336, 2, 2, 0), score(0, 0, 0, 0)];
    assert_eq!(expected, scores(Step::new("kv_least_loaded"), &request(1000), &list));
    let choose = |list: &[Candidate]| decide(Step::new("kv_least_loaded"), &request(1000), list).chosen;
    assert_eq!(Some(3), choose(&list), "the longest prefix, wherever it lies");
    assert_eq!(Some(0), choose(&list[..3]), "then the device, however busy");
    assert_eq!(Some(1), choose(&[with_flight("a", 2, 0), candidate("b")]), "then the lower load");
}

// F-07: the prefill round adds the least decode load behind the target; the decode round gets cache score 0.
#[test]
fn kv_least_loaded_differs_by_round() {
    let mut one = with_cache("a", [320, 0, 0, 0]);
    (one.promise.count, one.load_behind) = (2, 5);
    let of = |round| scores(Step::new("kv_least_loaded"), &Request { round, ..request(1000) }, &[one.clone()])[0];
    assert_eq!((320, 7), (of(Round::Prefill).matched_tokens, of(Round::Prefill).load));
    assert_eq!(Score { load: 2, ..Score::default() }, of(Round::Decode));
}

// F-07.
#[test]
fn least_loaded_takes_the_lowest_load_and_uniform_makes_all_equal() {
    let list = [with_load("a", 3, 1), with_load("b", 2, 0), with_flight("c", 9, 0)];
    let loads: Vec<u64> =
        scores(Step::new("least_loaded"), &request(9), &list).iter().map(|score| score.load).collect();
    assert_eq!(vec![4, 2, 9], loads);
    assert_eq!(Some(1), decide(Step::new("least_loaded"), &request(9), &list).chosen);
    assert_close(&[1.0, 1.0, 1.0], &values(Step::new("uniform"), &request(9), &list));
}

// F-07: (max − x)/(max − min), all 1 when equal; 1 − usage.
#[test]
fn queue_depth_running_request_and_kv_cache_utilization() {
    let list = [with_load("a", 8, 10), with_load("b", 2, 4), with_load("c", 6, 2), candidate("unknown")];
    assert_close(&[0.0, 0.75, 1.0, 0.5], &values(Step::new("queue_depth"), &request(9), &list));
    assert_close(&[0.0, 1.0, 2.0 / 6.0, 0.5], &values(Step::new("running_request"), &request(9), &list));
    let equal = [with_load("a", 3, 4), with_load("b", 3, 4)];
    assert_close(&[1.0, 1.0], &values(Step::new("queue_depth"), &request(9), &equal));
    let mut full = with_load("full", 0, 0);
    full.load.as_mut().unwrap().kv_usage = Some(0.8);
    assert_close(&[0.2, 0.5], &values(Step::new("kv_cache_utilization"), &request(9), &[full, candidate("unknown")]));
}

// F-40: count ≤ threshold → 1; else (max − count)/max × maxBusyScore; maxBusyScore outside [0, 1] → 1.0.
#[test]
fn active_request_counts_what_this_router_has_in_flight() {
    let list = [with_flight("a", 5, 0), with_flight("b", 0, 0), with_flight("c", 2, 0)];
    assert_close(&[0.0, 1.0, 0.6], &values(Step::new("active_request"), &request(9), &list));
    let tuned = Step::new("active_request").with("idleThreshold", 2.0).with("maxBusyScore", 0.5);
    assert_close(&[0.0, 1.0, 1.0], &values(tuned, &request(9), &list));
    let half = Step::new("active_request").with("maxBusyScore", 0.5);
    assert_close(&[0.0, 1.0, 0.3], &values(half, &request(9), &list));
    let outside = Step::new("active_request").with("maxBusyScore", 1.5);
    assert_close(&[0.0, 1.0, 0.6], &values(outside, &request(9), &list));
    assert_eq!(Some(1), decide(Step::new("active_request"), &request(9), &list).chosen);
}

// F-41: t = in flight + not cached; 1 if t ≤ 0 else 1 − min(t, T)/T; T ≤ 0 → 4194304.
#[test]
fn token_load_flips_when_the_prefix_is_cached() {
    let step = || Step::new("token_load").with("queueThresholdTokens", 10_000.0);
    let busy = with_flight("a", 1, 4000);
    let idle = with_flight("b", 1, 1000);
    assert_close(&[0.3, 0.6], &values(step(), &request(3000), &[busy.clone(), idle.clone()]));
    let mut cached = with_cache("a", [3000, 0, 0, 0]);
    cached.promise = TargetPromise { count: 1, tokens: 3500, prefill_tokens: 0 };
    assert_close(&[0.65, 0.6], &values(step(), &request(3000), &[cached.clone(), idle]));
    cached.promise = TargetPromise::default();
    assert_close(&[1.0], &values(step(), &request(3000), &[cached]));
    assert_close(&[0.0], &values(step(), &request(3000), &[with_flight("a", 1, 99_999)]));
    let default = Step::new("token_load").with("queueThresholdTokens", -1.0);
    assert_close(&[1.0 - 7000.0 / 4_194_304.0], &values(default, &request(3000), &[busy]));
}

// F-42: w·min(1, m·b/s)² + (1 − w)·m/t; no data → 0; aggregate and prefill rounds only.
#[test]
fn prefix_scores_the_matched_share_and_length() {
    // 10 of 20 blocks of 16.
    let list = [with_cache("a", [160, 0, 0, 0]), candidate("unknown")];
    assert_close(&[0.5, 0.0], &values(Step::new("prefix"), &request(335), &list));
    let weighted = || Step::new("prefix").with("matchLengthWeight", 0.4).with("matchLengthScaleTokens", 320.0);
    // 0.4 · (160/320)² + 0.6 · 0.5
    assert_close(&[0.4, 0.0], &values(weighted(), &request(335), &list));
    let saturated = weighted().with("matchLengthScaleTokens", 100.0);
    assert_close(&[0.7, 0.0], &values(saturated, &request(335), &list));
    let of = |round| values(Step::new("prefix"), &Request { round, ..request(335) }, &list)[0];
    assert_close(&[0.5, 0.0, 0.0], &[Round::Prefill, Round::Decode, Round::Encoder].map(of));
}

// F-43.
#[test]
fn no_hit_lru_visits_all_once_and_a_hit_anywhere_leaves_it_alone() {
    let pipeline = Pipeline::new(PipelineConfig::best_by(Step::new("no_hit_lru"))).unwrap();
    let names = ["a", "b", "c", "d"];
    let list: Vec<Candidate> = names.iter().map(|name| candidate(name)).collect();
    let (mut memory, mut draws) = (Memory::default(), Draws::new(1));
    let mut visited = Vec::new();
    for _ in 0..4 {
        let decision = pipeline.decide(&request(9), &list, &memory, &mut draws);
        visited.push(names[decision.chosen.unwrap()]);
        pipeline.picked(&request(9), &list, &decision, &mut memory);
    }
    assert_eq!(vec!["a", "b", "c", "d"], visited);
    let scores = |list: &[Candidate], memory: &Memory| -> Vec<f64> {
        let decision = pipeline.decide(&request(9), list, memory, &mut Draws::new(1));
        decision.verdicts.iter().map(|verdict| verdict.score.unwrap().preference).collect()
    };
    assert_close(&[1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0], &scores(&list, &memory));
    // One hit makes all equal, and the pick is not remembered.
    let mut with_hit = list.clone();
    with_hit[2] = with_cache("c", [16, 0, 0, 0]);
    assert_close(&[0.5; 4], &scores(&with_hit, &memory));
    let decision = pipeline.decide(&request(9), &with_hit, &memory, &mut draws);
    pipeline.picked(&request(9), &with_hit, &decision, &mut memory);
    // Neither is one of an encoder round.
    let encoder = Request { round: Round::Encoder, ..request(9) };
    pipeline.picked(&encoder, &list, &pipeline.decide(&encoder, &list, &memory, &mut draws), &mut memory);
    assert_close(&[1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0], &scores(&list, &memory));
    // "a" and "b" are absent and count in the rank: c is third, d fourth, e was never used. 1 − 3/2 is cut at 0.
    let others = [candidate("c"), candidate("d"), candidate("e")];
    assert_close(&[0.0, 0.0, 1.0], &scores(&others, &memory));
    assert_close(&[1.0], &scores(&list[..1], &memory));
}

// F-44: w = 0/64/128/unknown → 0.5/0.25/0/−1.
#[test]
fn load_aware_table() {
    let list =
        [with_load("a", 9, 0), with_load("b", 9, 64), with_load("c", 9, 128), candidate("d"), with_load("e", 9, 999)];
    assert_close(&[0.5, 0.25, 0.0, -1.0, 0.0], &values(Step::new("load_aware"), &request(9), &list));
}

// F-45.
#[test]
fn two_tier_leaves_the_cache_when_load_is_out_of_balance() {
    let cached = |active, tokens| {
        let mut one = with_cache("cached", [tokens, 0, 0, 0]);
        one.promise.count = active;
        one
    };
    let winner = |first: Candidate, second: Candidate| values(Step::new("two_tier"), &request(1000), &[first, second]);
    // 40 against 2 is out of balance (38 > 32 and 40 > 2.2), in spite of the overlap of 62 of 63 blocks.
    assert_close(&[0.0, 1.0], &winner(cached(40, 992), with_flight("idle", 2, 0)));
    // 34 against 2 is not (32 is not above 32).
    assert_close(&[1.0, 0.0], &winner(cached(34, 992), with_flight("idle", 2, 0)));
    // 31 of 63 blocks is not above 0.5, 32 is.
    assert_close(&[0.0, 1.0], &winner(cached(3, 496), with_flight("idle", 2, 0)));
    assert_close(&[1.0, 0.0], &winner(cached(3, 512), with_flight("idle", 2, 0)));
    // Only the device counts.
    assert_close(
        &[0.0, 1.0],
        &winner(with_cache("host", [0, 992, 0, 0]), {
            let mut one = cached(0, 640);
            one.target = target("b");
            one
        }),
    );
    // Block sizes that differ are a tie, which goes by load.
    let mut other = with_cache("other", [960, 0, 0, 0]);
    (other.block_size_tokens, other.promise.count) = (32, 1);
    assert_close(&[0.0, 1.0], &winner(cached(3, 992), other));
}

#[test]
fn round_robin_takes_each_in_turn() {
    let pipeline = Pipeline::new(PipelineConfig::best_by(Step::new("round_robin"))).unwrap();
    let list = [candidate("a"), with_flight("b", 99, 99), candidate("c")];
    let (mut memory, mut draws) = (Memory::default(), Draws::new(1));
    let mut visited = Vec::new();
    for _ in 0..6 {
        let decision = pipeline.decide(&request(9), &list, &memory, &mut draws);
        pipeline.picked(&request(9), &list, &decision, &mut memory);
        visited.push(decision.chosen.unwrap());
    }
    assert_eq!(vec![0, 1, 2, 0, 1, 2], visited);
}

#[test]
fn a_session_stays_moves_when_its_target_is_full_and_comes_back() {
    let names: Vec<String> = (0..5).map(|number| format!("w{number}")).collect();
    let list = |names: &[String]| names.iter().map(|name| with_flight(name, 4, 0)).collect::<Vec<_>>();
    let choose = |session: &str, list: &[Candidate]| {
        let request = Request { session: Some(session.into()), ..request(9) };
        list[decide(Step::new("session"), &request, list).chosen.unwrap()].target.clone()
    };
    let mut homes = std::collections::HashSet::new();
    let mut moved = 0;
    for number in 0..200 {
        let session = format!("s{number}");
        let home = choose(&session, &list(&names));
        homes.insert(home.clone());
        // A target that goes moves its own sessions alone.
        let without = choose(&session, &list(&names[..4]));
        moved += usize::from(without != home);
        assert!(without == home || home == target("w4"));
        // Room is ceil(1.25 · (others + 1) / 5): 6 of 22 requests, 7 of 26.
        let full = |active: u64| {
            let mut list = list(&names);
            list.iter_mut().find(|one| one.target == home).unwrap().promise.count = active;
            list
        };
        assert_eq!(home, choose(&session, &full(5)));
        assert_ne!(home, choose(&session, &full(9)));
    }
    assert_eq!((5, true), (homes.len(), (20..60).contains(&moved)), "{moved} of 200 moved");
    assert_close(&[0.5, 0.5], &values(Step::new("session"), &request(9), &list(&names)[..2]));
}

/// 1 ms for each 10 tokens, and as much for each 10 tokens and 10,000 of context.
fn rates() -> Rates {
    Rates {
        prefill: PrefillRate { seconds_per_token: 1e-4, seconds_per_token_and_context: 1e-8 },
        factor: 1.0,
        step_seconds_per_request: 1e-3,
        transfer_seconds_per_token: [0.0, 1e-5, 5e-5, 1.0],
    }
}

#[test]
fn cost_is_the_sum_of_its_terms_in_seconds() {
    let mut one = with_cache("a", [2000, 3000, 0, 3500]);
    one.rates = Rates { factor: 2.0, ..rates() };
    one.outstanding_tokens = Some(4000);
    one.load = Some(Load { running: 3, waiting: 1, kv_usage: Some(0.25), kv_blocks: Some(1000) });
    let request = Request { prompt_tokens: 7500, expected_output_tokens: 500, ..Request::default() };
    let step = Step::new("cost").with("recomputeWeight", 3.0).with("decodeWeight", 0.5).with("pressureSeconds", 0.06);
    let decision = decide(step, &request, &[one]);
    let terms = decision.verdicts[0].terms.unwrap();
    // Four prompts of 1,000 tokens: 2 · 4 · (0.1 + 1000 · 1e-8 · 500).
    let queue = 0.84;
    // 4,000 tokens behind 3,500: 2 · (0.4 + 4000 · 1e-8 · (3500 + 2000)).
    let prefill = 1.24;
    // 1,000 tokens from the host at 1e-5; 500 from outside at 1 s each, which 2 · (0.05 + 500 · 1e-8 · 3250) of computing
    // them beats.
    let transfer = 0.01 + 0.1325;
    // 500 steps, 4 others, 1 ms each, half.
    let decode = 1.0;
    // 500 of 1,000 blocks are added to 250: 0.06 · 0.75 / 0.25.
    let pressure = 0.18;
    assert_close(
        &[queue, prefill, transfer, 2.0 * prefill, decode, pressure],
        &[terms.queue, terms.prefill, terms.transfer, terms.displacement, terms.decode, terms.pressure],
    );
    assert_eq!(3500, terms.assumed_cached_tokens);
    assert_close(
        &[-(queue + 3.0 * prefill + transfer + decode + pressure)],
        &[decision.verdicts[0].score.unwrap().preference],
    );
}

fn cost_candidate(name: &str, cached: Option<(u64, bool)>, outstanding: Option<u64>) -> Candidate {
    let cached = cached.map(|(tokens, is_complete)| Cached {
        tier_tokens: [tokens, 0, 0, 0],
        matched_tokens: tokens,
        is_complete,
    });
    Candidate { cached, outstanding_tokens: outstanding, rates: rates(), ..candidate(name) }
}

#[test]
fn unknown_caches_and_loads_are_taken_for_usual_ones() {
    let assumed = |list: &[Candidate]| -> Vec<u64> {
        let decision = decide(Step::new("cost"), &request(10_000), list);
        decision.verdicts.iter().map(|verdict| verdict.terms.unwrap().assumed_cached_tokens).collect()
    };
    let list = [
        cost_candidate("full", Some((6000, true)), Some(0)),
        cost_candidate("empty", Some((0, true)), Some(0)),
        cost_candidate("unknown", None, Some(0)),
        cost_candidate("little", Some((100, false)), Some(0)),
        cost_candidate("much", Some((9000, false)), Some(0)),
    ];
    assert_eq!(vec![6000, 0, 3000, 3000, 9000], assumed(&list));
    assert_eq!(vec![0, 100], assumed(&[list[2].clone(), list[3].clone()]), "nothing is known of anybody");

    let queues = |list: &[Candidate]| -> Vec<f64> {
        let decision = decide(Step::new("cost"), &request(10), list);
        decision.verdicts.iter().map(|verdict| verdict.terms.unwrap().queue).collect()
    };
    let context_free = |tokens: u64| tokens as f64 * 1e-4 + tokens as f64 * 1e-8 * tokens as f64 / 2.0;
    let mut silent = cost_candidate("silent", None, None);
    let list = |silent: &Candidate| {
        [cost_candidate("a", None, Some(1000)), cost_candidate("b", None, Some(3000)), silent.clone()]
    };
    let mean = (context_free(1000) + context_free(3000)) / 2.0;
    assert_close(&[context_free(1000), context_free(3000), mean], &queues(&list(&silent)));
    // What this router itself has sent is known.
    silent.promise = TargetPromise { count: 1, tokens: 9000, prefill_tokens: 9000 };
    assert_close(&[context_free(1000), context_free(3000), context_free(9000)], &queues(&list(&silent)));
}

#[test]
fn a_cached_prompt_is_worth_a_queue_of_what_it_saves_and_no_more() {
    let choose = |outstanding| {
        let mut list = [
            cost_candidate("cached", Some((10_000, true)), Some(outstanding)),
            cost_candidate("idle", Some((0, true)), Some(0)),
        ];
        list.iter_mut().for_each(|one| one.rates.prefill.seconds_per_token_and_context = 0.0);
        decide(Step::new("cost"), &request(10_000), &list).chosen
    };
    // 10,000 tokens at weight 3 are 3 s, which are 30,000 tokens of queue.
    assert_eq!((Some(0), Some(1)), (choose(29_900), choose(30_100)));
}

// The example of docs/concepts/how-kvist-chooses.md.
#[test]
fn the_worked_example_is_what_it_says() {
    let target = |name, cached, queued, running| Candidate {
        load: Some(Load { running, ..Load::default() }),
        rates: Rates::default(),
        ..cost_candidate(name, Some((cached, true)), Some(queued))
    };
    let request = Request { prompt_tokens: 8000, expected_output_tokens: 128, ..Request::default() };
    let costs = |list: &[Candidate]| {
        let decision = Pipeline::standard().decide(&request, list, &Memory::default(), &mut Draws::new(3));
        let cost = decision.verdicts.iter().map(|verdict| (-1000.0 * verdict.score.unwrap().preference).round());
        (decision.chosen, cost.collect::<Vec<f64>>())
    };
    let rest = [target("b", 512, 0, 0), target("c", 0, 0, 0)];
    let list = |queued| [&[target("a", 6000, queued, 12)], &rest[..]].concat();
    assert_eq!((Some(0), vec![1531.0, 2246.0, 2400.0]), costs(&list(9000)));
    assert_eq!((Some(1), vec![2431.0, 2246.0, 2400.0]), costs(&list(18_000)));
}

#[test]
fn a_full_kv_pool_is_no_choice_unless_all_are_full() {
    let with_usage = |name, usage, outstanding| {
        let mut one = cost_candidate(name, Some((0, true)), Some(outstanding));
        one.load = Some(Load { kv_usage: Some(usage), kv_blocks: Some(100), ..Load::default() });
        one
    };
    let choose = |list: &[Candidate]| decide(Step::new("cost"), &request(160), list).chosen;
    // The prompt needs a tenth of the pool.
    assert_eq!(Some(1), choose(&[with_usage("a", 0.9, 0), with_usage("b", 0.85, 90_000)]));
    assert_eq!(Some(0), choose(&[with_usage("a", 0.9, 0), with_usage("b", 0.99, 9000)]));
}

fn share(picker: Step, preferences: &[f64]) -> Vec<f64> {
    // `token_load` gives any score in [0, 1]: 1 − tokens/1000.
    let list: Vec<Candidate> = preferences
        .iter()
        .enumerate()
        .map(|(number, score)| with_flight(&format!("w{number}"), 1, ((1.0 - score) * 1000.0).round() as u64))
        .collect();
    let scorers = vec![Step::new("token_load").with("queueThresholdTokens", 1000.0)];
    let pipeline = Pipeline::new(PipelineConfig { scorers, picker, ..PipelineConfig::default() }).unwrap();
    let mut counts = vec![0.0; preferences.len()];
    let mut draws = Draws::new(42);
    for _ in 0..10_000 {
        let decision = pipeline.decide(&request(0), &list, &Memory::default(), &mut draws);
        counts[decision.chosen.unwrap()] += 1.0 / 10_000.0;
    }
    counts
}

fn assert_near(expected: &[f64], actual: &[f64]) {
    let is_near = expected.iter().zip(actual).all(|(e, a)| (e - a).abs() < 0.02);
    assert!(is_near, "{expected:?} is not near {actual:?}");
}

// F-46: 10,000 picks over 3 distinct scores ≈ 3:2:1; ties equal, at the weight of the first of the tie.
#[test]
fn gamble_sampling_draws_by_rank() {
    let gamble = || Step::new("gamble_sampling");
    assert_near(&[3.0 / 6.0, 1.0 / 6.0, 2.0 / 6.0], &share(gamble(), &[0.9, 0.1, 0.8]));
    // Weights 4, 4, 4, 1.
    assert_near(&[4.0 / 13.0, 1.0 / 13.0, 4.0 / 13.0, 4.0 / 13.0], &share(gamble(), &[0.9, 0.1, 0.9, 0.9]));
}

// F-47: under two choices the worst is never picked; under max always the best.
#[test]
fn power_of_two_choices_never_takes_the_worst_and_max_always_the_best() {
    let two = || Step::new("power_of_two_choices");
    // Of three pairs the best is in two.
    assert_near(&[2.0 / 3.0, 0.0, 1.0 / 3.0], &share(two(), &[0.9, 0.1, 0.8]));
    assert_eq!(0.0, share(two(), &[0.9, 0.1, 0.8])[1]);
    assert_near(&[0.5, 0.5], &share(two(), &[0.5, 0.5]));
    assert_near(&[1.0], &share(two(), &[0.5]));
    assert_eq!(vec![0.0, 0.0], share(Step::new("max"), &[0.9, 0.1, 0.8])[1..].to_vec());
    assert_near(&[0.5, 0.0, 0.5], &share(Step::new("max"), &[0.9, 0.1, 0.9]));
    assert_near(&[0.5, 0.0, 0.5], &share(Step::new("max").with("epsilon", 0.1), &[0.9, 0.1, 0.82]));
    let by_share = |share_of_best: f64| share(Step::new("max").with("epsilonShare", share_of_best), &[0.8, 0.1, 0.75]);
    assert_near(&[0.5, 0.0, 0.5], &by_share(0.07));
    assert_near(&[1.0, 0.0, 0.0], &by_share(0.06));
    let bounded = Step::new("max").with("epsilonShare", 0.5).with("epsilonMost", 0.04);
    assert_near(&[1.0, 0.0, 0.0], &share(bounded, &[0.8, 0.1, 0.75]));
}

#[test]
fn softmax_draws_by_temperature() {
    // exp(0.1 / 0.1) against 1.
    let share = share(Step::new("softmax").with("temperature", 0.1), &[0.6, 0.5]);
    assert_near(&[std::f64::consts::E / (1.0 + std::f64::consts::E)], &share[..1]);
}

#[test]
fn scorers_are_added_up_by_weight() {
    let mut queue = Step::new("queue_depth");
    queue.weight = 3.0;
    let scorers = vec![queue, Step::new("prefix")];
    let pipeline = Pipeline::new(PipelineConfig { scorers, ..PipelineConfig::default() }).unwrap();
    let mut cached = with_cache("a", [160, 0, 0, 0]);
    cached.load = Some(Load { waiting: 4, ..Load::default() });
    let list = [cached, with_load("b", 0, 0), with_load("c", 0, 1)];
    let decision = pipeline.decide(&request(320), &list, &Memory::default(), &mut Draws::new(1));
    let actual: Vec<f64> = decision.verdicts.iter().map(|verdict| verdict.score.unwrap().preference).collect();
    assert_close(&[0.25 * 0.5, 0.75, 0.75 * 0.75], &actual);
}

fn filtered(filter: &str, list: &[Candidate]) -> (Vec<Option<&'static str>>, Outcome) {
    let config = PipelineConfig { filters: vec![Step::new(filter)], ..PipelineConfig::default() };
    let decision = Pipeline::new(config).unwrap().decide(&request(9), list, &Memory::default(), &mut Draws::new(1));
    (decision.verdicts.iter().map(|verdict| verdict.filtered).collect(), decision.outcome)
}

// L-04: above 0.85 is saturated; unmeasured, in flight / 4. L-44: foreign endpoints do not count.
#[test]
fn saturation_table() {
    let measured = |running, waiting| Candidate { most_running: Some(20), ..with_load("a", running, waiting) };
    let foreign = Candidate { is_foreign: true, ..with_flight("f", 99, 0) };
    let list = [measured(15, 2), measured(15, 3), with_flight("c", 3, 0), with_flight("d", 4, 0), foreign];
    let expected = vec![None, Some("saturated"), None, Some("saturated"), None];
    assert_eq!((expected, Outcome::Selected), filtered("saturation", &list));
    assert_eq!((vec![Some("saturated")], Outcome::Saturated), filtered("saturation", &list[1..2]));
    assert_eq!((vec![None], Outcome::Selected), filtered("allow_all", &list[1..2]));
}

#[test]
fn a_filter_leaves_out_what_its_name_says() {
    let broken = Candidate { is_broken: true, ..candidate("broken") };
    let small = Candidate { unsuitable: Some("context_too_short"), ..candidate("small") };
    let draining = Candidate { unavailable: Some("draining"), ..candidate("draining") };
    let list = [broken, small, draining, candidate("d")];
    let gone = Some("draining");
    assert_eq!((vec![Some("breaker_open"), None, gone, None], Outcome::Selected), filtered("breaker", &list));
    assert_eq!((vec![None, Some("context_too_short"), gone, None], Outcome::Selected), filtered("capability", &list));
    assert_eq!((vec![None, None, gone, None], Outcome::Selected), filtered("allow_all", &list));
    // Breakers never close a model: where nobody else is left, they do not count.
    assert_eq!(None, filtered("breaker", &list[..3]).0[0]);
    assert_eq!(Outcome::NoMatchingTarget, filtered("allow_all", &list[2..3]).1);
    assert_eq!(Outcome::NoMatchingTarget, filtered("allow_all", &[]).1);
}
