//! The cluster as the router knows it: models and their targets.

use std::{collections::HashMap, sync::Arc};

use kvist_blocks::{HashSeed, Incarnation, Namespace};
use kvist_errors::{Code, KvistError};
use kvist_link::WorkerLink;
use kvist_proto::controller::v1::{ClusterState, Model, WorkerEntry};
use kvist_text::ModelText;
use parking_lot::RwLock;

use crate::follow::Follower;

/// One worker with its connection. Kept as long as UID, address and incarnation stay the same.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) entry: WorkerEntry,
    pub(crate) link: Arc<WorkerLink>,
    /// Keeps the index fed; ends with the last description of this process.
    pub(crate) follower: Arc<Follower>,
}

impl Worker {
    pub(crate) fn uid(&self) -> &str {
        self.entry.target.as_ref().map_or("", |target| target.worker_uid.as_str())
    }

    pub(crate) fn address(&self) -> &str {
        self.entry.target.as_ref().map_or("", |target| target.address.as_str())
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        Incarnation(self.entry.incarnation)
    }

    pub(crate) fn namespace(&self, adapter: &str, cache_salt: &str) -> Namespace {
        let pool = if self.entry.namespace.is_empty() { &self.entry.model } else { &self.entry.namespace };
        Namespace::new(pool, adapter, cache_salt)
    }
}

/// One model with its targets.
#[derive(Debug)]
pub(crate) struct ModelEntry {
    pub(crate) model: Model,
    pub(crate) workers: Vec<Arc<Worker>>,
    /// Filled in once a worker has answered; loading takes CPU seconds, so never on a request's path.
    pub(crate) text: Arc<RwLock<Option<Arc<ModelText>>>>,
}

/// One version of the cluster.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    /// (store epoch, revision).
    pub(crate) version: (u64, u64),
    pub(crate) hash_seed: u64,
    /// By name and by alias.
    pub(crate) models: HashMap<String, Arc<ModelEntry>>,
}

impl Cluster {
    pub(crate) fn seed(&self) -> HashSeed {
        HashSeed(self.hash_seed)
    }

    pub(crate) fn model(&self, name: &str) -> Result<&Arc<ModelEntry>, KvistError> {
        self.models
            .get(name)
            .filter(|entry| !entry.model.deleting)
            .ok_or_else(|| KvistError::field(Code::UnknownModel, "model", format!("there is no model `{name}`")))
    }
}

/// Checks a state before anything of it is used.
pub(crate) fn validate(state: &ClusterState) -> Result<(u64, u64), KvistError> {
    let version = state
        .version
        .as_ref()
        .map(|version| (version.store_epoch, version.revision))
        .ok_or_else(|| KvistError::field(Code::InvalidArgument, "version", "is missing"))?;
    for (position, worker) in state.workers.iter().enumerate() {
        let path = |field: &str| format!("workers[{position}].{field}");
        let target = worker
            .target
            .as_ref()
            .ok_or_else(|| KvistError::field(Code::InvalidArgument, path("target"), "is missing"))?;
        for (field, value) in
            [("target.worker_uid", &target.worker_uid), ("target.address", &target.address), ("model", &worker.model)]
        {
            if value.is_empty() {
                return Err(KvistError::field(Code::InvalidArgument, path(field), "is missing"));
            }
        }
        if worker.block_size_tokens == 0 {
            return Err(KvistError::field(Code::InvalidArgument, path("block_size_tokens"), "must be above 0"));
        }
    }
    Ok(version)
}
