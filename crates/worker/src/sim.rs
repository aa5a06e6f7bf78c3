//! The simulated engine behind a worker: virtual time driven by a real clock.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{
        AbortReason, Capabilities, EngineRequest, FinishReason, Finished, TokenDelta, engine_request::Prompt,
    },
    events::v1::{LoadReport, Receipt},
};
use kvist_twin::{Finish, SimCounters, SimEngine, SimRequest, SimSettings};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::{Engine, EngineDescription, EngineHost, RequestSink, TokenizerFile};

/// Bytes, then the two control tokens of ChatML.
const VOCABULARY: u32 = 258;
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// How the simulated engine is.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SimWorkerSettings {
    /// Tokens a block.
    pub block_size_tokens: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Requests that run at once.
    pub max_running_requests: u32,
    /// Requests that may wait.
    pub max_waiting_requests: u32,
    /// Prompt and completion together.
    pub context_tokens: u32,
    /// Prompt tokens computed in one step at most.
    pub prefill_chunk_tokens: u32,
    /// Prompt tokens computed a second.
    pub prefill_tokens_per_second: f64,
    /// Microseconds of a step that decodes one request.
    pub decode_step_microseconds: u64,
    /// Microseconds that each further request adds.
    pub decode_step_per_request_microseconds: u64,
}

impl Default for SimWorkerSettings {
    fn default() -> Self {
        Self {
            block_size_tokens: 32,
            blocks: 4096,
            max_running_requests: 64,
            max_waiting_requests: 1024,
            context_tokens: 32_768,
            prefill_chunk_tokens: 2048,
            prefill_tokens_per_second: 20_000.0,
            decode_step_microseconds: 5_000,
            decode_step_per_request_microseconds: 50,
        }
    }
}

struct Job {
    request_id: String,
    sink: Option<RequestSink>,
    abort: Option<AbortReason>,
    cached_tokens: Option<u32>,
}

struct State {
    engine: SimEngine,
    jobs: HashMap<u64, Job>,
    by_request: HashMap<String, u64>,
    next_id: u64,
    closed: bool,
}

/// The engine `sim`.
pub struct SimWorkerEngine {
    settings: SimWorkerSettings,
    started: Instant,
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
    host: Mutex<Option<EngineHost>>,
}

impl SimWorkerEngine {
    /// An idle engine.
    #[must_use]
    pub fn new(settings: SimWorkerSettings) -> Self {
        let engine = SimEngine::new(SimSettings {
            block_size_tokens: settings.block_size_tokens as usize,
            blocks: settings.blocks as usize,
            max_running: settings.max_running_requests as usize,
            prefill_chunk_tokens: settings.prefill_chunk_tokens as usize,
            prefill_tokens_per_second: settings.prefill_tokens_per_second,
            decode_step: Duration::from_micros(settings.decode_step_microseconds),
            decode_step_per_request: Duration::from_micros(settings.decode_step_per_request_microseconds),
            // Lower-case letters.
            first_token: u32::from(b'a'),
            token_range: 26,
        });
        let state = State { engine, jobs: HashMap::new(), by_request: HashMap::new(), next_id: 0, closed: false };
        Self {
            settings,
            started: Instant::now(),
            state: Arc::new(Mutex::new(state)),
            wake: Arc::default(),
            host: Mutex::default(),
        }
    }
}

impl Engine for SimWorkerEngine {
    fn description(&self) -> EngineDescription {
        EngineDescription {
            engine: "sim".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            context_tokens: self.settings.context_tokens,
            max_running_requests: self.settings.max_running_requests,
            max_waiting_requests: self.settings.max_waiting_requests,
            max_top_logprobs: 0,
            kv_blocks: u64::from(self.settings.blocks),
            block_size_tokens: self.settings.block_size_tokens,
            capabilities: Capabilities { kv_events: true, ..Capabilities::default() },
            tokenizer: Some(TokenizerFile {
                json: byte_tokenizer().into(),
                chat_template: CHATML.to_owned(),
                eos_token: "<|im_end|>".to_owned(),
                eos_token_ids: vec![VOCABULARY - 1],
                ..TokenizerFile::default()
            }),
        }
    }

    fn start(&self, host: EngineHost) -> Result<(), KvistError> {
        *self.host.lock() = Some(host.clone());
        tokio::spawn(run(Arc::clone(&self.state), Arc::clone(&self.wake), host, self.started));
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let Some(Prompt::Tokens(tokens)) = request.prompt else {
            return sink.failed(&KvistError::new(Code::InvalidArgument, "the prompt is missing").before_start());
        };
        let Some(host) = self.host.lock().clone() else { return };
        let room = self.settings.context_tokens.saturating_sub(u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX));
        let asked = request.stop.as_ref().and_then(|stop| stop.max_tokens).unwrap_or(room);
        if tokens.ids.is_empty() || room == 0 {
            let error =
                KvistError::new(Code::ContextLengthExceeded, "the prompt does not fit the context").before_start();
            return sink.failed(&error);
        }
        let root = host.root(&request.adapter, &request.cache_salt);
        {
            let mut state = self.state.lock();
            let id = state.next_id;
            state.next_id += 1;
            let now = self.started.elapsed();
            let max_tokens = asked.clamp(1, room);
            state.engine.submit(now, SimRequest { id, prompt: tokens.ids, max_tokens, root });
            state.by_request.insert(request.request_id.clone(), id);
            let job = Job { request_id: request.request_id, sink: Some(sink), abort: None, cached_tokens: None };
            state.jobs.insert(id, job);
            let report = report(&state.engine.counters());
            drop(state);
            host.report_load(report);
        }
        self.wake.notify_one();
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        let mut state = self.state.lock();
        let Some(id) = state.by_request.get(request_id).copied() else { return };
        if let Some(job) = state.jobs.get_mut(&id) {
            job.abort.get_or_insert(reason);
        }
        state.engine.abort(id);
        drop(state);
        self.wake.notify_one();
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        let removed = self.state.lock().engine.reset_cache();
        self.wake.notify_one();
        Ok(removed as u64)
    }

    fn close(&self) {
        let jobs = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.jobs)
        };
        // Dropped sinks tell their routers that the engine gave up.
        drop(jobs);
        self.wake.notify_one();
    }
}

/// Steps the engine: a step's results are told when its time has passed.
async fn run(state: Arc<Mutex<State>>, wake: Arc<Notify>, host: EngineHost, started: Instant) {
    loop {
        let step = {
            let mut state = state.lock();
            if state.closed {
                return;
            }
            if state.engine.is_idle() { None } else { Some(state.engine.step(started.elapsed())) }
        };
        let Some(step) = step else {
            wake.notified().await;
            continue;
        };
        // Evictions are true at once; what the step computes is there at its end.
        let (evictions, stores) = step.events.split_at(step.events_at_begin.min(step.events.len()));
        host.cache_changed(evictions);
        let idle = step.duration.is_none() && step.finished.is_empty() && step.events.is_empty();
        match step.duration {
            Some(duration) => tokio::time::sleep(duration).await,
            None if idle => wake.notified().await,
            None => {}
        }
        host.cache_changed(stores);
        let mut state = state.lock();
        for (id, cached) in step.placed {
            if let Some(job) = state.jobs.get_mut(&id) {
                job.cached_tokens = Some(cached);
            }
        }
        for (id, token) in step.tokens {
            if let Some(job) = state.jobs.get_mut(&id)
                && let Some(sink) = &job.sink
            {
                sink.delta(TokenDelta {
                    token_ids: vec![token],
                    cached_tokens: job.cached_tokens.take(),
                    ..TokenDelta::default()
                });
            }
        }
        for finished in step.finished {
            let Some(mut job) = state.jobs.remove(&finished.id) else { continue };
            state.by_request.remove(&job.request_id);
            let Some(sink) = job.sink.take() else { continue };
            let reason = match (finished.finish, job.abort) {
                (Finish::Length, _) => FinishReason::Length,
                (Finish::Stop, _) => FinishReason::Stop,
                (Finish::Aborted, Some(AbortReason::StopString)) => FinishReason::Stop,
                (Finish::Aborted, _) => FinishReason::Aborted,
                (Finish::TooLarge, _) => {
                    let error = KvistError::new(
                        Code::ContextLengthExceeded,
                        "the request needs more cache than the engine has",
                    );
                    sink.failed(&error.before_start());
                    continue;
                }
            };
            sink.finished(Finished {
                reason: reason.into(),
                receipt: Some(Receipt {
                    prompt_tokens: finished.prompt_tokens,
                    cached_tokens: finished.cached_tokens,
                    completion_tokens: finished.completion_tokens,
                    queue_duration: finished.queue.try_into().ok(),
                    prefill_duration: finished.prefill.try_into().ok(),
                    decode_duration: finished.decode.try_into().ok(),
                    claimed_blocks: None,
                    block_size_tokens: u32::try_from(host.block_size_tokens()).unwrap_or(0),
                }),
                ..Finished::default()
            });
        }
        let report = report(&state.engine.counters());
        drop(state);
        host.report_load(report);
    }
}

fn report(counters: &SimCounters) -> LoadReport {
    LoadReport {
        running_requests: u32::try_from(counters.running).unwrap_or(u32::MAX),
        waiting_requests: u32::try_from(counters.waiting).unwrap_or(u32::MAX),
        outstanding_prefill_tokens: counters.outstanding_prefill_tokens,
        active_tokens: counters.active_tokens,
        used_blocks: counters.used_blocks as u64,
        total_blocks: counters.total_blocks as u64,
        finished_requests_total: counters.finished_requests,
        engine_steps_total: counters.steps,
        generated_tokens_total: counters.generated_tokens,
        ..LoadReport::default()
    }
}

/// A `tokenizer.json` with one token for each byte.
fn byte_tokenizer() -> Vec<u8> {
    let mut next = 256u32;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0u8..=255 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable { u32::from(byte) } else { next };
        next += u32::from(!printable);
        vocabulary.insert(char::from_u32(code).unwrap_or('?').to_string(), u32::from(byte).into());
    }
    let added = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false})
    };
    let byte_level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [added(256, "<|im_start|>"), added(257, "<|im_end|>")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
    })
    .to_string()
    .into_bytes()
}
