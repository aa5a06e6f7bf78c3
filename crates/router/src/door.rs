//! Where requests of one model wait until there is a place for them.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use kvist_schedule::{
    Admission, AdmissionConfig, Ended, Offer, Refusal, SATURATION_THRESHOLD, TicketId, TicketRequest,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{
    metrics::{RefusalLabels, RouterMetrics},
    policy::Policy,
    select::Selector,
    target::WorkerNode,
};

/// How often a queue looks whether saturated targets have room again. Requests that end are heard of at once.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// What a request says at the door.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket<'a> {
    pub(crate) class: &'a str,
    pub(crate) priority: i32,
    pub(crate) deadline: Instant,
    /// Tokens it will need: prompt and expected answer.
    pub(crate) tokens: u64,
}

/// The targets behind a door.
#[derive(Debug, Default)]
struct Fleet {
    workers: Vec<Arc<WorkerNode>>,
    threshold: f64,
}

#[derive(Debug)]
struct Inner {
    admission: Admission,
    waiting: HashMap<TicketId, oneshot::Sender<Ended>>,
    /// Let in and not yet promised to a target, so that no target counts them.
    unplaced: HashSet<TicketId>,
    fleet: Fleet,
    /// Whether a task looks after the queue.
    is_driven: bool,
}

/// The door of one model. It stays the same from one cluster state to the next.
pub(crate) struct Door {
    model: Arc<str>,
    inner: Mutex<Inner>,
    selector: Arc<Selector>,
    metrics: RouterMetrics,
    started: Instant,
}

impl fmt::Debug for Door {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Door").field("model", &self.model).finish_non_exhaustive()
    }
}

/// What a request finds at the door.
#[derive(Debug)]
pub(crate) enum Entry {
    /// It may start.
    Admitted(Place),
    /// It has to wait.
    Queued(Waiting),
}

/// The place of a request, running or waiting. It is given up when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    door: Arc<Door>,
    id: TicketId,
}

impl Place {
    /// The request has been promised to a target, whose load counts it from now on.
    pub(crate) fn placed(&self) {
        self.door.inner.lock().unplaced.remove(&self.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.door.leave(self.id);
    }
}

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct Waiting {
    place: Place,
    ended: oneshot::Receiver<Ended>,
    since: Instant,
}

impl Waiting {
    /// Waits until it may start or need not wait any longer.
    ///
    /// # Errors
    /// Why it does not start.
    pub(crate) async fn end(&mut self) -> Result<(), KvistError> {
        let door = &self.place.door;
        let ended = (&mut self.ended).await;
        let waited = self.since.elapsed();
        door.metrics.queue_seconds.observe(waited.as_secs_f64());
        match ended {
            Ok(Ended::Admitted) => Ok(()),
            Ok(Ended::TimedOut) => {
                door.count_refusal("queue_timeout");
                let seconds = waited.as_secs_f64();
                let message = format!("the request waited {seconds:.1} s, as long as requests of this model may");
                Err(KvistError::new(Code::QueueTimeout, message).with_retry_after(door.wait()).before_start())
            }
            Ok(Ended::DeadlinePassed) => {
                door.count_refusal("deadline_passed");
                let message = "the deadline passed before the request could be started";
                Err(KvistError::new(Code::DeadlineExceeded, message).before_start())
            }
            Err(_) => Err(KvistError::new(Code::Internal, "the queue forgot a request").before_start()),
        }
    }

    /// The place, with how long it was waited for.
    pub(crate) fn into_place(self) -> (Place, Duration) {
        (self.place, self.since.elapsed())
    }
}

impl Door {
    pub(crate) fn new(
        model: Arc<str>,
        config: AdmissionConfig,
        selector: Arc<Selector>,
        metrics: RouterMetrics,
    ) -> Self {
        let inner = Inner {
            admission: Admission::new(config),
            waiting: HashMap::new(),
            unplaced: HashSet::new(),
            fleet: Fleet::default(),
            is_driven: false,
        };
        Self { model, inner: Mutex::new(inner), selector, metrics, started: Instant::now() }
    }

    /// Takes up a new policy and new targets; both count for those who wait, too.
    pub(crate) fn follow(&self, policy: &Policy, workers: Vec<Arc<WorkerNode>>) {
        let mut inner = self.inner.lock();
        let threshold = policy.pipeline.saturation_threshold().unwrap_or(SATURATION_THRESHOLD);
        inner.fleet = Fleet { workers, threshold };
        if *inner.admission.config() != policy.admission {
            inner.admission.reconfigure(policy.admission.clone());
        }
        self.advance(&mut inner);
    }

    /// Asks for a place. Called within a runtime.
    ///
    /// # Errors
    /// The queue is full, or the wait would be longer than the deadline allows. The error says when to come back.
    pub(crate) fn enter(self: &Arc<Self>, ticket: Ticket<'_>) -> Result<Entry, KvistError> {
        let mut inner = self.inner.lock();
        let has_room = match inner.admission.config() {
            AdmissionConfig::AllowAll => true,
            AdmissionConfig::Concurrency { .. } => self.room(&inner) > 0,
        };
        let request = TicketRequest {
            class: inner.admission.class(ticket.class),
            priority: ticket.priority,
            deadline: Some(ticket.deadline.saturating_duration_since(self.started)),
            tokens: ticket.tokens,
        };
        match inner.admission.offer(self.started.elapsed(), request, has_room) {
            Offer::Admitted(id) => {
                inner.unplaced.insert(id);
                drop(inner);
                Ok(Entry::Admitted(Place { door: Arc::clone(self), id }))
            }
            Offer::Queued(id) => {
                let (sender, ended) = oneshot::channel();
                inner.waiting.insert(id, sender);
                if !std::mem::replace(&mut inner.is_driven, true) {
                    tokio::spawn(drive(Arc::downgrade(self)));
                }
                drop(inner);
                let place = Place { door: Arc::clone(self), id };
                Ok(Entry::Queued(Waiting { place, ended, since: Instant::now() }))
            }
            Offer::Refused { refusal, retry_after } => {
                let queued = inner.admission.queued();
                drop(inner);
                let (reason, error) = match refusal {
                    Refusal::QueueFull => {
                        let message = format!("all places of this model are taken, and {queued} requests wait already");
                        ("queue_full", KvistError::new(Code::QueueFull, message))
                    }
                    Refusal::DeadlineTooSoon => {
                        let message = "by the present wait, the request would be started after its deadline";
                        ("deadline_too_soon", KvistError::new(Code::DeadlineExceeded, message))
                    }
                };
                self.count_refusal(reason);
                Err(error.with_retry_after(retry_after).before_start())
            }
        }
    }

    /// Requests that run and requests that wait.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        (inner.admission.running(), inner.admission.queued())
    }

    /// How long a request that comes now would wait.
    fn wait(&self) -> Duration {
        self.inner.lock().admission.wait_estimate(usize::MAX)
    }

    fn count_refusal(&self, reason: &'static str) {
        let labels = RefusalLabels { model: self.model.to_string(), reason };
        self.metrics.admission_refusals.get_or_create(&labels).inc();
    }

    fn leave(&self, id: TicketId) {
        let mut inner = self.inner.lock();
        inner.admission.end(self.started.elapsed(), id);
        inner.unplaced.remove(&id);
        inner.waiting.remove(&id);
        self.advance(&mut inner);
    }

    /// Requests that the targets take before all of them are saturated. Without a target nobody needs to wait to hear that.
    fn room(&self, inner: &Inner) -> usize {
        let Fleet { workers, threshold } = &inner.fleet;
        let room = self.selector.room(workers, *threshold).unwrap_or(u64::MAX);
        usize::try_from(room).unwrap_or(usize::MAX).saturating_sub(inner.unplaced.len())
    }

    fn advance(&self, inner: &mut Inner) {
        if inner.admission.queued() == 0 {
            return;
        }
        let room = self.room(inner);
        for (id, ended) in inner.admission.advance(self.started.elapsed(), room) {
            if ended == Ended::Admitted {
                inner.unplaced.insert(id);
            }
            if let Some(waiting) = inner.waiting.remove(&id) {
                // Who has gone away gives up its place by itself.
                let _ = waiting.send(ended);
            }
        }
    }
}

/// Looks after a queue until it is empty.
async fn drive(door: Weak<Door>) {
    loop {
        let pause = {
            let Some(door) = door.upgrade() else { return };
            let mut inner = door.inner.lock();
            door.advance(&mut inner);
            let Some(wakes_at) = inner.admission.wakes_at() else {
                inner.is_driven = false;
                return;
            };
            wakes_at.saturating_sub(door.started.elapsed()).min(LOOK_INTERVAL)
        };
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use kvist_index::{Index, IndexSettings};
    use kvist_telemetry::Metrics;
    use proptest::prelude::*;

    use super::*;
    use crate::{select::Selector, settings::RouterSettings};

    fn door(admission: &str) -> Arc<Door> {
        let selector = Selector::new(Arc::new(Index::new(IndexSettings { byte_budget: 1 << 20 })));
        let metrics = RouterMetrics::new(&Metrics::default());
        Arc::new(Door::new("m".into(), policy(admission).admission, Arc::new(selector), metrics))
    }

    fn policy(admission: &str) -> Policy {
        let settings = RouterSettings::from_json(&format!("{{\"admission\": {admission}}}")).unwrap();
        Policy::of_router(&settings)
    }

    fn ticket(deadline_ms: u64) -> Ticket<'static> {
        Ticket { class: "", priority: 0, deadline: Instant::now() + Duration::from_millis(deadline_ms), tokens: 1 }
    }

    const ONE_AND_ONE: &str =
        r#"{"concurrency": {"maxConcurrentRequests": 1, "maxQueuedRequests": 1, "queueTimeout": "60ms"}}"#;

    fn refusals(door: &Door, reason: &'static str) -> u64 {
        let labels = RefusalLabels { model: "m".to_owned(), reason };
        door.metrics.admission_refusals.get_or_create(&labels).get()
    }

    // F-09: limit 1, queue 1, three at once: one runs, one waits, one is refused at once; both refusals are counted.
    #[tokio::test]
    async fn one_runs_one_waits_one_is_refused_and_the_wait_ends() {
        let door = door(ONE_AND_ONE);
        let Ok(Entry::Admitted(running)) = door.enter(ticket(60_000)) else { panic!("there is a place") };
        let Ok(Entry::Queued(mut waiting)) = door.enter(ticket(60_000)) else { panic!("there is a queue") };
        let refused = door.enter(ticket(60_000)).unwrap_err();
        assert_eq!((Code::QueueFull, true, true), (refused.code, refused.retry_after.is_some(), refused.not_started));
        assert_eq!(Code::QueueTimeout, waiting.end().await.unwrap_err().code);
        drop(waiting);
        assert_eq!((1, 0), door.counts());
        assert_eq!((1, 1), (refusals(&door, "queue_full"), refusals(&door, "queue_timeout")));

        let Ok(Entry::Queued(mut waiting)) = door.enter(ticket(60_000)) else { panic!("there is a queue") };
        drop(running);
        waiting.end().await.unwrap();
        let (place, _) = waiting.into_place();
        assert_eq!((1, 0), door.counts());
        drop(place);
        assert_eq!((0, 0), door.counts());
    }

    #[tokio::test]
    async fn another_policy_counts_for_those_who_wait() {
        let door = door(ONE_AND_ONE);
        let Ok(Entry::Admitted(_running)) = door.enter(ticket(60_000)) else { panic!("there is a place") };
        let Ok(Entry::Queued(mut waiting)) = door.enter(ticket(60_000)) else { panic!("there is a queue") };
        door.follow(&policy(r#""allow_all""#), Vec::new());
        waiting.end().await.unwrap();
        assert_eq!((2, 0), door.counts());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Enter {
            deadline_ms: u64,
        },
        /// A client goes away, whether its request runs or waits.
        Cancel(usize),
        /// The request has been promised to a target, or has failed to be.
        Placed(usize),
        /// Time passes, so that waits end.
        Pass,
        /// A new cluster state.
        Limit(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        prop::collection::vec(
            prop_oneof![
                4 => (1u64..2000).prop_map(|deadline_ms| Step::Enter { deadline_ms }),
                2 => any::<usize>().prop_map(Step::Cancel),
                1 => any::<usize>().prop_map(Step::Placed),
                1 => Just(Step::Pass),
                1 => (1u32..4).prop_map(Step::Limit),
            ],
            0..40,
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn places_return_to_zero_whatever_the_order_of_cancel_fail_and_expire(steps in steps()) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let door = door(ONE_AND_ONE);
                let mut places: Vec<Place> = Vec::new();
                let mut waiting: Vec<Waiting> = Vec::new();
                for step in steps {
                    match step {
                        Step::Enter { deadline_ms } => match door.enter(ticket(deadline_ms)) {
                            Ok(Entry::Admitted(place)) => places.push(place),
                            Ok(Entry::Queued(wait)) => waiting.push(wait),
                            Err(_) => {}
                        },
                        Step::Cancel(which) if !waiting.is_empty() && which % 2 == 0 => {
                            waiting.swap_remove(which % waiting.len());
                        }
                        Step::Cancel(which) if !places.is_empty() => {
                            places.swap_remove(which % places.len());
                        }
                        Step::Placed(which) if !places.is_empty() => places[which % places.len()].placed(),
                        Step::Cancel(_) | Step::Placed(_) => {}
                        Step::Pass => std::thread::sleep(Duration::from_millis(1)),
                        Step::Limit(limit) => {
                            let admission = format!(
                                r#"{{"concurrency": {{"maxConcurrentRequests": {limit}, "maxQueuedRequests": 2,
                                "queueTimeout": "2ms"}}}}"#
                            );
                            door.follow(&policy(&admission), Vec::new());
                        }
                    }
                    door.advance(&mut door.inner.lock());
                    // Those whose wait has ended go on, or away.
                    let mut still = Vec::new();
                    for mut wait in waiting {
                        match wait.ended.try_recv() {
                            Ok(Ended::Admitted) => places.push(wait.into_place().0),
                            Ok(_) => {}
                            Err(_) => still.push(wait),
                        }
                    }
                    waiting = still;
                    prop_assert_eq!((places.len(), waiting.len()), door.counts());
                }
                drop((places, waiting));
                let inner = door.inner.lock();
                prop_assert_eq!((0, 0), (inner.admission.running(), inner.admission.queued()));
                prop_assert!(inner.waiting.is_empty() && inner.unplaced.is_empty());
                Ok(())
            })?;
        }
    }
}
