//! The cluster state as the router uses it: one immutable view, swapped whole.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Weak},
};

use kvist_blocks::{HashSeed, Incarnation, WorkerUid};
use kvist_errors::{Code, KvistError};
use kvist_events::FeedWorker;
use kvist_link::{LinkSettings, WorkerLink};
use kvist_proto::controller::v1::{ClusterState, Model, WorkerEntry};
use kvist_text::ModelText;
use parking_lot::Mutex;
use prost::Message as _;

use crate::{
    model_state::{ModelState, ModelStates},
    target::{WorkerConnection, WorkerNode},
    text::{TextCache, TextPool},
};

/// Place of a state in history; a greater epoch is newer whatever the revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StateVersion {
    /// Made when the store is made or restored.
    pub store_epoch: u64,
    /// Revision of the store.
    pub revision: u64,
}

/// One model and the workers that serve it.
#[derive(Debug)]
pub(crate) struct ModelView {
    pub(crate) name: Arc<str>,
    pub(crate) model: Model,
    pub(crate) workers: Vec<Arc<WorkerNode>>,
    /// What stays of it from one state to the next.
    pub(crate) state: Arc<ModelState>,
}

impl ModelView {
    /// The text by which requests are tokenized: that of the pools' present revision where one is loaded.
    pub(crate) fn text(&self) -> Option<Arc<ModelText>> {
        let is_present = |node: &&Arc<WorkerNode>| {
            self.model
                .pools
                .iter()
                .any(|pool| pool.uid == node.target.pool_uid && pool.revision == node.target.pool_revision)
        };
        let usable = |node: &&Arc<WorkerNode>| node.excluded().is_none();
        let candidates = || self.workers.iter();
        candidates()
            .filter(is_present)
            .filter(usable)
            .find_map(|node| node.text())
            .or_else(|| candidates().filter(usable).find_map(|node| node.text()))
            .or_else(|| candidates().find_map(|node| node.text()))
    }

    /// Longest context of the workers that take requests, in tokens; 0 while none does.
    pub(crate) fn context_tokens(&self) -> u32 {
        let contexts =
            self.workers.iter().filter(|node| node.excluded().is_none()).filter_map(|node| node.description());
        contexts.filter_map(|description| description.limits.map(|limits| limits.context_tokens)).max().unwrap_or(0)
    }

    /// Whether a request could be answered: a prefill target alone cannot.
    pub(crate) fn can_answer(&self) -> bool {
        self.workers.iter().any(|node| node.answers() && node.excluded().is_none())
    }

    /// Targets that take requests.
    pub(crate) fn ready_targets(&self) -> u32 {
        self.workers.iter().filter(|node| node.excluded().is_none()).map(|node| node.ranks()).sum()
    }
}

/// Everything a request needs to know of the cluster.
#[derive(Debug, Default)]
pub(crate) struct ClusterView {
    pub(crate) version: StateVersion,
    pub(crate) cluster: String,
    pub(crate) hash_seed: u64,
    /// By name and alias.
    pub(crate) models: HashMap<String, Arc<ModelView>>,
    pub(crate) workers: BTreeMap<WorkerUid, Arc<WorkerNode>>,
    /// Deaths that were announced.
    pub(crate) dead: Vec<(WorkerUid, Incarnation)>,
    /// Engines that agents have attached: sources of knowledge, and no targets.
    pub(crate) attached: Vec<FeedWorker>,
}

impl ClusterView {
    pub(crate) fn seed(&self) -> HashSeed {
        HashSeed(self.hash_seed)
    }

    /// The models once each, by name.
    pub(crate) fn models_by_name(&self) -> Vec<&Arc<ModelView>> {
        let mut models: Vec<&Arc<ModelView>> =
            self.models.iter().filter(|(name, model)| **name == *model.name).map(|(_, model)| model).collect();
        models.sort_by(|left, right| left.name.cmp(&right.name));
        models
    }
}

/// Reads and checks an encoded state.
pub(crate) fn decode_state(bytes: &[u8]) -> Result<ClusterState, KvistError> {
    let wrong = |field: String, why: &str| Err(KvistError::field(Code::InvalidArgument, field, why));
    let state = ClusterState::decode(bytes).map_err(|error| {
        KvistError::new(Code::InvalidArgument, format!("the cluster state cannot be read: {error}"))
    })?;
    if state.version.is_none() {
        return wrong("version".to_owned(), "is missing");
    }
    if state.cluster.is_empty() {
        return wrong("cluster".to_owned(), "is missing");
    }
    let mut names = HashSet::new();
    for (position, model) in state.models.iter().enumerate() {
        if model.name.is_empty() {
            return wrong(format!("models[{position}].name"), "is missing");
        }
        for name in std::iter::once(&model.name).chain(&model.aliases) {
            if !names.insert(name.as_str()) {
                return wrong(format!("models[{position}]"), "has a name that another model has");
            }
        }
    }
    let mut uids = HashSet::new();
    for (position, entry) in state.workers.iter().enumerate() {
        let target = entry.target.as_ref();
        let uid = target.map_or("", |target| target.worker_uid.as_str());
        if uid.is_empty() || !uids.insert(uid) {
            return wrong(format!("workers[{position}].target.worker_uid"), "is missing or there twice");
        }
        if target.is_none_or(|target| target.address.is_empty()) {
            return wrong(format!("workers[{position}].target.address"), "is missing");
        }
    }
    Ok(state)
}

pub(crate) fn version_of(state: &ClusterState) -> StateVersion {
    let version = state.version.unwrap_or_default();
    StateVersion { store_epoch: version.store_epoch, revision: version.revision }
}

/// What connections are made with.
pub(crate) struct Connector {
    pub(crate) link_settings: LinkSettings,
    pub(crate) texts: Arc<TextCache>,
    pub(crate) pool: Arc<TextPool>,
    pub(crate) states: ModelStates,
    /// Workers that a state has left out while requests ran on them. One that comes back meanwhile is the same
    /// connection: a worker ends a router's older connection when that router connects again.
    withdrawn: Mutex<HashMap<WorkerUid, Withdrawn>>,
}

struct Withdrawn {
    entry: WorkerEntry,
    hash_seed: u64,
    /// Held by the requests alone.
    connection: Weak<WorkerConnection>,
}

impl Connector {
    pub(crate) fn new(
        link_settings: LinkSettings,
        texts: Arc<TextCache>,
        pool: Arc<TextPool>,
        states: ModelStates,
    ) -> Self {
        Self { link_settings, texts, pool, states, withdrawn: Mutex::default() }
    }

    /// The view of a state. Connections of workers that stayed (UID, incarnation, address) are kept; workers of models
    /// that are not in the state are dropped. Called within a runtime.
    pub(crate) fn view(&self, state: ClusterState, old: &ClusterView) -> Result<ClusterView, KvistError> {
        let mut nodes: BTreeMap<WorkerUid, Arc<WorkerNode>> = BTreeMap::new();
        let known: HashSet<&str> = state.models.iter().map(|model| model.name.as_str()).collect();
        let dead: Vec<(WorkerUid, Incarnation)> = state
            .dead_incarnations
            .iter()
            .map(|dead| (WorkerUid::from(dead.worker_uid.as_str()), Incarnation(dead.incarnation)))
            .collect();
        for entry in &state.workers {
            let Some(target) = entry.target.clone() else { continue };
            let mut entry = entry.clone();
            if entry.namespace.is_empty() {
                entry.namespace.clone_from(&entry.model);
            }
            let entry = &entry;
            let uid = WorkerUid::from(target.worker_uid.as_str());
            let is_dead = dead.iter().any(|(worker, up_to)| *worker == uid && entry.incarnation <= up_to.0);
            if !known.contains(entry.model.as_str()) || is_dead {
                tracing::warn!(worker = %uid, model = %entry.model, is_dead, "worker of the cluster state left out");
                continue;
            }
            let connection = if WorkerNode::is_linkable(&target) {
                Some(match self.reusable(old, &uid, entry, state.hash_seed) {
                    Some(connection) => connection,
                    None => {
                        let link = WorkerLink::connect(&target.address, self.link_settings.clone())?;
                        WorkerConnection::new(link, entry, state.hash_seed, &self.texts, &self.pool)
                    }
                })
            } else {
                None
            };
            let incarnation = Incarnation(entry.incarnation);
            let node = WorkerNode { uid: uid.clone(), incarnation, entry: entry.clone(), target, connection };
            nodes.insert(uid, Arc::new(node));
        }
        self.note_withdrawn(old, &nodes);
        let attached = FeedWorker::attached(&state).collect();
        let mut models = HashMap::new();
        let version = version_of(&state);
        for model in state.models {
            let workers: Vec<_> = nodes.values().filter(|node| node.entry.model == model.name).cloned().collect();
            let before = old.models.get(&model.name).map(|before| (&before.model, &before.state));
            let state = self.states.next(before, &model, &workers);
            let view = Arc::new(ModelView { name: model.name.as_str().into(), model, workers, state });
            for name in std::iter::once(&view.model.name).chain(&view.model.aliases) {
                models.insert(name.clone(), Arc::clone(&view));
            }
        }
        Ok(ClusterView {
            version,
            cluster: state.cluster,
            hash_seed: state.hash_seed,
            models,
            workers: nodes,
            dead,
            attached,
        })
    }

    /// The connection of the same start of the same worker; none when anything that was checked over it has changed.
    fn reusable(
        &self,
        old: &ClusterView,
        uid: &WorkerUid,
        entry: &WorkerEntry,
        hash_seed: u64,
    ) -> Option<Arc<WorkerConnection>> {
        if let Some(node) = old.workers.get(uid) {
            let is_same = old.hash_seed == hash_seed && is_same_start(&node.entry, entry);
            return if is_same { node.connection.clone() } else { None };
        }
        let withdrawn = self.withdrawn.lock();
        let known = withdrawn.get(uid)?;
        let is_same = known.hash_seed == hash_seed && is_same_start(&known.entry, entry);
        if is_same { known.connection.upgrade() } else { None }
    }

    fn note_withdrawn(&self, old: &ClusterView, nodes: &BTreeMap<WorkerUid, Arc<WorkerNode>>) {
        let mut withdrawn = self.withdrawn.lock();
        withdrawn.retain(|_, known| known.connection.strong_count() > 0);
        for (uid, node) in &old.workers {
            if let (false, Some(connection)) = (nodes.contains_key(uid), &node.connection) {
                let connection = Arc::downgrade(connection);
                let known = Withdrawn { entry: node.entry.clone(), hash_seed: old.hash_seed, connection };
                withdrawn.insert(uid.clone(), known);
            }
        }
    }
}

fn is_same_start(known: &WorkerEntry, entry: &WorkerEntry) -> bool {
    let address = |entry: &WorkerEntry| entry.target.as_ref().map(|target| target.address.clone());
    known.incarnation == entry.incarnation
        && address(known) == address(entry)
        && known.model == entry.model
        && known.block_size_tokens == entry.block_size_tokens
        && known.namespace == entry.namespace
}
