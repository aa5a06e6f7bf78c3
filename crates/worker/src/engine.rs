//! What an engine must be able to do.

use bytes::Bytes;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{AbortReason, Capabilities, EmbedRequest, EngineRequest, KvLayout, TokenizerHeader};

use crate::{EmbedSink, EngineHost, RequestSink, makes_no_embeddings};

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

impl TokenizerFile {
    /// BLAKE3 of the file, lower-case hex.
    #[must_use]
    pub fn digest(&self) -> String {
        blake3::hash(&self.json).to_hex().to_string()
    }

    /// BLAKE3 of the chat template, lower-case hex; empty when there is none.
    #[must_use]
    pub fn template_digest(&self) -> String {
        if self.chat_template.is_empty() {
            return String::new();
        }
        blake3::hash(self.chat_template.as_bytes()).to_hex().to_string()
    }

    pub(crate) fn header(&self, digest: String) -> TokenizerHeader {
        TokenizerHeader {
            digest,
            size_bytes: self.json.len() as u64,
            chat_template: self.chat_template.clone(),
            bos_token: self.bos_token.clone(),
            eos_token: self.eos_token.clone(),
            add_bos: self.add_bos,
            eos_token_ids: self.eos_token_ids.clone(),
        }
    }
}

/// What an engine is.
#[derive(Clone, Debug, Default)]
pub struct EngineDescription {
    /// Adapter: `attached`, `llamacpp`, `sim`, `vllm`.
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
    /// KV blocks of each rank; 0 when unknown.
    pub kv_blocks: u64,
    /// Tokens a block.
    pub block_size_tokens: u32,
    /// Data-parallel ranks; 0 means one.
    pub ranks: u32,
    /// How the engine itself names its blocks; empty when it does not say.
    pub hash_algorithm: String,
    /// A request can use whatever blocks its rank holds. Not so where a request that runs keeps what is in its slot to
    /// itself: such an engine states by itself, in its receipts, what the ledger claimed for the slot it chose.
    pub claims_hold_for_all: bool,
    /// It makes several choices of one request by itself. To another engine the worker gives one request for each.
    pub makes_choices: bool,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Its tokenizer.
    pub tokenizer: Option<TokenizerFile>,
    /// How its KV lies and by which connector it is handed over; none for an engine that hands nothing over.
    pub kv_layout: Option<KvLayout>,
}

/// What an engine without adapters says of them.
#[must_use]
pub fn takes_no_adapters() -> KvistError {
    KvistError::new(Code::NotImplemented, "this engine does not support adapters")
}

/// One engine. Only `start` and `close` may take time; they are called off the async threads.
pub trait Engine: Send + Sync + 'static {
    /// What it is; asked once, before `start`. May load the model.
    ///
    /// # Errors
    /// It cannot run.
    fn description(&self) -> Result<EngineDescription, KvistError>;

    /// Gives the engine its ledger and its place to report load. It takes requests once this returns. Called inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// It cannot run.
    fn start(&self, host: EngineHost) -> Result<(), KvistError>;

    /// Takes a request whose prompt is token ids, at least one. Never blocks. The sink gets exactly one terminal event;
    /// dropping it fails the request.
    fn submit(&self, request: EngineRequest, sink: RequestSink);

    /// Ends a request within a step. Never blocks; its sink still gets a terminal event. An unknown id is ignored.
    fn abort(&self, request_id: &str, reason: AbortReason);

    /// Makes embeddings of inputs that have at least one token each. Never blocks. Asked only of an engine whose
    /// capabilities say that it was started for them; such an engine gets no other requests.
    fn embed(&self, _request: EmbedRequest, sink: EmbedSink) {
        sink.failed(makes_no_embeddings().before_start());
    }

    /// Frees blocks that are kept for another engine under a lease, or would be kept of a request that still runs. Never
    /// blocks. An unknown lease is ignored; engines whose leases end by themselves ignore all.
    fn release_lease(&self, _lease_id: &str) {}

    /// Empties the prefix cache; returns how many blocks that were.
    ///
    /// # Errors
    /// It cannot, or not now.
    fn reset_cache(&self) -> Result<u64, KvistError>;

    /// Loads a LoRA adapter, for requests that name it from then on. Idempotent. May take time.
    ///
    /// # Errors
    /// It cannot, or takes no adapters.
    fn load_adapter(&self, _name: &str, _path: &str) -> Result<(), KvistError> {
        Err(takes_no_adapters())
    }

    /// Unloads a LoRA adapter; an unknown name is ignored. May take time.
    ///
    /// # Errors
    /// It cannot, or takes no adapters.
    fn unload_adapter(&self, _name: &str) -> Result<(), KvistError> {
        Err(takes_no_adapters())
    }

    /// Ends everything.
    fn close(&self);
}
