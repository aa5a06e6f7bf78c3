//! What policies are worth in a mesh, on fixed seeds, and that nothing is lost in it. The traces of these tests are made.

#![allow(clippy::expect_used, reason = "helpers of tests")]

use kvist_twin::{EngineSettings, Incident, MadeTrace, MeshReport, MeshSettings, TraceRequest, policy, run_mesh};

fn run(settings: &MeshSettings, trace: &[TraceRequest], name: &str) -> MeshReport {
    let pipeline = policy(name).expect("the policy exists");
    run_mesh(settings, trace, name, &pipeline)
}

fn plain() -> EngineSettings {
    EngineSettings { is_full: false, ..EngineSettings::default() }
}

/// Conversations that keep eight workers busy for two thirds of the time, as long as their caches are found.
fn conversations() -> Vec<TraceRequest> {
    MadeTrace { seed: 5, requests: 6000, requests_per_second: 70.0, output_tokens: 20 }.multi_turn(600, 2)
}

#[test]
fn equal_seeds_give_equal_reports() {
    let trace = &conversations()[..600];
    let settings = MeshSettings { routers: 2, event_loss: 0.05, ..MeshSettings::default() };
    let report = run(&settings, trace, "cost");
    assert_eq!(report, run(&settings, trace, "cost"));
    assert_ne!(report, run(&MeshSettings { seed: 2, ..settings }, trace, "cost"));
}

#[test]
fn unknown_policies_are_named_with_those_that_there_are() {
    let message = policy("nosuch").unwrap_err();
    assert!(message.contains("most_overlap") && message.contains("no_hit_lru"), "{message}");
}

// Everything that is lost is found: every index ends up with what the ledgers hold, and no reservation stays.
#[test]
fn lost_events_are_fetched_and_cost_hardly_a_hit() {
    let trace = conversations();
    let settings = MeshSettings { routers: 3, ..MeshSettings::default() };
    let whole = run(&settings, &trace, "cost");
    let lossy = run(&MeshSettings { event_loss: 0.05, ..settings }, &trace, "cost");
    assert!(lossy.lost_batches > 500 && lossy.catch_ups > 400, "{lossy:?}");
    for report in [&whole, &lossy] {
        assert_eq!(vec![report.ledger_blocks; 3], report.claimed_blocks_by_router);
        assert_eq!((0, 0), (report.open_reservations, report.failed));
    }
    assert!(lossy.hit_rate > whole.hit_rate - 0.01, "{} {}", lossy.hit_rate, whole.hit_rate);
}

// No shared first block pulls everything to one target; `most_overlap` is the bad example.
#[test]
fn a_shared_system_prompt_does_not_herd() {
    let made = MadeTrace { seed: 3, requests: 3000, requests_per_second: 40.0, output_tokens: 20 };
    let trace = made.shared_prefix(8, 4);
    let settings = MeshSettings { engine: plain(), ..MeshSettings::default() };
    let cost = run(&settings, &trace, "cost");
    let overlap = run(&settings, &trace, "most_overlap");
    assert!(cost.imbalance < 1.25, "{}", cost.imbalance);
    assert!(cost.hit_rate > 0.98 * cost.ideal_hit_rate, "{} of {}", cost.hit_rate, cost.ideal_hit_rate);
    assert!(overlap.imbalance > 4.0, "{}", overlap.imbalance);
    assert!(cost.worst_backlog_seconds < overlap.worst_backlog_seconds / 20.0);
}

#[test]
fn affinity_beats_load_alone_and_costs_no_time() {
    let trace = conversations();
    let [cost, least_loaded] = ["cost", "least_loaded"].map(|name| run(&MeshSettings::default(), &trace, name));
    assert!(
        cost.hit_rate > 0.9 * cost.ideal_hit_rate && cost.hit_rate > 2.0 * least_loaded.hit_rate,
        "{}",
        cost.hit_rate
    );
    assert!(cost.time_to_first_token_seconds.p99 < least_loaded.time_to_first_token_seconds.p50);
    // What a router predicts is what comes, within a step of the engine for most.
    assert!(cost.prediction_error_seconds.p50 < 0.14, "{:?}", cost.prediction_error_seconds);
}

#[test]
fn frozen_load_reports_are_survived_on_the_routers_own_books() {
    let trace = conversations();
    let settings = MeshSettings { routers: 4, ..MeshSettings::default() };
    let freeze = Incident::FreezeLoads { from_seconds: 30.0, until_seconds: 40.0 };
    let good = run(&settings, &trace, "cost");
    let frozen = run(&MeshSettings { incidents: vec![freeze], ..settings }, &trace, "cost");
    assert!(frozen.hit_rate > good.hit_rate - 0.02, "{} {}", frozen.hit_rate, good.hit_rate);
    let (frozen, good) = (frozen.worst_backlog_seconds, good.worst_backlog_seconds);
    assert!(frozen < good + 1.0, "{frozen} {good}");
}

#[test]
fn a_worker_that_joins_empty_gets_its_share() {
    // Most requests begin a conversation, and so are free to go anywhere.
    let made = MadeTrace { seed: 5, requests: 6000, requests_per_second: 70.0, output_tokens: 20 };
    let trace = made.multi_turn(4000, 2);
    let join = Incident::Join { at_seconds: 40.0 };
    let report = run(&MeshSettings { incidents: vec![join], ..MeshSettings::default() }, &trace, "cost");
    let computed = &report.computed_tokens_by_worker;
    let mean = computed[..8].iter().sum::<u64>() as f64 / 8.0;
    // It is there for about half of the time.
    assert!((0.25..0.9).contains(&(computed[8] as f64 / mean)), "{computed:?}");
    assert_eq!(0, report.failed);
}

#[test]
fn a_slow_worker_gets_less_and_holds_nobody_up() {
    let trace = conversations();
    let slow = Incident::Slow { worker: 3, factor: 3.0 };
    let settings = MeshSettings { incidents: vec![slow], ..MeshSettings::default() };
    let [cost, round_robin] = ["cost", "round_robin"].map(|name| run(&settings, &trace, name));
    let computed = &cost.computed_tokens_by_worker;
    let others = (computed.iter().sum::<u64>() - computed[3]) as f64 / 7.0;
    assert!((computed[3] as f64) < 0.6 * others, "{computed:?}");
    assert!(cost.time_to_first_token_seconds.p99 < 1.0, "{:?}", cost.time_to_first_token_seconds);
    assert!(round_robin.time_to_first_token_seconds.p95 > 10.0, "{:?}", round_robin.time_to_first_token_seconds);
}

#[test]
fn a_crash_fails_only_what_had_begun_and_leaving_fails_nothing() {
    let trace = conversations();
    let run = |incident| run(&MeshSettings { incidents: vec![incident], ..MeshSettings::default() }, &trace, "cost");
    let crash = run(Incident::Crash { at_seconds: 40.0, worker: 2 });
    assert!((1..=20).contains(&crash.failed), "{}", crash.failed);
    assert_eq!((0, vec![crash.ledger_blocks]), (crash.open_reservations, crash.claimed_blocks_by_router.clone()));
    let leave = run(Incident::Leave { at_seconds: 40.0, worker: 2 });
    assert_eq!((0, 0), (leave.failed, leave.open_reservations));
    for report in [crash, leave] {
        let computed = report.computed_tokens_by_worker;
        let mean = computed.iter().sum::<u64>() as f64 / 8.0;
        assert!((0.2..0.85).contains(&(computed[2] as f64 / mean)), "{computed:?}");
    }
}
