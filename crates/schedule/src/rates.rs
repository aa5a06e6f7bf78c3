//! How fast a target works: the pool's prior times a clamped factor for each target.

use std::time::Duration;

use hashbrown::HashMap;

use crate::TargetId;

/// How far a target may be from its pool, either way: one wrong report must not exile a target.
const MOST_FACTOR: f64 = 4.0;

/// How fast what was reported once is forgotten, so that a target without traffic gets another chance.
const FACTOR_HALF_LIFE: Duration = Duration::from_secs(60);

/// How long a computed factor is used.
const FACTOR_VALID_FOR: Duration = Duration::from_secs(1);

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
    /// Of the last report.
    at: Duration,
    /// The factor as of the last second.
    factor: f64,
    factor_at: Duration,
}

impl Known {
    fn log_factor(&self, now: Duration) -> f64 {
        let age = now.saturating_sub(self.at).as_secs_f64();
        self.log_factor * 0.5f64.powf(age / FACTOR_HALF_LIFE.as_secs_f64())
    }

    /// Powers are not computed anew for each decision: in a second a factor hardly changes by itself.
    fn factor(&mut self, now: Duration) -> f64 {
        if now.saturating_sub(self.factor_at) >= FACTOR_VALID_FOR {
            self.factor = self.log_factor(now).exp();
            self.factor_at = now;
        }
        self.factor
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

    /// How fast a target works, as far as is known, given the worker's last estimate in prompt tokens a second and when
    /// it arrived. One that was taken before, or is no positive number, changes nothing.
    pub fn observe(&mut self, now: Duration, target: &TargetId, estimate: Option<(Duration, f64)>) -> Rates {
        let known = self.factors.get_mut(target);
        let observed = estimate.and_then(|(at, tokens_per_second)| {
            if known.as_ref().is_some_and(|known| known.at >= at) {
                return None;
            }
            let factor = 1.0 / (tokens_per_second * self.prior.prefill.seconds_per_token);
            let is_sane = factor.is_finite() && factor > 0.0;
            is_sane.then(|| (at, factor.clamp(1.0 / MOST_FACTOR, MOST_FACTOR).ln()))
        });
        let factor = match (known, observed) {
            (Some(known), Some((at, observed))) => {
                let before = known.log_factor(at);
                let log_factor = before + REPORT_WEIGHT * (observed - before);
                *known = Known { log_factor, at, factor: log_factor.exp(), factor_at: at };
                known.factor(now)
            }
            (Some(known), None) => known.factor(now),
            (None, Some((at, log_factor))) => {
                let mut known = Known { log_factor, at, factor: log_factor.exp(), factor_at: at };
                let factor = known.factor(now);
                self.factors.insert(target.clone(), known);
                factor
            }
            (None, None) => 1.0,
        };
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
        let mut now = Duration::from_secs(10);
        for _ in 0..50 {
            now += Duration::from_millis(1);
            book.observe(now, &target(), Some((now, 10.0)));
        }
        let mut factor = |now| book.observe(now, &target(), None).factor;
        assert!((4.0 - factor(now)).abs() < 1e-3);
        assert!((2.0 - factor(now + FACTOR_HALF_LIFE)).abs() < 1e-3);
        assert!(factor(now + 20 * FACTOR_HALF_LIFE) < 1.001);
    }

    #[test]
    fn a_report_counts_once_and_nonsense_not_at_all() {
        let mut book = RateBook::new(Rates::default());
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let now = Duration::from_secs(1);
            assert_eq!(Rates::default(), book.observe(now, &target(), Some((now, rate))));
        }
        let now = Duration::from_secs(2);
        // The first report is taken as it is, and a fifth of the way to the second, in the logarithm.
        assert!((2.0 - book.observe(now, &target(), Some((now, 5000.0))).factor).abs() < 1e-9);
        let later = now + Duration::from_nanos(1);
        for _ in 0..3 {
            let factor = book.observe(later, &target(), Some((later, 10_000.0))).factor;
            assert!((2f64.powf(0.8) - factor).abs() < 1e-6, "{factor}");
        }
    }
}
