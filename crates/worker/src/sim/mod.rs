//! The simulated engine behind a worker: virtual time driven by a real clock.

mod embeddings;
mod hand_over;
mod record;
mod steps;
mod tokenizer;
mod transfer;

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use kvist_blocks::{BlockHash, block_hashes, usable_blocks};
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{
        AbortReason, Capabilities, EmbedRequest, EngineRequest, FinishReason, Finished, KvLayout, Role,
        engine_request::Prompt,
    },
    events::v1::LoadReport,
};
use kvist_twin::{SimEngine, SimRequest, SimSettings, SimTransfer};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::{sync::Notify, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use self::{
    embeddings::Embedder,
    hand_over::{Arrival, Asked, Leases},
    record::RequestRecord,
    tokenizer::{FIRST_WORD, WORD_COUNT},
};
pub use self::{tokenizer::sim_tokenizer, transfer::TransferFault};
use crate::{EmbedSink, Engine, EngineDescription, EngineHost, HandOverSettings, RequestSink, WorkerSettings};

/// How the simulated engine is. Names may also be written in camel case, as in manifests.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SimWorkerSettings {
    /// Tokens a block.
    #[serde(alias = "blockSizeTokens")]
    pub block_size_tokens: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Requests that run at once.
    #[serde(alias = "maxRunning")]
    pub max_running: u32,
    /// Requests that may wait.
    #[serde(alias = "maxWaiting")]
    pub max_waiting: u32,
    /// Prompt and completion together.
    #[serde(alias = "contextTokens")]
    pub context_tokens: u32,
    /// Prompt tokens computed in one step at most.
    #[serde(alias = "prefillChunkTokens")]
    pub prefill_chunk_tokens: u32,
    /// Prompt tokens computed a second; 0 means that they cost no time.
    #[serde(alias = "prefillTokensPerSecond")]
    pub prefill_tokens_per_second: f64,
    /// Milliseconds of a step that decodes one request.
    #[serde(alias = "decodeStepMs")]
    pub decode_step_ms: f64,
    /// Milliseconds that each further request adds to it.
    #[serde(alias = "decodeStepPerRequestMs")]
    pub decode_step_per_request_ms: f64,
    /// Texts end by themselves after so many tokens; absent for never.
    #[serde(alias = "stopAfterTokens")]
    pub stop_after_tokens: Option<u32>,
    /// Length of a text whose request sets no budget; longer where it asks to go on after the end.
    #[serde(alias = "textTokens")]
    pub text_tokens: u32,
    /// Whether the engine has a tokenizer and a chat template of its own.
    pub tokenizer: bool,
    /// Length of its embeddings, for an engine that makes these and generates nothing; 0 for one that generates.
    #[serde(alias = "embeddingDimensions")]
    pub embedding_dimensions: u32,
    /// Where it writes down which requests it took and how they ended; nowhere when absent.
    #[serde(alias = "recordFolder")]
    pub record_folder: Option<PathBuf>,
    /// Prompt tokens whose KV arrives in a second from another engine; 0 means that it costs no time.
    #[serde(alias = "transferTokensPerSecond")]
    pub transfer_tokens_per_second: f64,
    /// Milliseconds that a decode engine waits for KV.
    #[serde(alias = "transferTimeoutMs")]
    pub transfer_timeout_ms: u64,
    /// What goes wrong when KV is fetched from this engine.
    #[serde(alias = "transferFault")]
    pub transfer_fault: TransferFault,
    /// Devices over which it says that its KV is divided.
    #[serde(alias = "tensorParallelSize")]
    pub tensor_parallel_size: u32,
}

impl Default for SimWorkerSettings {
    fn default() -> Self {
        Self {
            block_size_tokens: 16,
            blocks: 8192,
            max_running: 64,
            max_waiting: 4096,
            context_tokens: 65_536,
            prefill_chunk_tokens: 2048,
            prefill_tokens_per_second: 20_000.0,
            decode_step_ms: 5.0,
            decode_step_per_request_ms: 0.05,
            stop_after_tokens: None,
            text_tokens: 64,
            tokenizer: true,
            embedding_dimensions: 0,
            record_folder: None,
            transfer_tokens_per_second: 0.0,
            transfer_timeout_ms: 5_000,
            transfer_fault: TransferFault::None,
            tensor_parallel_size: 1,
        }
    }
}

/// The engine `sim`.
pub struct SimWorkerEngine {
    settings: SimWorkerSettings,
    /// None for an engine that neither keeps nor fetches KV.
    hand_over: Option<HandOverSettings>,
    role: Role,
    shared: Arc<Shared>,
    embedder: Arc<Embedder>,
}

impl std::fmt::Debug for SimWorkerEngine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("SimWorkerEngine").field("settings", &self.settings).finish_non_exhaustive()
    }
}

struct Shared {
    started: Instant,
    block_size: usize,
    state: Mutex<State>,
    has_work: Notify,
}

struct State {
    engine: SimEngine,
    jobs: HashMap<u64, Job>,
    by_request: HashMap<String, u64>,
    last_id: u64,
    host: Option<EngineHost>,
    record: Option<RequestRecord>,
    /// As of the last step, and what came in since.
    load: LoadReport,
    is_closed: bool,
    leases: Leases,
    failed_transfers: u64,
    /// Serves decode engines.
    serving: Option<AbortOnDropHandle<()>>,
}

impl State {
    /// Takes a request out that has ended.
    fn remove(&mut self, id: u64) -> Option<Job> {
        let job = self.jobs.remove(&id)?;
        self.by_request.remove(job.sink.request_id());
        Some(job)
    }
}

/// What the engine does not need to know of a request.
struct Job {
    sink: RequestSink,
    /// Blocks that could be found in the cache.
    usable: Vec<BlockHash>,
    claimed_blocks: u32,
    /// Told with the first tokens.
    cached_tokens: Option<u32>,
    stop_token_ids: Vec<u32>,
    min_tokens: u32,
    generated_tokens: u32,
    stopped_by: Option<u32>,
    /// The text ends where its budget does.
    ends_by_itself: bool,
    /// Under which its blocks are kept at its end; none for not at all.
    lease: Option<String>,
    /// It waits for its KV, and the engine does not know it yet.
    arrival: Option<Arrival>,
}

impl State {
    fn note_end(&self, job: &Job, reason: &str) {
        if let Some(record) = &self.record {
            record.ended(job.sink.request_id(), reason, job.generated_tokens);
        }
    }
}

impl SimWorkerEngine {
    /// An idle engine of a worker.
    #[must_use]
    pub fn of(settings: &WorkerSettings) -> Self {
        Self { role: settings.role, hand_over: settings.hand_over.clone(), ..Self::new(settings.sim.clone()) }
    }

    /// An idle engine that computes prompts and answers.
    #[must_use]
    pub fn new(settings: SimWorkerSettings) -> Self {
        let millis = |millis: f64| Duration::try_from_secs_f64(millis / 1000.0).unwrap_or_default();
        let mut engine = SimEngine::new(SimSettings {
            block_size_tokens: settings.block_size_tokens as usize,
            blocks: settings.blocks as usize,
            max_running: settings.max_running as usize,
            prefill_chunk_tokens: settings.prefill_chunk_tokens as usize,
            prefill_tokens_per_second: settings.prefill_tokens_per_second,
            decode_step: millis(settings.decode_step_ms),
            decode_step_per_request: millis(settings.decode_step_per_request_ms),
            first_token: FIRST_WORD,
            token_range: WORD_COUNT,
        });
        if let Some(tokens) = settings.stop_after_tokens {
            engine = engine.stop_after_tokens(tokens);
        }
        let state = State {
            engine,
            jobs: HashMap::new(),
            by_request: HashMap::new(),
            last_id: 0,
            host: None,
            record: None,
            load: LoadReport::default(),
            is_closed: false,
            leases: Leases::default(),
            failed_transfers: 0,
            serving: None,
        };
        let block_size = settings.block_size_tokens as usize;
        let shared = Shared { started: Instant::now(), block_size, state: Mutex::new(state), has_work: Notify::new() };
        let most_calls = (settings.max_running as usize).saturating_add(settings.max_waiting as usize);
        let embedder = Embedder::new(settings.embedding_dimensions, settings.prefill_tokens_per_second, most_calls);
        Self { settings, hand_over: None, role: Role::Aggregate, shared: Arc::new(shared), embedder }
    }

    /// What the mesh asks of the engine for a request.
    fn asked(&self, request: &EngineRequest) -> Result<Option<Asked>, KvistError> {
        let Some(parameters) = &request.kv_transfer else { return Ok(None) };
        let asked = hand_over::read(parameters)?;
        let fits = match (&asked, self.role) {
            (None, _) => true,
            (Some(Asked::Keep(_)), role) => role == Role::Prefill,
            (Some(Asked::Fetch(_)), role) => role == Role::Decode,
        };
        if fits && (asked.is_none() || self.hand_over.is_some()) {
            return Ok(asked);
        }
        let error = KvistError::field(Code::UnsupportedField, "kv_transfer", "this worker has another role");
        Err(error.before_start())
    }

    /// Refuses what the engine cannot do, by name.
    ///
    /// # Errors
    /// `UNSUPPORTED_FIELD`.
    pub fn check(&self, request: &EngineRequest) -> Result<(), KvistError> {
        let sampling = request.sampling.as_ref();
        let unsupported = [
            ("sampling.choices", sampling.is_some_and(|sampling| sampling.choices.unwrap_or(1) > 1)),
            ("sampling.top_logprobs", sampling.is_some_and(|sampling| sampling.top_logprobs.is_some())),
            ("sampling.prompt_logprobs", sampling.is_some_and(|sampling| sampling.prompt_logprobs.is_some())),
            ("structured_output", request.structured_output.as_ref().is_some_and(|output| output.constraint.is_some())),
            ("adapter", !request.adapter.is_empty()),
            ("kv_transfer", request.kv_transfer.is_some() && self.hand_over.is_none()),
            ("kv_hints", request.kv_hints.is_some()),
        ];
        if let Some((field, _)) = unsupported.into_iter().find(|(_, is_set)| *is_set) {
            return Err(KvistError::field(Code::UnsupportedField, field, "the simulated engine does not support it"));
        }
        if let Some(name) = request.engine_extras.as_ref().and_then(|extras| extras.fields.keys().next()) {
            return Err(KvistError::field(Code::UnsupportedField, name, "the simulated engine does not know it"));
        }
        Ok(())
    }
}

impl Engine for SimWorkerEngine {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        Ok(EngineDescription {
            engine: "sim".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            context_tokens: self.settings.context_tokens,
            max_running_requests: self.settings.max_running,
            max_waiting_requests: self.settings.max_waiting,
            kv_blocks: self.settings.blocks.into(),
            block_size_tokens: self.settings.block_size_tokens,
            ranks: 1,
            claims_hold_for_all: true,
            capabilities: Capabilities {
                kv_events: self.settings.embedding_dimensions == 0,
                embeddings: self.settings.embedding_dimensions > 0,
                kv_transfer: self.hand_over.is_some(),
                ..Capabilities::default()
            },
            tokenizer: self.settings.tokenizer.then(sim_tokenizer),
            kv_layout: self.hand_over.as_ref().map(|hand_over| KvLayout {
                connector: hand_over.connector.clone(),
                tensor_parallel_size: self.settings.tensor_parallel_size,
                prefill_context_parallel_size: 1,
                decode_context_parallel_size: 1,
            }),
            ..EngineDescription::default()
        })
    }

    fn start(&self, host: EngineHost) -> Result<(), KvistError> {
        if self.settings.block_size_tokens == 0 || self.settings.max_running == 0 {
            let description = "block_size_tokens and max_running must be above 0";
            return Err(KvistError::field(Code::InvalidArgument, "sim", description));
        }
        let record = match (&self.settings.record_folder, host.ledgers().first()) {
            (Some(folder), Some(ledger)) => Some(RequestRecord::create(folder, ledger.source()).map_err(|error| {
                KvistError::field(Code::InvalidArgument, "sim.record_folder", format!("cannot be written: {error}"))
            })?),
            _ => None,
        };
        let mut state = self.shared.state.lock();
        state.host = Some(host.clone());
        state.record = record;
        drop(state);
        if self.hand_over.is_some() && self.role == Role::Prefill {
            hand_over::listen(&self.shared, &self.settings)?;
        }
        // Ends when the engine is closed; holds nothing but the engine's own state.
        let hand_over = self.hand_over.clone().unwrap_or_default();
        tokio::spawn(steps::run(Arc::clone(&self.shared), host, self.settings.clone(), hand_over));
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let asked = match self.check(&request).and_then(|()| self.asked(&request)) {
            Ok(asked) => asked,
            Err(error) => return sink.failed(&error.before_start()),
        };
        let stop = request.stop.unwrap_or_default();
        let Some(Prompt::Tokens(tokens)) = request.prompt else { return };
        let prompt_tokens = u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
        let room = self.settings.context_tokens.saturating_sub(prompt_tokens).max(1);
        let text_tokens = self.settings.text_tokens.min(room);
        let ends_by_itself = stop.max_tokens.is_none() && !stop.ignore_eos && text_tokens < room;
        let max_tokens = if ends_by_itself { text_tokens } else { stop.max_tokens.unwrap_or(room) }.clamp(1, room);
        let block_size = self.settings.block_size_tokens as usize;
        let mut state = self.shared.state.lock();
        let Some(host) = state.host.clone().filter(|_| !state.is_closed) else { return };
        if state.jobs.len() >= (self.settings.max_running as usize).saturating_add(self.settings.max_waiting as usize) {
            let error = KvistError::new(Code::QueueFull, "too many requests are waiting");
            return sink.failed(&error.with_retry_after(Duration::from_secs(1)).before_start());
        }
        let root = host.root(&request.adapter, &request.cache_salt);
        let mut usable = block_hashes(root, &tokens.ids, block_size);
        usable.truncate(usable_blocks(tokens.ids.len(), block_size));
        let cached_tokens = host.claimed_blocks(request.rank, &usable) * block_size;
        if let Some(record) = &state.record {
            record.accepted(&request.request_id);
        }
        state.last_id += 1;
        let id = state.last_id;
        let sim_request = SimRequest { id, prompt: tokens.ids, max_tokens, root };
        let mut uncomputed_tokens = u64::from(prompt_tokens).saturating_sub(cached_tokens as u64);
        let (mut lease, mut arrival) = (None, None);
        match (asked, &self.hand_over) {
            (Some(Asked::Fetch(origin)), Some(hand_over)) => {
                uncomputed_tokens = 0;
                let settings = (&self.settings, hand_over);
                // What it fetches is let in under the lock that is held here, and so after the request is known.
                arrival = Some(hand_over::begin_fetch(&self.shared, origin, sim_request, settings));
            }
            (asked, _) => {
                if let Some(Asked::Keep(lease_id)) = asked {
                    lease = Some(lease_id);
                }
                let transfer = SimTransfer { keeps_blocks: lease.is_some(), ..SimTransfer::default() };
                state.engine.submit_with(self.shared.started.elapsed(), sim_request, transfer);
            }
        }
        state.by_request.insert(request.request_id, id);
        let job = Job {
            sink,
            usable,
            claimed_blocks: 0,
            cached_tokens: None,
            stop_token_ids: stop.stop_token_ids,
            min_tokens: stop.min_tokens.unwrap_or(0),
            generated_tokens: 0,
            stopped_by: None,
            ends_by_itself,
            lease,
            arrival,
        };
        state.jobs.insert(id, job);
        state.load.waiting_requests += 1;
        state.load.outstanding_prefill_tokens += uncomputed_tokens;
        // Under the lock, so that reports keep their order.
        host.report_load(state.load);
        drop(state);
        self.shared.has_work.notify_one();
    }

    fn abort(&self, request_id: &str, _reason: AbortReason) {
        let mut state = self.shared.state.lock();
        let Some(id) = state.by_request.get(request_id).copied() else { return };
        if state.jobs.get(&id).is_some_and(|job| job.arrival.is_some()) {
            // It has not come to the engine yet.
            if let Some(job) = state.remove(id) {
                state.note_end(&job, "aborted");
                let reason = FinishReason::Aborted.into();
                job.sink.finished(Finished { reason, ..Finished::default() });
            }
            hand_over::tell_load(&mut state);
            return;
        }
        state.engine.abort(id);
        drop(state);
        self.shared.has_work.notify_one();
    }

    fn embed(&self, request: EmbedRequest, sink: EmbedSink) {
        // Without a host the sink is dropped, which fails the call.
        let host = self.shared.state.lock().host.clone();
        if let Some(host) = host {
            self.embedder.embed(host, request, sink);
        }
    }

    fn release_lease(&self, lease_id: &str) {
        hand_over::release(&self.shared, lease_id);
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        let removed = self.shared.state.lock().engine.reset_cache();
        self.shared.has_work.notify_one();
        Ok(removed as u64)
    }

    fn close(&self) {
        let error = KvistError::new(Code::Draining, "the worker is being stopped");
        let jobs = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            state.host = None;
            for job in state.jobs.values() {
                state.note_end(job, error.code.name());
            }
            state.serving = None;
            state.leases = Leases::default();
            std::mem::take(&mut state.jobs)
        };
        jobs.into_values().for_each(|job| job.sink.failed(&error));
        self.shared.has_work.notify_one();
    }
}
