//! How good a candidate is.

use std::cmp::Ordering;

use kvist_blocks::Tier;

/// Compared part by part; the first that differs decides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// More is better. `cost` states its seconds here, negative.
    pub preference: f64,
    /// Leading prompt tokens in the cache; more is better.
    pub matched_tokens: u64,
    /// Device 4, host 3, disk 2, external 1; 0 for none.
    pub tier: u8,
    /// In the worker's own machine 2, elsewhere 1; 0 for none.
    pub locality: u8,
    /// Requests; fewer are better.
    pub load: u64,
}

impl Score {
    /// A score that is one number.
    #[must_use]
    pub fn of(preference: f64) -> Self {
        Self { preference, ..Self::default() }
    }

    /// Better is greater.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Ordering {
        // A zero is a zero, whatever its sign.
        (self.preference + 0.0).total_cmp(&(other.preference + 0.0)).then_with(|| self.compare_rest(other))
    }

    fn compare_rest(&self, other: &Self) -> Ordering {
        (self.matched_tokens, self.tier, self.locality, other.load).cmp(&(
            other.matched_tokens,
            other.tier,
            other.locality,
            self.load,
        ))
    }

    /// Whether it is as good as the best, but for at most `epsilon` of preference.
    #[must_use]
    pub fn is_within(&self, epsilon: f64, best: &Self) -> bool {
        let is_close = self.preference == best.preference || best.preference - self.preference <= epsilon;
        is_close && self.compare_rest(best) == Ordering::Equal
    }
}

/// Rank of a tier among the tiers, more is better.
pub(crate) fn tier_rank(tier: Tier) -> u8 {
    4 - tier.position() as u8
}

/// 2 in the worker's own machine, 1 elsewhere.
pub(crate) fn locality(tier: Tier) -> u8 {
    if tier == Tier::External { 1 } else { 2 }
}
