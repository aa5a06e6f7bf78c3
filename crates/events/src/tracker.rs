//! What a feed knows of each source, and what it does about it. No I/O and no clock: time and randomness come in,
//! orders to catch up go out.
//!
//! A source is either followed (its batches are applied as they come) or being caught up: its batches are kept, its
//! worker is asked for what is missing, and what was kept follows. At most one question for a source is open.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use kvist_blocks::{Batch, Incarnation, Rank, Run, SourceKey, Tier, WorkerUid};
use kvist_index::{Applied, DigestVerdict, Index};
use kvist_ledger::LedgerDigest;
use kvist_proto::controller::v1::ClusterState;
use rand::{Rng as _, rngs::SmallRng};

use crate::{
    refusals::{Refusal, RefusalCounts, Refusals},
    worker_channel::retry_delay,
};

const SHORTEST_RETRY: Duration = Duration::from_millis(50);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// Between snapshots of a source whose digests keep disagreeing: a worker with a broken ledger must not be asked for
/// all of it every few seconds.
const SHORTEST_MISMATCH_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_MISMATCH_PAUSE: Duration = Duration::from_secs(60);
/// Incarnations are microseconds of the Unix time at which an engine started; a worker's clock may be ahead by so much.
/// What claims to come from further in the future is a damaged number: believed, it would outlast every true one.
const MOST_CLOCK_LEAD_MICROS: u64 = 24 * 3600 * 1_000_000;

/// A worker whose cache the index describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedWorker {
    /// UID of its slot.
    pub uid: WorkerUid,
    /// Host and port of its engine service; of its agent when it is attached.
    pub address: String,
    /// Kvist did not start it: its ledger lives in the agent at the address.
    pub is_attached: bool,
    /// The incarnation that runs there.
    pub incarnation: Incarnation,
    /// Ranks of its engine.
    pub ranks: u32,
}

impl FeedWorker {
    /// The engines of a cluster state that agents have attached.
    pub fn attached(state: &ClusterState) -> impl Iterator<Item = Self> + '_ {
        state.attached.iter().filter_map(|entry| {
            let engine = entry.engine.as_ref()?;
            (!engine.worker_uid.is_empty() && !entry.agent_address.is_empty()).then(|| Self {
                uid: WorkerUid::from(engine.worker_uid.as_str()),
                address: entry.agent_address.clone(),
                is_attached: true,
                incarnation: Incarnation(engine.incarnation),
                ranks: engine.ranks.max(1),
            })
        })
    }
}

/// How sources are tracked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackerSettings {
    /// A source that was silent for so long is STALE.
    pub(crate) silence_limit: Duration,
    /// When everything has to catch up, the questions are spread over this time.
    pub(crate) spread: Duration,
    /// Most batches kept for a source while it catches up.
    pub(crate) most_kept_batches: usize,
}

/// When something happens: on a clock that only goes forward, and by the calendar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) since_start: Duration,
    pub(crate) unix_nanos: u64,
}

impl Moment {
    /// Whether an engine may have started as an incarnation by this time.
    pub(crate) fn may_have_seen(self, incarnation: Incarnation) -> bool {
        incarnation.0 <= (self.unix_nanos / 1_000).saturating_add(MOST_CLOCK_LEAD_MICROS)
    }
}

/// A question to a worker. The answer carries the number, so that one to a superseded question is told apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CatchUpOrder {
    pub(crate) number: u64,
    pub(crate) key: SourceKey,
    pub(crate) address: String,
    /// The address is that of an agent.
    pub(crate) is_attached: bool,
    /// What was applied: incarnation, and sequence of the last batch. None asks for a snapshot.
    pub(crate) resume: Option<(Incarnation, Option<u64>)>,
    /// How many questions before this one had no answer.
    pub(crate) attempt: u32,
    pub(crate) delay: Duration,
}

/// What a worker answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct History {
    pub(crate) incarnation: Incarnation,
    pub(crate) snapshot: Option<HistorySnapshot>,
    /// Batches after the snapshot, or after the position that was asked for.
    pub(crate) batches: Vec<Batch>,
    /// The ledger's account after all that.
    pub(crate) digest: Option<LedgerDigest>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HistorySnapshot {
    pub(crate) next_sequence: u64,
    pub(crate) blocks: Vec<(Tier, Vec<Run>)>,
    pub(crate) complete: bool,
}

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TrackerCounters {
    /// Batches applied.
    pub applied_batches: u64,
    /// Batches that were applied before.
    pub duplicate_batches: u64,
    /// Batches of closed or older incarnations.
    pub refused_batches: u64,
    /// Batches that could not be kept while a source caught up.
    pub dropped_batches: u64,
    /// Gaps seen in sequences.
    pub gaps: u64,
    /// Digests that agreed.
    pub equal_digests: u64,
    /// Digests that disagreed at the same position.
    pub mismatches: u64,
    /// Questions to workers.
    pub catch_ups: u64,
    /// Questions without an answer.
    pub failed_catch_ups: u64,
    /// Snapshots applied.
    pub snapshots: u64,
    /// Incarnations closed.
    pub tombstones: u64,
    /// Time between the record of the last applied batch and its place in the index.
    pub last_lag_micros: u64,
    /// Batches by which all sources together are known to be ahead of the index, a moment ago.
    pub lag_batches: u64,
    /// What could not be used.
    #[serde(flatten)]
    pub refusals: RefusalCounts,
}

#[derive(Debug)]
struct CatchingUp {
    number: u64,
    attempt: u32,
    kept: VecDeque<(Incarnation, Batch)>,
}

#[derive(Debug)]
struct Tracked {
    /// The largest incarnation that was heard of.
    incarnation: Incarnation,
    /// The sequence that its next batch will carry, by the newest word of it.
    stated_next_sequence: u64,
    catching_up: Option<CatchingUp>,
    heard_since_start: Duration,
    is_silent: bool,
    mismatches_in_a_row: u32,
}

/// All sources of one feed.
#[derive(Debug)]
pub(crate) struct Tracker {
    index: Arc<Index>,
    settings: TrackerSettings,
    workers: HashMap<WorkerUid, FeedWorker>,
    sources: HashMap<SourceKey, Tracked>,
    bus_is_connected: bool,
    next_number: u64,
    rng: SmallRng,
    counters: TrackerCounters,
    refusals: Refusals,
    orders: Vec<CatchUpOrder>,
}

impl Tracker {
    pub(crate) fn new(index: Arc<Index>, settings: TrackerSettings, rng: SmallRng) -> Self {
        Self {
            index,
            settings,
            workers: HashMap::new(),
            sources: HashMap::new(),
            bus_is_connected: false,
            next_number: 0,
            rng,
            counters: TrackerCounters::default(),
            refusals: Refusals::default(),
            orders: Vec::new(),
        }
    }

    pub(crate) fn counters(&self) -> TrackerCounters {
        TrackerCounters { refusals: self.refusals.counts(), ..self.counters }
    }

    /// Questions that arose since the last call; each replaces an earlier one of the same source.
    pub(crate) fn take_orders(&mut self) -> Vec<CatchUpOrder> {
        std::mem::take(&mut self.orders)
    }

    /// Whether an order's answer is still waited for.
    pub(crate) fn is_open(&self, order: &CatchUpOrder) -> bool {
        self.sources
            .get(&order.key)
            .and_then(|tracked| tracked.catching_up.as_ref())
            .is_some_and(|catching_up| catching_up.number == order.number)
    }

    /// The workers there are; others are forgotten.
    pub(crate) fn set_workers(&mut self, workers: Vec<FeedWorker>, now: Moment) {
        let mut next: HashMap<WorkerUid, FeedWorker> = HashMap::with_capacity(workers.len());
        for worker in workers {
            next.insert(worker.uid.clone(), worker);
        }
        let old = std::mem::take(&mut self.workers);
        for uid in old.keys().filter(|uid| !next.contains_key(*uid)) {
            self.index.remove_worker(uid);
        }
        self.sources.retain(|key, _| next.get(&key.worker).is_some_and(|worker| key.rank.0 < worker.ranks));
        self.workers = next;
        let mut keys: Vec<(SourceKey, bool)> = Vec::new();
        for worker in self.workers.values() {
            let is_unchanged = old.get(&worker.uid) == Some(worker);
            for rank in 0..worker.ranks {
                keys.push((SourceKey { worker: worker.uid.clone(), rank: Rank(rank) }, is_unchanged));
            }
        }
        keys.sort();
        for (key, is_unchanged) in keys {
            if !is_unchanged {
                self.expect(&key, now);
            }
        }
    }

    /// A source that is new, or whose worker has a new address or incarnation.
    fn expect(&mut self, key: &SourceKey, now: Moment) {
        let Some(worker) = self.workers.get(&key.worker) else { return };
        let incarnation = worker.incarnation;
        self.index.expect_source(key, incarnation);
        let Some(status) = self.index.source(key) else {
            // The incarnation is closed: its successor will be announced, or will speak.
            self.sources.entry(key.clone()).or_insert_with(|| Tracked::new(incarnation, now));
            return;
        };
        let tracked = self.sources.entry(key.clone()).or_insert_with(|| Tracked::new(incarnation, now));
        tracked.incarnation = tracked.incarnation.max(incarnation).max(status.incarnation);
        tracked.heard_since_start = now.since_start;
        if !self.bus_is_connected {
            self.index.mark_stale(key);
        }
        // A source that is followed already has only moved house.
        let is_followed = tracked.catching_up.is_none()
            && status.incarnation >= incarnation
            && status.state != kvist_index::SourceState::CatchingUp;
        if !is_followed {
            let delay = self.spread();
            self.catch_up(key, 0, delay, true);
        }
    }

    /// Death is a fact: everything up to the incarnation is gone at once.
    pub(crate) fn close(&mut self, worker: &WorkerUid, incarnation: Incarnation) {
        if incarnation.0 == 0 {
            return;
        }
        self.counters.tombstones += 1;
        self.index.close(worker, incarnation);
        for (key, tracked) in &mut self.sources {
            if key.worker == *worker && tracked.incarnation <= incarnation {
                tracked.catching_up = None;
            }
        }
    }

    /// The bus came or went.
    pub(crate) fn set_bus_connected(&mut self, connected: bool, now: Moment) {
        self.bus_is_connected = connected;
        let mut keys: Vec<SourceKey> = self.sources.keys().cloned().collect();
        keys.sort();
        for key in keys {
            if !connected {
                self.index.mark_stale(&key);
                continue;
            }
            if let Some(tracked) = self.sources.get_mut(&key) {
                tracked.heard_since_start = now.since_start;
            }
            // Whatever was said while the bus was away is missing; a closed source has nothing to say.
            if self.index.source(&key).is_some() {
                let delay = self.spread();
                self.catch_up(&key, 0, delay, true);
            }
        }
    }

    /// A batch from the bus.
    pub(crate) fn batch(&mut self, key: &SourceKey, incarnation: Incarnation, batch: Batch, now: Moment) {
        let most_kept = self.settings.most_kept_batches;
        self.start_anew(key, incarnation, batch.sequence, now);
        let Some(tracked) = self.hear(key, incarnation, now) else { return };
        tracked.note_position(incarnation, batch.sequence.saturating_add(1));
        if let Some(catching_up) = &mut tracked.catching_up {
            if incarnation < tracked.incarnation {
                self.counters.refused_batches += 1;
            } else if catching_up.kept.len() < most_kept {
                catching_up.kept.push_back((incarnation, batch));
            } else {
                // The answer will be newer than what was kept first; what is missing then is a gap like any other.
                catching_up.kept.pop_front();
                catching_up.kept.push_back((incarnation, batch));
                self.counters.dropped_batches += 1;
            }
            return;
        }
        match self.apply(key, incarnation, &batch, now) {
            Applied::Gap { .. } | Applied::NewIncarnation => {
                self.catch_up(key, 0, Duration::ZERO, true);
                self.keep(key, incarnation, batch);
            }
            Applied::Applied | Applied::Duplicate | Applied::OldIncarnation => {}
        }
        self.stay_stale_without_bus(key);
    }

    /// A digest from the bus.
    pub(crate) fn digest(&mut self, key: &SourceKey, incarnation: Incarnation, digest: &LedgerDigest, now: Moment) {
        self.start_anew(key, incarnation, digest.next_sequence, now);
        let Some(tracked) = self.hear(key, incarnation, now) else { return };
        tracked.note_position(incarnation, digest.next_sequence);
        if tracked.catching_up.is_none() {
            match self.verify(key, incarnation, digest, now) {
                DigestVerdict::Behind | DigestVerdict::Unknown => self.catch_up(key, 0, Duration::ZERO, true),
                DigestVerdict::Mismatch => self.distrust(key),
                DigestVerdict::Equal | DigestVerdict::Old | DigestVerdict::OldIncarnation => {}
            }
            self.stay_stale_without_bus(key);
        }
    }

    /// Something of a source that could not be understood: what it said is unknown, so all of it is fetched.
    pub(crate) fn malformed(&mut self, key: &SourceKey, incarnation: Incarnation, now: Moment) {
        self.refusals.note(Refusal::Malformed, key.worker.as_str(), now.since_start);
        if self.hear(key, incarnation, now).is_some_and(|tracked| tracked.catching_up.is_none()) {
            self.index.expect_source(key, incarnation);
            // An incarnation that is closed has no source, and nobody to ask.
            if self.index.source(key).is_some() {
                self.distrust(key);
            }
        }
    }

    /// Something that opens nothing, whoever speaks.
    pub(crate) fn refuse(&mut self, refusal: Refusal, speaker: &str, now: Moment) {
        self.refusals.note(refusal, speaker, now.since_start);
    }

    /// A worker's answer.
    pub(crate) fn answer(&mut self, order: &CatchUpOrder, answer: Result<History, ()>, now: Moment) {
        if !self.is_open(order) {
            return;
        }
        let key = &order.key;
        let Some(tracked) = self.sources.get_mut(key) else { return };
        let Some(catching_up) = tracked.catching_up.as_mut() else { return };
        let history = match answer {
            Ok(history) if history.incarnation >= tracked.incarnation => history,
            // An older incarnation than one that was heard of: the process at the address is not the one meant.
            _ => {
                self.counters.failed_catch_ups += 1;
                let attempt = catching_up.attempt + 1;
                let delay = retry_delay(attempt, SHORTEST_RETRY, LONGEST_RETRY, &mut self.rng);
                let resumes = order.resume.is_some();
                return self.catch_up(key, attempt, delay, resumes);
            }
        };
        let incarnation = history.incarnation;
        tracked.incarnation = incarnation;
        tracked.heard_since_start = now.since_start;
        tracked.is_silent = false;
        let mut kept = std::mem::take(&mut catching_up.kept);
        tracked.catching_up = None;
        if let Some(snapshot) = &history.snapshot {
            let taken = self.index.apply_snapshot(
                key,
                incarnation,
                snapshot.next_sequence,
                &snapshot.blocks,
                snapshot.complete,
                now.unix_nanos,
            );
            self.counters.snapshots += u64::from(taken);
        } else {
            self.index.expect_source(key, incarnation);
        }
        for batch in &history.batches {
            if matches!(self.apply(key, incarnation, batch, now), Applied::Gap { .. } | Applied::NewIncarnation) {
                // The answer itself has a hole.
                self.distrust(key);
                return self.keep_all(key, kept);
            }
        }
        // The ledger's word comes before that of the bus: it is about exactly what was fetched.
        if let Some(digest) = &history.digest {
            let verdict = self.verify(key, incarnation, digest, now);
            if matches!(verdict, DigestVerdict::Behind | DigestVerdict::Mismatch | DigestVerdict::Unknown) {
                self.distrust(key);
                return self.keep_all(key, kept);
            }
        }
        self.index.mark_caught_up(key, incarnation);
        while let Some((incarnation, batch)) = kept.pop_front() {
            if matches!(self.apply(key, incarnation, &batch, now), Applied::Gap { .. } | Applied::NewIncarnation) {
                self.catch_up(key, 0, Duration::ZERO, true);
                kept.push_front((incarnation, batch));
                return self.keep_all(key, kept);
            }
        }
        self.stay_stale_without_bus(key);
    }

    /// Looks for silence.
    pub(crate) fn tick(&mut self, now: Moment) {
        self.counters.lag_batches = self.lag_batches();
        for (key, tracked) in &mut self.sources {
            let silence = now.since_start.saturating_sub(tracked.heard_since_start);
            if !tracked.is_silent && silence > self.settings.silence_limit {
                tracked.is_silent = true;
                self.index.mark_stale(key);
                tracing::info!(worker = key.worker.as_str(), rank = key.rank.0, "kv_source_silent");
            }
        }
    }

    /// What was said and is not applied yet; only a source that is being caught up can have any.
    fn lag_batches(&self) -> u64 {
        let behind = self.sources.iter().filter(|(_, tracked)| tracked.catching_up.is_some());
        let lags = behind.map(|(key, tracked)| {
            let known = self.index.source(key).filter(|known| known.incarnation == tracked.incarnation);
            tracked.stated_next_sequence.saturating_sub(known.map_or(0, |known| known.next_sequence))
        });
        lags.fold(0, u64::saturating_add)
    }

    /// Sources that are being caught up, and that are silent.
    pub(crate) fn catching_up_and_silent(&self) -> (usize, usize) {
        let catching_up = self.sources.values().filter(|tracked| tracked.catching_up.is_some()).count();
        (catching_up, self.sources.values().filter(|tracked| tracked.is_silent).count())
    }

    /// Notes that a source spoke. None when it is nobody we should listen to.
    fn hear(&mut self, key: &SourceKey, incarnation: Incarnation, now: Moment) -> Option<&mut Tracked> {
        let is_known = self.workers.get(&key.worker).is_some_and(|worker| key.rank.0 < worker.ranks);
        if !is_known {
            self.refusals.note(Refusal::UnknownWorker, key.worker.as_str(), now.since_start);
            return None;
        }
        if !now.may_have_seen(incarnation) {
            self.refusals.note(Refusal::Garbage, key.worker.as_str(), now.since_start);
            return None;
        }
        let tracked = self.sources.entry(key.clone()).or_insert_with(|| Tracked::new(incarnation, now));
        if incarnation > tracked.incarnation {
            tracked.stated_next_sequence = 0;
        }
        if incarnation >= tracked.incarnation {
            tracked.incarnation = incarnation;
            tracked.heard_since_start = now.since_start;
            tracked.is_silent = false;
        }
        Some(tracked)
    }

    fn apply(&mut self, key: &SourceKey, incarnation: Incarnation, batch: &Batch, now: Moment) -> Applied {
        let applied = self.index.apply_batch(key, incarnation, batch, now.unix_nanos);
        match applied {
            Applied::Applied => {
                self.counters.applied_batches += 1;
                self.counters.last_lag_micros = now.unix_nanos.saturating_sub(batch.recorded_at_unix_nanos) / 1000;
            }
            Applied::Duplicate => self.counters.duplicate_batches += 1,
            Applied::OldIncarnation => self.counters.refused_batches += 1,
            Applied::Gap { expected } => {
                self.counters.gaps += 1;
                tracing::info!(
                    worker = key.worker.as_str(),
                    rank = key.rank.0,
                    expected,
                    received = batch.sequence,
                    "kv_gap_detected"
                );
            }
            Applied::NewIncarnation => {}
        }
        applied
    }

    fn verify(
        &mut self,
        key: &SourceKey,
        incarnation: Incarnation,
        digest: &LedgerDigest,
        now: Moment,
    ) -> DigestVerdict {
        let LedgerDigest { next_sequence, tiers, complete } = digest;
        let apply = || self.index.apply_digest(key, incarnation, *next_sequence, tiers, *complete, now.unix_nanos);
        let mut verdict = apply();
        if verdict == DigestVerdict::Unknown {
            // A start that has stored nothing yet speaks by its digest first.
            self.index.expect_source(key, incarnation);
            verdict = apply();
        }
        match verdict {
            DigestVerdict::Equal => {
                self.counters.equal_digests += 1;
                if let Some(tracked) = self.sources.get_mut(key) {
                    tracked.mismatches_in_a_row = 0;
                }
            }
            DigestVerdict::Mismatch => {
                self.counters.mismatches += 1;
                tracing::warn!(
                    worker = key.worker.as_str(),
                    rank = key.rank.0,
                    next_sequence = digest.next_sequence,
                    "kv_digest_mismatch"
                );
            }
            DigestVerdict::Behind | DigestVerdict::Unknown | DigestVerdict::Old | DigestVerdict::OldIncarnation => {}
        }
        verdict
    }

    /// The very beginning of a newer start needs no history: a question about the older one is dropped, its worker is
    /// gone anyway.
    fn start_anew(&mut self, key: &SourceKey, incarnation: Incarnation, position: u64, now: Moment) {
        if let Some(tracked) = self.sources.get_mut(key)
            && position == 0
            && incarnation > tracked.incarnation
            && now.may_have_seen(incarnation)
        {
            tracked.catching_up = None;
        }
    }

    /// What is applied while the bus is away is true, and nobody says for how long.
    fn stay_stale_without_bus(&self, key: &SourceKey) {
        if !self.bus_is_connected {
            self.index.mark_stale(key);
        }
    }

    /// What is held of the source is wrong, or may be: a snapshot replaces it.
    fn distrust(&mut self, key: &SourceKey) {
        let Some(tracked) = self.sources.get_mut(key) else { return };
        tracked.mismatches_in_a_row = tracked.mismatches_in_a_row.saturating_add(1);
        let delay = match tracked.mismatches_in_a_row {
            1 => Duration::ZERO,
            more => retry_delay(more - 1, SHORTEST_MISMATCH_PAUSE, LONGEST_MISMATCH_PAUSE, &mut self.rng),
        };
        self.catch_up(key, 0, delay, false);
    }

    /// Orders the worker to be asked; an earlier question is superseded, what was kept is kept.
    fn catch_up(&mut self, key: &SourceKey, attempt: u32, delay: Duration, resumes: bool) {
        let Some(worker) = self.workers.get(&key.worker) else { return };
        let Some(tracked) = self.sources.get_mut(key) else { return };
        self.index.mark_catching_up(key);
        let position = self.index.source(key).map(|status| (status.incarnation, status.next_sequence.checked_sub(1)));
        self.next_number += 1;
        self.counters.catch_ups += 1;
        let kept = tracked.catching_up.take().map(|catching_up| catching_up.kept).unwrap_or_default();
        tracked.catching_up = Some(CatchingUp { number: self.next_number, attempt, kept });
        self.orders.push(CatchUpOrder {
            number: self.next_number,
            key: key.clone(),
            address: worker.address.clone(),
            is_attached: worker.is_attached,
            resume: position.filter(|_| resumes),
            attempt,
            delay,
        });
    }

    fn keep(&mut self, key: &SourceKey, incarnation: Incarnation, batch: Batch) {
        self.keep_all(key, VecDeque::from([(incarnation, batch)]));
    }

    fn keep_all(&mut self, key: &SourceKey, kept: VecDeque<(Incarnation, Batch)>) {
        if let Some(catching_up) = self.sources.get_mut(key).and_then(|tracked| tracked.catching_up.as_mut()) {
            catching_up.kept = kept;
        }
    }

    fn spread(&mut self) -> Duration {
        // One source has nobody to wait for.
        let ranks: u64 = self.workers.values().map(|worker| u64::from(worker.ranks)).sum();
        if ranks <= 1 {
            return Duration::ZERO;
        }
        self.settings.spread.mul_f64(self.rng.random_range(0.0..1.0))
    }
}

impl Tracked {
    fn note_position(&mut self, incarnation: Incarnation, next_sequence: u64) {
        if incarnation == self.incarnation {
            self.stated_next_sequence = self.stated_next_sequence.max(next_sequence);
        }
    }

    fn new(incarnation: Incarnation, now: Moment) -> Self {
        Self {
            incarnation,
            stated_next_sequence: 0,
            catching_up: None,
            heard_since_start: now.since_start,
            is_silent: false,
            mismatches_in_a_row: 0,
        }
    }
}

#[cfg(test)]
#[path = "tracker_tests.rs"]
mod tests;
