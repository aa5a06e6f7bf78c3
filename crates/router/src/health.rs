//! What requests tell of the health of their targets.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kvist_blocks::Incarnation;
use kvist_errors::{Code, KvistError};
use kvist_schedule::{BreakerBook, BreakerState, Report, TargetId};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;

/// A target that is silent for less cannot be blamed when a request runs out of time.
const LEAST_SILENCE: Duration = Duration::from_secs(5);

/// How many times longer than was expected a target may be silent.
const TIMES_EXPECTED: u32 = 4;

/// The breakers of one model's targets. They stay from one cluster state to the next.
#[derive(Debug)]
pub(crate) struct Health {
    book: Mutex<BreakerBook>,
    incarnations: Mutex<HashMap<TargetId, Incarnation>>,
    started: Instant,
    openings: Counter,
}

impl Health {
    pub(crate) fn new(openings: Counter) -> Self {
        Self { book: Mutex::default(), incarnations: Mutex::default(), started: Instant::now(), openings }
    }

    /// States who the targets are. Those that stay keep their breakers; an engine that was started anew begins with a
    /// closed one.
    pub(crate) fn follow(&self, targets: HashMap<TargetId, Incarnation>) {
        let now = self.now();
        let mut known = self.incarnations.lock();
        let mut book = self.book.lock();
        for (target, incarnation) in &targets {
            if known.get(target).is_some_and(|before| before != incarnation) {
                book.report(now, target, Report::Success);
            }
        }
        book.set_fleet(now, targets.keys().map(|target| (target, false)));
        *known = targets;
    }

    /// Takes what came of a request.
    pub(crate) fn report(&self, target: &TargetId, report: Report) {
        if self.book.lock().report(self.now(), target, report) {
            self.openings.inc();
            tracing::warn!(worker = %target.worker, rank = target.rank.0, ?report, "breaker_opened");
        }
    }

    /// A probe has been answered: it is over as soon as there is a token.
    pub(crate) fn has_begun_to_answer(&self, target: &TargetId) {
        let now = self.now();
        let mut book = self.book.lock();
        if book.state(now, target) == BreakerState::HalfOpen {
            book.report(now, target, Report::Success);
            tracing::info!(worker = %target.worker, rank = target.rank.0, "breaker_closed");
        }
    }

    /// State of one target.
    pub(crate) fn state(&self, target: &TargetId) -> BreakerState {
        self.book.lock().state(self.now(), target)
    }

    /// Adds the targets of each state.
    pub(crate) fn count(&self, closed: &mut i64, open: &mut i64, half_open: &mut i64) {
        let now = self.now();
        for (_, state) in self.book.lock().states(now) {
            *match state {
                BreakerState::Closed => &mut *closed,
                BreakerState::Open => &mut *open,
                BreakerState::HalfOpen => &mut *half_open,
            } += 1;
        }
    }

    /// The breakers during a choice, so that a probe is chosen once.
    pub(crate) fn during_choice(&self) -> (Duration, MutexGuard<'_, BreakerBook>) {
        (self.now(), self.book.lock())
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// What a failure says of the target that it came from.
pub(crate) fn report_of(error: &KvistError) -> Report {
    match error.code {
        Code::EngineUnavailable => Report::ConnectFailure,
        Code::EngineLost | Code::EngineFailed | Code::Internal => Report::ServerError,
        Code::Overloaded | Code::QueueFull => Report::Overloaded(error.retry_after),
        // The request was wrong, its client in a hurry or gone, or the worker is being ended: nobody is ill.
        _ => Report::ClientError,
    }
}

/// What it says that a request ran out of time without a token. A client in a hurry is not the target's fault.
pub(crate) fn report_of_silence(silent_for: Duration, expected: Option<Duration>) -> Report {
    let may_be_silent = expected.unwrap_or_default().saturating_mul(TIMES_EXPECTED).max(LEAST_SILENCE);
    if silent_for >= may_be_silent { Report::TimedOut } else { Report::ClientError }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_the_targets_fault_counts() {
        let report = |code| report_of(&KvistError::new(code, "x"));
        assert_eq!(Report::ConnectFailure, report(Code::EngineUnavailable));
        for code in [Code::EngineLost, Code::EngineFailed, Code::Internal] {
            assert_eq!(Report::ServerError, report(code));
        }
        let wait = Duration::from_secs(3);
        let busy = KvistError::new(Code::QueueFull, "x").with_retry_after(wait);
        assert_eq!(
            (Report::Overloaded(Some(wait)), Report::Overloaded(None)),
            (report_of(&busy), report(Code::Overloaded))
        );
        for code in [Code::InvalidArgument, Code::UnsupportedField, Code::Cancelled, Code::Draining, Code::SlowClient] {
            assert_eq!(Report::ClientError, report(code));
        }
    }

    #[test]
    fn a_breaker_stays_with_its_target_until_the_engine_is_started_anew() {
        let health = Health::new(Counter::default());
        let target = |name: &str| TargetId { worker: name.into(), rank: kvist_blocks::Rank(0) };
        let fleet =
            |incarnation| HashMap::from([(target("a"), Incarnation(incarnation)), (target("b"), Incarnation(1))]);
        health.follow(fleet(1));
        for _ in 0..9 {
            health.report(&target("a"), Report::ServerError);
        }
        assert_eq!((BreakerState::Open, 1), (health.state(&target("a")), health.openings.get()));
        health.follow(fleet(1));
        assert_eq!(BreakerState::Open, health.state(&target("a")));
        health.follow(fleet(2));
        assert_eq!(BreakerState::Closed, health.state(&target("a")));
    }

    #[test]
    fn a_target_is_blamed_for_silence_only_when_it_was_longer_than_can_be_expected() {
        let seconds = Duration::from_secs;
        assert_eq!(Report::ClientError, report_of_silence(Duration::from_millis(4999), None));
        assert_eq!(Report::TimedOut, report_of_silence(seconds(5), None));
        assert_eq!(Report::ClientError, report_of_silence(seconds(39), Some(seconds(10))));
        assert_eq!(Report::TimedOut, report_of_silence(seconds(40), Some(seconds(10))));
    }
}
