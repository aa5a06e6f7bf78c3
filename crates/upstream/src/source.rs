//! The bytes of an upstream's answer, within the time limits of a request.

use std::pin::Pin;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use kvist_errors::{Code, KvistError};
use kvist_router::StageTimer;
use tokio::time::{Instant, Sleep};

/// Most bytes of an answer that is not a stream.
const WHOLE_LIMIT_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct Source {
    body: Incoming,
    deadline: Pin<Box<Sleep>>,
    stages: StageTimer,
}

impl Source {
    pub(crate) fn new(body: Incoming, deadline: Instant, stages: StageTimer) -> Self {
        Self { body, deadline: Box::pin(tokio::time::sleep_until(deadline)), stages }
    }

    /// The next piece; none at the end.
    ///
    /// # Errors
    /// The answer broke off, or a time limit passed.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, KvistError> {
        loop {
            let frame = tokio::select! {
                biased;
                frame = self.body.frame() => frame,
                () = &mut self.deadline => return Err(late()),
                error = self.stages.expired() => return Err(error),
            };
            match frame {
                None => return Ok(None),
                Some(Err(_)) => return Err(lost()),
                // Trailers say nothing.
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.stages.saw_tokens();
                        return Ok(Some(bytes));
                    }
                }
            }
        }
    }

    /// All of it.
    ///
    /// # Errors
    /// As for `next`, and when it is too large.
    pub(crate) async fn whole(mut self) -> Result<Bytes, KvistError> {
        let mut whole = Vec::new();
        while let Some(piece) = self.next().await? {
            whole.extend_from_slice(&piece);
            if whole.len() > WHOLE_LIMIT_BYTES {
                return Err(KvistError::new(Code::EngineFailed, "the provider's answer is too large"));
            }
        }
        Ok(whole.into())
    }
}

pub(crate) fn late() -> KvistError {
    KvistError::new(Code::DeadlineExceeded, "the request took too long")
}

pub(crate) fn lost() -> KvistError {
    KvistError::new(Code::EngineLost, "the provider's answer broke off")
}
