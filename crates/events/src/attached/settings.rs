//! What an agent is told of an engine that runs already.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use kvist_blocks::{HashSeed, Tier};
use kvist_ledger::vllm::{HashAlgorithm, HashScheme, Medium, VllmSettings};
use serde::Deserialize;

use crate::{EventsError, VllmReaderSettings, subject::check_token};

/// Largest port.
const MOST_PORT: u32 = 65_535;

/// What a medium's name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediumMeaning {
    /// Claims in the device tier.
    Device,
    /// Claims in the host tier.
    Host,
    /// Claims in the disk tier.
    Disk,
    /// Claims in the external tier.
    External,
    /// It never reports removals: hints with a time to live.
    Hint,
}

impl MediumMeaning {
    fn medium(self) -> Medium {
        let claim = |tier| Medium { tier, is_hint: false };
        match self {
            Self::Device => claim(Tier::Device),
            Self::Host => claim(Tier::Host),
            Self::Disk => claim(Tier::Disk),
            Self::External => claim(Tier::External),
            Self::Hint => Medium { tier: Tier::External, is_hint: true },
        }
    }
}

/// How an engine was told to name its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashAlgorithmName {
    /// Nobody says.
    #[default]
    #[serde(rename = "")]
    Unstated,
    /// SHA-256 of a pickle.
    Sha256,
    /// SHA-256 of CBOR.
    Sha256Cbor,
    /// Not reproducible: its seed is random.
    Xxhash,
    /// Likewise.
    XxhashCbor,
}

impl HashAlgorithmName {
    /// How its hashes are recomputed, with the engine's `PYTHONHASHSEED`; none where they cannot be.
    #[must_use]
    pub fn scheme(self, seed: Option<&str>) -> Option<HashScheme> {
        let algorithm = match self {
            Self::Sha256 => HashAlgorithm::Sha256,
            Self::Sha256Cbor => HashAlgorithm::Sha256Cbor,
            Self::Unstated | Self::Xxhash | Self::XxhashCbor => return None,
        };
        Some(HashScheme { algorithm, seed: seed.map(str::to_owned) })
    }
}

/// One engine that Kvist did not start.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachSettings {
    /// UID under which its ledger speaks.
    pub worker_uid: String,
    /// Its name on this node.
    pub name: String,
    /// Name of the model that it serves.
    pub model: String,
    /// Namespace of its block hashes; the model's name when empty.
    #[serde(default)]
    pub namespace: String,
    /// PUB socket of the first rank: `tcp://host:port` or `ipc://path`. Further ranks have the following ports.
    pub events_endpoint: String,
    /// ROUTER socket of the first rank, likewise.
    pub replay_endpoint: String,
    /// Beginning of the topic.
    #[serde(default)]
    pub topic: String,
    /// Data-parallel ranks.
    #[serde(default = "one")]
    pub ranks: u32,
    /// The number by which the engine calls the first of them.
    #[serde(default)]
    pub first_rank: u32,
    /// Tokens a block of the ledger: the engine's block, or a part of it.
    pub block_size_tokens: u32,
    /// `--prefix-caching-hash-algo` of the engine.
    #[serde(default)]
    pub hash_algorithm: HashAlgorithmName,
    /// The engine's `PYTHONHASHSEED`; none when it has none.
    #[serde(default)]
    pub python_hash_seed: Option<String>,
    /// Vouches that nobody sends it salts, images or embeddings; for engines that do not state them.
    #[serde(default)]
    pub plain_requests_only: bool,
    /// Whether requests may ask the engine to report what it holds already.
    #[serde(default = "yes")]
    pub may_repeat: bool,
    /// Names of adapters by the number that older versions send instead.
    #[serde(default)]
    pub adapters: HashMap<u64, String>,
    /// Media beside `gpu`, `cpu` and `storage`, or instead of them, by their names.
    #[serde(default)]
    pub media: BTreeMap<String, MediumMeaning>,
    /// Milliseconds without news after which the last batch is verified.
    #[serde(default = "idle_interval_ms")]
    pub idle_interval_ms: u64,
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

fn idle_interval_ms() -> u64 {
    2_000
}

impl AttachSettings {
    /// Looks for what cannot be right.
    pub(super) fn check(&self) -> Result<(), EventsError> {
        check_token("worker_uid", &self.worker_uid)?;
        let wrong = |field, reason: &str| {
            Err(EventsError::Attach { name: self.name.clone(), field, reason: reason.to_owned() })
        };
        if self.model.is_empty() {
            return wrong("model", "must not be empty");
        }
        if self.block_size_tokens == 0 {
            return wrong("block_size_tokens", "must be at least 1");
        }
        if !(1..=1024).contains(&self.ranks) {
            return wrong("ranks", "must be 1 to 1,024");
        }
        if self.idle_interval_ms == 0 {
            return wrong("idle_interval_ms", "must be at least 1");
        }
        for (field, endpoint) in
            [("events_endpoint", &self.events_endpoint), ("replay_endpoint", &self.replay_endpoint)]
        {
            if let Err(reason) = rank_endpoint(endpoint, self.ranks - 1) {
                return wrong(field, reason);
            }
        }
        if self.events_endpoint == self.replay_endpoint {
            return wrong("replay_endpoint", "is the events endpoint: the engine needs one for each");
        }
        Ok(())
    }

    /// The namespace of block hashes.
    #[must_use]
    pub fn effective_namespace(&self) -> &str {
        if self.namespace.is_empty() { &self.model } else { &self.namespace }
    }

    /// How one of its ranks is read.
    pub(super) fn reader(&self, rank: u32, hash_seed: HashSeed) -> Result<VllmReaderSettings, EventsError> {
        let wrong = |field| {
            move |reason: &'static str| EventsError::Attach {
                name: self.name.clone(),
                field,
                reason: reason.to_owned(),
            }
        };
        let events = rank_endpoint(&self.events_endpoint, rank).map_err(wrong("events_endpoint"))?;
        let replay = rank_endpoint(&self.replay_endpoint, rank).map_err(wrong("replay_endpoint"))?;
        let mut engine = VllmSettings::new(self.effective_namespace(), hash_seed);
        engine.adapters.clone_from(&self.adapters);
        engine.media.extend(self.media.iter().map(|(name, meaning)| (name.to_lowercase(), meaning.medium())));
        engine.has_plain_requests_only = self.plain_requests_only;
        engine.may_repeat = self.may_repeat;
        engine.hashes = self.hash_algorithm.scheme(self.python_hash_seed.as_deref());
        let mut settings = VllmReaderSettings::new(events, replay, engine);
        settings.topic.clone_from(&self.topic);
        settings.idle_interval = Duration::from_millis(self.idle_interval_ms);
        Ok(settings)
    }
}

/// An engine gives each rank the port that many after the first one's.
fn rank_endpoint(endpoint: &str, rank: u32) -> Result<String, &'static str> {
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        return match (path.is_empty(), rank) {
            (true, _) => Err("has no path after ipc://"),
            (false, 0) => Ok(endpoint.to_owned()),
            (false, _) => Err("must be tcp:// for an engine of several ranks: only ports can be counted up"),
        };
    }
    let Some(address) = endpoint.strip_prefix("tcp://") else { return Err("must be tcp://host:port or ipc://path") };
    let Some((host, port)) = address.rsplit_once(':') else { return Err("has no port") };
    if host.is_empty() || host == "*" {
        return Err("must name the host that the engine runs on");
    }
    let port = port.parse::<u32>().ok().filter(|port| (1..=MOST_PORT).contains(port));
    let Some(port) = port else { return Err("must have a port from 1 to 65,535") };
    match port.checked_add(rank).filter(|port| *port <= MOST_PORT) {
        Some(port) => Ok(format!("tcp://{host}:{port}")),
        None => Err("leaves no ports for all ranks"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(change: &str) -> AttachSettings {
        let mut value: serde_json::Value = serde_json::json!({
            "worker_uid": "attached-1", "name": "a", "model": "m", "block_size_tokens": 16,
            "events_endpoint": "tcp://h:5557", "replay_endpoint": "tcp://[::1]:5657", "ranks": 2,
        });
        let change: serde_json::Value = serde_json::from_str(change).unwrap();
        value.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn ranks_have_ports_that_follow_each_other() {
        let settings = settings(
            r#"{"media": {"LMCache": "host", "gpu": "hint"}, "topic": "kv", "hash_algorithm": "sha256", "python_hash_seed": "0"}"#,
        );
        settings.check().unwrap();
        let reader = settings.reader(1, HashSeed(7)).unwrap();
        assert_eq!(("tcp://h:5558", "tcp://[::1]:5658"), (&*reader.endpoint, &*reader.replay_endpoint));
        assert_eq!(("kv", "m"), (&*reader.topic, &*reader.engine.pool));
        let scheme = HashScheme { algorithm: HashAlgorithm::Sha256, seed: Some("0".to_owned()) };
        assert_eq!(Some(scheme), reader.engine.hashes);
        let media = &reader.engine.media;
        assert_eq!(Medium { tier: Tier::Host, is_hint: false }, media["lmcache"]);
        assert!(media["gpu"].is_hint && !media["cpu"].is_hint);
    }

    #[test]
    fn what_cannot_be_right_is_named() {
        for (change, field) in [
            (r#"{"worker_uid": "A"}"#, "worker_uid"),
            (r#"{"model": ""}"#, "model"),
            (r#"{"block_size_tokens": 0}"#, "block_size_tokens"),
            (r#"{"ranks": 0}"#, "ranks"),
            (r#"{"idle_interval_ms": 0}"#, "idle_interval_ms"),
            (r#"{"events_endpoint": "tcp://*:5557"}"#, "events_endpoint"),
            (r#"{"events_endpoint": "http://h:5557"}"#, "events_endpoint"),
            (r#"{"events_endpoint": "tcp://h"}"#, "events_endpoint"),
            (r#"{"events_endpoint": "ipc:///run/a"}"#, "events_endpoint"),
            (r#"{"events_endpoint": "ipc://", "ranks": 1}"#, "events_endpoint"),
            (r#"{"replay_endpoint": "tcp://h:65535"}"#, "replay_endpoint"),
            (r#"{"replay_endpoint": "tcp://h:5557"}"#, "replay_endpoint"),
        ] {
            let error = settings(change).check().unwrap_err().to_string();
            assert!(error.contains(field), "{change}: {error}");
        }
    }
}
