//! Targets that fail get a rest.

use std::time::Duration;

use hashbrown::HashMap;

use crate::TargetId;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Failures in a row that open it.
    pub failures: u32,
    /// How long it stays open the first time; doubles with each failed probe.
    pub open_for: Duration,
    /// How long it stays open at most.
    pub open_for_at_most: Duration,
    /// How long a foreign endpoint is left alone that asks for it without saying how long.
    pub back_off: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            open_for: Duration::from_secs(5),
            open_for_at_most: Duration::from_secs(60),
            back_off: Duration::from_secs(1),
        }
    }
}

/// What came of a request to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// It was answered.
    Success,
    /// No connection.
    ConnectFailure,
    /// No answer in time.
    TimedOut,
    /// A 5xx that is not 503 for overload.
    ServerError,
    /// A 4xx other than 429: the request was wrong, not the target.
    ClientError,
    /// 429, or 503 for overload, and when to come back if that was said. Neutral for health; a foreign endpoint is left
    /// alone for a while.
    Overloaded(Option<Duration>),
}

/// State of one target's breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// None passes.
    Open,
    /// One passes as a probe.
    HalfOpen,
}

#[derive(Clone, Copy, Debug, Default)]
struct Breaker {
    is_foreign: bool,
    failures: u32,
    /// When it was opened and until when; none while closed.
    open: Option<(Duration, Duration)>,
    /// Probes that failed in a row.
    failed_probes: u32,
    /// When the probe under way counts as lost.
    probe_until: Option<Duration>,
    /// A foreign endpoint has asked for a pause.
    backs_off_until: Duration,
}

/// The breakers of one fleet: the targets of a model. Times are durations since any fixed moment, and never go back.
///
/// At least one target of the fleet is not open at any time: a failure that all share is not the fault of one, and a
/// router that sends nothing anywhere never learns that it is over.
#[derive(Debug, Default)]
pub struct BreakerBook {
    settings: BreakerSettings,
    fleet: HashMap<TargetId, Breaker>,
}

impl BreakerBook {
    /// A book without targets.
    #[must_use]
    pub fn new(settings: BreakerSettings) -> Self {
        Self { settings, fleet: HashMap::new() }
    }

    /// States who is in the fleet, and who of them is foreign. Those that stay keep their state.
    pub fn set_fleet<'a>(&mut self, now: Duration, targets: impl IntoIterator<Item = (&'a TargetId, bool)>) {
        let mut fleet = HashMap::new();
        for (target, is_foreign) in targets {
            let known = self.fleet.get(target).copied().unwrap_or_default();
            fleet.insert(target.clone(), Breaker { is_foreign, ..known });
        }
        self.fleet = fleet;
        self.keep_one(now);
    }

    /// Whether every breaker is closed and nobody has asked for a pause: then nothing is broken.
    #[must_use]
    pub fn is_all_well(&self) -> bool {
        self.fleet.values().all(|breaker| breaker.open.is_none() && breaker.backs_off_until.is_zero())
    }

    /// State of each target.
    pub fn states(&self, now: Duration) -> impl Iterator<Item = (&TargetId, BreakerState)> {
        self.fleet.keys().map(move |target| (target, self.state(now, target)))
    }

    /// State of a target; one outside the fleet counts as closed.
    #[must_use]
    pub fn state(&self, now: Duration, target: &TargetId) -> BreakerState {
        match self.fleet.get(target).and_then(|breaker| breaker.open) {
            None => BreakerState::Closed,
            Some((_, until)) if now < until => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }

    /// Whether nothing may be sent to a target now: its breaker is open, its probe is under way, or it asked for a pause.
    #[must_use]
    pub fn is_broken(&self, now: Duration, target: &TargetId) -> bool {
        let Some(breaker) = self.fleet.get(target) else { return false };
        now < breaker.backs_off_until
            || match self.state(now, target) {
                BreakerState::Closed => false,
                BreakerState::Open => true,
                BreakerState::HalfOpen => breaker.probe_until.is_some_and(|until| now < until),
            }
    }

    /// Notes that a request was sent to a target.
    pub fn sent(&mut self, now: Duration, target: &TargetId) {
        if self.state(now, target) == BreakerState::HalfOpen
            && let Some(breaker) = self.fleet.get_mut(target)
        {
            breaker.probe_until = Some(now + self.settings.open_for_at_most);
        }
    }

    /// Takes what came of a request. True when that has opened the breaker.
    pub fn report(&mut self, now: Duration, target: &TargetId, report: Report) -> bool {
        let state = self.state(now, target);
        let settings = self.settings;
        let Some(breaker) = self.fleet.get_mut(target) else { return false };
        match report {
            Report::Success => {
                *breaker = Breaker { is_foreign: breaker.is_foreign, ..Breaker::default() };
            }
            Report::ClientError => breaker.probe_until = None,
            Report::Overloaded(pause) => {
                breaker.probe_until = None;
                if breaker.is_foreign {
                    let until = now + pause.unwrap_or(settings.back_off).min(settings.open_for_at_most);
                    breaker.backs_off_until = breaker.backs_off_until.max(until);
                }
            }
            Report::ConnectFailure | Report::TimedOut | Report::ServerError => {
                breaker.failures = breaker.failures.saturating_add(1);
                match state {
                    // What was under way when it opened proves nothing new.
                    BreakerState::Open => {}
                    BreakerState::HalfOpen => {
                        breaker.failed_probes = breaker.failed_probes.saturating_add(1);
                        self.open(now, target);
                    }
                    BreakerState::Closed if breaker.failures >= settings.failures => self.open(now, target),
                    BreakerState::Closed => {}
                }
            }
        }
        state != BreakerState::Open && self.state(now, target) == BreakerState::Open
    }

    fn open(&mut self, now: Duration, target: &TargetId) {
        let settings = self.settings;
        if let Some(breaker) = self.fleet.get_mut(target) {
            let doubled = settings.open_for.saturating_mul(1 << breaker.failed_probes.min(16));
            breaker.probe_until = None;
            breaker.open = Some((now, now + doubled.min(settings.open_for_at_most)));
        }
        self.keep_one(now);
    }

    /// When all are open, the one that has rested longest is tried.
    fn keep_one(&mut self, now: Duration) {
        if self.fleet.keys().any(|target| self.state(now, target) != BreakerState::Open) {
            return;
        }
        let longest =
            self.fleet.iter_mut().min_by(|left, right| left.1.open.cmp(&right.1.open).then(left.0.cmp(right.0)));
        if let Some((_, breaker)) = longest
            && let Some((_, until)) = &mut breaker.open
        {
            *until = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn target(number: usize) -> TargetId {
        TargetId { worker: format!("w{number}").as_str().into(), rank: Rank(0) }
    }

    fn book(size: usize, is_foreign: bool) -> BreakerBook {
        let targets: Vec<TargetId> = (0..size).map(target).collect();
        let mut book = BreakerBook::new(BreakerSettings::default());
        book.set_fleet(Duration::ZERO, targets.iter().map(|target| (target, is_foreign)));
        book
    }

    #[test]
    fn five_failures_open_it_a_probe_closes_it_and_a_failed_probe_doubles_the_rest() {
        let mut book = book(2, false);
        let bad = target(0);
        for failure in [Report::ConnectFailure, Report::TimedOut, Report::ServerError, Report::ServerError] {
            book.report(SECOND, &bad, failure);
        }
        assert_eq!(BreakerState::Closed, book.state(SECOND, &bad));
        assert!(book.is_all_well());
        assert!(book.report(SECOND, &bad, Report::TimedOut), "the fifth opens it");
        assert!(!book.report(SECOND, &bad, Report::TimedOut) && !book.is_all_well());
        assert_eq!(BreakerState::Open, book.state(5 * SECOND, &bad));
        assert!(!book.is_broken(6 * SECOND, &bad));
        book.sent(6 * SECOND, &bad);
        assert!(book.is_broken(6 * SECOND, &bad), "one probe at a time");
        book.report(7 * SECOND, &bad, Report::ServerError);
        assert_eq!(
            [BreakerState::Open, BreakerState::HalfOpen],
            [16 * SECOND, 17 * SECOND].map(|now| book.state(now, &bad))
        );
        book.report(17 * SECOND, &bad, Report::Success);
        assert_eq!(BreakerState::Closed, book.state(17 * SECOND, &bad));
    }

    #[test]
    fn what_the_client_did_or_what_load_does_says_nothing_of_health() {
        let mut book = book(2, false);
        for _ in 0..100 {
            book.report(SECOND, &target(0), Report::ClientError);
            book.report(SECOND, &target(0), Report::Overloaded(None));
        }
        assert!(!book.is_broken(SECOND, &target(0)));
    }

    // L-07: a provider that answers 429 is left alone for a time; L-44: also when all are.
    #[test]
    fn a_foreign_endpoint_that_asks_for_a_pause_gets_it() {
        let mut book = book(1, true);
        book.report(SECOND, &target(0), Report::Overloaded(Some(3 * SECOND)));
        book.report(SECOND, &target(0), Report::Overloaded(None));
        assert_eq!([true, false], [3 * SECOND, 4 * SECOND].map(|now| book.is_broken(now, &target(0))));
        assert_eq!(BreakerState::Closed, book.state(2 * SECOND, &target(0)));
    }

    proptest! {
        #[test]
        fn it_never_opens_for_the_whole_fleet(
            size in 1usize..5,
            steps in prop::collection::vec((0usize..5, 0u8..9, 0u64..4000), 0..200),
        ) {
            let mut book = book(size, false);
            let mut fleet: Vec<TargetId> = (0..size).map(target).collect();
            let mut now = Duration::ZERO;
            for (number, what, millis) in steps {
                now += Duration::from_millis(millis / 4);
                let chosen = target(number % size);
                match what {
                    0 => assert!(!book.report(now, &chosen, Report::Success)),
                    1 => book.sent(now, &chosen),
                    2 if fleet.len() > 1 => {
                        fleet.remove(number % fleet.len());
                        book.set_fleet(now, fleet.iter().map(|target| (target, false)));
                    }
                    3 => {
                        fleet = (0..size).map(target).collect();
                        book.set_fleet(now, fleet.iter().map(|target| (target, false)));
                    }
                    4 => _ = book.report(now, &chosen, Report::TimedOut),
                    _ => _ = book.report(now, &chosen, Report::ServerError),
                }
                prop_assert!(fleet.iter().any(|target| book.state(now, target) != BreakerState::Open));
            }
        }
    }
}
