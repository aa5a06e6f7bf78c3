//! A worker as the router holds it.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use kvist_blocks::{Incarnation, Rank, WorkerUid};
use kvist_errors::KvistError;
use kvist_link::{LinkState, WorkerLink};
use kvist_proto::{
    controller::v1::WorkerEntry,
    engine::v1::{Role, WorkerDescription},
    router::v1::{Target, Transport},
};
use kvist_schedule::{Round, TargetId};
use kvist_text::ModelText;
use tokio_util::task::AbortOnDropHandle;

use crate::text::{TextCache, TextPool};

/// What stays the same from one cluster state to the next while UID, incarnation and address do: the connection, and
/// what was learned over it.
#[derive(Debug)]
pub(crate) struct WorkerConnection {
    pub(crate) link: WorkerLink,
    /// Tokenizer and template; none before they are loaded, or when the engine has none.
    pub(crate) text: ArcSwapOption<ModelText>,
    /// Why the worker cannot be used although it is connected.
    pub(crate) fault: ArcSwapOption<KvistError>,
    /// Whether the worker has been looked at: its text is there, or it has none.
    pub(crate) prepared: std::sync::atomic::AtomicBool,
    _preparing: std::sync::OnceLock<AbortOnDropHandle<()>>,
}

impl WorkerConnection {
    /// Connects, and fetches the tokenizer as soon as the worker has introduced itself. Called within a runtime.
    pub(crate) fn new(
        link: WorkerLink,
        entry: &WorkerEntry,
        hash_seed: u64,
        texts: &Arc<TextCache>,
        pool: &Arc<TextPool>,
    ) -> Arc<Self> {
        let connection = Arc::new(Self {
            link,
            text: ArcSwapOption::empty(),
            fault: ArcSwapOption::empty(),
            prepared: false.into(),
            _preparing: std::sync::OnceLock::new(),
        });
        let weak = Arc::downgrade(&connection);
        let (texts, pool, entry) = (Arc::clone(texts), Arc::clone(pool), entry.clone());
        let mut states = connection.link.watch_state();
        let task = tokio::spawn(async move {
            loop {
                if *states.borrow_and_update() == LinkState::Connected {
                    let Some(connection) = weak.upgrade() else { return };
                    let Some(description) = connection.link.description() else { return };
                    let link = connection.link.clone();
                    let result = prepare(&link, &description, &entry, hash_seed, &texts, &pool).await;
                    match result {
                        Ok(text) => {
                            connection.text.store(text);
                            connection.fault.store(None);
                            connection.prepared.store(true, std::sync::atomic::Ordering::Release);
                        }
                        Err(error) => {
                            tracing::warn!(worker = %description.worker_uid, %error, "worker cannot be used");
                            connection.fault.store(Some(Arc::new(error)));
                            // Another attempt comes with the next connection, or after a while.
                            drop(connection);
                            let pause = tokio::time::sleep(std::time::Duration::from_secs(2));
                            tokio::select! {
                                () = pause => continue,
                                changed = states.changed() => if changed.is_err() { return },
                            }
                            continue;
                        }
                    }
                }
                if states.changed().await.is_err() {
                    return;
                }
            }
        });
        let _ = connection._preparing.set(AbortOnDropHandle::new(task));
        connection
    }
}

/// Holds the worker's own words against its entry, and loads its text.
async fn prepare(
    link: &WorkerLink,
    description: &WorkerDescription,
    entry: &WorkerEntry,
    hash_seed: u64,
    texts: &TextCache,
    pool: &TextPool,
) -> Result<Option<Arc<ModelText>>, KvistError> {
    use kvist_errors::Code::PoolRevisionMismatch as Mismatch;
    let differs = |what: &str| Err(KvistError::new(Mismatch, format!("{what} is not what the cluster state says")));
    let uid = entry.target.as_ref().map_or("", |target| target.worker_uid.as_str());
    if description.worker_uid != uid {
        return differs("the worker's UID");
    }
    // Overlap that is silently zero is worse than a worker that is left out loudly.
    if description.incarnation != entry.incarnation {
        return differs("the worker's incarnation");
    }
    if description.model != entry.model {
        return differs("the worker's model");
    }
    if description.block_size_tokens != entry.block_size_tokens {
        return differs("the worker's block size");
    }
    if description.namespace != entry.namespace {
        return differs("the worker's namespace");
    }
    if description.hash_seed != hash_seed {
        return differs("the worker's hash seed");
    }
    if description.tokenizer_digest.is_empty() {
        return Ok(None);
    }
    let key = format!("{}:{}", description.tokenizer_digest, description.template_digest);
    texts.get(pool, key, || link.fetch_tokenizer("")).await.map(Some)
}

/// One worker of a cluster state.
#[derive(Clone, Debug)]
pub(crate) struct WorkerNode {
    pub(crate) uid: WorkerUid,
    pub(crate) incarnation: Incarnation,
    pub(crate) entry: WorkerEntry,
    pub(crate) target: Target,
    /// None for a target that no link can reach.
    pub(crate) connection: Option<Arc<WorkerConnection>>,
}

impl WorkerNode {
    pub(crate) fn target_id(&self, rank: u32) -> TargetId {
        TargetId { worker: self.uid.clone(), rank: Rank(rank) }
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.entry.ranks.max(1)
    }

    pub(crate) fn block_size(&self) -> usize {
        self.entry.block_size_tokens as usize
    }

    pub(crate) fn description(&self) -> Option<Arc<WorkerDescription>> {
        self.connection.as_ref().and_then(|connection| connection.link.description())
    }

    pub(crate) fn text(&self) -> Option<Arc<ModelText>> {
        self.connection.as_ref().and_then(|connection| connection.text.load_full())
    }

    /// Why it takes no requests at all; none when it does.
    pub(crate) fn excluded(&self) -> Option<&'static str> {
        let Some(connection) = &self.connection else { return Some("transport_unsupported") };
        if self.entry.draining || connection.link.is_draining() {
            Some("draining")
        } else if connection.link.state() != LinkState::Connected {
            Some("connection_lost")
        } else if connection.fault.load().is_some() {
            Some("description_differs")
        } else if !connection.prepared.load(std::sync::atomic::Ordering::Acquire) {
            Some("tokenizer_loading")
        } else if self.target.role() == Role::Encoder {
            Some("role")
        } else {
            None
        }
    }

    /// What its role makes it for.
    pub(crate) fn round(&self) -> Round {
        match self.target.role() {
            Role::Unspecified | Role::Aggregate => Round::Aggregate,
            Role::Encoder => Round::Encoder,
            Role::Prefill => Round::Prefill,
            Role::Decode => Round::Decode,
        }
    }

    /// Whether it generates answers, so that a request that runs takes a place there.
    pub(crate) fn answers(&self) -> bool {
        matches!(self.round(), Round::Aggregate | Round::Decode)
    }

    pub(crate) fn is_linkable(target: &Target) -> bool {
        matches!(target.transport(), Transport::Unspecified | Transport::Grpc)
    }
}
