//! What a configuration may say, and what it is told when it says something else.

use kvist_schedule::{Pipeline, PipelineConfig, Step, catalogue};
use serde_json::{Value, json};

fn pipeline(value: Value) -> Result<Pipeline, String> {
    PipelineConfig::from_value(&value).and_then(Pipeline::new).map_err(|error| error.to_string())
}

#[test]
fn an_empty_configuration_is_the_default_and_every_part_may_be_written_alone() {
    assert_eq!(&PipelineConfig::default(), pipeline(json!({})).unwrap().config());
    assert_eq!("cost, max", pipeline(json!({})).unwrap().summary());
    assert_eq!(format!("{:?}", pipeline(json!({})).unwrap()), format!("{:?}", Pipeline::standard()));
    let one = pipeline(json!({"filter": {"algorithm": "saturation", "parameters": {"threshold": 0.5}}})).unwrap();
    assert_eq!(vec![Step::new("saturation").with("threshold", 0.5)], one.config().filters);
    let two = json!({"scorers": [{"algorithm": "prefix", "weight": 2}, {"algorithm": "queue_depth"}]});
    assert_eq!("prefix + queue_depth, max", pipeline(two).unwrap().summary());
}

// F-06: filter allow_all, scorer kv_least_loaded, picker gamble_sampling.
#[test]
fn the_preset_foretoken_is_what_its_users_had() {
    let expected = json!({
        "filters": [{"algorithm": "allow_all"}],
        "scorers": [{"algorithm": "kv_least_loaded"}],
        "picker": {"algorithm": "gamble_sampling"},
    });
    let config = pipeline(json!({"preset": "foretoken"})).unwrap().config().clone();
    assert_eq!(expected, serde_json::to_value(&config).unwrap());
}

#[test]
fn what_is_wrong_is_refused_with_what_is_valid() {
    let scorer = |name: &str| json!({"algorithm": name});
    for (value, words) in [
        // F-48: as a picker the name is gone.
        (
            json!({"picker": {"algorithm": "round_robin"}}),
            vec!["unknown picker \"round_robin\"", "is a scorer", "gamble_sampling"],
        ),
        (json!({"filter": scorer("nosuch")}), vec!["unknown filter", "allow_all, saturation, breaker, capability"]),
        (json!({"scorer": scorer("nosuch")}), vec!["unknown scorer", "kv_least_loaded", "no_hit_lru"]),
        (json!({"preset": "nosuch"}), vec!["unknown preset", "kvist, foretoken"]),
        (
            json!({"scorer": {"algorithm": "two_tier", "parameters": {"cacheThreshold": 1}}}),
            vec!["cacheThreshold", "cache_threshold, balance_abs"],
        ),
        (json!({"scorer": {"algorithm": "uniform", "parameters": {"x": 1}}}), vec!["no parameter \"x\"", "none"]),
        (
            json!({"scorer": {"algorithm": "two_tier", "parameters": {"balance_rel_threshold": 0.9}}}),
            vec!["balance_rel_threshold is 0.9", "from 1 to"],
        ),
        (
            json!({"scorer": {"algorithm": "cost", "parameters": {"decodeWeight": "much"}}}),
            vec!["decodeWeight must be a number"],
        ),
        // F-45: the picker has to be max.
        (
            json!({"scorer": scorer("two_tier"), "picker": {"algorithm": "gamble_sampling"}}),
            vec!["two_tier needs picker max"],
        ),
        (json!({"scorers": [scorer("cost"), scorer("prefix")]}), vec!["cost stands alone", "queue_depth"]),
        (json!({"scorers": [scorer("prefix"), scorer("load_aware")]}), vec!["load_aware stands alone"]),
        (json!({"scorers": [scorer("prefix"), scorer("prefix")]}), vec!["prefix is named twice"]),
        (json!({"scorers": []}), vec!["no scorer"]),
        (
            json!({"scorer": scorer("kv_least_loaded"), "picker": {"algorithm": "softmax"}}),
            vec!["softmax needs", "kv_least_loaded is not"],
        ),
        (json!({"scorer": {"algorithm": "prefix", "weight": 0}}), vec!["weight must be above 0"]),
        (json!({"picker": {"algorithm": "max", "weight": 2}}), vec!["picker max cannot have a weight"]),
        (json!({"pickers": {}}), vec!["pickers"]),
        (json!({"picker": {"algorithm": "max", "params": {}}}), vec!["params", "{algorithm, parameters}"]),
        (json!("cost"), vec!["routing pipeline"]),
    ] {
        let message = pipeline(value.clone()).expect_err(&value.to_string());
        for word in words {
            assert!(message.contains(word), "{value}: {message:?} does not say {word:?}");
        }
    }
}

// F-40, F-41, F-43: these fall back to their defaults where others are refused.
#[test]
fn some_parameters_forgive() {
    for (name, parameter) in
        [("active_request", "maxBusyScore"), ("token_load", "queueThresholdTokens"), ("no_hit_lru", "lruSize")]
    {
        for value in [json!(-1), json!(null)] {
            let step = json!({"algorithm": name, "parameters": {parameter: value}});
            assert!(pipeline(json!({"scorer": step})).is_ok(), "{name}");
        }
    }
}

#[test]
fn every_algorithm_of_the_catalogue_can_be_made() {
    for algorithm in catalogue::ALGORITHMS {
        let step = json!({"algorithm": algorithm.name});
        let picker = if algorithm.name == "softmax" { "prefix" } else { "cost" };
        let value = match algorithm.stage {
            catalogue::Stage::Filter => json!({"filter": step}),
            catalogue::Stage::Scorer => json!({"scorer": step}),
            catalogue::Stage::Picker => json!({"scorer": {"algorithm": picker}, "picker": step}),
        };
        pipeline(value).unwrap();
    }
}

#[test]
fn the_reference_page_is_current() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/algorithms.md");
    let committed = std::fs::read_to_string(page).unwrap();
    assert!(catalogue::reference_page() == committed, "docs/reference/algorithms.md is not current: run `./task gen`");
}
