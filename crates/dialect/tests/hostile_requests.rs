//! Bodies that nobody meant to send: every parser answers with a request or with an error of the caller, and with
//! nothing else. `PROPTEST_CASES` sets how many are tried.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use kvist_dialect::{
    GenerateInput, parse_chat_completion, parse_completion, parse_count_tokens, parse_detokenize, parse_head,
    parse_messages, parse_response, parse_tokenize,
};
use kvist_errors::KvistError;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Whether a body was understood; an error has to be the caller's and to say something.
type Parser = fn(&[u8]) -> Result<(), KvistError>;

const PARSERS: [(&str, Parser); 8] = [
    ("chat", |body| parse_chat_completion(body).map(check)),
    ("completion", |body| parse_completion(body).map(check)),
    ("messages", |body| parse_messages(body).map(check)),
    ("response", |body| parse_response(body).map(check)),
    ("count_tokens", |body| parse_count_tokens(body).map(drop)),
    ("tokenize", |body| parse_tokenize(body).map(drop)),
    ("detokenize", |body| parse_detokenize(body).map(drop)),
    ("head", |body| parse_head(body).map(drop)),
];

/// What holds of everything that is understood.
fn check(input: GenerateInput) {
    assert!(!input.model.is_empty());
    assert!(input.choices >= 1);
    assert!(input.max_tokens != Some(0));
    let sampling = &input.sampling;
    for number in [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty] {
        assert!(number.is_none_or(|number| number.is_finite() && number >= 0.0), "{number:?}");
    }
    for field in ["kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_event_report_mode", "vllm_xargs"] {
        assert!(!input.extras.contains_key(field), "only the mesh sets {field}");
    }
}

fn try_all(body: &[u8]) {
    for (name, parse) in PARSERS {
        if let Err(error) = parse(body) {
            let status = error.code.http_status();
            assert!((400..500).contains(&status) && !error.message.is_empty(), "{name}: {status} {error}");
        }
    }
}

/// Good bodies, which mutations begin with.
fn seeds() -> Vec<Value> {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": "a"},
    ]);
    vec![
        json!({
            "model": "m", "messages": messages, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "n": 2, "stop": ["x"],
            "max_tokens": 9, "seed": 7, "stream": true, "stream_options": {"include_usage": true}, "logprobs": true,
            "top_logprobs": 2, "logit_bias": {"1": 5}, "priority": -1, "cache_salt": "c", "min_p": 0.1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        }),
        json!({"model": "m", "prompt": [1, 2, 3], "echo": true, "stop": "x", "ignore_eos": true}),
        json!({"model": "m", "prompt": "text", "suffix": null, "best_of": 1, "logprobs": 1}),
        json!({
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
            "messages": [{"role": "user", "content": "t"}], "metadata": {"user_id": "u"},
        }),
        json!({
            "model": "m", "store": false, "input": [{"role": "user", "content": [{"type": "input_text", "text": "t"}]}],
            "instructions": "i", "max_output_tokens": 3, "text": {"format": {"type": "text"}},
        }),
        json!({"model": "m", "tokens": [1, 2], "prompt": "p"}),
    ]
}

/// Any JSON, a few levels deep.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        Just(json!(1e308)),
        Just(json!(-0.0)),
        ".{0,12}".prop_map(Value::from),
        Just(json!("text")),
        Just(json!("user")),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let key =
            prop_oneof!["[a-z_]{1,8}", Just("type".to_owned()), Just("role".to_owned()), Just("content".to_owned())];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4).prop_map(|items| Value::Object(items.into_iter().collect())),
        ]
    })
}

/// The places inside a value, the value itself among them.
fn places(value: &Value) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut walk: Vec<(String, &Value)> = vec![(String::new(), value)];
    while let Some((path, value)) = walk.pop() {
        let children: Vec<(String, &Value)> = match value {
            Value::Object(map) => map.iter().map(|(key, child)| (format!("{path}/{key}"), child)).collect(),
            Value::Array(items) => {
                items.iter().enumerate().map(|(at, child)| (format!("{path}/{at}"), child)).collect()
            }
            _ => Vec::new(),
        };
        found.extend(children.iter().map(|(path, _)| path.clone()));
        walk.extend(children);
    }
    found.sort_unstable();
    found
}

proptest! {
    #[test]
    fn bytes_of_any_kind(body in prop::collection::vec(any::<u8>(), 0..200)) {
        try_all(&body);
    }

    #[test]
    fn json_of_any_kind(body in any_json()) {
        try_all(body.to_string().as_bytes());
    }

    #[test]
    fn good_bodies_with_something_else_in_places(
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
    ) {
        let seeds = seeds();
        let mut body = seed.get(&seeds).clone();
        for (place, value) in changes {
            let places = places(&body);
            let place: &String = place.get(&places);
            *body.pointer_mut(place).unwrap() = value;
        }
        try_all(body.to_string().as_bytes());
    }

    #[test]
    fn good_bodies_with_bytes_that_are_wrong(
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        kept in any::<prop::sample::Index>(),
    ) {
        let mut body = seed.get(&seeds()).to_string().into_bytes();
        for (place, byte) in changes {
            let place = place.index(body.len());
            body[place] = byte;
        }
        try_all(&body);
        body.truncate(kept.index(body.len()));
        try_all(&body);
    }
}

#[test]
fn the_bodies_that_mutations_begin_with_are_good() {
    for seed in seeds() {
        let body = seed.to_string();
        let understood = PARSERS.iter().filter(|(name, _)| *name != "head").map(|(_, parse)| parse(body.as_bytes()));
        let errors: Vec<String> = understood.filter_map(|result| result.err()).map(|error| error.to_string()).collect();
        assert!(errors.len() < PARSERS.len() - 1, "nobody understands {body}: {errors:#?}");
    }
}
