//! Numbers of starts.

use std::time::{SystemTime, UNIX_EPOCH};

/// An incarnation above a floor and, on a clock that does not step back, above all earlier ones of any slot.
#[must_use]
pub fn new_incarnation(floor: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX).max(floor.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_is_above_its_floor() {
        assert!(new_incarnation(0) > 1_700_000_000_000_000);
        assert_eq!(u64::MAX, new_incarnation(u64::MAX - 1));
    }
}
