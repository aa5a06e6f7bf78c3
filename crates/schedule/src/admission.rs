//! Who may start now, who waits, and who is told to come back later.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::AdmissionConfig;

/// Tokens that a class of weight 1 may send in each turn. Large enough that most requests need one turn.
const QUANTUM_TOKENS: f64 = 4096.0;

/// Weight of the newest request in the mean time that requests hold their place.
const HOLD_WEIGHT: f64 = 0.1;

/// Assumed until the first request has ended.
const FIRST_HOLD_SECONDS: f64 = 1.0;

/// Names a request in the queue; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId(pub u64);

/// What a request says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TicketRequest {
    /// Position of its class; one that there is not counts as the last.
    pub class: usize,
    /// Within the class, smaller runs earlier.
    pub priority: i32,
    /// When its answer is of no use any more.
    pub deadline: Option<Duration>,
    /// Tokens it will need; what classes share.
    pub tokens: u64,
}

/// Why a request was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many wait as may.
    QueueFull,
    /// By the present wait it would start after its deadline.
    DeadlineTooSoon,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// It starts.
    Admitted(TicketId),
    /// It waits; [`Admission::advance`] tells what becomes of it.
    Queued(TicketId),
    /// It is turned away.
    Refused {
        /// Why.
        refusal: Refusal,
        /// When it may be worth another try.
        retry_after: Duration,
    },
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It starts.
    Admitted,
    /// It waited longer than the queue allows.
    TimedOut,
    /// Its deadline passed.
    DeadlinePassed,
}

/// In the order of service: priority, deadline, arrival.
type QueueKey = (i32, Duration, TicketId);

#[derive(Debug)]
struct Waiting {
    tokens: f64,
    /// By its deadline or the time-out, whichever is first.
    ends_at: Duration,
    is_late_then: bool,
}

#[derive(Debug)]
struct Class {
    name: Arc<str>,
    weight: f64,
    queue: BTreeMap<QueueKey, Waiting>,
    /// Tokens it may still send in this turn.
    deficit: f64,
}

/// The door of one model. Times are durations since any fixed moment, and never go back.
///
/// Classes share places by deficit round robin over tokens: a class that always has requests gets its weight's share of
/// tokens, whatever the size of its requests, and a class without requests saves nothing up.
#[derive(Debug)]
pub struct Admission {
    config: AdmissionConfig,
    classes: Vec<Class>,
    /// The class whose turn it is.
    cursor: usize,
    running: HashMap<TicketId, Duration>,
    queued: HashMap<TicketId, (usize, QueueKey)>,
    /// When waits end by themselves, soonest first.
    ends: BTreeSet<(Duration, TicketId)>,
    next: u64,
    hold_seconds: f64,
}

impl Admission {
    /// A door before the first request.
    #[must_use]
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            classes: classes_of(&config),
            config,
            cursor: 0,
            running: HashMap::new(),
            queued: HashMap::new(),
            ends: BTreeSet::new(),
            next: 0,
            hold_seconds: FIRST_HOLD_SECONDS,
        }
    }

    /// What it goes by.
    #[must_use]
    pub fn config(&self) -> &AdmissionConfig {
        &self.config
    }

    /// Position of a class; the last one for a name that there is not.
    #[must_use]
    pub fn class(&self, name: &str) -> usize {
        self.classes.iter().position(|class| &*class.name == name).unwrap_or(self.classes.len() - 1)
    }

    /// Goes by another configuration from now on. What runs goes on, and what waits keeps its time-out and its class; if
    /// that is gone, it waits in the last one. [`Admission::advance`] lets in what has a place now.
    pub fn reconfigure(&mut self, config: AdmissionConfig) {
        let before = std::mem::replace(&mut self.classes, classes_of(&config));
        self.config = config;
        self.cursor = 0;
        for class in before {
            let position = self.class(&class.name);
            for (key, waiting) in class.queue {
                self.queued.insert(key.2, (position, key));
                self.classes[position].queue.insert(key, waiting);
            }
        }
    }

    /// A request at the door. `has_room` is false while all targets are saturated.
    pub fn offer(&mut self, now: Duration, request: TicketRequest, has_room: bool) -> Offer {
        let id = TicketId(self.next);
        self.next += 1;
        let AdmissionConfig::Concurrency { most_running, most_queued, queue_timeout, .. } = self.config else {
            self.running.insert(id, now);
            return Offer::Admitted(id);
        };
        if has_room && self.queued.is_empty() && self.running.len() < most_running {
            self.running.insert(id, now);
            return Offer::Admitted(id);
        }
        let class = request.class.min(self.classes.len() - 1);
        let key = (request.priority, request.deadline.unwrap_or(Duration::MAX), id);
        let wait = self.wait_before(class, key);
        let refused = |refusal| Offer::Refused { refusal, retry_after: wait };
        if self.queued.len() >= most_queued {
            return refused(Refusal::QueueFull);
        }
        if request.deadline.is_some_and(|deadline| now + wait >= deadline) {
            return refused(Refusal::DeadlineTooSoon);
        }
        let times_out_at = now + queue_timeout;
        let ends_at = request.deadline.map_or(times_out_at, |deadline| deadline.min(times_out_at));
        let tokens = request.tokens.max(1) as f64;
        let is_late_then = request.deadline == Some(ends_at);
        self.classes[class].queue.insert(key, Waiting { tokens, ends_at, is_late_then });
        self.queued.insert(id, (class, key));
        self.ends.insert((ends_at, id));
        Offer::Queued(id)
    }

    /// Ends waits that are over and fills free places, as many as targets have `room` for. To be called when a request has
    /// ended, when targets have room again, and at [`Admission::wakes_at`].
    pub fn advance(&mut self, now: Duration, room: usize) -> Vec<(TicketId, Ended)> {
        let mut ended = Vec::new();
        while let Some((_, id)) = self.ends.first().copied().filter(|(ends_at, _)| *ends_at <= now) {
            let is_late = self.take(id).is_some_and(|waiting| waiting.is_late_then);
            ended.push((id, if is_late { Ended::DeadlinePassed } else { Ended::TimedOut }));
        }
        let places = match self.config {
            AdmissionConfig::AllowAll => usize::MAX,
            AdmissionConfig::Concurrency { most_running, .. } => {
                most_running.saturating_sub(self.running.len()).min(room)
            }
        };
        for _ in 0..places {
            let Some(id) = self.take_next() else { break };
            self.running.insert(id, now);
            ended.push((id, Ended::Admitted));
        }
        ended
    }

    /// A request has ended, or its client has left: it gives up its place, wherever that is. False when it had ended
    /// before.
    pub fn end(&mut self, now: Duration, id: TicketId) -> bool {
        if let Some(since) = self.running.remove(&id) {
            let held = now.saturating_sub(since).as_secs_f64();
            self.hold_seconds += HOLD_WEIGHT * (held - self.hold_seconds);
            return true;
        }
        self.take(id).is_some()
    }

    /// Takes a request out of the queue.
    fn take(&mut self, id: TicketId) -> Option<Waiting> {
        let (class, key) = self.queued.remove(&id)?;
        let waiting = self.classes[class].queue.remove(&key)?;
        self.ends.remove(&(waiting.ends_at, id));
        Some(waiting)
    }

    /// When the next wait ends by itself.
    #[must_use]
    pub fn wakes_at(&self) -> Option<Duration> {
        self.ends.first().map(|(ends_at, _)| *ends_at)
    }

    /// How long a request that arrives now in a class is expected to wait.
    #[must_use]
    pub fn wait_estimate(&self, class: usize) -> Duration {
        self.wait_before(class.min(self.classes.len() - 1), (0, Duration::MAX, TicketId(u64::MAX)))
    }

    /// Requests that run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Places become free every hold time divided by their number, and while targets are saturated there are no more than
    /// requests run; a class gets its share of them, and all when the others have no requests.
    fn wait_before(&self, class: usize, key: QueueKey) -> Duration {
        let AdmissionConfig::Concurrency { most_running, .. } = self.config else { return Duration::ZERO };
        let ahead = self.classes[class].queue.range(..key).count() as f64;
        let others: f64 = (0..self.classes.len())
            .filter(|other| *other != class && !self.classes[*other].queue.is_empty())
            .map(|other| self.classes[other].weight)
            .sum();
        let share = self.classes[class].weight / (self.classes[class].weight + others);
        let before = (ahead / share).min(ahead + (self.queued.len() as f64 - self.classes[class].queue.len() as f64));
        let places = self.running.len().clamp(1, most_running.max(1));
        let seconds = (before + 1.0) * self.hold_seconds / places as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 4)
    }

    /// The next request by deficit round robin. Turns are counted rather than taken: a request may need many.
    fn take_next(&mut self) -> Option<TicketId> {
        let count = self.classes.len();
        // By class: turns until its first request may go, and how soon in a turn the class comes.
        let place = |position: usize, class: &Class| {
            let first = class.queue.first_key_value()?.1;
            let turns = ((first.tokens - class.deficit) / (QUANTUM_TOKENS * class.weight)).ceil().max(0.0);
            let distance = (position + count - self.cursor) % count;
            // The class whose turn it is had its quantum; its next one comes after all others.
            Some((turns, if distance == 0 && turns > 0.0 { count } else { distance }))
        };
        let places: Vec<Option<(f64, usize)>> =
            self.classes.iter().enumerate().map(|(position, class)| place(position, class)).collect();
        let (winner, (turns, distance)) = places
            .iter()
            .enumerate()
            .filter_map(|(position, place)| Some((position, (*place)?)))
            .min_by(|left, right| left.1.0.total_cmp(&right.1.0).then(left.1.1.cmp(&right.1.1)))?;
        for (class, place) in self.classes.iter_mut().zip(&places) {
            match place {
                None => class.deficit = 0.0,
                Some((_, other)) => {
                    let visits = if *other <= distance { turns } else { (turns - 1.0).max(0.0) };
                    class.deficit += visits * QUANTUM_TOKENS * class.weight;
                }
            }
        }
        self.cursor = winner;
        let id = self.classes[winner].queue.first_key_value()?.0.2;
        let waiting = self.take(id)?;
        self.classes[winner].deficit -= waiting.tokens;
        Some(id)
    }
}

fn classes_of(config: &AdmissionConfig) -> Vec<Class> {
    let class = |name: &str, weight: f64| Class { name: name.into(), weight, queue: BTreeMap::new(), deficit: 0.0 };
    match config {
        AdmissionConfig::Concurrency { classes, .. } if !classes.is_empty() => {
            classes.iter().map(|one| class(&one.name, one.weight.max(1e-6))).collect()
        }
        _ => vec![class("", 1.0)],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ClassConfig;

    const ROOM: usize = usize::MAX;
    const SECOND: Duration = Duration::from_secs(1);

    fn config(most_running: usize, most_queued: usize, weights: &[f64]) -> AdmissionConfig {
        let class = |(number, weight): (usize, &f64)| ClassConfig { name: format!("c{number}"), weight: *weight };
        let classes = weights.iter().enumerate().map(class).collect();
        AdmissionConfig::Concurrency { most_running, most_queued, queue_timeout: 10 * SECOND, classes }
    }

    fn door(most_running: usize, most_queued: usize, weights: &[f64]) -> Admission {
        Admission::new(config(most_running, most_queued, weights))
    }

    fn request(class: usize, tokens: u64) -> TicketRequest {
        TicketRequest { class, tokens, ..TicketRequest::default() }
    }

    // F-09: limit 1, queue 1, three at once: one runs, one waits, one is refused.
    #[test]
    fn one_runs_one_waits_one_is_refused() {
        let mut door = door(1, 1, &[]);
        assert_eq!(Offer::Admitted(TicketId(0)), door.offer(SECOND, request(0, 1), true));
        assert_eq!(Offer::Queued(TicketId(1)), door.offer(SECOND, request(0, 1), true));
        let refused = Offer::Refused { refusal: Refusal::QueueFull, retry_after: 2 * SECOND };
        assert_eq!(refused, door.offer(SECOND, request(0, 1), true));
        assert_eq!(Some(11 * SECOND), door.wakes_at());
        assert!(door.end(2 * SECOND, TicketId(0)));
        assert_eq!(vec![(TicketId(1), Ended::Admitted)], door.advance(2 * SECOND, ROOM));
        assert_eq!((1, 0), (door.running(), door.queued()));
    }

    #[test]
    fn a_wait_ends_at_the_time_out_or_at_the_deadline() {
        let mut door = door(1, 9, &[]);
        door.offer(Duration::ZERO, request(0, 1), true);
        door.offer(Duration::ZERO, request(0, 1), true);
        let urgent = TicketRequest { deadline: Some(5 * SECOND), ..request(0, 1) };
        assert_eq!(Offer::Queued(TicketId(2)), door.offer(Duration::ZERO, urgent, true));
        assert_eq!(Some(5 * SECOND), door.wakes_at());
        assert_eq!(vec![(TicketId(2), Ended::DeadlinePassed)], door.advance(5 * SECOND, ROOM));
        assert_eq!(vec![(TicketId(1), Ended::TimedOut)], door.advance(10 * SECOND, ROOM));
    }

    #[test]
    fn what_cannot_be_in_time_is_refused_at_the_door() {
        let mut door = door(1, 9, &[]);
        door.offer(Duration::ZERO, request(0, 1), true);
        door.end(4 * SECOND, TicketId(0));
        door.offer(4 * SECOND, request(0, 1), true);
        // The mean hold is 1 + 0.1 · (4 − 1) seconds.
        assert_eq!(Duration::from_millis(1300), door.wait_estimate(0));
        let late = TicketRequest { deadline: Some(5 * SECOND), ..request(0, 1) };
        let refused = Offer::Refused { refusal: Refusal::DeadlineTooSoon, retry_after: Duration::from_millis(1300) };
        assert_eq!(refused, door.offer(4 * SECOND, late, true));
    }

    #[test]
    fn saturated_targets_make_requests_wait_though_places_are_free() {
        let mut door = door(9, 9, &[]);
        assert_eq!(Offer::Queued(TicketId(0)), door.offer(Duration::ZERO, request(0, 1), false));
        assert!(door.advance(SECOND, 0).is_empty());
        assert_eq!(vec![(TicketId(0), Ended::Admitted)], door.advance(SECOND, ROOM));
    }

    #[test]
    fn no_more_are_let_in_than_targets_have_room_for() {
        let mut door = door(9, 9, &[]);
        for _ in 0..4 {
            door.offer(Duration::ZERO, request(0, 1), false);
        }
        assert_eq!(3, door.advance(SECOND, 3).len());
        assert_eq!((3, 1), (door.running(), door.queued()));
    }

    #[test]
    fn another_configuration_counts_at_once_and_nobody_loses_a_place() {
        let mut door = Admission::new(AdmissionConfig::AllowAll);
        for _ in 0..3 {
            assert!(matches!(door.offer(Duration::ZERO, request(0, 1), true), Offer::Admitted(_)));
        }
        door.reconfigure(config(2, 9, &[1.0, 1.0]));
        assert_eq!([0, 1, 1], ["c0", "c1", "nosuch"].map(|name| door.class(name)));
        for class in [0, 1] {
            assert!(matches!(door.offer(Duration::ZERO, request(class, 1), true), Offer::Queued(_)));
        }
        assert!(door.end(SECOND, TicketId(0)) && door.advance(SECOND, ROOM).is_empty(), "two still run");
        // Only the second class is left, and both wait in it, in the order of arrival.
        let AdmissionConfig::Concurrency { mut classes, .. } = config(1, 0, &[1.0, 1.0]) else { unreachable!() };
        classes.remove(0);
        let queue_timeout = 10 * SECOND;
        door.reconfigure(AdmissionConfig::Concurrency { most_running: 1, most_queued: 0, queue_timeout, classes });
        assert_eq!((2, 2), (door.running(), door.queued()));
        assert!(door.end(SECOND, TicketId(1)) && door.end(SECOND, TicketId(2)));
        assert_eq!(vec![(TicketId(3), Ended::Admitted)], door.advance(SECOND, ROOM));
        door.reconfigure(AdmissionConfig::AllowAll);
        assert_eq!(vec![(TicketId(4), Ended::Admitted)], door.advance(SECOND, 0));
        assert!(door.end(SECOND, TicketId(3)) && door.end(SECOND, TicketId(4)));
        assert_eq!((0, 0), (door.running(), door.queued()));
    }

    #[test]
    fn classes_share_tokens_by_weight_and_a_class_keeps_priority_then_deadline_then_arrival() {
        let mut door = door(1, 1000, &[3.0, 1.0]);
        door.offer(Duration::ZERO, request(0, 1), true);
        // The heavy class has large requests, the light one small ones: 300 of 4,000 tokens, 400 of 1,000.
        let class_of: Vec<usize> = (0..700).map(|number| usize::from(number >= 300)).collect();
        for class in &class_of {
            door.offer(Duration::ZERO, request(*class, if *class == 0 { 4000 } else { 1000 }), true);
        }
        let mut tokens = [0, 0];
        let mut running = TicketId(0);
        for _ in 0..300 {
            door.end(Duration::ZERO, running);
            let admitted = door.advance(Duration::ZERO, ROOM);
            running = admitted[0].0;
            let class = class_of[running.0 as usize - 1];
            tokens[class] += if class == 0 { 4000 } else { 1000 };
        }
        let ratio = f64::from(tokens[0]) / f64::from(tokens[1]);
        assert!((2.8..3.2).contains(&ratio), "{ratio}");

        let mut door = self::door(1, 9, &[]);
        door.offer(Duration::ZERO, request(0, 1), true);
        let order = [(0, None), (0, Some(9 * SECOND)), (-1, None), (0, Some(8 * SECOND))];
        for (priority, deadline) in order {
            door.offer(Duration::ZERO, TicketRequest { priority, deadline, ..request(0, 1) }, true);
        }
        let mut served = Vec::new();
        for _ in 0..4 {
            door.end(Duration::ZERO, served.last().copied().unwrap_or(TicketId(0)));
            served.push(door.advance(Duration::ZERO, ROOM)[0].0);
        }
        assert_eq!([3, 4, 2, 1].map(TicketId).to_vec(), served);
    }

    proptest! {
        #[test]
        fn places_are_never_exceeded_nobody_is_lost_and_all_return_to_zero(
            steps in prop::collection::vec((0u8..5, 0usize..4, 0u64..5000), 0..80),
            most_running in 1usize..4, most_queued in 0usize..5,
        ) {
            let mut door = door(most_running, most_queued, &[1.0, 2.5, 0.1]);
            let mut now = Duration::ZERO;
            let mut open: Vec<TicketId> = Vec::new();
            for (what, number, amount) in steps {
                now += Duration::from_millis(amount);
                match what {
                    0 | 1 => {
                        let deadline = (number == 3).then(|| now + Duration::from_millis(amount));
                        let request = TicketRequest { class: number, priority: 0, deadline, tokens: amount };
                        match door.offer(now, request, number != 2) {
                            Offer::Admitted(id) | Offer::Queued(id) => open.push(id),
                            Offer::Refused { .. } => {}
                        }
                    }
                    2 if !open.is_empty() => {
                        let id = open.swap_remove(number % open.len());
                        prop_assert!(door.end(now, id));
                        prop_assert!(!door.end(now, id));
                    }
                    3 => door.reconfigure(config(most_running, most_queued, &[0.1, 1.0, 3.0, 1.0][number..])),
                    _ => {
                        for (id, ended) in door.advance(now, ROOM) {
                            prop_assert!(open.contains(&id));
                            if ended != Ended::Admitted {
                                open.retain(|other| *other != id);
                            }
                        }
                        prop_assert!(door.queued() == 0 || door.running() == most_running);
                    }
                }
                prop_assert_eq!(open.len(), door.running() + door.queued());
                prop_assert!(door.running() <= most_running && door.queued() <= most_queued);
            }
            for id in open {
                prop_assert!(door.end(now, id));
            }
            prop_assert_eq!((0, 0, None), (door.running(), door.queued(), door.wakes_at()));
        }
    }
}
