//! Random numbers from one seed, so that a decision is a function of its arguments.

/// SplitMix64: fast, and good enough to spread requests.
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// Draws that depend on the seed alone.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A position below `count`; 0 when there is none.
    pub fn below(&mut self, count: usize) -> usize {
        // The bias of the remainder is below 2^-50 for any number of targets.
        self.number().checked_rem(count as u64).unwrap_or(0) as usize
    }

    /// A number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A position, drawn in proportion to the weights; the last with a weight above 0 when rounding leaves a rest.
    pub fn weighted(&mut self, weights: &[f64]) -> Option<usize> {
        let total: f64 = weights.iter().sum();
        let mut left = self.unit() * total;
        for (position, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return Some(position);
            }
        }
        weights.iter().rposition(|weight| *weight > 0.0)
    }
}

/// The finalizer of SplitMix64: a bijection that spreads every bit.
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
