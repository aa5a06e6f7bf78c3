//! The simulated engine started for embeddings: inputs are computed one after the other, in virtual time.

use std::{sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{EmbedRequest, EmbedResponse, Embedding},
    events::v1::LoadReport,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{EmbedSink, EngineHost};

/// The steps of a linear congruential generator, by which the components of a token's vector follow from each other.
const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// What embeds.
#[derive(Debug)]
pub(super) struct Embedder {
    dimensions: u32,
    tokens_per_second: f64,
    most_calls: usize,
    account: Mutex<Account>,
}

#[derive(Debug)]
struct Account {
    /// When what has been accepted will have been computed.
    busy_until: Instant,
    calls: usize,
    load: LoadReport,
}

impl Embedder {
    pub(super) fn new(dimensions: u32, tokens_per_second: f64, most_calls: usize) -> Arc<Self> {
        let account = Account { busy_until: Instant::now(), calls: 0, load: LoadReport::default() };
        Arc::new(Self { dimensions, tokens_per_second, most_calls, account: Mutex::new(account) })
    }

    /// Answers when the time that the inputs take has passed. Called within a runtime.
    pub(super) fn embed(self: &Arc<Self>, host: EngineHost, request: EmbedRequest, sink: EmbedSink) {
        let tokens: u64 = request.inputs.iter().map(|input| input.ids.len() as u64).sum();
        let done_at = {
            let mut account = self.account.lock();
            if account.calls >= self.most_calls {
                let error = KvistError::new(Code::QueueFull, "too many requests are waiting");
                return sink.failed(error.with_retry_after(Duration::from_secs(1)).before_start());
            }
            account.calls += 1;
            account.busy_until = account.busy_until.max(Instant::now()) + self.time_of(tokens);
            account.load.outstanding_prefill_tokens += tokens;
            Self::report(&mut account, &host);
            account.busy_until
        };
        let embedder = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep_until(done_at).await;
            {
                let mut account = embedder.account.lock();
                account.calls -= 1;
                account.load.outstanding_prefill_tokens -= tokens;
                account.load.finished_requests_total += 1;
                Self::report(&mut account, &host);
            }
            let embed = |ids: &[u32]| Embedding {
                values: vector(ids, embedder.dimensions),
                prompt_tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX),
            };
            let embeddings = request.inputs.iter().map(|input| embed(&input.ids)).collect();
            sink.finished(EmbedResponse { embeddings });
        });
    }

    fn time_of(&self, tokens: u64) -> Duration {
        if self.tokens_per_second <= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(tokens as f64 / self.tokens_per_second).unwrap_or_default()
    }

    fn report(account: &mut Account, host: &EngineHost) {
        let calls = u32::try_from(account.calls).unwrap_or(u32::MAX);
        account.load.running_requests = calls.min(1);
        account.load.waiting_requests = calls.saturating_sub(1);
        // Under the lock, so that reports keep their order.
        host.report_load(account.load);
    }
}

/// A vector of length 1 in which inputs that share tokens are near each other: the sum of one vector for each token.
fn vector(ids: &[u32], dimensions: u32) -> Vec<f32> {
    let mut values = vec![0.0_f64; dimensions as usize];
    for id in ids {
        let mut state = u64::from(*id).wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
        for value in &mut values {
            state = state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
            *value += (state >> 33) as f64 / f64::from(1_u32 << 30) - 1.0;
        }
    }
    let length = values.iter().map(|value| value * value).sum::<f64>().sqrt();
    let scale = if length > 0.0 { length.recip() } else { 0.0 };
    #[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
    values.into_iter().map(|value| (value * scale) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn likeness(left: &[f32], right: &[f32]) -> f32 {
        left.iter().zip(right).map(|(left, right)| left * right).sum()
    }

    #[test]
    fn what_shares_tokens_is_near() {
        let [one, same, near, far] =
            [&[1, 2, 3, 4][..], &[1, 2, 3, 4], &[1, 2, 3, 9], &[21, 22, 23]].map(|ids| vector(ids, 64));
        assert_eq!(one, same);
        assert!((likeness(&one, &one) - 1.0).abs() < 1e-5);
        assert!(likeness(&one, &near) > 0.5 && likeness(&one, &far) < 0.5);
    }
}
