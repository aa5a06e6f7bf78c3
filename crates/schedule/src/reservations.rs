//! Work that was promised to targets and is not yet finished.

use hashbrown::HashMap;

use crate::TargetId;

/// Names a reservation; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReservationId(pub u64);

/// What one router has promised to one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetPromise {
    /// Reservations.
    pub count: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// The reservations of one router.
///
/// What other routers have promised arrives as the engine's own report of outstanding tokens, which also contains what
/// this router has sent and the engine has not yet computed. [`Reservations::promised_tokens`] takes the larger of both
/// and so counts nothing twice.
#[derive(Debug, Default)]
pub struct Reservations {
    open: HashMap<ReservationId, (TargetId, u64)>,
    by_target: HashMap<TargetId, TargetPromise>,
    next: u64,
}

impl Reservations {
    /// Promises tokens to a target.
    pub fn reserve(&mut self, target: TargetId, tokens: u64) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        let promise = self.by_target.entry(target.clone()).or_default();
        promise.count += 1;
        promise.tokens += tokens;
        self.open.insert(id, (target, tokens));
        id
    }

    /// Lowers the tokens of a reservation, as when its prompt has been computed.
    pub fn reduce(&mut self, id: ReservationId, tokens: u64) {
        let Some((target, reserved)) = self.open.get_mut(&id) else { return };
        let less = reserved.saturating_sub(tokens);
        *reserved -= less;
        if let Some(promise) = self.by_target.get_mut(target) {
            promise.tokens -= less;
        }
    }

    /// Ends a reservation; false when it had ended before.
    pub fn release(&mut self, id: ReservationId) -> bool {
        let Some((target, tokens)) = self.open.remove(&id) else { return false };
        if let Some(promise) = self.by_target.get_mut(&target) {
            promise.count -= 1;
            promise.tokens -= tokens;
            if promise.count == 0 {
                self.by_target.remove(&target);
            }
        }
        true
    }

    /// What this router has promised to a target.
    #[must_use]
    pub fn of(&self, target: &TargetId) -> TargetPromise {
        self.by_target.get(target).copied().unwrap_or_default()
    }

    /// What this router has promised to all targets together.
    #[must_use]
    pub fn total(&self) -> TargetPromise {
        self.by_target.values().fold(TargetPromise::default(), |sum, promise| TargetPromise {
            count: sum.count + promise.count,
            tokens: sum.tokens + promise.tokens,
        })
    }

    /// Tokens that all routers have promised to a target, given what its engine reports as outstanding.
    #[must_use]
    pub fn promised_tokens(&self, target: &TargetId, reported_outstanding: Option<u64>) -> u64 {
        self.of(target).tokens.max(reported_outstanding.unwrap_or(0))
    }

    /// Open reservations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether none is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn promises_are_the_sum_of_open_reservations(steps in prop::collection::vec((0u8..4, 0usize..3, 0u64..100), 0..60)) {
            let mut reservations = Reservations::default();
            let mut open: Vec<(ReservationId, usize, u64)> = Vec::new();
            let target = |number: usize| TargetId { worker: format!("w{number}").as_str().into(), rank: Rank(0) };
            for (what, number, tokens) in steps {
                match what {
                    0 | 1 => open.push((reservations.reserve(target(number), tokens), number, tokens)),
                    2 if !open.is_empty() => {
                        let (id, ..) = open.swap_remove(number % open.len());
                        prop_assert!(reservations.release(id));
                        prop_assert!(!reservations.release(id));
                    }
                    _ if !open.is_empty() => {
                        let position = number % open.len();
                        let (id, _, left) = &mut open[position];
                        reservations.reduce(*id, tokens);
                        *left = (*left).min(tokens);
                    }
                    _ => {}
                }
                for number in 0..3 {
                    let of: Vec<u64> = open.iter().filter(|entry| entry.1 == number).map(|entry| entry.2).collect();
                    let expected = TargetPromise { count: of.len() as u64, tokens: of.iter().sum() };
                    prop_assert_eq!(expected, reservations.of(&target(number)));
                }
                prop_assert_eq!(open.len(), reservations.len());
                let total = TargetPromise { count: open.len() as u64, tokens: open.iter().map(|entry| entry.2).sum() };
                prop_assert_eq!(total, reservations.total());
                let own = reservations.of(&target(0)).tokens;
                prop_assert_eq!(own.max(77), reservations.promised_tokens(&target(0), Some(77)));
                prop_assert_eq!(own, reservations.promised_tokens(&target(0), None));
            }
        }
    }
}
