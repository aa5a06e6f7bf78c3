//! The KV master's index.

use std::{sync::Arc, time::Duration};

use kvist_blocks::{BlockHash, HashSeed, Incarnation, Namespace, SourceKey, WorkerUid};
use kvist_doors::ClientTlsSettings;
use kvist_errors::{Code, KvistError};
use kvist_events::{
    BootstrapAnswer, Bootstraps, BusSettings, FeedSettings, FeedWorker, IndexFeed, care_for_index, convert,
    is_of_strange_store,
};
use kvist_index::{Index, IndexSettings, Overlap};
use kvist_proto::{
    controller::v1::ClusterState,
    events::v1::TierMatch,
    kvmaster::v1::{LookupRequest, LookupResponse, SourceMatch, StatsResponse, lookup_request::Prompt},
    router::v1::Transport,
};
use parking_lot::Mutex;
use prost::Message as _;
use pyo3::{prelude::*, types::PyBytes};
use serde::Deserialize;
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    doors::open_tls,
    failure::{raise, raise_invalid},
    relay::refused,
    runtime::{Runtime, block_on},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    nats_url: String,
    cluster: String,
    #[serde(default)]
    client_name: String,
    #[serde(default)]
    credentials_file: Option<std::path::PathBuf>,
    #[serde(default)]
    tls_ca_file: Option<std::path::PathBuf>,
    #[serde(default)]
    tls: ClientTlsSettings,
    byte_budget: u64,
    #[serde(default = "default_digest_interval_ms")]
    digest_interval_ms: u64,
}

/// Bytes of a bootstrap that are handed to Python at once, or one source when that has more.
const PARTS_BYTES: usize = 256 * 1024;

fn default_digest_interval_ms() -> u64 {
    5_000
}

/// What was taken from the last cluster state.
#[derive(Default)]
struct Followed {
    version: Option<(u64, u64)>,
    hash_seed: u64,
    workers: Vec<(WorkerUid, Incarnation)>,
}

/// The index of a whole cluster, fed from NATS and from the workers themselves.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct IndexService {
    handle: Handle,
    settings: Settings,
    index: Arc<Index>,
    bootstraps: Arc<Bootstraps>,
    followed: Mutex<Followed>,
    feed: Mutex<Option<Arc<IndexFeed>>>,
    caring: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[pymethods]
impl IndexService {
    /// Settings: `nats_url`, `cluster`, `byte_budget`, `client_name`, `credentials_file`, `tls_ca_file`,
    /// `digest_interval_ms`, and `tls`: how workers and KV masters are called.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings_json).map_err(|error| raise_invalid("index", error))?;
        let index = Arc::new(Index::new(IndexSettings { byte_budget: settings.byte_budget }));
        Ok(Self {
            handle: runtime.handle()?,
            settings,
            bootstraps: Bootstraps::new(Arc::clone(&index)),
            index,
            followed: Mutex::default(),
            feed: Mutex::new(None),
            caring: Mutex::new(None),
        })
    }

    /// Subscribes; NATS may come later.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        if self.feed.lock().is_some() {
            return Ok(());
        }
        let mut bus = BusSettings::new(self.settings.nats_url.clone(), self.settings.cluster.clone());
        bus.client_name.clone_from(&self.settings.client_name);
        bus.credentials_file.clone_from(&self.settings.credentials_file);
        bus.tls_ca_file.clone_from(&self.settings.tls_ca_file);
        let mut settings = FeedSettings::new(bus);
        settings.digest_interval = Duration::from_millis(self.settings.digest_interval_ms);
        settings.worker_tls = open_tls(&self.handle, &self.settings.tls)?;
        let feed = block_on(py, &self.handle, IndexFeed::start(settings, Arc::clone(&self.index))).map_err(refused)?;
        *self.feed.lock() = Some(Arc::new(feed));
        *self.caring.lock() = Some(AbortOnDropHandle::new(self.handle.spawn(care_for_index(Arc::clone(&self.index)))));
        Ok(())
    }

    /// Follows the workers of an encoded `ClusterState`; false when it is not newer than the last, or knows nothing of the
    /// workers that are followed.
    fn apply_cluster_state(&self, state: &[u8]) -> PyResult<bool> {
        let state = ClusterState::decode(state).map_err(|error| raise_invalid("cluster_state", error))?;
        if state.cluster != self.settings.cluster {
            return Err(raise_invalid("cluster_state.cluster", "is another cluster's"));
        }
        let version = state.version.unwrap_or_default();
        let version = Some((version.store_epoch, version.revision));
        let feed = self.feed()?;
        let mut followed = self.followed.lock();
        if followed.version >= version {
            return Ok(false);
        }
        let known = followed.workers.iter().map(|(uid, incarnation)| (uid, *incarnation));
        if followed.version.is_some_and(|(epoch, _)| is_of_strange_store(epoch, known, &state)) {
            return Ok(false);
        }
        let named = state.workers.iter().filter_map(|entry| {
            let target = entry.target.as_ref()?;
            Some((WorkerUid::from(target.worker_uid.as_str()), Incarnation(entry.incarnation)))
        });
        *followed = Followed { version, hash_seed: state.hash_seed, workers: named.collect() };
        let dead = state
            .dead_incarnations
            .iter()
            .map(|dead| (WorkerUid::from(dead.worker_uid.as_str()), Incarnation(dead.incarnation)))
            .collect();
        let attached: Vec<FeedWorker> = FeedWorker::attached(&state).collect();
        let workers = state.workers.into_iter().filter_map(|entry| {
            let target = entry.target?;
            // A server that Kvist does not host has no ledger to ask.
            matches!(target.transport(), Transport::Unspecified | Transport::Grpc).then(|| FeedWorker {
                uid: WorkerUid::from(target.worker_uid.as_str()),
                address: target.address,
                is_attached: false,
                incarnation: Incarnation(entry.incarnation),
                ranks: entry.ranks.max(1),
            })
        });
        feed.close_incarnations(dead);
        feed.set_workers(workers.chain(attached).collect());
        Ok(true)
    }

    /// Answers an encoded `LookupRequest` with an encoded `LookupResponse`, without `answered_by`.
    fn lookup<'py>(&self, py: Python<'py>, request: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let request = LookupRequest::decode(request).map_err(|error| raise_invalid("request", error))?;
        let hash_seed = self.followed.lock().hash_seed;
        let answer = py.detach(|| {
            let hashes = hashes_of(request, hash_seed)?;
            let overlaps = self.index.lookup(&hashes);
            let matches = overlaps.iter().filter(|(_, overlap)| overlap.matched_blocks > 0).map(to_match);
            let prompt_blocks = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
            Ok(LookupResponse { matches: matches.collect(), prompt_blocks, ..LookupResponse::default() })
        });
        let answer = answer.map_err(|error: KvistError| raise(&error))?;
        Ok(PyBytes::new(py, &answer.encode_to_vec()))
    }

    /// An encoded `StatsResponse`, without `role`.
    fn stats<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let answer = py.detach(|| {
            let memory = self.index.memory();
            StatsResponse {
                sources: self.index.sources().iter().map(convert::status_to).collect(),
                index_bytes: memory.bytes,
                index_byte_budget: memory.byte_budget,
                index_blocks: memory.blocks,
                ..StatsResponse::default()
            }
        });
        PyBytes::new(py, &answer.encode_to_vec())
    }

    /// Numbers of the feed as JSON text.
    fn feed_stats(&self) -> PyResult<String> {
        Ok(serde_json::to_string(&self.feed()?.stats()).unwrap_or_default())
    }

    /// Snapshots of the sources of the named workers, or of all when none is named.
    fn bootstrap(&self, worker_uids: Vec<String>) -> IndexSnapshots {
        IndexSnapshots(Mutex::new(self.bootstraps.answer(&worker_uids)))
    }

    /// Ends the feed; what is known stays. Idempotent.
    fn stop(&self, py: Python<'_>) {
        let running = (self.feed.lock().take(), self.caring.lock().take());
        py.detach(|| drop(running));
    }
}

/// One reader's way through an index.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct IndexSnapshots(Mutex<BootstrapAnswer>);

#[pymethods]
impl IndexSnapshots {
    /// The next encoded `BootstrapResponse`s, some hundred kilobytes of them; none after the end mark. Walks the index.
    fn next_parts<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let parts = py.detach(|| {
            let (mut parts, mut bytes) = (Vec::new(), 0);
            let mut answer = self.0.lock();
            while bytes < PARTS_BYTES
                && let Some(of_source) = answer.next()
            {
                let encoded = of_source.iter().map(prost::Message::encode_to_vec);
                parts.extend(encoded.inspect(|part| bytes += part.len()));
            }
            parts
        });
        parts.iter().map(|part| PyBytes::new(py, part)).collect()
    }
}

impl IndexService {
    fn feed(&self) -> PyResult<Arc<IndexFeed>> {
        self.feed.lock().clone().ok_or_else(|| raise(&KvistError::new(Code::NotReady, "the index is not running")))
    }
}

fn hashes_of(request: LookupRequest, hash_seed: u64) -> Result<Vec<BlockHash>, KvistError> {
    match request.prompt {
        Some(Prompt::Blocks(blocks)) => Ok(blocks.hashes.into_iter().map(BlockHash).collect()),
        Some(Prompt::Tokens(_)) if request.block_size_tokens == 0 => {
            Err(KvistError::field(Code::InvalidArgument, "block_size_tokens", "must be given with tokens"))
        }
        Some(Prompt::Tokens(tokens)) => {
            let namespace = Namespace::new(&request.namespace, &request.adapter, &request.cache_salt);
            let root = namespace.root(HashSeed(hash_seed));
            Ok(kvist_blocks::block_hashes(root, &tokens.ids, request.block_size_tokens as usize))
        }
        None => Err(KvistError::field(Code::InvalidArgument, "prompt", "must be blocks or tokens")),
    }
}

fn to_match((source, overlap): (&SourceKey, Overlap)) -> SourceMatch {
    let matches = kvist_blocks::Tier::ALL.iter().filter_map(|tier| {
        let blocks = overlap.tier_blocks[tier.position()];
        (blocks > 0).then(|| TierMatch { tier: tier.to_number(), blocks })
    });
    SourceMatch {
        source: Some(convert::source_to(source, overlap.incarnation)),
        state: convert::state_to(overlap.state).into(),
        next_sequence: overlap.applied_sequence.map_or(0, |sequence| sequence.saturating_add(1)),
        matches: matches.collect(),
    }
}
