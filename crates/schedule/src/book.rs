//! What decisions read and write: reservations, rates, and what scorers remember. One router has one book, behind one
//! lock, so that a choice and its reservation are one step.

use std::time::Duration;

use crate::{
    Candidate, Decision, Draws, Load, Memory, OutstandingReport, PairDecision, Pipeline, RateBook, Rates, Request,
    ReservationId, Reservations, Round, Saturation, TargetId, Work, decide_pair,
};

/// The time in which a request reaches its engine and the engine's report of it comes back, generously: work that was
/// promised later is taken to be missing in a report.
const REPORT_LAG: Duration = Duration::from_millis(100);

/// A report that is older says nothing of the present.
const REPORT_VALID_FOR: Duration = Duration::from_secs(5);

/// Tokens that a request of unknown length is expected to generate.
const EXPECTED_OUTPUT_TOKENS: u64 = 128;

/// Most tokens that a request is expected to generate, whatever it asks for: most answers end long before their limit.
const MOST_EXPECTED_OUTPUT_TOKENS: u64 = 256;

/// Tokens that a request is expected to generate.
#[must_use]
pub fn expected_output_tokens(most: Option<u32>) -> u64 {
    most.map_or(EXPECTED_OUTPUT_TOKENS, u64::from).min(MOST_EXPECTED_OUTPUT_TOKENS)
}

/// What an engine last said of itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineReport {
    /// When it arrived.
    pub received_at: Duration,
    /// Requests and KV pool.
    pub load: Load,
    /// Prompt tokens accepted and not yet computed, of all routers.
    pub outstanding_prefill_tokens: u64,
    /// Its own estimate; none before there is one.
    pub prefill_tokens_per_second: Option<f64>,
}

/// The book of one router. Times are durations since any fixed moment, and never go back.
#[derive(Debug, Default)]
pub struct Book {
    /// What was promised.
    pub reservations: Reservations,
    /// How fast targets are.
    pub rates: RateBook,
    memory: Memory,
}

impl Book {
    /// An empty book of targets that work at `prior` as far as they do not say otherwise.
    #[must_use]
    pub fn new(prior: Rates) -> Self {
        Self { rates: RateBook::new(prior), ..Self::default() }
    }

    /// States in the candidates of one pool what is known of their loads and rates at this moment, given the last report of
    /// each. A report that is too old does not count.
    pub fn describe(&mut self, now: Duration, candidates: &mut [Candidate], reports: &[Option<EngineReport>]) {
        let is_valid = |report: &&EngineReport| now.saturating_sub(report.received_at) < REPORT_VALID_FOR;
        let valid = |position: usize| reports.get(position).and_then(Option::as_ref).filter(is_valid);
        let mut own = Vec::with_capacity(candidates.len());
        for (position, candidate) in candidates.iter().enumerate() {
            let estimate =
                valid(position).and_then(|report| Some((report.received_at, report.prefill_tokens_per_second?)));
            own.push(self.rates.observe(now, &candidate.target, estimate));
        }
        let rates = self.rates.rates(&own);
        for (position, (candidate, rates)) in candidates.iter_mut().zip(rates).enumerate() {
            let report = valid(position);
            candidate.rates = rates;
            candidate.load = report.map(|report| report.load);
            let outstanding = report.map(|report| OutstandingReport {
                tokens: report.outstanding_prefill_tokens,
                received_at: report.received_at,
                computed_since: rates.tokens_in(now.saturating_sub(report.received_at)),
            });
            (candidate.promise, candidate.outstanding_tokens) =
                self.reservations.state(&candidate.target, outstanding, REPORT_LAG);
        }
    }

    /// How full a target is at this moment, given its last report.
    #[must_use]
    pub fn saturation(
        &self,
        now: Duration,
        target: &TargetId,
        report: Option<&EngineReport>,
        most_running: Option<u64>,
    ) -> Saturation {
        let report = report.filter(|report| now.saturating_sub(report.received_at) < REPORT_VALID_FOR);
        Saturation::new(report.map(|report| report.load), self.reservations.of(target).count, most_running)
    }

    /// Chooses a target, and with `reserve` promises it the work.
    pub fn decide(
        &mut self,
        now: Duration,
        pipeline: &Pipeline,
        request: &Request,
        candidates: &[Candidate],
        draws: &mut Draws,
        reserve: bool,
    ) -> (Decision, Option<ReservationId>) {
        let decision = pipeline.decide(request, candidates, &self.memory, draws);
        let chosen = decision.chosen.and_then(|chosen| candidates.get(chosen)).filter(|_| reserve);
        let reservation = chosen.map(|chosen| {
            pipeline.picked(request, candidates, &decision, &mut self.memory);
            let work =
                Work { prefill_tokens: chosen.uncached_tokens(request), decode_tokens: request.expected_output_tokens };
            self.reservations.reserve(now, chosen.target.clone(), work)
        });
        (decision, reservation)
    }

    /// Chooses a prefill target and a decode target behind it, and with `reserve` promises each its part of the work: both
    /// or neither.
    #[expect(clippy::too_many_arguments, reason = "the same as of one target, and a second list")]
    pub fn decide_pair(
        &mut self,
        now: Duration,
        pipeline: &Pipeline,
        request: &Request,
        prefill: &[Candidate],
        decode: &[Candidate],
        draws: &mut Draws,
        reserve: bool,
    ) -> (PairDecision, Option<(ReservationId, ReservationId)>) {
        let pair = decide_pair(pipeline, request, prefill, decode, &self.memory, draws);
        let decoder = pair.decode.as_ref().and_then(|decision| Some((decision, decode.get(decision.chosen?)?)));
        let prefiller = pair.prefill.chosen.and_then(|chosen| prefill.get(chosen));
        let (Some(prefiller), Some((decision, decoder)), true) = (prefiller, decoder, reserve) else {
            return (pair, None);
        };
        let of = |round| Request { round, ..request.clone() };
        pipeline.picked(&of(Round::Prefill), prefill, &pair.prefill, &mut self.memory);
        pipeline.picked(&of(Round::Decode), decode, decision, &mut self.memory);
        let of_prompt = Work { prefill_tokens: prefiller.uncached_tokens(request), decode_tokens: 0 };
        let of_answer = Work { prefill_tokens: 0, decode_tokens: request.expected_output_tokens };
        let first = self.reservations.reserve(now, prefiller.target.clone(), of_prompt);
        let second = self.reservations.reserve(now, decoder.target.clone(), of_answer);
        (pair, Some((first, second)))
    }
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;

    use super::*;

    #[test]
    fn a_report_counts_for_five_seconds_and_what_it_lacks_is_added() {
        let target = TargetId { worker: "w".into(), rank: Rank(0) };
        let seconds = Duration::from_secs_f64;
        let mut book = Book::default();
        book.reservations.reserve(seconds(9.95), target.clone(), Work { prefill_tokens: 700, decode_tokens: 1 });
        let report = EngineReport {
            received_at: seconds(10.0),
            load: Load { running: 3, ..Load::default() },
            outstanding_prefill_tokens: 2000,
            prefill_tokens_per_second: None,
        };
        let mut list = [Candidate::new(target)];
        // 1,000 of the reported are computed in 0.1 s.
        book.describe(seconds(10.1), &mut list, &[Some(report)]);
        assert_eq!((Some(1700), 3), (list[0].outstanding_tokens, list[0].active_requests()));
        book.describe(seconds(15.0), &mut list, &[Some(report)]);
        let candidate = &list[0];
        assert_eq!((None, None, 1), (candidate.load, candidate.outstanding_tokens, candidate.active_requests()));
    }
}
