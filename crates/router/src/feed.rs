//! Keeps the index fed for the cluster that the router serves.

use std::sync::Arc;

use kvist_blocks::{Incarnation, WorkerUid};
use kvist_doors::ClientTls;
use kvist_events::{BusSettings, FeedSettings, FeedStats, FeedWorker, IndexFeed};
use kvist_index::Index;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::{cluster::ClusterView, target::WorkerNode};

/// What the feed has to know of a cluster state.
#[derive(Clone, Debug, Default)]
struct Wanted {
    cluster: String,
    workers: Vec<FeedWorker>,
    dead: Vec<(WorkerUid, Incarnation)>,
}

/// A feed that begins with the first cluster state: only then is the cluster's name known.
#[derive(Debug)]
pub(crate) struct FeedKeeper {
    wanted: watch::Sender<Wanted>,
    stats: watch::Receiver<FeedStats>,
    _task: AbortOnDropHandle<()>,
}

impl FeedKeeper {
    /// Begins to wait for a cluster state. Called within a runtime.
    pub(crate) fn new(bus: BusSettings, kvmasters: Vec<String>, tls: Option<ClientTls>, index: Arc<Index>) -> Self {
        let (wanted, mut updates) = watch::channel(Wanted::default());
        let (sampled, stats) = watch::channel(FeedStats::default());
        let task = tokio::spawn(async move {
            let mut running: Option<(String, IndexFeed)> = None;
            let mut tick = tokio::time::interval(std::time::Duration::from_secs(1));
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    changed = updates.changed() => if changed.is_err() { return },
                    _ = tick.tick() => {
                        sampled.send_replace(running.as_ref().map(|(_, feed)| feed.stats()).unwrap_or_default());
                        // A feed that could not be started is tried again; one that runs needs nothing.
                        let cluster = updates.borrow().cluster.clone();
                        if cluster.is_empty() || running.as_ref().is_some_and(|(name, _)| *name == cluster) {
                            continue;
                        }
                    }
                }
                let now = updates.borrow_and_update().clone();
                if now.cluster.is_empty() {
                    continue;
                }
                if running.as_ref().is_none_or(|(cluster, _)| *cluster != now.cluster) {
                    drop(running.take());
                    let bus = BusSettings { cluster: now.cluster.clone(), ..bus.clone() };
                    let mut settings = FeedSettings::new(bus);
                    settings.kvmasters.clone_from(&kvmasters);
                    settings.worker_tls.clone_from(&tls);
                    match IndexFeed::start(settings, Arc::clone(&index)).await {
                        Ok(feed) => running = Some((now.cluster.clone(), feed)),
                        Err(error) => {
                            tracing::error!(%error, "the index feed cannot be started");
                            continue;
                        }
                    }
                }
                if let Some((_, feed)) = &running {
                    feed.close_incarnations(now.dead);
                    feed.set_workers(now.workers);
                }
            }
        });
        Self { wanted, stats, _task: AbortOnDropHandle::new(task) }
    }

    /// Takes up a new cluster state.
    pub(crate) fn follow(&self, view: &ClusterView) {
        let workers = view
            .workers
            .values()
            .filter(|node| WorkerNode::is_linkable(&node.target))
            .map(|node| FeedWorker {
                uid: node.uid.clone(),
                address: node.target.address.clone(),
                is_attached: false,
                incarnation: node.incarnation,
                ranks: node.ranks(),
            })
            .chain(view.attached.iter().cloned())
            .collect();
        self.wanted.send_replace(Wanted { cluster: view.cluster.clone(), workers, dead: view.dead.clone() });
    }

    /// Numbers of the feed, a second old at most.
    pub(crate) fn stats(&self) -> FeedStats {
        *self.stats.borrow()
    }
}
