//! What a server's `/metrics` says, as far as it is read.

use std::collections::BTreeMap;

/// One sample of Prometheus' text format.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    labels: BTreeMap<String, String>,
    value: f64,
}

/// What the engine of one data-parallel rank is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheConfig {
    /// Tokens a block; 0 when it is not said.
    pub(crate) block_size_tokens: u32,
    /// Blocks of the cache; 0 when it is not said.
    pub(crate) kv_blocks: u64,
    /// How blocks are named; empty when it is not said.
    pub(crate) hash_algorithm: String,
}

/// How loaded a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RankGauges {
    pub(crate) running_requests: u32,
    pub(crate) waiting_requests: u32,
    /// Part of the blocks that running requests use.
    pub(crate) cache_usage_ratio: f64,
    pub(crate) generated_tokens_total: u64,
    pub(crate) preemptions_total: u64,
    /// Of speculative decoding.
    pub(crate) drafts_total: u64,
    pub(crate) draft_tokens_total: u64,
    pub(crate) accepted_draft_tokens_total: u64,
}

/// All of it, by the engine's own numbers of its ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ServerMetrics {
    pub(crate) caches: BTreeMap<u32, CacheConfig>,
    pub(crate) gauges: BTreeMap<u32, RankGauges>,
}

impl ServerMetrics {
    /// Reads what concerns this; everything else is skipped, damaged lines too.
    pub(crate) fn read(text: &str) -> Self {
        let mut read = Self::default();
        for (name, sample) in text.lines().filter_map(sample) {
            let Some(name) = name.strip_prefix("vllm:") else { continue };
            let rank = sample.labels.get("engine").and_then(|rank| rank.parse().ok()).unwrap_or(0);
            let label = |name: &str| sample.labels.get(name).map(String::as_str).unwrap_or_default();
            if name == "cache_config_info" {
                let config = CacheConfig {
                    block_size_tokens: label("block_size").parse().unwrap_or(0),
                    kv_blocks: label("num_gpu_blocks").parse().unwrap_or(0),
                    hash_algorithm: label("prefix_caching_hash_algo").to_owned(),
                };
                read.caches.insert(rank, config);
                continue;
            }
            let mut gauges = read.gauges.get(&rank).copied().unwrap_or_default();
            match name {
                "num_requests_running" => gauges.running_requests += sample.value as u32,
                "num_requests_waiting" => gauges.waiting_requests += sample.value as u32,
                "kv_cache_usage_perc" => gauges.cache_usage_ratio = sample.value,
                "generation_tokens_total" => gauges.generated_tokens_total += sample.value as u64,
                "num_preemptions_total" => gauges.preemptions_total += sample.value as u64,
                "spec_decode_num_drafts_total" => gauges.drafts_total += sample.value as u64,
                "spec_decode_num_draft_tokens_total" => gauges.draft_tokens_total += sample.value as u64,
                "spec_decode_num_accepted_tokens_total" => gauges.accepted_draft_tokens_total += sample.value as u64,
                _ => continue,
            }
            read.gauges.insert(rank, gauges);
        }
        read
    }
}

/// A line of the format: `name{label="value",…} value`.
fn sample(line: &str) -> Option<(&str, Sample)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (name, rest) = line.split_at(line.find(['{', ' '])?);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, Sample { labels, value }))
}

fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = quoted.char_indices();
        rest = loop {
            match characters.next()? {
                (at, '"') => break &quoted[at + 1..],
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = r#"
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="64",prefix_caching_hash_algo="sha256_cbor"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="None",odd="a \"}\" b"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:generation_tokens_total{engine="1",model_name="m"} 17.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 3.0
process_open_fds 12
"#;

    #[test]
    fn caches_and_gauges_are_read_by_rank() {
        let read = ServerMetrics::read(TEXT);
        let hash_algorithm = "sha256_cbor".to_owned();
        assert_eq!(CacheConfig { block_size_tokens: 32, kv_blocks: 64, hash_algorithm }, read.caches[&0]);
        assert_eq!((32, 0), (read.caches[&1].block_size_tokens, read.caches[&1].kv_blocks));
        let expected = RankGauges {
            running_requests: 3,
            waiting_requests: 2,
            cache_usage_ratio: 0.25,
            generated_tokens_total: 17,
            preemptions_total: 1,
            drafts_total: 4,
            draft_tokens_total: 12,
            accepted_draft_tokens_total: 9,
        };
        assert_eq!(expected, read.gauges[&1]);
        assert_eq!(1, read.gauges.len());
    }

    proptest! {
        #[test]
        fn damaged_text_is_skipped(cut in 0..TEXT.len(), noise in "[ -~]{0,12}") {
            let _ = ServerMetrics::read(&format!("{}{noise}{}", &TEXT[..cut], &TEXT[cut..]));
        }
    }
}
