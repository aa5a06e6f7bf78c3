//! What a worker says of the load of a server's ranks. Pure.
//!
//! The server states what runs and waits, of all who ask it, each time its metrics are read; what this worker has sent
//! and not seen the end of is known exactly. The larger one is said.

use std::{collections::HashMap, time::Duration};

use kvist_proto::events::v1::{LoadReport, Receipt};

use crate::metrics::RankGauges;

/// A new observation counts this much.
const WEIGHT: f64 = 0.2;
/// Rates of shorter prefills say more about fixed costs than about tokens.
const LEAST_PREFILL_TOKENS: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct Progress {
    prompt_tokens: u32,
    expected_cached_tokens: u32,
    generated_tokens: u32,
}

/// Totals and estimates of one rank.
#[derive(Debug, Default)]
pub(crate) struct RankLoad {
    rank: u32,
    total_blocks: u64,
    gauges: RankGauges,
    requests: HashMap<u64, Progress>,
    finished_requests: u64,
    generated_tokens: u64,
    prefill_tokens_per_second: Option<f64>,
    decode_step_seconds: Option<f64>,
}

impl RankLoad {
    pub(crate) fn new(rank: u32, total_blocks: u64) -> Self {
        Self { rank, total_blocks, ..Self::default() }
    }

    /// The server's metrics were read.
    pub(crate) fn read(&mut self, gauges: RankGauges) {
        self.gauges = gauges;
    }

    /// A request is sent.
    pub(crate) fn begin(&mut self, number: u64, prompt_tokens: u32, expected_cached_tokens: u32) {
        self.requests.insert(number, Progress { prompt_tokens, expected_cached_tokens, generated_tokens: 0 });
    }

    /// Tokens of it came; true for the first ones.
    pub(crate) fn generated(&mut self, number: u64, tokens: u32) -> bool {
        self.generated_tokens += u64::from(tokens);
        let Some(progress) = self.requests.get_mut(&number) else { return false };
        let is_first = progress.generated_tokens == 0 && tokens > 0;
        progress.generated_tokens += tokens;
        is_first
    }

    /// It has ended; what it took goes into the estimates. The time to the first token includes waiting, so that the
    /// rate is what a request gets of the server and not what the server could do.
    pub(crate) fn end(&mut self, number: u64, receipt: Option<&Receipt>) {
        if self.requests.remove(&number).is_none() {
            return;
        }
        self.finished_requests += 1;
        let Some(receipt) = receipt else { return };
        let seconds = |duration: Option<prost_types::Duration>| {
            Duration::try_from(duration?).ok().map(|one| one.as_secs_f64()).filter(|one| *one > 0.0)
        };
        let computed = receipt.prompt_tokens.saturating_sub(receipt.cached_tokens);
        if computed >= LEAST_PREFILL_TOKENS
            && let Some(seconds) = seconds(receipt.prefill_duration)
        {
            blend(&mut self.prefill_tokens_per_second, f64::from(computed) / seconds);
        }
        let steps = receipt.completion_tokens.saturating_sub(1);
        if steps > 0
            && let Some(seconds) = seconds(receipt.decode_duration)
        {
            blend(&mut self.decode_step_seconds, seconds / f64::from(steps));
        }
    }

    /// The report; the worker numbers it.
    pub(crate) fn report(&self) -> LoadReport {
        let (mut decoding, mut waiting, mut outstanding, mut active) = (0, 0, 0, 0);
        for one in self.requests.values() {
            if one.generated_tokens > 0 {
                decoding += 1;
                active += u64::from(one.prompt_tokens) + u64::from(one.generated_tokens);
            } else {
                waiting += 1;
                outstanding += u64::from(one.prompt_tokens.saturating_sub(one.expected_cached_tokens));
            }
        }
        let running = self.gauges.running_requests.max(decoding);
        let at_least: u32 = decoding + waiting;
        LoadReport {
            rank: self.rank,
            running_requests: running,
            waiting_requests: self.gauges.waiting_requests.max(at_least.saturating_sub(running)),
            outstanding_prefill_tokens: outstanding,
            active_tokens: active,
            used_blocks: (self.gauges.cache_usage_ratio.clamp(0.0, 1.0) * self.total_blocks as f64).round() as u64,
            total_blocks: self.total_blocks,
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode_step_duration: self
                .decode_step_seconds
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()?.try_into().ok()),
            finished_requests_total: self.finished_requests,
            preemptions_total: self.gauges.preemptions_total,
            drafts_total: self.gauges.drafts_total,
            draft_tokens_total: self.gauges.draft_tokens_total,
            accepted_draft_tokens_total: self.gauges.accepted_draft_tokens_total,
            generated_tokens_total: self.gauges.generated_tokens_total.max(self.generated_tokens),
            ..LoadReport::default()
        }
    }
}

fn blend(known: &mut Option<f64>, new: f64) {
    *known = Some(known.map_or(new, |old| old + WEIGHT * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(load: &RankLoad) -> (u32, u32, u64, u64) {
        let report = load.report();
        (report.running_requests, report.waiting_requests, report.outstanding_prefill_tokens, report.active_tokens)
    }

    #[test]
    fn own_requests_count_at_once_and_those_of_others_when_they_are_read() {
        let mut load = RankLoad::new(1, 100);
        load.begin(1, 40, 32);
        load.begin(2, 10, 0);
        assert_eq!((0, 2, 18, 0), counts(&load));
        assert!(load.generated(1, 1));
        assert!(!load.generated(1, 2));
        assert_eq!((1, 1, 10, 43), counts(&load));
        load.read(RankGauges {
            running_requests: 5,
            waiting_requests: 3,
            cache_usage_ratio: 0.5,
            ..RankGauges::default()
        });
        assert_eq!((5, 3, 10, 43), counts(&load));
        assert_eq!((50, 100, 1), (load.report().used_blocks, load.report().total_blocks, load.report().rank));
    }

    #[test]
    fn rates_come_from_receipts() {
        let mut load = RankLoad::new(0, 0);
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        load.begin(1, 116, 0);
        let receipt = Receipt {
            prompt_tokens: 116,
            cached_tokens: 16,
            completion_tokens: 5,
            prefill_duration: seconds(2),
            decode_duration: seconds(8),
            ..Receipt::default()
        };
        load.end(1, Some(&receipt));
        load.end(1, Some(&receipt));
        let report = load.report();
        assert_eq!((Some(50.0), 1), (report.prefill_tokens_per_second, report.finished_requests_total));
        assert_eq!(seconds(2), report.decode_step_duration);
    }
}
