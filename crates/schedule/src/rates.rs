//! How fast a target works: what its pool tells, times a clamped factor for each target.

use std::time::Duration;

use hashbrown::HashMap;

use crate::TargetId;

/// How far a target may be from its pool, either way: one wrong report must not exile a target.
const MOST_FACTOR: f64 = 4.0;

/// How fast what was reported once is forgotten, so that a target without traffic gets another chance.
const FACTOR_HALF_LIFE: Duration = Duration::from_secs(60);

/// So long nothing is forgotten, and no power is computed for a decision.
const FRESH_FOR: Duration = Duration::from_secs(1);

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
    /// Natural logarithm of seconds a prompt token: twice as slow and twice as fast are equally far apart.
    log_seconds: f64,
    /// Of the last report.
    at: Duration,
}

/// What workers estimate of their own steps, smoothed.
#[derive(Debug, Default)]
pub struct RateBook {
    prior: Rates,
    known: HashMap<TargetId, Known>,
}

/// A target's own rate, as far as it has told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnRate {
    log_seconds: f64,
    /// What is left of the difference to the pool, 0 to 1.
    freshness: f64,
}

impl RateBook {
    /// A book of pools that work at `prior` as long as nobody says otherwise.
    #[must_use]
    pub fn new(prior: Rates) -> Self {
        Self { prior, known: HashMap::new() }
    }

    /// What a target has told, given its last estimate in prompt tokens a second and when it arrived. One that was taken
    /// before, or is no positive number, changes nothing.
    pub fn observe(&mut self, now: Duration, target: &TargetId, estimate: Option<(Duration, f64)>) -> Option<OwnRate> {
        let sane = estimate.filter(|(_, tokens_per_second)| tokens_per_second.is_finite() && *tokens_per_second > 0.0);
        let known = match (self.known.get_mut(target), sane) {
            (Some(known), Some((at, tokens_per_second))) if at > known.at => {
                let observed = -tokens_per_second.ln();
                known.log_seconds += REPORT_WEIGHT * (observed - known.log_seconds);
                known.at = at;
                *known
            }
            (Some(known), _) => *known,
            (None, Some((at, tokens_per_second))) => {
                let known = Known { log_seconds: -tokens_per_second.ln(), at };
                self.known.insert(target.clone(), known);
                known
            }
            (None, None) => return None,
        };
        let age = now.saturating_sub(known.at);
        let is_new = age < FRESH_FOR;
        let freshness = if is_new { 1.0 } else { 0.5f64.powf(age.as_secs_f64() / FACTOR_HALF_LIFE.as_secs_f64()) };
        Some(OwnRate { log_seconds: known.log_seconds, freshness })
    }

    /// The rates of the targets of one pool, in their order: the middle of what they have told, times a factor for each.
    pub fn rates<'a>(&self, own: &'a [Option<OwnRate>]) -> impl Iterator<Item = Rates> + 'a {
        let prior = self.prior;
        let mut told: Vec<f64> = own.iter().flatten().map(|own| own.log_seconds).collect();
        let middle = (told.len().saturating_sub(1)) / 2;
        let (pool, scale) = if told.is_empty() {
            // Nobody has told anything: the prior is the pool's, and no target has a factor.
            (0.0, 1.0)
        } else {
            let pool = *told.select_nth_unstable_by(middle, f64::total_cmp).1;
            // Who computes prompts more slowly than expected is taken to do everything more slowly.
            (pool, pool.exp() / prior.prefill.seconds_per_token)
        };
        let of_pool = Rates {
            prefill: PrefillRate {
                seconds_per_token: scale * prior.prefill.seconds_per_token,
                seconds_per_token_and_context: scale * prior.prefill.seconds_per_token_and_context,
            },
            step_seconds_per_request: scale * prior.step_seconds_per_request,
            ..prior
        };
        let most = MOST_FACTOR.ln();
        let factor = move |own: OwnRate| match own.log_seconds - pool {
            0.0 => 1.0,
            difference => (difference.clamp(-most, most) * own.freshness).exp(),
        };
        own.iter().map(move |own| Rates { factor: own.map_or(1.0, factor), ..of_pool })
    }

    /// Forgets the targets that are not in use.
    pub fn retain(&mut self, mut is_used: impl FnMut(&TargetId) -> bool) {
        self.known.retain(|target, _| is_used(target));
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;

    use super::*;

    fn target(name: &str) -> TargetId {
        TargetId { worker: name.into(), rank: Rank(0) }
    }

    #[test]
    fn a_prompt_behind_a_context_takes_longer() {
        let rate = PrefillRate { seconds_per_token: 1e-4, seconds_per_token_and_context: 1e-8 };
        // 1000 · 1e-4 + 1000 · 1e-8 · (4000 + 500)
        assert!((0.145 - rate.seconds(1000, 4000)).abs() < 1e-12);
    }

    #[test]
    fn the_pool_is_the_middle_of_what_is_told_and_a_target_is_at_most_four_times_slower() {
        let mut book = RateBook::new(Rates::default());
        let now = Duration::from_secs(10);
        assert!(book.rates(&[None, None]).eq([Rates::default(); 2]));
        let mut rates = |now, estimate: Option<(Duration, [f64; 3])>| {
            let of = |position: usize| estimate.map(|(at, rates)| (at, rates[position]));
            let names = ["a", "b", "c"].iter().enumerate();
            let mut own: Vec<_> = names.map(|(number, name)| book.observe(now, &target(name), of(number))).collect();
            own.push(None);
            book.rates(&own).collect::<Vec<_>>()
        };
        // Ten times slower than expected: so is everything, and who says nothing is like the pool.
        let first = rates(now, Some((now, [1000.0, 900.0, 20.0])));
        let seconds = |rates: &[Rates]| rates.iter().map(|rates| rates.prefill_seconds(900, 0)).collect::<Vec<_>>();
        let close = |expected: &[f64], actual: &[f64]| expected.iter().zip(actual).all(|(e, a)| (e - a).abs() < 1e-9);
        assert!(close(&[0.9, 1.0, 4.0, 1.0], &seconds(&first)), "{first:?}");
        assert!((first[0].step_seconds_per_request - 2e-4 / 0.09).abs() < 1e-9);
        // Without traffic it gets another chance: half of the way in a minute.
        assert!(close(&[0.9f64.sqrt(), 1.0, 2.0, 1.0], &seconds(&rates(now + FACTOR_HALF_LIFE, None))));
        assert!(seconds(&rates(now + 20 * FACTOR_HALF_LIFE, None))[2] < 1.001);
    }

    #[test]
    fn a_report_counts_once_and_nonsense_not_at_all() {
        let mut book = RateBook::new(Rates::default());
        let now = Duration::from_secs(1);
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(None, book.observe(now, &target("a"), Some((now, rate))));
        }
        book.observe(now, &target("a"), Some((now, 5000.0)));
        let later = now + Duration::from_nanos(1);
        for _ in 0..3 {
            // A fifth of the way from the first report to the second, in the logarithm.
            let own = book.observe(later, &target("a"), Some((later, 10_000.0))).unwrap();
            assert!((own.log_seconds + 5000f64.ln() + 0.2 * 2f64.ln()).abs() < 1e-9);
        }
    }
}
