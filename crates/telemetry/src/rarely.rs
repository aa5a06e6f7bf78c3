//! For log lines about what may happen a thousand times a second.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lets one through in an interval, and counts the others.
#[derive(Debug)]
pub struct Rarely {
    interval: Duration,
    state: Mutex<(Option<Instant>, u64)>,
}

impl Rarely {
    /// At most one in an interval.
    #[must_use]
    pub fn every(interval: Duration) -> Self {
        Self { interval, state: Mutex::new((None, 0)) }
    }

    /// How many there were since the last one that was let through, this one included; none when it is too early.
    pub fn due(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let (last, withheld) = &mut *state;
        *withheld += 1;
        if last.is_some_and(|last| last.elapsed() < self.interval) {
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(withheld))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_is_let_through_and_says_how_many_there_were() {
        let rarely = Rarely::every(Duration::from_secs(3_600));
        assert_eq!([Some(1), None, None], [rarely.due(), rarely.due(), rarely.due()]);
        let always = Rarely::every(Duration::ZERO);
        assert_eq!([Some(1), Some(1)], [always.due(), always.due()]);
    }
}
