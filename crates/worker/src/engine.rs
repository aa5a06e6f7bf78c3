//! What an engine must be able to do.

use bytes::Bytes;
use kvist_errors::{Code, KvistError};
use kvist_link::StreamSink;
use kvist_proto::engine::v1::{
    AbortReason, Capabilities, EngineRequest, Finished, GenerateResponse, TokenDelta, generate_response::Event,
};
use tokio::sync::mpsc;
use tonic::Status;

use crate::EngineHost;

/// The tokenizer as the engine uses it.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFile {
    /// `tokenizer.json`.
    pub json: Bytes,
    /// Jinja chat template; empty when there is none.
    pub chat_template: String,
    /// Text of the token that begins a sequence; empty when none.
    pub bos_token: String,
    /// Text of the token that ends a sequence; empty when none.
    pub eos_token: String,
    /// Whether plain prompts get the beginning token in front.
    pub add_bos: bool,
    /// Ids of tokens that end generation.
    pub eos_token_ids: Vec<u32>,
}

/// What an engine is.
#[derive(Clone, Debug, Default)]
pub struct EngineDescription {
    /// Adapter: `llamacpp`, `sim`.
    pub engine: String,
    /// Version of the engine.
    pub version: String,
    /// Prompt and completion together.
    pub context_tokens: u32,
    /// Requests that run at once.
    pub max_running_requests: u32,
    /// Requests that may wait.
    pub max_waiting_requests: u32,
    /// Most alternatives in log-probabilities.
    pub max_top_logprobs: u32,
    /// KV blocks of each rank.
    pub kv_blocks: u64,
    /// Tokens a block.
    pub block_size_tokens: u32,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Its tokenizer.
    pub tokenizer: Option<TokenizerFile>,
}

/// One engine of one rank. All calls return at once; work happens on the engine's own threads.
pub trait Engine: Send + Sync + 'static {
    /// What it is; asked once, before `start`.
    fn description(&self) -> EngineDescription;

    /// Gives the engine its ledger and its place to report load.
    ///
    /// # Errors
    /// It cannot run.
    fn start(&self, host: EngineHost) -> Result<(), KvistError>;

    /// Takes a request whose prompt is token ids. The sink gets exactly one terminal event.
    fn submit(&self, request: EngineRequest, sink: RequestSink);

    /// Ends a request within a step. Its sink still gets a terminal event.
    fn abort(&self, request_id: &str, reason: AbortReason);

    /// Empties the prefix cache; returns how many blocks that were.
    ///
    /// # Errors
    /// It cannot.
    fn reset_cache(&self) -> Result<u64, KvistError>;

    /// Ends everything.
    fn close(&self);
}

enum Target {
    Link(StreamSink),
    Call(mpsc::UnboundedSender<Result<GenerateResponse, Status>>),
}

/// Where the events of one request go. Dropped without an end, it says that the engine failed.
pub struct RequestSink {
    target: Target,
    ended: bool,
    on_end: Option<Box<dyn FnOnce() + Send>>,
}

impl RequestSink {
    pub(crate) fn link(sink: StreamSink, on_end: Box<dyn FnOnce() + Send>) -> Self {
        Self { target: Target::Link(sink), ended: false, on_end: Some(on_end) }
    }

    pub(crate) fn call(
        sender: mpsc::UnboundedSender<Result<GenerateResponse, Status>>,
        on_end: Box<dyn FnOnce() + Send>,
    ) -> Self {
        Self { target: Target::Call(sender), ended: false, on_end: Some(on_end) }
    }

    /// New tokens. False when nobody listens any more.
    pub fn delta(&self, delta: TokenDelta) -> bool {
        match &self.target {
            Target::Link(sink) => {
                sink.delta(delta);
                true
            }
            Target::Call(sender) => sender.send(Ok(GenerateResponse { event: Some(Event::Delta(delta)) })).is_ok(),
        }
    }

    /// The engine ended the request.
    pub fn finished(mut self, finished: Finished) {
        self.end();
        match &self.target {
            Target::Link(sink) => sink.finished(finished),
            Target::Call(sender) => {
                let _ = sender.send(Ok(GenerateResponse { event: Some(Event::Finished(finished)) }));
            }
        }
    }

    /// The request failed.
    pub fn failed(mut self, error: &KvistError) {
        self.fail(error);
    }

    fn fail(&mut self, error: &KvistError) {
        self.end();
        match &self.target {
            Target::Link(sink) => sink.failed(error),
            Target::Call(sender) => {
                let _ = sender.send(Err(error.clone().into()));
            }
        }
    }

    fn end(&mut self) {
        self.ended = true;
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
    }
}

impl Drop for RequestSink {
    fn drop(&mut self) {
        if !self.ended {
            self.fail(&KvistError::new(Code::EngineFailed, "the engine gave the request up"));
        }
    }
}
