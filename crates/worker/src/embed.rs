//! Embeddings: one answer for a list of inputs, beside the streams of requests that generate.

use std::sync::Arc;

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{EmbedRequest, EmbedResponse};
use tokio::sync::oneshot;

use crate::worker::Worker;

/// Where the embeddings of one call go. Dropped before its end, the call fails.
#[derive(Debug)]
pub struct EmbedSink {
    answer: oneshot::Sender<Result<EmbedResponse, KvistError>>,
}

impl EmbedSink {
    /// The embeddings, in order of the inputs.
    pub fn finished(self, response: EmbedResponse) {
        let _ = self.answer.send(Ok(response));
    }

    /// The call failed.
    pub fn failed(self, error: KvistError) {
        let _ = self.answer.send(Err(error));
    }

    /// Whether nobody waits for it any more.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

/// Counts a call among what runs, for as long as somebody waits for it.
struct Counted<'a>(&'a Worker);

impl<'a> Counted<'a> {
    fn new(worker: &'a Worker) -> Self {
        worker.count_running(1);
        Self(worker)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.count_running(-1);
    }
}

/// What an engine that was not started for embeddings says.
#[must_use]
pub fn makes_no_embeddings() -> KvistError {
    KvistError::new(Code::NotImplemented, "this engine was not started for embeddings")
}

impl Worker {
    /// Checks a call and waits for the engine's answer. Dropping the future tells the engine that nobody waits.
    pub(crate) async fn embed(self: &Arc<Self>, request: EmbedRequest) -> Result<EmbedResponse, KvistError> {
        let result = self.ask_for_embeddings(request).await;
        self.metrics.request_ended(result.as_ref().map_or_else(|error| error.code.name(), |_| "embedded"));
        result
    }

    async fn ask_for_embeddings(&self, request: EmbedRequest) -> Result<EmbedResponse, KvistError> {
        self.check_embed(&request)?;
        let inputs = request.inputs.len();
        let _counted = Counted::new(self);
        let (answer, answered) = oneshot::channel();
        let mut failure = self.watch_failure();
        self.engine.embed(request, EmbedSink { answer });
        let response = tokio::select! {
            biased;
            answered = answered => {
                answered.map_err(|_| KvistError::new(Code::EngineFailed, "the engine dropped the call"))??
            }
            _ = failure.wait_for(|has_failed| *has_failed) => {
                return Err(KvistError::new(Code::EngineFailed, "the engine has failed"));
            }
        };
        if response.embeddings.len() != inputs {
            let message = format!("the engine made {} embeddings of {inputs} inputs", response.embeddings.len());
            return Err(KvistError::new(Code::EngineFailed, message));
        }
        Ok(response)
    }

    fn check_embed(&self, request: &EmbedRequest) -> Result<(), KvistError> {
        self.check_takes_requests().map_err(KvistError::before_start)?;
        let description = &self.up()?.description;
        if !description.capabilities.unwrap_or_default().embeddings {
            return Err(makes_no_embeddings().before_start());
        }
        let invalid = |field: String, why| Err(KvistError::field(Code::InvalidArgument, field, why).before_start());
        if request.rank >= description.ranks.max(1) {
            return invalid("rank".to_owned(), "the engine has no such rank");
        }
        if request.inputs.is_empty() {
            return invalid("inputs".to_owned(), "must have at least one input");
        }
        let context = description.limits.as_ref().map_or(0, |limits| limits.context_tokens);
        for (position, input) in request.inputs.iter().enumerate() {
            let tokens = input.ids.len();
            if tokens == 0 {
                return invalid(format!("inputs[{position}]"), "must have at least one token");
            }
            if context > 0 && tokens > context as usize {
                let message = format!("inputs[{position}] has {tokens} tokens and the context {context}");
                return Err(KvistError::new(Code::ContextLengthExceeded, message).before_start());
            }
        }
        Ok(())
    }
}
