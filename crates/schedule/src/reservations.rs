//! Work that was promised to targets and is not yet finished.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use hashbrown::HashMap;

use crate::TargetId;

/// Names a reservation; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReservationId(pub u64);

/// What one router has promised to one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetPromise {
    /// Reservations.
    pub count: u64,
    /// Their tokens, prompts and answers.
    pub tokens: u64,
    /// Of these, prompt tokens that are not known to be computed.
    pub prefill_tokens: u64,
}

impl TargetPromise {
    fn add(&mut self, work: Work) {
        self.count += 1;
        self.tokens += work.prefill_tokens + work.decode_tokens;
        self.prefill_tokens += work.prefill_tokens;
    }

    fn remove(&mut self, work: Work) {
        self.count -= 1;
        self.tokens -= work.prefill_tokens + work.decode_tokens;
        self.prefill_tokens -= work.prefill_tokens;
    }
}

/// What a request asks of a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens that have to be computed.
    pub prefill_tokens: u64,
    /// Tokens expected to be generated.
    pub decode_tokens: u64,
}

/// What an engine reports as outstanding, for all routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutstandingReport {
    /// Prompt tokens accepted and not yet computed.
    pub tokens: u64,
    /// When the report arrived.
    pub received_at: Duration,
    /// Tokens that the engine will have computed since.
    pub computed_since: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: ReservationId,
    made_at: Duration,
    work: Work,
}

#[derive(Debug, Default)]
struct Book {
    promise: TargetPromise,
    /// In the order they were made. Most end in about that order, so that little is moved when one is taken out.
    open: VecDeque<Entry>,
}

impl Book {
    fn position(&self, id: ReservationId) -> Option<usize> {
        self.open.binary_search_by_key(&id, |entry| entry.id).ok()
    }
}

/// The reservations of one router. Times are durations since any fixed moment, and never go back.
#[derive(Debug, Default)]
pub struct Reservations {
    by_target: HashMap<TargetId, Book>,
    targets: HashMap<ReservationId, TargetId>,
    /// Ends of leases, soonest first.
    expiries: BTreeMap<(Duration, ReservationId), ()>,
    leases: HashMap<ReservationId, Duration>,
    next: u64,
}

impl Reservations {
    /// Promises work to a target.
    pub fn reserve(&mut self, now: Duration, target: TargetId, work: Work) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        let book = self.by_target.entry(target.clone()).or_default();
        book.promise.add(work);
        book.open.push_back(Entry { id, made_at: now, work });
        self.targets.insert(id, target);
        id
    }

    /// Ends a reservation by itself at a time, whoever forgets it. A later call counts; an unknown one is ignored.
    pub fn lease(&mut self, id: ReservationId, expires_at: Duration) {
        if !self.targets.contains_key(&id) {
            return;
        }
        if let Some(before) = self.leases.insert(id, expires_at) {
            self.expiries.remove(&(before, id));
        }
        self.expiries.insert((expires_at, id), ());
    }

    /// Ends what is leased no longer; returns which.
    pub fn expire(&mut self, now: Duration) -> Vec<ReservationId> {
        let mut expired = Vec::new();
        while let Some((&(at, id), ())) = self.expiries.first_key_value() {
            if at > now {
                break;
            }
            self.release(id);
            expired.push(id);
        }
        expired
    }

    /// The prompt has been computed; what is left is the answer. An unknown one is ignored.
    pub fn prefilled(&mut self, id: ReservationId) {
        let Some(book) = self.targets.get(&id).and_then(|target| self.by_target.get_mut(target)) else { return };
        if let Some(entry) = book.position(id).and_then(|position| book.open.get_mut(position)) {
            let computed = std::mem::take(&mut entry.work.prefill_tokens);
            book.promise.tokens -= computed;
            book.promise.prefill_tokens -= computed;
        }
    }

    /// Ends a reservation; false when it had ended before.
    pub fn release(&mut self, id: ReservationId) -> bool {
        let Some(target) = self.targets.remove(&id) else { return false };
        if let Some(expires_at) = self.leases.remove(&id) {
            self.expiries.remove(&(expires_at, id));
        }
        if let Some(book) = self.by_target.get_mut(&target) {
            if let Some(entry) = book.position(id).and_then(|position| book.open.remove(position)) {
                book.promise.remove(entry.work);
            }
            if book.open.is_empty() {
                self.by_target.remove(&target);
            }
        }
        true
    }

    /// What this router has promised to a target.
    #[must_use]
    pub fn of(&self, target: &TargetId) -> TargetPromise {
        self.by_target.get(target).map(|book| book.promise).unwrap_or_default()
    }

    /// What this router has promised to all targets together.
    #[must_use]
    pub fn total(&self) -> TargetPromise {
        self.by_target.values().fold(TargetPromise::default(), |sum, book| TargetPromise {
            count: sum.count + book.promise.count,
            tokens: sum.tokens + book.promise.tokens,
            prefill_tokens: sum.prefill_tokens + book.promise.prefill_tokens,
        })
    }

    /// Prompt tokens that all routers have sent to a target and that are not computed yet.
    ///
    /// The engine's report holds everything that it had accepted, this router's share included, and is right about how
    /// far it has come. Only what this router promised too late to be in the report is added: later than `lag` before the
    /// report arrived, the time that a request and a report are on their way. Nothing is counted twice, and nothing that
    /// was just sent is forgotten.
    ///
    /// Beside it stands what this router has promised; the tokens are none without a report.
    #[must_use]
    pub fn state(
        &self,
        target: &TargetId,
        report: Option<OutstandingReport>,
        lag: Duration,
    ) -> (TargetPromise, Option<u64>) {
        let book = self.by_target.get(target);
        let outstanding = report.map(|report| {
            let known_until = report.received_at.saturating_sub(lag);
            let unreported: u64 = book.map_or(0, |book| {
                let newest_first = book.open.iter().rev();
                let is_unreported = |entry: &&Entry| entry.made_at > known_until;
                newest_first.take_while(is_unreported).map(|entry| entry.work.prefill_tokens).sum()
            });
            unreported + report.tokens.saturating_sub(report.computed_since)
        });
        (book.map(|book| book.promise).unwrap_or_default(), outstanding)
    }

    /// Open reservations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether none is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;
    use proptest::prelude::*;

    use super::*;

    fn target(number: usize) -> TargetId {
        TargetId { worker: format!("w{number}").as_str().into(), rank: Rank(0) }
    }

    #[test]
    fn a_report_replaces_what_it_contains_and_no_more() {
        let ms = Duration::from_millis;
        let outstanding =
            |book: &Reservations, number, report, lag| book.state(&target(number), Some(report), ms(lag)).1.unwrap();
        let mut book = Reservations::default();
        let old = book.reserve(ms(100), target(0), Work { prefill_tokens: 1000, decode_tokens: 9 });
        book.reserve(ms(480), target(0), Work { prefill_tokens: 300, decode_tokens: 9 });
        book.reserve(ms(900), target(0), Work { prefill_tokens: 50, decode_tokens: 9 });
        // 400 of the first are computed, and another router has sent 2,000.
        let report = OutstandingReport { tokens: 2600, received_at: ms(500), computed_since: 0 };
        assert_eq!(2600 + 300 + 50, outstanding(&book, 0, report, 50));
        assert_eq!(2600 + 50, outstanding(&book, 0, report, 10));
        let drained = OutstandingReport { computed_since: 9999, ..report };
        assert_eq!(350, outstanding(&book, 0, drained, 50));
        book.prefilled(old);
        assert_eq!(TargetPromise { count: 3, tokens: 377, prefill_tokens: 350 }, book.of(&target(0)));
        assert_eq!(2600, outstanding(&book, 1, report, 50));
    }

    proptest! {
        // Requests end by their client, by an error, or because nobody came back; in any order, more than once, or never.
        #[test]
        fn promises_are_the_sum_of_open_reservations_and_return_to_zero(
            steps in prop::collection::vec((0u8..6, 0usize..3, 0u64..100), 0..80),
        ) {
            let mut book = Reservations::default();
            let mut open: Vec<(ReservationId, usize, Work, Duration)> = Vec::new();
            let mut ended: Vec<ReservationId> = Vec::new();
            let mut now = Duration::ZERO;
            for (what, number, amount) in steps {
                now += Duration::from_millis(amount);
                match what {
                    0 | 1 => {
                        let work = Work { prefill_tokens: amount, decode_tokens: 7 };
                        let id = book.reserve(now, target(number), work);
                        let expires_at = now + Duration::from_millis(1 + 3 * amount);
                        book.lease(id, now);
                        book.lease(id, expires_at);
                        open.push((id, number, work, expires_at));
                    }
                    2 if !open.is_empty() => {
                        let (id, ..) = open.swap_remove(number % open.len());
                        prop_assert!(book.release(id));
                        ended.push(id);
                    }
                    3 if !open.is_empty() => {
                        let position = number % open.len();
                        book.prefilled(open[position].0);
                        open[position].2.prefill_tokens = 0;
                    }
                    4 => {
                        let mut expected: Vec<ReservationId> =
                            open.iter().filter(|entry| entry.3 <= now).map(|entry| entry.0).collect();
                        let mut expired = book.expire(now);
                        expected.sort();
                        expired.sort();
                        prop_assert_eq!(&expected, &expired);
                        open.retain(|entry| entry.3 > now);
                        ended.extend(expired);
                    }
                    _ => {
                        // What has ended cannot end again, nor come back.
                        for id in &ended {
                            book.prefilled(*id);
                            book.lease(*id, now);
                            prop_assert!(!book.release(*id));
                        }
                    }
                }
                let mut total = TargetPromise::default();
                for number in 0..3 {
                    let mut expected = TargetPromise::default();
                    open.iter().filter(|entry| entry.1 == number).for_each(|entry| expected.add(entry.2));
                    prop_assert_eq!(expected, book.of(&target(number)));
                    total.count += expected.count;
                    total.tokens += expected.tokens;
                    total.prefill_tokens += expected.prefill_tokens;
                }
                prop_assert_eq!(total, book.total());
                prop_assert_eq!(open.len(), book.len());
            }
            for (position, (id, ..)) in open.iter().enumerate() {
                if position % 2 == 0 {
                    prop_assert!(book.release(*id));
                }
            }
            book.expire(now + Duration::from_secs(3600));
            prop_assert!(book.is_empty() && book.by_target.is_empty() && book.leases.is_empty() && book.expiries.is_empty());
            prop_assert_eq!(TargetPromise::default(), book.total());
        }
    }
}
