//! The router: cluster state in, requests to targets.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use kvist_doors::ClientTls;
use kvist_errors::{Code, KvistError};
use kvist_events::FeedStats;
use kvist_index::{Index, IndexSettings};
use kvist_link::LinkSettings;
use kvist_telemetry::{Metrics, ReadyFlag};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    awareness::Awareness,
    cluster::{ClusterView, Connector, ModelView, StateVersion},
    explain::Explanations,
    feed::FeedKeeper,
    follow::Followers,
    generate::Prompt,
    held_state::HeldState,
    leases::Leases,
    life::fingerprint,
    metrics::{FeedMetrics, RouterMetrics},
    model_state::ModelStates,
    needs::Needs,
    policy::Policy,
    quarantine::Quarantine,
    select::{Demand, Selector},
    settings::RouterSettings,
    stages::StageLimits,
    start::session_of,
    text::{TextCache, TextPool},
};

/// Longest id that a caller may give.
const LONGEST_REQUEST_ID: usize = 128;

/// The router without its sockets.
pub struct RouterCore {
    name: String,
    default_deadline: Duration,
    pub(crate) stage_limits: StageLimits,
    /// Until when requests wait for the first target of their model.
    pub(crate) starting_until: Instant,
    pub(crate) view: ArcSwap<ClusterView>,
    pub(crate) has_state: AtomicBool,
    /// A state that is not believed yet. Locked while one is taken up: one at a time.
    pub(crate) held_state: Mutex<Option<HeldState>>,
    pub(crate) connector: Connector,
    pool: Arc<TextPool>,
    pub(crate) feed: ArcSwapOption<Feed>,
    active: AtomicUsize,
    idle: Notify,
    draining: AtomicBool,
    control_plane_connected: AtomicBool,
    id_prefix: String,
    next_request: AtomicU64,
    pub(crate) selector: Arc<Selector>,
    pub(crate) explanations: Explanations,
    pub(crate) quarantine: Quarantine,
    pub(crate) leases: Leases,
    pub(crate) awareness: Awareness,
    /// Models by name, with whether their caches are known.
    pub(crate) aware_models: watch::Sender<BTreeMap<Arc<str>, bool>>,
    /// The moment from which durations count.
    pub(crate) started: Instant,
    pub(crate) metrics: RouterMetrics,
    /// None without a bus.
    pub(crate) feed_metrics: Option<FeedMetrics>,
    pub(crate) stopped: CancellationToken,
    pub(crate) ready: ReadyFlag,
    pub(crate) serving: watch::Sender<bool>,
}

impl fmt::Debug for RouterCore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RouterCore").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Where the index learns of caches.
#[derive(Debug)]
pub(crate) enum Feed {
    Bus(FeedKeeper),
    Direct(Followers),
}

/// Numbers of a router for people and supervisors.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RouterStatus {
    /// Name of the router.
    pub name: String,
    /// Why it takes no requests; none when it does.
    pub not_ready_reason: Option<String>,
    /// Place of the cluster state: store epoch and revision.
    pub cluster_version: (u64, u64),
    /// Place of a state that knows no worker and is not believed, since workers answer; none is held back as a rule.
    pub held_cluster_version: Option<(u64, u64)>,
    /// Whether a controller can be reached.
    pub control_plane_connected: bool,
    /// Whether the bus can be reached; none without one.
    pub bus_connected: Option<bool>,
    /// Models of the cluster state.
    pub models: usize,
    /// Workers of the cluster state.
    pub workers: usize,
    /// Targets that take requests.
    pub ready_targets: u32,
    /// Requests that run or wait.
    pub active_requests: usize,
    /// Of these, the ones that wait at the door of their model.
    pub queued_requests: usize,
    /// Reservations held.
    pub reservations: usize,
    /// Sources of the index.
    pub index_sources: usize,
    /// Sources of which the index knows everything.
    pub exact_index_sources: usize,
}

impl RouterCore {
    /// A router that waits for its first cluster state. Called within a runtime; the index is fed when a bus is set.
    #[must_use]
    pub fn new(settings: &RouterSettings, tls: Option<&ClientTls>, metrics: &Metrics, ready: ReadyFlag) -> Arc<Self> {
        let index = Arc::new(Index::new(IndexSettings { byte_budget: settings.index_byte_budget_bytes }));
        let selector = Arc::new(Selector::new(Arc::clone(&index)));
        let router_metrics = RouterMetrics::new(metrics);
        let states = ModelStates {
            defaults: Policy::of_router(settings),
            selector: Arc::clone(&selector),
            metrics: router_metrics.clone(),
        };
        let pool = Arc::new(TextPool::new(settings.text_threads));
        let mut link_settings = LinkSettings::new(settings.name.as_str());
        link_settings.request_buffer_tokens = settings.request_buffer_tokens;
        link_settings.tls = tls.cloned();
        let feed = match settings.bus() {
            Some(bus) => Feed::Bus(FeedKeeper::new(bus, settings.kvmasters.clone(), tls.cloned(), Arc::clone(&index))),
            None => Feed::Direct(Followers::new(index)),
        };
        // Ids of an earlier life of the same router must not come again.
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Arc::new(Self {
            name: settings.name.clone(),
            default_deadline: Duration::from_millis(settings.default_deadline_ms),
            stage_limits: settings.stage_limits(),
            starting_until: Instant::now() + Duration::from_millis(settings.startup_wait_ms),
            view: ArcSwap::default(),
            has_state: false.into(),
            held_state: Mutex::default(),
            connector: Connector::new(link_settings, Arc::new(TextCache::default()), Arc::clone(&pool), states),
            pool,
            feed: ArcSwapOption::from_pointee(feed),
            active: 0.into(),
            idle: Notify::new(),
            draining: false.into(),
            control_plane_connected: false.into(),
            id_prefix: format!("{}-{started:x}{:04x}", settings.name, rand::random::<u16>()),
            next_request: 0.into(),
            selector,
            explanations: Explanations::new(settings.explained_requests),
            quarantine: Quarantine::default(),
            leases: Leases::default(),
            awareness: Awareness::default(),
            aware_models: watch::Sender::default(),
            started: Instant::now(),
            metrics: router_metrics,
            feed_metrics: settings.nats_url.as_ref().map(|_| FeedMetrics::new(metrics)),
            stopped: CancellationToken::new(),
            ready,
            serving: watch::Sender::new(false),
        })
    }

    /// Notes whether a controller can be reached. Requests go on either way.
    pub fn set_control_plane_connected(&self, connected: bool) {
        self.control_plane_connected.store(connected, Ordering::Relaxed);
    }

    /// Takes nothing new, and waits until what runs has ended or the time is over. True when nothing runs any more.
    pub async fn drain(&self, time_limit: Duration) -> bool {
        self.draining.store(true, Ordering::Release);
        self.ready.set_not_ready("draining");
        self.serving.send_replace(false);
        let deadline = tokio::time::Instant::now() + time_limit;
        loop {
            let idle = self.idle.notified();
            if self.active.load(Ordering::Acquire) == 0 {
                return true;
            }
            if tokio::time::timeout_at(deadline, idle).await.is_err() {
                return self.active.load(Ordering::Acquire) == 0;
            }
        }
    }

    /// Ends everything that runs with an error.
    pub fn stop(&self) {
        self.draining.store(true, Ordering::Release);
        self.ready.set_not_ready("stopped");
        self.serving.send_replace(false);
        self.stopped.cancel();
        self.leases.clear();
        self.feed.store(None);
    }

    /// Whether nothing new is taken.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The flag that says whether requests are taken.
    #[must_use]
    pub fn ready(&self) -> &ReadyFlag {
        &self.ready
    }

    /// Follows whether requests are taken, for health checks.
    #[must_use]
    pub fn watch_serving(&self) -> watch::Receiver<bool> {
        self.serving.subscribe()
    }

    /// Follows of which models the caches are known, for health checks of their own.
    #[must_use]
    pub fn watch_awareness(&self) -> watch::Receiver<BTreeMap<Arc<str>, bool>> {
        self.aware_models.subscribe()
    }

    /// Requests that run or wait.
    #[must_use]
    pub fn active_requests(&self) -> usize {
        self.active.load(Ordering::Acquire)
    }

    /// Reservations held, those of `Select` included.
    #[must_use]
    pub fn open_reservations(&self) -> usize {
        self.selector.open_reservations()
    }

    /// Places that are taken at the doors of all models, by requests that run and by those that wait.
    #[must_use]
    pub fn taken_places(&self) -> usize {
        let counts = |model: &&Arc<ModelView>| model.state.door.counts();
        self.view().models_by_name().iter().map(counts).map(|(running, queued)| running + queued).sum()
    }

    /// The index, for who feeds or looks at it.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.selector.index
    }

    /// Time that a request may take when nobody says.
    pub(crate) fn default_deadline(&self) -> Duration {
        self.default_deadline
    }

    /// Name of the router.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Numbers for people and supervisors.
    #[must_use]
    pub fn status(&self) -> RouterStatus {
        let view = self.view();
        let sources = self.selector.index.sources();
        let StateVersion { store_epoch, revision } = view.version;
        let models = view.models_by_name();
        RouterStatus {
            name: self.name.clone(),
            not_ready_reason: self.ready.reason(),
            cluster_version: (store_epoch, revision),
            held_cluster_version: self.held_state.lock().as_ref().map(|held| {
                let StateVersion { store_epoch, revision } = held.version();
                (store_epoch, revision)
            }),
            control_plane_connected: self.control_plane_connected.load(Ordering::Relaxed),
            bus_connected: self.feed_stats().map(|stats| stats.bus_connected),
            models: models.len(),
            workers: view.workers.len(),
            ready_targets: models.iter().map(|model| model.ready_targets()).sum(),
            active_requests: self.active_requests(),
            queued_requests: models.iter().map(|model| model.state.door.counts().1).sum(),
            reservations: self.open_reservations(),
            index_sources: sources.len(),
            exact_index_sources: sources.iter().filter(|source| source.state.is_exact()).count(),
        }
    }

    /// Numbers of the subscription to the bus; none without one.
    pub(crate) fn feed_stats(&self) -> Option<FeedStats> {
        match self.feed.load().as_deref() {
            Some(Feed::Bus(keeper)) => Some(keeper.stats()),
            _ => None,
        }
    }

    pub(crate) fn view(&self) -> Arc<ClusterView> {
        self.view.load_full()
    }

    pub(crate) fn request_began(&self) {
        self.active.fetch_add(1, Ordering::AcqRel);
        self.metrics.active.inc();
    }

    pub(crate) fn request_ended(&self) {
        self.metrics.active.dec();
        if self.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// The model of a name, if requests may go to it.
    pub(crate) fn model(&self, view: &ClusterView, name: &str) -> Result<Arc<ModelView>, KvistError> {
        if !self.has_state.load(Ordering::Acquire) {
            return Err(KvistError::new(Code::NotReady, "the router has no cluster state yet").before_start());
        }
        if name.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "model", "is missing"));
        }
        match view.models.get(name) {
            Some(model) if !model.model.deleting => Ok(Arc::clone(model)),
            _ => Err(KvistError::field(Code::UnknownModel, "model", format!("there is no model \"{name}\""))),
        }
    }

    /// Renders and tokenizes a prompt.
    pub(crate) async fn tokenize(&self, model: &ModelView, prompt: Prompt) -> Result<Vec<u32>, KvistError> {
        Ok(self.tokenize_with(model, prompt, "").await?.0)
    }

    pub(crate) async fn tokenize_with(
        &self,
        model: &ModelView,
        prompt: Prompt,
        cache_salt: &str,
    ) -> Result<(Vec<u32>, Option<Arc<kvist_text::ModelText>>), KvistError> {
        let text = model.text();
        if text.is_none() && !matches!(prompt, Prompt::Tokens(_)) && model.ready_targets() == 0 {
            let error = KvistError::new(Code::NoReadyTarget, "no worker of this model takes requests at the moment");
            return Err(error.before_start());
        }
        let tokens = self.pool.encode(text.clone(), prompt, cache_salt).await?;
        if tokens.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "prompt", "must not be empty"));
        }
        Ok((tokens, text))
    }

    /// What a prompt asks of targets, for decisions that start nothing.
    pub(crate) async fn demand(
        &self,
        model: &ModelView,
        prompt: Prompt,
        adapter: String,
        cache_salt: String,
        max_tokens: Option<u32>,
        session_id: &str,
    ) -> Result<Demand, KvistError> {
        let (tokens, text) = self.tokenize_with(model, prompt, &cache_salt).await?;
        Ok(Demand {
            request_id: self.request_id("").into(),
            tokens: Arc::new(tokens),
            adapter,
            cache_salt,
            further_tokens: 0,
            max_tokens,
            text,
            needs: Needs::default(),
            session: session_of(session_id),
            queued_for: None,
        })
    }

    /// The id of a request: the router's name, and the caller's id or a new one.
    pub(crate) fn request_id(&self, of_caller: &str) -> String {
        let of_caller: String = of_caller.chars().filter(char::is_ascii_graphic).take(LONGEST_REQUEST_ID).collect();
        if of_caller.is_empty() {
            let number = self.next_request.fetch_add(1, Ordering::Relaxed);
            format!("{}-{number:x}", self.id_prefix)
        } else {
            format!("{}-{of_caller}", self.name)
        }
    }

    /// Refuses a prompt that has ended several engines.
    pub(crate) fn check_quarantine(&self, tokens: &[u32]) -> Result<(), KvistError> {
        if self.quarantine.holds(|| fingerprint(tokens), Instant::now()) {
            let message = "engines were lost while they computed this prompt; it is held back for some minutes";
            return Err(KvistError::new(Code::PromptQuarantined, message));
        }
        Ok(())
    }
}
