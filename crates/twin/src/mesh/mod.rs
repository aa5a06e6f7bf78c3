//! A whole mesh in virtual time: routers with the scheduler, index and book of live ones, workers with the ledger of live
//! ones, and a network with delays and losses between them. Everything follows from the settings and their seed.

mod report;
mod router;
mod settings;
mod worker;

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
    sync::Arc,
    time::Duration,
};

use kvist_blocks::{Batch, HashSeed, Namespace, block_hashes, usable_blocks};
use kvist_ledger::LedgerDigest;
use kvist_schedule::{Draws, EngineReport, Pipeline, PrefillRate, Rates, ReservationId};

use crate::{
    SimRequest, Step,
    trace::{TRACE_BLOCK_TOKENS, TraceRequest, ideal_hit_rate},
};
pub use report::{MeshReport, Percentiles, table};
use router::Router;
use settings::duration;
pub use settings::{EngineSettings, Incident, MeshSettings};
use worker::{Prompt, Worker};

/// Between two digests of a ledger.
const DIGEST_INTERVAL: Duration = Duration::from_secs(2);

/// Between two load reports of an idle worker.
const IDLE_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// From the discovery of a gap to the missing batches.
const CATCH_UP_TIME: Duration = Duration::from_millis(20);

/// After the last request, for events and digests that are on their way.
const SETTLE_TIME: Duration = Duration::from_secs(5);

/// Intervals that the time of a trace is divided in, for the backlog over time.
const BACKLOG_INTERVALS: usize = 200;

/// Placements of a request: the first, and one more when its worker was lost before the first token.
const MOST_ATTEMPTS: u32 = 2;

enum Event {
    Arrival(usize),
    Submit { job: usize, worker: usize, attempt: u32, most_waiting_tokens: Option<u64> },
    Refused { job: usize, worker: usize, attempt: u32, report: EngineReport },
    StepEnd { worker: usize, step: Box<Step> },
    PlainEnd { job: usize, worker: usize, attempt: u32 },
    Batch { router: usize, worker: usize, batch: Arc<Batch> },
    Digest { router: usize, worker: usize, digest: Box<LedgerDigest> },
    DigestTick,
    ReportTick,
    CatchUp { router: usize, worker: usize },
    Load { router: usize, worker: usize, report: EngineReport },
    Incident(Incident),
}

struct Entry {
    at: Duration,
    /// Of two at the same time, the one that was made first.
    number: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// One request on its way.
#[derive(Clone, Debug, Default)]
struct Job {
    router: usize,
    worker: usize,
    attempt: u32,
    refusals: u32,
    reservation: Option<ReservationId>,
    predicted_cached_tokens: u64,
    predicted_seconds: Option<f64>,
    decided_at: Duration,
    cached_tokens: u64,
    first_token_at: Option<Duration>,
    finished_at: Option<Duration>,
    has_failed: bool,
}

struct Mesh<'a> {
    settings: &'a MeshSettings,
    trace: &'a [TraceRequest],
    now: Duration,
    queue: BinaryHeap<Reverse<Entry>>,
    next_entry: u64,
    draws: Draws,
    routers: Vec<Router>,
    workers: Vec<Worker>,
    jobs: Vec<Job>,
    left: usize,
    worst_backlog_seconds: f64,
    backlog_seconds_over_time: Vec<f64>,
    backlog_interval_seconds: f64,
    are_loads_frozen: bool,
    lost_batches: u64,
    catch_ups: u64,
    refusals: u64,
}

/// Runs a trace through a mesh.
#[must_use]
pub fn run_mesh(settings: &MeshSettings, trace: &[TraceRequest], policy: &str, pipeline: &Pipeline) -> MeshReport {
    let mut mesh = Mesh::new(settings, trace, pipeline);
    let mut ends_at = Duration::MAX;
    while let Some(Reverse(entry)) = mesh.queue.pop() {
        if mesh.left == 0 && ends_at == Duration::MAX {
            ends_at = entry.at + SETTLE_TIME;
        }
        if entry.at > ends_at {
            break;
        }
        mesh.now = entry.at;
        mesh.take(entry.event);
    }
    mesh.report(policy)
}

impl<'a> Mesh<'a> {
    fn new(settings: &'a MeshSettings, trace: &'a [TraceRequest], pipeline: &Pipeline) -> Self {
        let engine = &settings.engine;
        let prior = Rates {
            prefill: PrefillRate {
                seconds_per_token: 1.0 / engine.prefill_tokens_per_second,
                seconds_per_token_and_context: 0.0,
            },
            step_seconds_per_request: engine.decode_step_seconds_per_request,
            ..Rates::default()
        };
        let last_arrival = trace.last().map_or(Duration::ZERO, |request| request.at);
        let mut draws = Draws::new(settings.seed);
        let routers = (0..settings.routers.max(1)).map(|_| Router::new(pipeline.clone(), prior, draws.number()));
        let mut mesh = Self {
            settings,
            trace,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            next_entry: 0,
            routers: routers.collect(),
            draws,
            workers: Vec::new(),
            jobs: vec![Job::default(); trace.len()],
            left: trace.len(),
            worst_backlog_seconds: 0.0,
            backlog_seconds_over_time: vec![0.0; BACKLOG_INTERVALS],
            backlog_interval_seconds: last_arrival.as_secs_f64().max(1e-3) / BACKLOG_INTERVALS as f64,
            are_loads_frozen: false,
            lost_batches: 0,
            catch_ups: 0,
            refusals: 0,
        };
        for _ in 0..settings.workers {
            mesh.join();
        }
        for (number, request) in trace.iter().enumerate() {
            mesh.at(request.at, Event::Arrival(number));
        }
        for incident in &settings.incidents {
            let seconds = match incident {
                Incident::Join { at_seconds }
                | Incident::Leave { at_seconds, .. }
                | Incident::Crash { at_seconds, .. } => *at_seconds,
                Incident::FreezeLoads { from_seconds, .. } => *from_seconds,
                Incident::Slow { .. } => continue,
            };
            mesh.at(duration(seconds), Event::Incident(*incident));
        }
        mesh.at(DIGEST_INTERVAL, Event::DigestTick);
        mesh.at(IDLE_REPORT_INTERVAL, Event::ReportTick);
        mesh
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.next_entry += 1;
        self.queue.push(Reverse(Entry { at, number: self.next_entry, event }));
    }

    fn after(&mut self, seconds: f64, event: Event) {
        self.at(self.now + duration(seconds), event);
    }

    fn join(&mut self) {
        let number = self.workers.len();
        let slowness = self.settings.incidents.iter().find_map(|incident| match incident {
            Incident::Slow { worker, factor } if *worker == number => Some(*factor),
            _ => None,
        });
        let worker = Worker::new(number, &self.settings.engine, slowness.unwrap_or(1.0));
        for router in 0..self.routers.len() {
            self.routers[router].add(worker.target.clone(), worker.incarnation);
            self.at(self.now, Event::CatchUp { router, worker: number });
        }
        self.workers.push(worker);
        self.send_report(number);
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Arrival(job) => {
                self.jobs[job].router = self.draws.below(self.routers.len());
                self.place(job, None);
            }
            Event::Submit { job, worker, attempt, most_waiting_tokens } => {
                self.submit(job, worker, attempt, most_waiting_tokens);
            }
            Event::Refused { job, worker, attempt, report } => self.take_refusal(job, worker, attempt, report),
            Event::StepEnd { worker, step } => self.end_step(worker, &step),
            Event::PlainEnd { job, worker, attempt } => {
                if self.is_current(job, worker, attempt) {
                    self.first_token(job);
                    self.finish(job);
                }
            }
            Event::Batch { router, worker, batch } => {
                if self.routers[router].take_batch(self.now, worker, &batch) {
                    self.at(self.now + CATCH_UP_TIME, Event::CatchUp { router, worker });
                }
            }
            Event::Digest { router, worker, digest } => {
                if self.routers[router].take_digest(self.now, worker, &digest) {
                    self.at(self.now + CATCH_UP_TIME, Event::CatchUp { router, worker });
                }
            }
            Event::DigestTick => self.send_digests(),
            Event::ReportTick => {
                for worker in 0..self.workers.len() {
                    if self.workers[worker].is_alive {
                        self.send_report(worker);
                    }
                }
                self.at(self.now + IDLE_REPORT_INTERVAL, Event::ReportTick);
            }
            Event::CatchUp { router, worker } => {
                let after = self.routers[router].applied_sequence(worker);
                if self.workers[worker].is_alive
                    && let Ok(batches) = self.workers[worker].ledger.range_after(after)
                {
                    self.catch_ups += u64::from(!batches.is_empty());
                    self.routers[router].catch_up(self.now, worker, &batches);
                }
            }
            Event::Load { router, worker, report } => self.routers[router].take_report(self.now, worker, report),
            Event::Incident(incident) => self.happen(incident),
        }
    }

    fn is_current(&self, job: usize, worker: usize, attempt: u32) -> bool {
        let known = &self.jobs[job];
        self.workers[worker].is_alive
            && known.worker == worker
            && known.attempt == attempt
            && known.finished_at.is_none()
    }

    fn prompt(&self, job: usize) -> Prompt {
        let root = Namespace::new("twin", "", "").root(HashSeed(self.settings.seed));
        let request = &self.trace[job];
        if self.settings.engine.is_full {
            let tokens = request.tokens();
            let mut hashes = block_hashes(root, &tokens, TRACE_BLOCK_TOKENS);
            hashes.truncate(usable_blocks(tokens.len(), TRACE_BLOCK_TOKENS));
            Prompt { hashes: Arc::new(hashes), tokens, root }
        } else {
            let hashes = block_hashes(root, &request.blocks, 1);
            Prompt { hashes: Arc::new(hashes), tokens: request.blocks.clone(), root }
        }
    }

    fn place(&mut self, job: usize, tried: Option<usize>) {
        let hashes = self.prompt(job).hashes;
        let router = self.jobs[job].router;
        let prompt_tokens = self.trace[job].prompt_tokens;
        let Some(choice) = self.routers[router].choose(self.now, &hashes, prompt_tokens, tried) else {
            return self.fail(job);
        };
        let known = &mut self.jobs[job];
        known.worker = choice.worker;
        known.attempt += 1;
        known.reservation = Some(choice.reservation);
        known.predicted_cached_tokens = choice.predicted_cached_tokens;
        known.predicted_seconds = choice.predicted_seconds;
        known.decided_at = self.now;
        let most_waiting_tokens = choice.most_waiting_tokens.filter(|_| known.refusals < self.settings.most_refusals);
        let event = Event::Submit { job, worker: choice.worker, attempt: known.attempt, most_waiting_tokens };
        self.after(self.settings.network_seconds, event);
    }

    fn submit(&mut self, job: usize, worker: usize, attempt: u32, most_waiting_tokens: Option<u64>) {
        if !self.is_current(job, worker, attempt) {
            return;
        }
        if let Some(most) = most_waiting_tokens {
            let report = self.workers[worker].report(self.now);
            if report.outstanding_prefill_tokens > most {
                let event = Event::Refused { job, worker, attempt, report };
                return self.after(self.settings.network_seconds, event);
            }
        }
        let prompt = self.prompt(job);
        let request = &self.trace[job];
        let place = &mut self.workers[worker];
        if let Some((hits, events, end)) = place.serve_plainly(self.now, &prompt, request.prompt_tokens) {
            self.jobs[job].cached_tokens = (hits * TRACE_BLOCK_TOKENS).min(request.prompt_tokens) as u64;
            self.publish(worker, &events);
            self.at(end, Event::PlainEnd { job, worker, attempt });
        } else {
            let request = SimRequest {
                id: job as u64,
                prompt: prompt.tokens,
                max_tokens: request.output_tokens,
                root: prompt.root,
            };
            place.submit(self.now, request);
            if !place.is_stepping {
                self.step(worker);
            }
        }
        let backlog = self.workers[worker].backlog_seconds(self.now);
        self.worst_backlog_seconds = self.worst_backlog_seconds.max(backlog);
        // The last arrival, and what is on its way then, belong to the last interval.
        let interval = (self.now.as_secs_f64() / self.backlog_interval_seconds) as usize;
        if let Some(worst) = self.backlog_seconds_over_time.get_mut(interval.min(BACKLOG_INTERVALS - 1)) {
            *worst = worst.max(backlog);
        }
        self.send_report(worker);
    }

    /// More waited there than the decision rests on: nothing of it holds, and the router decides again.
    fn take_refusal(&mut self, job: usize, worker: usize, attempt: u32, report: EngineReport) {
        if !self.is_current(job, worker, attempt) {
            return;
        }
        let hashes = self.prompt(job).hashes;
        let known = &mut self.jobs[job];
        let router = &mut self.routers[known.router];
        router.take_report(self.now, worker, report);
        if let Some(reservation) = known.reservation.take() {
            router.take_back(known.decided_at, worker, reservation, &hashes);
        }
        known.refusals += 1;
        self.refusals += 1;
        self.place(job, None);
    }

    fn step(&mut self, worker: usize) {
        let place = &mut self.workers[worker];
        let Some(step) = place.step(self.now) else {
            place.is_stepping = false;
            return;
        };
        place.is_stepping = true;
        for (job, cached_tokens) in &step.placed {
            let prompt = self.trace[*job as usize].prompt_tokens as u64;
            place.computed_tokens += prompt - u64::from(*cached_tokens);
            self.jobs[*job as usize].cached_tokens = u64::from(*cached_tokens);
        }
        let begin = &step.events[..step.events_at_begin];
        self.publish(worker, begin);
        let end = self.now + step.duration.unwrap_or_default();
        self.at(end, Event::StepEnd { worker, step: Box::new(step) });
    }

    fn end_step(&mut self, worker: usize, step: &Step) {
        if !self.workers[worker].is_alive {
            return;
        }
        self.publish(worker, &step.events[step.events_at_begin..]);
        for (job, _) in &step.tokens {
            if self.jobs[*job as usize].first_token_at.is_none() {
                self.first_token(*job as usize);
            }
        }
        for finished in &step.finished {
            if finished.completion_tokens == 0 {
                self.fail(finished.id as usize);
            } else {
                self.finish(finished.id as usize);
            }
        }
        let due = self.workers[worker].reported_at + duration(self.settings.load_interval_seconds);
        if due <= self.now || !step.finished.is_empty() {
            self.send_report(worker);
        }
        self.step(worker);
    }

    fn first_token(&mut self, job: usize) {
        let known = &mut self.jobs[job];
        known.first_token_at = Some(self.now);
        if let Some(reservation) = known.reservation {
            self.routers[known.router].book.reservations.prefilled(reservation);
        }
    }

    fn finish(&mut self, job: usize) {
        let known = &mut self.jobs[job];
        known.finished_at = Some(self.now);
        self.left -= 1;
        if let Some(reservation) = known.reservation.take() {
            self.routers[known.router].book.reservations.release(reservation);
        }
    }

    fn fail(&mut self, job: usize) {
        self.jobs[job].has_failed = true;
        self.finish(job);
    }

    fn publish(&mut self, worker: usize, events: &[kvist_ledger::EngineEvent]) {
        let Some(batch) = self.workers[worker].apply(self.now, events) else { return };
        for router in 0..self.routers.len() {
            if self.settings.event_loss > 0.0 && self.draws.unit() < self.settings.event_loss {
                self.lost_batches += 1;
                continue;
            }
            let event = Event::Batch { router, worker, batch: Arc::clone(&batch) };
            self.after(self.settings.event_lag_seconds, event);
        }
    }

    fn send_digests(&mut self) {
        for worker in 0..self.workers.len() {
            if !self.workers[worker].is_alive {
                continue;
            }
            let digest = self.workers[worker].digest();
            for router in 0..self.routers.len() {
                let event = Event::Digest { router, worker, digest: Box::new(digest.clone()) };
                self.after(self.settings.event_lag_seconds, event);
            }
        }
        self.at(self.now + DIGEST_INTERVAL, Event::DigestTick);
    }

    fn send_report(&mut self, worker: usize) {
        let report = self.workers[worker].report(self.now);
        self.workers[worker].reported_at = self.now;
        if self.are_loads_frozen {
            return;
        }
        for router in 0..self.routers.len() {
            self.after(self.settings.load_lag_seconds, Event::Load { router, worker, report });
        }
    }

    fn happen(&mut self, incident: Incident) {
        match incident {
            Incident::Join { .. } => self.join(),
            Incident::Leave { worker, .. } if worker < self.workers.len() => {
                self.routers.iter_mut().for_each(|router| router.exclude(worker, "draining"));
            }
            Incident::Crash { worker, .. } if worker < self.workers.len() => self.crash(worker),
            Incident::FreezeLoads { from_seconds, until_seconds } => {
                self.are_loads_frozen = !self.are_loads_frozen;
                if self.are_loads_frozen {
                    self.after((until_seconds - from_seconds).max(0.0), Event::Incident(incident));
                }
            }
            Incident::Leave { .. } | Incident::Crash { .. } | Incident::Slow { .. } => {}
        }
    }

    /// Streams are lost at once; what has no token yet is placed once more.
    fn crash(&mut self, worker: usize) {
        self.workers[worker].is_alive = false;
        self.routers.iter_mut().for_each(|router| router.close(worker));
        for job in 0..self.jobs.len() {
            let known = &mut self.jobs[job];
            if known.attempt == 0 || known.worker != worker || known.finished_at.is_some() {
                continue;
            }
            if known.first_token_at.is_some() || known.attempt - known.refusals >= MOST_ATTEMPTS {
                self.fail(job);
                continue;
            }
            if let Some(reservation) = known.reservation.take() {
                self.routers[known.router].book.reservations.release(reservation);
            }
            self.place(job, Some(worker));
        }
    }

    fn report(&self, policy: &str) -> MeshReport {
        let references: usize = self.trace.iter().map(|request| request.blocks.len()).sum();
        let hits: u64 = self.jobs.iter().map(|job| job.cached_tokens.div_ceil(TRACE_BLOCK_TOKENS as u64)).sum();
        let computed: Vec<u64> = self.workers.iter().map(|worker| worker.computed_tokens).collect();
        let mean = computed.iter().sum::<u64>() as f64 / computed.len().max(1) as f64;
        let most = computed.iter().copied().max().unwrap_or(0) as f64;
        let errors = self.jobs.iter().filter_map(|job| {
            let actual = job.first_token_at?.saturating_sub(job.decided_at).as_secs_f64();
            Some((job.predicted_seconds? - actual).abs())
        });
        let since_arrival = |at: fn(&Job) -> Option<Duration>| {
            let jobs = self.jobs.iter().zip(self.trace).filter(|(job, _)| !job.has_failed);
            jobs.filter_map(|(job, request)| Some((at(job)? - request.at).as_secs_f64())).collect()
        };
        MeshReport {
            policy: policy.to_owned(),
            requests: self.trace.len(),
            failed: self.jobs.iter().filter(|job| job.has_failed).count(),
            hit_rate: hits as f64 / references.max(1) as f64,
            ideal_hit_rate: ideal_hit_rate(self.trace),
            predicted_hit_tokens: self.jobs.iter().map(|job| job.predicted_cached_tokens).sum(),
            delivered_hit_tokens: self.jobs.iter().map(|job| job.cached_tokens).sum(),
            time_to_first_token_seconds: Percentiles::of(since_arrival(|job| job.first_token_at)),
            end_to_end_seconds: Percentiles::of(since_arrival(|job| job.finished_at)),
            prediction_error_seconds: Percentiles::of(errors.collect()),
            worst_backlog_seconds: self.worst_backlog_seconds,
            backlog_seconds_over_time: self.backlog_seconds_over_time.clone(),
            backlog_interval_seconds: self.backlog_interval_seconds,
            imbalance: if mean > 0.0 { most / mean } else { 1.0 },
            computed_tokens_by_worker: computed,
            open_reservations: self.routers.iter().map(|router| router.book.reservations.len()).sum(),
            lost_batches: self.lost_batches,
            catch_ups: self.catch_ups,
            refusals: self.refusals,
            claimed_blocks_by_router: self.routers.iter().map(Router::claimed_blocks).collect(),
            ledger_blocks: self.workers.iter().filter(|worker| worker.is_alive).map(|w| w.ledger.block_count()).sum(),
        }
    }
}
