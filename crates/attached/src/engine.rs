//! The engine of a worker that speaks for a server.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{AbortReason, EngineRequest, FinishReason, Finished},
    events::v1::Receipt,
};
use kvist_worker::{Engine, EngineDescription, EngineHost, RequestSink, TokenizerFile};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{runtime::Handle, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    answer::{Answer, Ending},
    client::{Client, lost, whole},
    facts::ServerFacts,
    failure::refusal,
    introduction::introduce,
    key::FOLDER_VARIABLE,
    load::RankLoad,
    metrics::ServerMetrics,
    request::{Prepared, prepare},
    settings::{Api, AttachedSettings},
    tokenizer::Tokenizer,
    watch,
};

/// Text of the requests that only ask whether they are taken.
const PROBE_TEXT: &str = "Hello";
/// Most alternatives in log-probabilities: `--max-logprobs` of a server that does not say another.
const MOST_TOP_LOGPROBS: u32 = 20;

/// The engine `attached`: a vLLM server that Kvist did not start, behind the worker's own server.
#[derive(Debug)]
pub struct AttachedEngine {
    settings: AttachedSettings,
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) client: Client,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    up: Option<Up>,
    running: HashMap<String, (u64, CancellationToken)>,
    loads: Vec<RankLoad>,
    last_number: u64,
    is_closed: bool,
    watch: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("State").field("running", &self.running.len()).finish_non_exhaustive()
    }
}

/// What is known once the server was asked.
#[derive(Clone)]
struct Up {
    facts: Arc<ServerFacts>,
    tokenizer: TokenizerFile,
    /// None until the worker has started the engine.
    host: Option<(EngineHost, Handle)>,
}

impl AttachedEngine {
    /// An engine for a server, which is not asked yet.
    ///
    /// # Errors
    /// The arguments are wrong.
    pub fn new(arguments: &Value) -> Result<Self, KvistError> {
        let settings = AttachedSettings::from_value(arguments)?;
        let keys = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
        let client = Client::new(&settings, keys.as_deref())?;
        Ok(Self { settings, shared: Arc::new(Shared { client, state: Mutex::default() }) })
    }

    async fn ask_server(&self) -> Result<Up, KvistError> {
        let mut tokenizer = Tokenizer::read(&self.settings.tokenizer)?;
        let prompt = tokenizer.encode(PROBE_TEXT)?;
        let facts = introduce(&self.shared.client, &self.settings, &prompt).await?;
        if !tokenizer.compare(&self.shared.client, &facts.model).await? {
            tracing::warn!("the server has no /tokenize, so that its tokenizer cannot be compared");
        }
        Ok(Up { facts: Arc::new(facts), tokenizer: tokenizer.file, host: None })
    }
}

impl Engine for AttachedEngine {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        let up = Handle::current().block_on(self.ask_server())?;
        let facts = Arc::clone(&up.facts);
        let tokenizer = up.tokenizer.clone();
        self.shared.state.lock().up = Some(up);
        Ok(EngineDescription {
            engine: "attached".to_owned(),
            version: format!("{} at {}", facts.version, facts.api.path()),
            context_tokens: facts.context_tokens,
            max_running_requests: self.settings.max_num_seqs,
            // The server queues without a limit that it would state.
            max_waiting_requests: 0,
            max_top_logprobs: if facts.api == Api::Generate { MOST_TOP_LOGPROBS } else { 0 },
            kv_blocks: facts.ranks.iter().map(|rank| rank.kv_blocks).min().unwrap_or(0),
            block_size_tokens: facts.block_size_tokens,
            hash_algorithm: facts.hash_algorithm.clone(),
            ranks: u32::try_from(facts.ranks.len()).unwrap_or(u32::MAX),
            // A removal is published after the step that made it.
            claims_hold_for_all: false,
            makes_choices: true,
            capabilities: facts.capabilities(),
            tokenizer: Some(tokenizer),
            kv_layout: None,
        })
    }

    fn start(&self, host: EngineHost) -> Result<(), KvistError> {
        let mut state = self.shared.state.lock();
        let Some(up) = &mut state.up else {
            return Err(KvistError::new(Code::NotReady, "the server was not asked what it is"));
        };
        let facts = Arc::clone(&up.facts);
        up.host = Some((host.clone(), Handle::current()));
        for (number, rank) in (0..).zip(&facts.ranks) {
            let Some(sockets) = &rank.sockets else { continue };
            let events = json!({
                "endpoint": sockets.endpoint,
                "replay_endpoint": sockets.replay_endpoint,
                "engine_rank": rank.called,
                "hash_algorithm": facts.hash_algorithm,
                "python_hash_seed": self.settings.python_hash_seed,
                // Others may ask the server too, for a report of what it holds.
                "may_repeat": true,
            });
            host.follow_vllm(number, &events.to_string())?;
        }
        state.loads = (0..).zip(&facts.ranks).map(|(number, rank)| RankLoad::new(number, rank.kv_blocks)).collect();
        let dead_after = Duration::from_secs_f64(self.settings.dead_after_seconds);
        state.watch = Some(tokio::spawn(watch::run(Arc::downgrade(&self.shared), host, dead_after)));
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        let mut state = self.shared.state.lock();
        let Some((facts, (host, runtime))) = state
            .up
            .as_ref()
            .filter(|_| !state.is_closed)
            .and_then(|up| Some((Arc::clone(&up.facts), up.host.clone()?)))
        else {
            return sink.failed(&KvistError::new(Code::Draining, "the worker is being stopped").before_start());
        };
        let prepared = match prepare(request, &facts) {
            Ok(prepared) => prepared,
            Err(error) => return sink.failed(&error),
        };
        state.last_number += 1;
        let number = state.last_number;
        let cancelled = CancellationToken::new();
        state.running.insert(sink.request_id().to_owned(), (number, cancelled.clone()));
        if let Some(load) = state.loads.get_mut(prepared.rank as usize) {
            load.begin(number, prepared.prompt_tokens, prepared.expected_cached_tokens);
            // Under the lock, so that reports keep their order.
            host.report_load(load.report());
        }
        drop(state);
        let request = Request { shared: Arc::clone(&self.shared), host, facts, prepared, number };
        runtime.spawn(request.run(sink, cancelled));
    }

    fn abort(&self, request_id: &str, _reason: AbortReason) {
        if let Some((_, cancelled)) = self.shared.state.lock().running.get(request_id) {
            cancelled.cancel();
        }
    }

    fn reset_cache(&self) -> Result<u64, KvistError> {
        let up = self.shared.state.lock().up.clone();
        let Some((host, facts)) = up.and_then(|up| Some((up.host?.0, up.facts))) else {
            return Err(KvistError::new(Code::NotReady, "the engine is not up"));
        };
        if !facts.resets_cache {
            let message = "the server empties its cache for nobody: start it with VLLM_SERVER_DEV_MODE=1";
            return Err(KvistError::new(Code::NotImplemented, message));
        }
        // Nothing is claimed from before the order on; the server says late that it has obeyed.
        let claimed = host.clear_ordered();
        let asking = async {
            let path = "/reset_prefix_cache?reset_running_requests=true";
            self.shared.client.ask(path, http::HeaderMap::new(), &Value::Null).await
        };
        match tokio::task::block_in_place(|| Handle::current().block_on(asking)) {
            Ok(reply) if reply.status.is_success() => Ok(claimed),
            other => {
                // Whether it will say that it is empty is not known any more.
                host.cache_unknown();
                Err(other
                    .err()
                    .unwrap_or_else(|| KvistError::new(Code::EngineFailed, "the server did not empty its cache")))
            }
        }
    }

    fn close(&self) {
        let (running, watch) = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            (std::mem::take(&mut state.running), state.watch.take())
        };
        if let Some(watch) = watch {
            watch.abort();
        }
        running.into_values().for_each(|(_, cancelled)| cancelled.cancel());
    }
}

impl Shared {
    /// The server's metrics were read.
    pub(crate) fn note_metrics(&self, host: &EngineHost, metrics: &ServerMetrics) {
        let mut state = self.state.lock();
        let Some(facts) = state.up.as_ref().map(|up| Arc::clone(&up.facts)) else { return };
        for (rank, load) in facts.ranks.iter().zip(&mut state.loads) {
            load.read(metrics.gauges.get(&rank.called).copied().unwrap_or_default());
            host.report_load(load.report());
        }
    }

    fn with_load(&self, host: &EngineHost, rank: u32, change: impl FnOnce(&mut RankLoad) -> bool) {
        if let Some(load) = self.state.lock().loads.get_mut(rank as usize)
            && change(load)
        {
            host.report_load(load.report());
        }
    }
}

/// A request that is under way.
struct Request {
    shared: Arc<Shared>,
    host: EngineHost,
    facts: Arc<ServerFacts>,
    prepared: Prepared,
    number: u64,
}

/// When what happened to it.
#[derive(Clone, Copy)]
struct Times {
    sent: Instant,
    first: Option<Instant>,
    last: Instant,
}

impl Request {
    /// Runs it to its end; its sink hears exactly one.
    async fn run(self, sink: RequestSink, cancelled: CancellationToken) {
        let prepared = &self.prepared;
        let mut answer = Answer::new(prepared.prompt_tokens, prepared.choices, prepared.alternatives);
        let now = Instant::now();
        let mut times = Times { sent: now, first: None, last: now };
        let ended = tokio::select! {
            biased;
            // What is dropped here closes the connection, which ends the request at the server.
            () = cancelled.cancelled() => None,
            ended = self.talk(&mut answer, &mut times, &sink) => Some(ended),
        };
        let receipt = self.receipt(&answer, times);
        let is_closed = {
            let mut state = self.shared.state.lock();
            if state.running.get(sink.request_id()).is_some_and(|(number, _)| *number == self.number) {
                state.running.remove(sink.request_id());
            }
            state.is_closed
        };
        let has_ended_well = matches!(ended, Some(Ok(_)));
        self.shared.with_load(&self.host, self.prepared.rank, |load| {
            load.end(self.number, has_ended_well.then_some(&receipt));
            true
        });
        match ended {
            Some(Ok(ending)) => sink.finished(Finished {
                reason: ending.reason.into(),
                stop_token_id: ending.stop_token_id,
                receipt: Some(receipt),
                choice_reasons: ending.choice_reasons.into_iter().map(Into::into).collect(),
                ..Finished::default()
            }),
            Some(Err(error)) => sink.failed(&error),
            None if is_closed => sink.failed(&KvistError::new(Code::Draining, "the worker is being stopped")),
            None => {
                let reason = FinishReason::Aborted.into();
                sink.finished(Finished { reason, receipt: Some(receipt), ..Finished::default() });
            }
        }
    }

    async fn talk(&self, answer: &mut Answer, times: &mut Times, sink: &RequestSink) -> Result<Ending, KvistError> {
        let prepared = &self.prepared;
        let body = prepared.body.to_string().into();
        let response = self.shared.client.post(self.facts.api.path(), prepared.headers.clone(), body).await?;
        let (head, mut body) = response.into_parts();
        if head.status != http::StatusCode::OK {
            let said = whole(body).await.unwrap_or_default();
            return Err(refusal(head.status, &head.headers, &said, &prepared.adapter));
        }
        while !answer.has_ended() {
            let frame = match body.frame().await {
                None => break,
                Some(frame) => frame.map_err(|_| lost())?,
            };
            let Ok(piece) = frame.into_data() else { continue };
            for delta in answer.take(&piece)? {
                times.last = Instant::now();
                times.first.get_or_insert(times.last);
                let tokens = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
                self.shared.with_load(&self.host, prepared.rank, |load| load.generated(self.number, tokens));
                sink.delta(delta);
            }
        }
        answer.ending()
    }

    fn receipt(&self, answer: &Answer, times: Times) -> Receipt {
        let between = |begin: Instant, end: Instant| end.saturating_duration_since(begin).try_into().ok();
        Receipt {
            block_size_tokens: self.facts.block_size_tokens,
            prefill_duration: times.first.and_then(|first| between(times.sent, first)),
            decode_duration: times.first.and_then(|first| between(first, times.last)),
            ..answer.receipt()
        }
    }
}
