//! What came of a run.

use serde::Serialize;

/// Nearest-rank percentiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half are at most this.
    pub p50: f64,
    /// 95 of 100 are at most this.
    pub p95: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
}

impl Percentiles {
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.max(1) - 1).copied().unwrap_or(0.0)
        };
        Self { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// One policy on one trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeshReport {
    /// Name of the policy.
    pub policy: String,
    /// Requests of the trace.
    pub requests: usize,
    /// Requests without a whole answer.
    pub failed: usize,
    /// Block references served by a cache, as a share of all.
    pub hit_rate: f64,
    /// The same for one cache without bounds.
    pub ideal_hit_rate: f64,
    /// Prompt tokens that routers expected in the chosen caches.
    pub predicted_hit_tokens: u64,
    /// Prompt tokens that engines found there.
    pub delivered_hit_tokens: u64,
    /// From arrival to the first token.
    pub time_to_first_token_seconds: Percentiles,
    /// From arrival to the last token.
    pub end_to_end_seconds: Percentiles,
    /// Between predicted and actual time to the first token; 0 for other scorers than `cost`.
    pub prediction_error_seconds: Percentiles,
    /// The most uncomputed prompt that any worker ever had, in seconds of its work.
    pub worst_backlog_seconds: f64,
    /// The same in intervals of equal length from the beginning of the trace to its last arrival; for a plot.
    #[serde(skip)]
    pub backlog_seconds_over_time: Vec<f64>,
    /// Length of such an interval, seconds.
    #[serde(skip)]
    pub backlog_interval_seconds: f64,
    /// Tokens computed by the busiest worker, in parts of the mean.
    pub imbalance: f64,
    /// Prompt tokens computed.
    pub computed_tokens_by_worker: Vec<u64>,
    /// Reservations that nobody released; 0 unless something is wrong.
    pub open_reservations: usize,
    /// Event batches lost on their way.
    pub lost_batches: u64,
    /// Times that missing batches were fetched.
    pub catch_ups: u64,
    /// Times that a worker refused because more waited there than the router knew of.
    pub refusals: u64,
    /// Pairs of block and holder that each router's index claims at the end.
    pub claimed_blocks_by_router: Vec<u64>,
    /// Blocks that the ledgers hold at the end.
    pub ledger_blocks: u64,
}

/// Reports side by side, as text.
#[must_use]
pub fn table(reports: &[MeshReport]) -> String {
    let header = [
        "policy",
        "hit rate",
        "ideal",
        "TTFT p50",
        "p95",
        "p99",
        "E2E p50",
        "p95",
        "p99",
        "backlog",
        "imbalance",
        "failed",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    for report in reports {
        let (first, whole) = (&report.time_to_first_token_seconds, &report.end_to_end_seconds);
        let seconds = |value: f64| format!("{value:.3}");
        rows.push([
            report.policy.clone(),
            seconds(report.hit_rate),
            seconds(report.ideal_hit_rate),
            seconds(first.p50),
            seconds(first.p95),
            seconds(first.p99),
            seconds(whole.p50),
            seconds(whole.p95),
            seconds(whole.p99),
            format!("{:.1}", report.worst_backlog_seconds),
            format!("{:.2}", report.imbalance),
            report.failed.to_string(),
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let cell = if column == 0 { format!("{cell}{pad}") } else { format!("  {pad}{cell}") };
            text.push_str(&cell);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}
