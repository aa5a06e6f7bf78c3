//! How fast a target works: the pool's prior times a clamped factor for each target.

use std::time::Duration;

use hashbrown::HashMap;

use crate::TargetId;

/// How far a target may be from its pool, either way: one wrong report must not exile a target.
const MOST_FACTOR: f64 = 4.0;

/// How fast what was reported once is forgotten, so that a target without traffic gets another chance.
const FACTOR_HALF_LIFE: Duration = Duration::from_secs(60);

/// Weight of a new report.
const REPORT_WEIGHT: f64 = 0.2;

/// Seconds to compute a prompt: `a·tokens + b·tokens·context`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillRate {
    /// a: seconds a token.
    pub seconds_per_token: f64,
    /// b: seconds a token and token of context before it, for attention.
    pub seconds_per_token_and_context: f64,
}

impl PrefillRate {
    /// Seconds to compute `tokens` that follow `context` others.
    #[must_use]
    pub fn seconds(&self, tokens: u64, context: u64) -> f64 {
        // On average half of the new tokens are before a new token.
        let mean_context = context as f64 + tokens as f64 / 2.0;
        tokens as f64 * (self.seconds_per_token + self.seconds_per_token_and_context * mean_context)
    }
}

/// How fast a target works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// The pool's.
    pub prefill: PrefillRate,
    /// How many times the pool's time this target needs.
    pub factor: f64,
    /// Seconds that one more running request adds to each decoding step.
    pub step_seconds_per_request: f64,
    /// Seconds to bring one token's KV to the device, by tier; 0 for the device.
    pub transfer_seconds_per_token: [f64; 4],
}

impl Default for Rates {
    /// A mid-sized model on one accelerator: 10,000 tokens a second; 128 KiB a token over 25, 5 and 1 GB/s.
    fn default() -> Self {
        Self {
            prefill: PrefillRate { seconds_per_token: 1e-4, seconds_per_token_and_context: 0.0 },
            factor: 1.0,
            step_seconds_per_request: 2e-4,
            transfer_seconds_per_token: [0.0, 5e-6, 2.6e-5, 1.3e-4],
        }
    }
}

impl Rates {
    /// Seconds that this target needs to compute `tokens` that follow `context` others.
    #[must_use]
    pub fn prefill_seconds(&self, tokens: u64, context: u64) -> f64 {
        self.factor * self.prefill.seconds(tokens, context)
    }

    /// Prompt tokens that this target computes in a time, context left aside.
    #[must_use]
    pub fn tokens_in(&self, time: Duration) -> u64 {
        let seconds_per_token = self.factor * self.prefill.seconds_per_token;
        if seconds_per_token > 0.0 { (time.as_secs_f64() / seconds_per_token) as u64 } else { u64::MAX }
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// Natural logarithm of the factor: twice as slow and twice as fast are equally far from the pool.
    log_factor: f64,
    at: Duration,
}

impl Known {
    fn at(self, now: Duration) -> f64 {
        let age = now.saturating_sub(self.at).as_secs_f64();
        self.log_factor * 0.5f64.powf(age / FACTOR_HALF_LIFE.as_secs_f64())
    }
}

/// The factors of the targets of one pool, from what workers estimate of their own steps.
#[derive(Debug, Default)]
pub struct RateBook {
    prior: Rates,
    factors: HashMap<TargetId, Known>,
}

impl RateBook {
    /// A book of a pool that works at `prior`.
    #[must_use]
    pub fn new(prior: Rates) -> Self {
        Self { prior, factors: HashMap::new() }
    }

    /// Takes a worker's own estimate, in prompt tokens a second. One that is no positive number is ignored.
    pub fn report(&mut self, now: Duration, target: &TargetId, tokens_per_second: f64) {
        let factor = 1.0 / (tokens_per_second * self.prior.prefill.seconds_per_token);
        if !(factor.is_finite() && factor > 0.0) {
            return;
        }
        let observed = factor.clamp(1.0 / MOST_FACTOR, MOST_FACTOR).ln();
        let before = self.factors.get(target).map_or(observed, |known| known.at(now));
        let log_factor = before + REPORT_WEIGHT * (observed - before);
        self.factors.insert(target.clone(), Known { log_factor, at: now });
    }

    /// How fast a target works, as far as is known.
    #[must_use]
    pub fn of(&self, now: Duration, target: &TargetId) -> Rates {
        let factor = self.factors.get(target).map_or(1.0, |known| known.at(now).exp());
        Rates { factor, ..self.prior }
    }

    /// Forgets the targets that are not in use.
    pub fn retain(&mut self, mut is_used: impl FnMut(&TargetId) -> bool) {
        self.factors.retain(|target, _| is_used(target));
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;

    use super::*;

    fn target() -> TargetId {
        TargetId { worker: "w".into(), rank: Rank(0) }
    }

    #[test]
    fn a_prompt_behind_a_context_takes_longer() {
        let rate = PrefillRate { seconds_per_token: 1e-4, seconds_per_token_and_context: 1e-8 };
        // 1000 · 1e-4 + 1000 · 1e-8 · (4000 + 500)
        assert!((0.145 - rate.seconds(1000, 4000)).abs() < 1e-12);
    }

    #[test]
    fn a_target_is_at_most_four_times_slower_and_recovers_without_traffic() {
        let mut book = RateBook::new(Rates::default());
        let now = Duration::from_secs(10);
        for _ in 0..50 {
            book.report(now, &target(), 10.0);
        }
        assert!((4.0 - book.of(now, &target()).factor).abs() < 1e-9);
        let after_a_half_life = book.of(now + FACTOR_HALF_LIFE, &target()).factor;
        assert!((2.0 - after_a_half_life).abs() < 1e-9);
        assert!(book.of(now + 20 * FACTOR_HALF_LIFE, &target()).factor < 1.001);
    }

    #[test]
    fn nonsense_changes_nothing() {
        let mut book = RateBook::new(Rates::default());
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            book.report(Duration::ZERO, &target(), rate);
        }
        assert_eq!(Rates::default(), book.of(Duration::ZERO, &target()));
    }
}
