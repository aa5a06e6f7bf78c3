//! Time limits of a request's stages: to the first token, and from token to token.

use std::{pin::Pin, time::Duration};

use kvist_errors::{Code, KvistError};
use tokio::time::{Instant, Sleep};

/// How long each stage may take; none for no limit but the request's deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageLimits {
    /// From the placement to the first token.
    pub first_token: Option<Duration>,
    /// From a token to the next one.
    pub token: Option<Duration>,
}

/// Watches the stages of one request. Its timer is set anew only when it fires, so that a flowing stream pays for a look
/// at the clock and nothing more.
#[derive(Debug)]
pub struct StageTimer {
    limits: StageLimits,
    has_token: bool,
    /// When the present stage began.
    since: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

impl StageTimer {
    /// A timer whose first stage begins now.
    #[must_use]
    pub fn new(limits: StageLimits) -> Self {
        Self { limits, has_token: false, since: Instant::now(), timer: None }
    }

    /// The request was placed, for the first time or again.
    pub(crate) fn placed(&mut self) {
        self.since = Instant::now();
    }

    /// Tokens came.
    pub fn saw_tokens(&mut self) {
        self.has_token = true;
        self.since = Instant::now();
    }

    /// Returns when the present stage has taken too long; never where it may take as long as it likes. May be dropped
    /// and called again.
    pub async fn expired(&mut self) -> KvistError {
        loop {
            let limit = if self.has_token { self.limits.token } else { self.limits.first_token };
            let Some(limit) = limit else { return std::future::pending().await };
            let due = self.since + limit;
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            // A timer that was set for an earlier stage fires early, or late after a change to a shorter limit.
            if timer.deadline() > due || timer.is_elapsed() {
                timer.as_mut().reset(due);
            }
            timer.as_mut().await;
            if self.since + limit <= Instant::now() {
                return self.error();
            }
        }
    }

    fn error(&self) -> KvistError {
        if self.has_token {
            KvistError::new(Code::TokenTimeout, "the engine had begun to answer and sent nothing more in time")
        } else {
            KvistError::new(Code::FirstTokenTimeout, "the engine did not send a token in time")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StageLimits =
        StageLimits { first_token: Some(Duration::from_secs(10)), token: Some(Duration::from_secs(2)) };

    #[tokio::test(start_paused = true)]
    async fn each_stage_has_a_limit_and_a_code_of_its_own() {
        let mut timer = StageTimer::new(LIMITS);
        let began = Instant::now();
        assert_eq!(Code::FirstTokenTimeout, timer.expired().await.code);
        assert_eq!(Duration::from_secs(10), began.elapsed());
        timer.saw_tokens();
        let token = Instant::now();
        assert_eq!(Code::TokenTimeout, timer.expired().await.code);
        assert_eq!(Duration::from_secs(2), token.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_that_keep_coming_keep_it_quiet() {
        let mut timer = StageTimer::new(LIMITS);
        for _ in 0..50 {
            let waited = tokio::time::timeout(Duration::from_millis(1900), timer.expired()).await;
            assert!(waited.is_err(), "{waited:?}");
            timer.saw_tokens();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_limits_it_never_ends() {
        let mut timer = StageTimer::new(StageLimits::default());
        assert!(tokio::time::timeout(Duration::from_secs(1_000_000), timer.expired()).await.is_err());
    }
}
