//! An answer that is passed on as it comes.

use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, stream};
use http::StatusCode;
use kvist_errors::{Code, KvistError};

use crate::{
    metrics::Counted,
    scan::Scan,
    source::{Source, lost},
};

/// An answer of an upstream.
pub enum Relayed {
    /// Server-sent events, whole lines at a time.
    Stream(RelayedBody),
    /// Everything else.
    Whole(Whole),
}

/// The bytes of a stream.
pub type RelayedBody = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

/// An answer that is no stream.
#[derive(Debug)]
pub struct Whole {
    /// As the upstream said it.
    pub status: StatusCode,
    /// JSON, for all that is known.
    pub body: Bytes,
}

struct Relay {
    source: Source,
    scan: Scan,
    counted: Counted,
}

/// Passes events on until the upstream's own end mark. What ends otherwise, or has no finish reason, ends with an error
/// and without an end mark.
pub(crate) fn relayed(source: Source, counted: Counted) -> RelayedBody {
    let relay = Relay { source, scan: Scan::default(), counted };
    Box::pin(stream::unfold(Some(relay), |relay| async move { relay?.step().await }))
}

impl Relay {
    async fn step(mut self) -> Option<(Bytes, Option<Self>)> {
        loop {
            let error = match self.source.next().await {
                Ok(Some(piece)) => match self.scan.take(piece) {
                    Ok(passed) if !self.scan.has_ended && passed.is_empty() => continue,
                    Ok(passed) if !self.scan.has_ended => return Some((passed, Some(self))),
                    Ok(passed) => return Some((self.end(passed), None)),
                    Err(_) => KvistError::new(Code::EngineFailed, "the provider sent a line without an end"),
                },
                Ok(None) => lost(),
                Err(error) => error,
            };
            return self.break_off(&error);
        }
    }

    /// The last bytes of a stream whose end mark has come.
    fn end(&mut self, passed: Bytes) -> Bytes {
        let end = if self.scan.has_error {
            self.counted.ended(Code::EngineFailed.name());
            // Nothing follows an error.
            Vec::new()
        } else if self.scan.has_reason {
            self.counted.ended("finished");
            b"data: [DONE]\n\n".to_vec()
        } else {
            let error = KvistError::new(Code::EngineFailed, "the provider ended the answer without a reason");
            self.counted.ended(error.code.name());
            error_event(&error)
        };
        [&passed[..], &end].concat().into()
    }

    fn break_off(mut self, error: &KvistError) -> Option<(Bytes, Option<Self>)> {
        self.counted.ended(error.code.name());
        // What the upstream has told itself is not told twice.
        (!self.scan.has_error).then(|| (error_event(error).into(), None))
    }
}

/// An event of its own, whatever line stood before it.
fn error_event(error: &KvistError) -> Vec<u8> {
    [b"\ndata: ", &error.to_openai_json()[..], b"\n\n"].concat()
}
