//! What is known of a server that answers. Pure.

use kvist_proto::engine::v1::Capabilities;

use crate::settings::Api;

/// Where a rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventSockets {
    pub(crate) endpoint: String,
    pub(crate) replay_endpoint: String,
}

/// One data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankFacts {
    /// The engine's own number of it.
    pub(crate) called: u32,
    /// Blocks of its cache; 0 when the server does not say.
    pub(crate) kv_blocks: u64,
    /// None where its events are not followed.
    pub(crate) sockets: Option<EventSockets>,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerFacts {
    pub(crate) version: String,
    /// The model as the server names it.
    pub(crate) model: String,
    pub(crate) api: Api,
    pub(crate) context_tokens: u32,
    pub(crate) block_size_tokens: u32,
    /// How blocks are named; empty when the server does not say.
    pub(crate) hash_algorithm: String,
    /// At least one.
    pub(crate) ranks: Vec<RankFacts>,
    pub(crate) takes_salts: bool,
    pub(crate) orders_by_priority: bool,
    pub(crate) has_adapters: bool,
    /// Whether it empties its cache when asked: `VLLM_SERVER_DEV_MODE=1`.
    pub(crate) resets_cache: bool,
}

impl ServerFacts {
    /// Whether every rank's cache is accounted for.
    pub(crate) fn follows_events(&self) -> bool {
        self.ranks.iter().all(|rank| rank.sockets.is_some())
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        Capabilities {
            logprobs: self.api == Api::Generate,
            json_schema: true,
            grammar: true,
            regex: true,
            structural_tag: true,
            adapters: self.has_adapters,
            kv_events: self.follows_events(),
            ..Capabilities::default()
        }
    }
}
