//! What a Python engine is given: its ledger, its place to report load, and a sink for each request.

#![expect(clippy::too_many_arguments, reason = "keywords in Python; the functions that PyO3 makes are meant")]

use kvist_blocks::BlockHash;
use kvist_errors::KvistError;
use kvist_ledger::EngineHash;
use kvist_proto::{
    engine::v1::{Finished, TokenDelta},
    events::v1::LoadReport,
};
use kvist_worker::{EngineHost, RequestSink};
use prost::Message as _;
use pyo3::prelude::*;

use crate::failure::{error_of, raise, raise_invalid};

/// The ledgers and the load of a worker. All methods may be called from any thread.
#[pyclass(frozen, name = "EngineHost", module = "kvist._core")]
pub(crate) struct Host {
    inner: EngineHost,
}

impl Host {
    pub(crate) fn new(inner: EngineHost) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl Host {
    /// Tokens a block.
    #[getter]
    fn block_size_tokens(&self) -> usize {
        self.inner.block_size_tokens()
    }

    /// Blocks are in the cache from here on, each the parent of the next.
    #[pyo3(signature = (rank, engine_hashes, parent, tokens, adapter="", cache_salt=""))]
    fn stored(
        &self,
        py: Python<'_>,
        rank: u32,
        engine_hashes: Vec<u64>,
        parent: Option<u64>,
        tokens: Vec<u32>,
        adapter: &str,
        cache_salt: &str,
    ) {
        py.detach(|| {
            let root = self.inner.root(adapter, cache_salt);
            self.inner.stored(rank, hashes(engine_hashes), parent.map(EngineHash), tokens, root);
        });
    }

    /// One copy of each of these blocks has left the cache. Said before their memory is used for something else.
    fn removed(&self, py: Python<'_>, rank: u32, engine_hashes: Vec<u64>) {
        py.detach(|| self.inner.removed(rank, hashes(engine_hashes)));
    }

    /// The cache of a rank is empty.
    fn cleared(&self, py: Python<'_>, rank: u32) {
        py.detach(|| self.inner.cleared(rank));
    }

    /// Feeds a rank's ledger from the sockets on which the engine publishes its KV events, as vLLM does. Settings:
    /// `endpoint`, `replay_endpoint`, `engine_rank`, `hash_algorithm`, `python_hash_seed`. Only within `start`.
    fn follow_vllm(&self, py: Python<'_>, rank: u32, settings_json: &str) -> PyResult<()> {
        py.detach(|| self.inner.follow_vllm(rank, settings_json)).map_err(|error| raise(&error))
    }

    /// The engine is about to empty its cache and will say so late; returns how many blocks were claimed.
    fn clear_ordered(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.inner.clear_ordered())
    }

    /// Nothing is known of what the engine holds.
    fn cache_unknown(&self, py: Python<'_>) {
        py.detach(|| self.inner.cache_unknown());
    }

    /// Block hashes of a prompt, as the ledger names them.
    #[pyo3(signature = (tokens, adapter="", cache_salt=""))]
    fn block_hashes(&self, py: Python<'_>, tokens: Vec<u32>, adapter: &str, cache_salt: &str) -> Vec<u64> {
        py.detach(|| {
            let root = self.inner.root(adapter, cache_salt);
            let hashes = kvist_blocks::block_hashes(root, &tokens, self.inner.block_size_tokens());
            hashes.into_iter().map(|hash| hash.0).collect()
        })
    }

    /// Leading blocks of a prompt that the ledger claims.
    fn claimed_blocks(&self, py: Python<'_>, rank: u32, block_hashes: Vec<u64>) -> usize {
        py.detach(|| {
            let prompt: Vec<BlockHash> = block_hashes.into_iter().map(BlockHash).collect();
            self.inner.claimed_blocks(rank, &prompt)
        })
    }

    /// Replaces the load report of its rank: an encoded `kvist.events.v1.LoadReport`, numbered by the worker.
    fn report_load(&self, py: Python<'_>, report: &[u8]) -> PyResult<()> {
        let report = LoadReport::decode(report).map_err(|error| raise_invalid("report", error))?;
        py.detach(|| self.inner.report_load(report));
        Ok(())
    }

    /// The engine is broken: nothing new is taken and what runs fails. The reason is for the log.
    fn failed(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.inner.engine_failed(reason));
    }
}

/// Where the events of one request go. Dropped before its end, the request fails.
#[pyclass(frozen, name = "RequestSink", module = "kvist._core")]
pub(crate) struct Sink {
    inner: RequestSink,
}

impl Sink {
    pub(crate) fn new(inner: RequestSink) -> Self {
        Self { inner }
    }

    pub(crate) fn fail(&self, error: &KvistError) {
        self.inner.failed(error);
    }
}

#[pymethods]
impl Sink {
    /// Id of the request.
    #[getter]
    fn request_id(&self) -> &str {
        self.inner.request_id()
    }

    /// New tokens of a choice. `logprobs` is an encoded `TokenDelta` whose log-probabilities are taken; `cached_tokens`
    /// goes with the first tokens.
    #[pyo3(signature = (token_ids, logprobs=None, cached_tokens=None, choice=0))]
    fn tokens(
        &self,
        py: Python<'_>,
        token_ids: Vec<u32>,
        logprobs: Option<&[u8]>,
        cached_tokens: Option<u32>,
        choice: u32,
    ) -> PyResult<()> {
        let logprobs = match logprobs {
            Some(encoded) => TokenDelta::decode(encoded).map_err(|error| raise_invalid("logprobs", error))?.logprobs,
            None => Vec::new(),
        };
        py.detach(|| self.inner.delta(TokenDelta { index: choice, token_ids, logprobs, cached_tokens }));
        Ok(())
    }

    /// The engine ended the request: an encoded `kvist.engine.v1.Finished`. `prompt_logprobs` is an encoded `TokenDelta`
    /// whose log-probabilities are those of the prompt.
    #[pyo3(signature = (finished, prompt_logprobs=None))]
    fn finished(&self, py: Python<'_>, finished: &[u8], prompt_logprobs: Option<&[u8]>) -> PyResult<()> {
        let finished = Finished::decode(finished).map_err(|error| raise_invalid("finished", error))?;
        let prompt = TokenDelta::decode(prompt_logprobs.unwrap_or_default())
            .map_err(|error| raise_invalid("prompt_logprobs", error))?
            .logprobs;
        py.detach(|| self.inner.finished_with_prompt_logprobs(finished, prompt));
        Ok(())
    }

    /// The request failed, with a code of the catalogue and a public text.
    #[pyo3(signature = (code, message, not_started=false, retry_after_ms=None, fields=Vec::new()))]
    fn failed(
        &self,
        py: Python<'_>,
        code: &str,
        message: &str,
        not_started: bool,
        retry_after_ms: Option<u64>,
        fields: Vec<(String, String)>,
    ) -> PyResult<()> {
        let error = error_of(code, message, not_started, retry_after_ms, fields)?;
        py.detach(|| self.inner.failed(&error));
        Ok(())
    }

    /// Whether somebody has asked for its end.
    fn is_aborted(&self) -> bool {
        self.inner.is_aborted()
    }
}

fn hashes(engine_hashes: Vec<u64>) -> Vec<EngineHash> {
    engine_hashes.into_iter().map(EngineHash).collect()
}
