//! Finding out what a server is and can do. What can be tried is tried: a server that ignores a field would take it
//! silently in another meaning.

use std::collections::BTreeMap;

use http::HeaderMap;
use kvist_errors::{Code, KvistError};
use serde_json::{Map, Value, json};

use crate::{
    client::{Client, Reply, put},
    facts::{EventSockets, RankFacts, ServerFacts},
    metrics::{CacheConfig, ServerMetrics},
    request::say,
    settings::{Api, AttachedSettings, SchedulingPolicy, wrong},
};

/// A rank that no server has.
const NO_RANK: &str = "65535";

/// Learns everything that the worker has to know.
///
/// # Errors
/// Nobody answers, or the server does not fit what the worker was told, with the argument and the reason.
pub(crate) async fn introduce(
    client: &Client,
    settings: &AttachedSettings,
    prompt: &[u32],
) -> Result<ServerFacts, KvistError> {
    let models = client.get("/v1/models").await.map_err(|error| {
        KvistError::field(
            Code::EngineUnavailable,
            "engine_arguments.url",
            format!("{}: {}", settings.url, error.message),
        )
    })?;
    let cards = cards(&models)?;
    let card = choose(&cards, settings.model.as_deref())?;
    let context_tokens = agreed("max-model-len", settings.max_model_len, card.context_tokens)?;
    let version = client.get("/version").await?.good_json();
    let metrics = client.get("/metrics").await?;
    let metrics = if metrics.status.is_success() {
        ServerMetrics::read(&String::from_utf8_lossy(&metrics.body))
    } else {
        ServerMetrics::default()
    };
    let sources = sources(&client.get("/kv_event_sources").await?);
    let (block_size_tokens, hash_algorithm) = cache(&metrics.caches, settings)?;
    let ranks = ranks(&metrics.caches, &sources, settings, client.host())?;
    let probe = Probe { client, model: &card.id, prompt };
    let (api, states_cached_tokens) = probe.api(settings.api).await?;
    let facts = ServerFacts {
        version: version.as_ref().and_then(|one| one["version"].as_str()).unwrap_or("unknown").to_owned(),
        model: card.id.clone(),
        api,
        context_tokens,
        block_size_tokens,
        hash_algorithm,
        takes_salts: probe.knows(api, "cache_salt", "".into()).await?,
        orders_by_priority: settings.scheduling_policy == Some(SchedulingPolicy::Priority),
        has_adapters: cards.iter().any(|other| other.parent.is_some()),
        resets_cache: client.get("/is_sleeping").await?.status.is_success(),
        ranks,
    };
    // Whether priorities count nobody says: without such a policy vLLM takes them and does nothing.
    if facts.orders_by_priority && !probe.knows(api, "priority", "first".into()).await? {
        return Err(wrong("scheduling-policy", "the server does not look at priorities"));
    }
    if facts.ranks.len() > 1 && !probe.pins(api).await? {
        return Err(wrong("url", "the server has several data-parallel ranks, and requests cannot be pinned to one"));
    }
    if facts.follows_events() && !states_cached_tokens {
        let why = "the server publishes KV events and does not state cached tokens, so that claims could not be checked: \
                   start it with --enable-prompt-tokens-details, or say kv-events: false";
        return Err(wrong("kv-events", why));
    }
    Ok(facts)
}

/// A model that the server lists.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Card {
    id: String,
    root: Option<String>,
    /// The base model of an adapter.
    parent: Option<String>,
    context_tokens: Option<u32>,
}

fn cards(reply: &Reply) -> Result<Vec<Card>, KvistError> {
    let text = |card: &Value, name: &str| card[name].as_str().map(str::to_owned);
    let listed = reply.good_json();
    let listed = listed.as_ref().and_then(|models| models["data"].as_array());
    let listed = listed.ok_or_else(|| {
        wrong(
            "url",
            format!("/v1/models answers with status {} and no list: no server of the OpenAI API", reply.status),
        )
    })?;
    Ok(listed
        .iter()
        .filter_map(|card| {
            let context_tokens = card["max_model_len"].as_u64().and_then(|most| u32::try_from(most).ok());
            Some(Card { id: text(card, "id")?, root: text(card, "root"), parent: text(card, "parent"), context_tokens })
        })
        .collect())
}

fn choose<'a>(cards: &'a [Card], wanted: Option<&str>) -> Result<&'a Card, KvistError> {
    let models: Vec<&Card> = cards.iter().filter(|card| card.parent.is_none()).collect();
    let names = || models.iter().map(|card| card.id.as_str()).collect::<Vec<_>>().join(", ");
    match (wanted, models.as_slice()) {
        (Some(wanted), _) => models
            .iter()
            .find(|card| card.id == wanted)
            .copied()
            .ok_or_else(|| wrong("model", format!("the server does not serve {wanted}; it serves {}", names()))),
        (None, []) => Err(wrong("url", "the server lists no model")),
        // Several names of one model are the same.
        (None, [first, others @ ..]) if others.iter().all(|other| other.root.is_some() && other.root == first.root) => {
            Ok(first)
        }
        (None, _) => Err(wrong("model", format!("the server serves several, name one of {}", names()))),
    }
}

/// What both say, or the one who does.
fn agreed(field: &'static str, told: Option<u32>, stated: Option<u32>) -> Result<u32, KvistError> {
    match (told, stated) {
        (Some(told), Some(stated)) if told != stated => {
            Err(wrong(field, format!("is {stated} at the server and {told} here")))
        }
        (told, stated) => stated.or(told).ok_or_else(|| wrong(field, "the server does not say it: name it")),
    }
}

fn cache(caches: &BTreeMap<u32, CacheConfig>, settings: &AttachedSettings) -> Result<(u32, String), KvistError> {
    let mut stated = caches.values().map(|cache| cache.block_size_tokens).filter(|size| *size > 0);
    let first = stated.next();
    if stated.any(|size| Some(size) != first) {
        return Err(wrong("block-size", "the server's ranks have different ones"));
    }
    let hash_algorithm = caches.values().next().map(|cache| cache.hash_algorithm.clone()).unwrap_or_default();
    Ok((agreed("block-size", settings.block_size, first)?, hash_algorithm))
}

/// What `/kv_event_sources` says, by the engine's numbers of its ranks; nothing where the server has no such page.
fn sources(reply: &Reply) -> BTreeMap<u32, Value> {
    let sources = reply.good_json().unwrap_or(Value::Null);
    let publishes = |source: &Value| source["enable_kv_cache_events"] == true && source["publisher"] != "null";
    let sources = sources.as_object().cloned().unwrap_or_default().into_iter();
    sources
        .filter(|(_, source)| publishes(source))
        .filter_map(|(rank, source)| Some((rank.parse().ok()?, source)))
        .collect()
}

fn ranks(
    caches: &BTreeMap<u32, CacheConfig>,
    sources: &BTreeMap<u32, Value>,
    settings: &AttachedSettings,
    host: &str,
) -> Result<Vec<RankFacts>, KvistError> {
    let mut called: Vec<u32> = caches.keys().chain(sources.keys()).copied().collect();
    called.sort_unstable();
    called.dedup();
    if called.is_empty() {
        called.push(0);
    }
    let follows = settings.kv_events.unwrap_or(!sources.is_empty());
    called
        .into_iter()
        .map(|called| {
            let sockets = match (follows, sources.get(&called)) {
                (false, _) => None,
                (true, Some(source)) => Some(sockets(source, host)?),
                (true, None) => {
                    let why = format!("rank {called} of the server publishes none: start it with --kv-events-config");
                    return Err(wrong("kv-events", why));
                }
            };
            let kv_blocks = caches.get(&called).map_or(0, |cache| cache.kv_blocks);
            Ok(RankFacts { called, kv_blocks, sockets })
        })
        .collect()
}

fn sockets(source: &Value, host: &str) -> Result<EventSockets, KvistError> {
    let endpoint = |name: &str| match source[name].as_str() {
        Some(text) => reachable(text, host),
        None if name == "replay_endpoint" => Err(wrong(
            "kv-events",
            "the server has no replay socket, and a lost removal would stay unknown: give its --kv-events-config a \
             replay_endpoint, or say kv-events: false",
        )),
        None => Err(wrong("kv-events", "the server does not say where it publishes")),
    };
    Ok(EventSockets { endpoint: endpoint("endpoint")?, replay_endpoint: endpoint("replay_endpoint")? })
}

/// An endpoint as others reach it: what is bound to all addresses of the server's host is at that host.
fn reachable(endpoint: &str, host: &str) -> Result<String, KvistError> {
    let Some(address) = endpoint.strip_prefix("tcp://") else { return Ok(endpoint.to_owned()) };
    let (bound, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let is_loopback = |host: &str| matches!(host, "127.0.0.1" | "localhost" | "::1" | "[::1]");
    match bound {
        "*" | "0.0.0.0" | "[::]" | "::" => Ok(format!("tcp://{host}:{port}")),
        bound if is_loopback(bound) && !is_loopback(host) => {
            Err(wrong("kv-events", format!("the server publishes at {endpoint}, which is its own host alone")))
        }
        _ => Ok(endpoint.to_owned()),
    }
}

/// Requests that only ask whether they are taken.
struct Probe<'a> {
    client: &'a Client,
    model: &'a str,
    prompt: &'a [u32],
}

impl Probe<'_> {
    async fn ask(&self, api: Api, headers: HeaderMap, fields: &[(&str, Value)]) -> Result<Reply, KvistError> {
        let mut body = json!({"model": self.model, "stream": false});
        for (name, value) in fields {
            body[*name] = value.clone();
        }
        let words = Map::from_iter([("max_tokens".to_owned(), 1.into()), ("temperature".to_owned(), 0.into())]);
        say(&mut body, api, self.prompt.to_vec(), words);
        self.client.ask(api.path(), headers, &body).await
    }

    /// The door that is open, and whether its answers state cached tokens.
    async fn api(&self, wanted: Option<Api>) -> Result<(Api, bool), KvistError> {
        let candidates = wanted.map_or_else(|| vec![Api::Generate, Api::Completions], |api| vec![api]);
        let mut reasons = Vec::new();
        for api in candidates {
            let reply = self.ask(api, HeaderMap::new(), &[]).await?;
            let answer = reply.json();
            if !reply.status.is_success() {
                let said = answer.pointer("/error/message").or_else(|| answer.get("detail"));
                let said: String = said.and_then(Value::as_str).unwrap_or("no reason").chars().take(200).collect();
                reasons.push(format!("{} answers {}: {said}", api.path(), reply.status));
            } else if answer.pointer("/choices/0/token_ids").and_then(Value::as_array).is_none_or(Vec::is_empty) {
                reasons.push(format!("{} does not return token ids", api.path()));
            } else {
                let states = answer.pointer("/usage/prompt_tokens_details/cached_tokens").is_some_and(Value::is_u64);
                return Ok((api, states));
            }
        }
        Err(wrong("api", reasons.join("; ")))
    }

    /// Whether a field is looked at: one with a wrong value is refused then.
    async fn knows(&self, api: Api, field: &str, wrong_value: Value) -> Result<bool, KvistError> {
        Ok(self.ask(api, HeaderMap::new(), &[(field, wrong_value)]).await?.status.is_client_error())
    }

    async fn pins(&self, api: Api) -> Result<bool, KvistError> {
        let mut headers = HeaderMap::new();
        put(&mut headers, "x-data-parallel-rank", NO_RANK);
        Ok(self.ask(api, headers, &[]).await?.status.is_client_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(id: &str, root: &str, parent: Option<&str>) -> Card {
        let root = Some(root.to_owned());
        Card { id: id.to_owned(), root, parent: parent.map(str::to_owned), context_tokens: None }
    }

    #[test]
    fn the_only_model_is_chosen_and_several_need_a_name() {
        let chosen = |cards: &[Card], wanted| choose(cards, wanted).map(|card| card.id.clone());
        let message = |cards: &[Card], wanted| choose(cards, wanted).unwrap_err().message;
        let aliases = [card("a", "/m", None), card("b", "/m", None), card("lora", "/l", Some("a"))];
        assert_eq!(Ok("a".to_owned()), chosen(&aliases, None));
        assert_eq!(Ok("b".to_owned()), chosen(&aliases, Some("b")));
        assert!(message(&aliases, Some("lora")).ends_with("does not serve lora; it serves a, b"));
        let others = [card("a", "/m", None), card("b", "/n", None)];
        assert!(message(&others, None).ends_with("name one of a, b"));
        assert!(message(&[], None).contains("lists no model"));
    }

    #[test]
    fn what_both_say_has_to_be_the_same() {
        assert_eq!(Ok(16), agreed("block-size", None, Some(16)));
        assert_eq!(Ok(16), agreed("block-size", Some(16), None));
        assert_eq!(Ok(16), agreed("block-size", Some(16), Some(16)));
        assert!(
            agreed("block-size", Some(32), Some(16)).unwrap_err().message.ends_with("is 16 at the server and 32 here")
        );
        assert!(agreed("block-size", None, None).is_err());
    }

    #[test]
    fn what_is_bound_to_all_addresses_is_at_the_servers_host() {
        for (endpoint, host, expected) in [
            ("tcp://*:5557", "10.0.0.7", Some("tcp://10.0.0.7:5557")),
            ("tcp://0.0.0.0:5557", "h", Some("tcp://h:5557")),
            ("tcp://[::]:5557", "[::1]", Some("tcp://[::1]:5557")),
            ("tcp://10.0.0.9:5557", "10.0.0.7", Some("tcp://10.0.0.9:5557")),
            ("tcp://127.0.0.1:5557", "localhost", Some("tcp://127.0.0.1:5557")),
            ("tcp://127.0.0.1:5557", "10.0.0.7", None),
            ("ipc:///run/events", "10.0.0.7", Some("ipc:///run/events")),
        ] {
            assert_eq!(expected, reachable(endpoint, host).ok().as_deref(), "{endpoint} of {host}");
        }
    }

    #[test]
    fn every_rank_publishes_or_the_server_is_refused() {
        let settings = |kv_events: Value| {
            AttachedSettings::from_value(&json!({"url": "http://h", "tokenizer": "/", "kv-events": kv_events})).unwrap()
        };
        let cache = |kv_blocks| CacheConfig { kv_blocks, ..CacheConfig::default() };
        let caches = BTreeMap::from([(0, cache(5)), (1, cache(6))]);
        let source = json!({"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"});
        let both = BTreeMap::from([(0, source.clone()), (1, source.clone())]);
        let found = ranks(&caches, &both, &settings(Value::Null), "h").unwrap();
        assert_eq!(vec![(0, 5, true), (1, 6, true)], seen(&found));
        assert!(ranks(&caches, &BTreeMap::from([(0, source)]), &settings(Value::Null), "h").is_err());
        let found = ranks(&caches, &both, &settings(false.into()), "h").unwrap();
        assert_eq!(vec![(0, 5, false), (1, 6, false)], seen(&found));
        let found = ranks(&BTreeMap::new(), &BTreeMap::new(), &settings(Value::Null), "h").unwrap();
        assert_eq!(vec![(0, 0, false)], seen(&found));
        assert!(ranks(&caches, &BTreeMap::new(), &settings(true.into()), "h").is_err());
    }

    fn seen(ranks: &[RankFacts]) -> Vec<(u32, u64, bool)> {
        ranks.iter().map(|rank| (rank.called, rank.kv_blocks, rank.sockets.is_some())).collect()
    }
}
