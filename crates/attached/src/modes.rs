//! What a server can do by each of its doors, for the reference of engines: asked of the code that refuses.

use kvist_errors::KvistError;
use kvist_proto::engine::v1::{Capabilities, EngineRequest};

use crate::{
    facts::{EventSockets, RankFacts, ServerFacts},
    request::prepare,
    settings::Api,
};

/// A server as it is without any flag, or with all of them that concern Kvist.
fn example(api: Api, is_configured: bool) -> ServerFacts {
    let sockets = EventSockets { endpoint: "tcp://h:1".to_owned(), replay_endpoint: "tcp://h:2".to_owned() };
    let rank = RankFacts { sockets: is_configured.then_some(sockets), ..RankFacts::default() };
    ServerFacts {
        version: String::new(),
        model: "model".to_owned(),
        api,
        context_tokens: 4_096,
        block_size_tokens: 16,
        hash_algorithm: String::new(),
        ranks: vec![rank; if is_configured { 2 } else { 1 }],
        takes_salts: is_configured,
        orders_by_priority: is_configured,
        has_adapters: is_configured,
        resets_cache: is_configured,
    }
}

/// What such a server can do.
#[must_use]
pub fn capabilities(api: Api, is_configured: bool) -> Capabilities {
    example(api, is_configured).capabilities()
}

/// Data-parallel ranks of such a server.
#[must_use]
pub fn ranks(is_configured: bool) -> usize {
    example(Api::Generate, is_configured).ranks.len()
}

/// Why such a server is not asked for something; none when it is.
#[must_use]
pub fn refusal(request: EngineRequest, api: Api, is_configured: bool) -> Option<KvistError> {
    prepare(request, &example(api, is_configured)).err()
}
