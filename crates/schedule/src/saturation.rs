//! How full a target is.

use crate::{Candidate, Load};

/// Saturation above which a target counts as full when nobody says otherwise.
pub const SATURATION_THRESHOLD: f64 = 0.85;

/// Requests at which an unmeasured target counts as full.
const UNMEASURED_MOST: u64 = 4;

/// Requests at a target, and how many run there at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saturation {
    active: u64,
    most: Option<u64>,
}

impl Saturation {
    /// Of a target that this router has `in_flight` requests at. One without a report or a known size counts as if it
    /// ran four at once.
    #[must_use]
    pub fn new(load: Option<Load>, in_flight: u64, most_running: Option<u64>) -> Self {
        match (load, most_running) {
            (Some(load), Some(most)) if most > 0 => {
                Self { active: (load.running + load.waiting).max(in_flight), most: Some(most) }
            }
            _ => Self { active: in_flight, most: Some(UNMEASURED_MOST) },
        }
    }

    /// Of a target that belongs to somebody else, who takes care of it: never full.
    #[must_use]
    pub fn of_foreign() -> Self {
        Self { active: 0, most: None }
    }

    /// Requests there over requests that run at once; 1 when as many are there as run.
    #[must_use]
    pub fn share(self) -> f64 {
        self.most.map_or(0.0, |most| self.active as f64 / most as f64)
    }

    /// Whether it is too full.
    #[must_use]
    pub fn is_above(self, threshold: f64) -> bool {
        self.share() > threshold
    }

    /// Requests that it takes before it is too full.
    #[must_use]
    pub fn room(self, threshold: f64) -> u64 {
        let Some(most) = self.most else { return u64::MAX };
        if self.is_above(threshold) {
            return 0;
        }
        // One more request passes as long as those that are there do not exceed the threshold.
        let still_passes = (threshold * most as f64).floor();
        (still_passes as u64).saturating_sub(self.active).saturating_add(1)
    }
}

impl Candidate {
    /// How full it is.
    #[must_use]
    pub fn saturation(&self) -> Saturation {
        if self.is_foreign {
            return Saturation::of_foreign();
        }
        Saturation::new(self.load, self.promise.count, self.most_running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(running: u64, waiting: u64, in_flight: u64, most: u64) -> Saturation {
        Saturation::new(Some(Load { running, waiting, ..Load::default() }), in_flight, Some(most))
    }

    #[test]
    fn room_is_what_passes_one_after_the_other_until_the_target_is_too_full() {
        for (most, threshold) in [(1, 0.85), (2, 0.85), (64, 0.85), (10, 1.0), (10, 0.05), (20, 0.85)] {
            for active in 0..=most {
                let mut passed = 0;
                while !reported(active + passed, 0, 0, most).is_above(threshold) {
                    passed += 1;
                }
                assert_eq!(passed, reported(active, 0, 0, most).room(threshold), "{active} of {most} by {threshold}");
            }
        }
    }

    // L-04: what is not measured counts a quarter for each request in flight. L-44: what is foreign never counts.
    #[test]
    fn what_is_not_measured_is_full_at_four_and_what_is_foreign_never() {
        let saturation = |in_flight| Saturation::new(None, in_flight, Some(64));
        assert_eq!([0.0, 0.75, 1.0], [0, 3, 4].map(|in_flight| saturation(in_flight).share()));
        assert_eq!([4, 1, 0], [0, 3, 4].map(|in_flight| saturation(in_flight).room(SATURATION_THRESHOLD)));
        assert_eq!((0.0, u64::MAX), (Saturation::of_foreign().share(), Saturation::of_foreign().room(0.0)));
        assert_eq!(0.75, reported(4, 2, 5, 8).share());
        assert_eq!(1.0, reported(4, 2, 8, 8).share());
    }
}
