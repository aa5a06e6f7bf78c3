//! What the router knows, and how it decides.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwap;
use kvist_blocks::{BlockHash, Incarnation, Rank, block_hashes, usable_blocks};
use kvist_errors::{Code, KvistError};
use kvist_index::{Index, IndexSettings, Overlap};
use kvist_link::{LinkSettings, LinkState, WorkerLink};
use kvist_proto::{
    controller::v1::{ClusterState, WorkerEntry},
    engine::v1::{GetTokenizerRequest, engine_service_client::EngineServiceClient, get_tokenizer_response},
    events::v1::{Candidate as RecordCandidate, DecisionRecord, TierMatch},
    router::v1::{Prompt, prompt::Form},
};
use kvist_schedule::{Candidate, POLICY_LEAST_TOKENS, ReservationId, Reservations, TargetId, decide};
use kvist_text::{Chat, ModelText, TextError, TextHeader};
use parking_lot::{Mutex, RwLock};
use prost::Message as _;
use tokio::sync::{Semaphore, watch};

use crate::{
    cluster::{Cluster, ModelEntry, Worker, validate},
    convert,
    follow::{Follower, now_unix_nanos, source_key},
    record::Records,
};

/// Texts longer than this are rendered and encoded on the bounded pool, so that they never stall streams.
const INLINE_TEXT_BYTES: usize = 4096;
/// A report older than this says nothing about the present.
const LOAD_LIFETIME: Duration = Duration::from_secs(5);

/// How a router is.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    /// Unique in the cluster; part of each request id.
    pub name: String,
    /// Most bytes of the index.
    pub index_byte_budget: u64,
    /// Deadline of a request whose client gave none.
    pub default_deadline: Duration,
    /// Threads that may render and encode long texts at once.
    pub text_threads: usize,
}

impl RouterSettings {
    /// The usual settings.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            index_byte_budget: 1 << 30,
            default_deadline: Duration::from_secs(600),
            text_threads: 2,
        }
    }
}

/// The router's knowledge and its decisions.
#[derive(Debug)]
pub struct RouterCore {
    pub(crate) settings: RouterSettings,
    pub(crate) cluster: ArcSwap<Cluster>,
    /// One state is taken in at a time.
    applying: Mutex<()>,
    pub(crate) index: Arc<Index>,
    pub(crate) reservations: Mutex<Reservations>,
    pub(crate) leases: Mutex<HashMap<String, (ReservationId, Instant)>>,
    pub(crate) records: Records,
    text_pool: Arc<Semaphore>,
    next_request: AtomicU64,
    /// Separates the request ids of two lives of one router.
    life: u64,
    pub(crate) ready: watch::Sender<bool>,
}

/// A reservation that ends with its holder, whatever way that goes.
#[derive(Debug)]
pub(crate) struct Reserved {
    core: Arc<RouterCore>,
    pub(crate) id: ReservationId,
}

impl Reserved {
    /// The prompt has been computed: only what is still to be generated stays promised.
    pub(crate) fn prompt_done(&self, rest_tokens: u64) {
        self.core.reservations.lock().reduce(self.id, rest_tokens);
    }

    /// Hands the reservation over to a lease.
    pub(crate) fn into_id(self) -> ReservationId {
        let id = self.id;
        std::mem::forget(self);
        id
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.core.reservations.lock().release(self.id);
    }
}

/// A prompt as token ids, with what routing needs of it.
#[derive(Clone, Debug)]
pub(crate) struct Tokenized {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: Arc<ModelText>,
}

/// The chosen worker, and the promise made to it.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) worker: Arc<Worker>,
    pub(crate) reserved: Option<Reserved>,
    pub(crate) expected_cached_tokens: u32,
    pub(crate) record: DecisionRecord,
}

/// What a decision is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionInput<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) ids: &'a [u32],
    pub(crate) adapter: &'a str,
    pub(crate) cache_salt: &'a str,
    pub(crate) attempt: u32,
    pub(crate) reserve: bool,
}

impl RouterCore {
    /// A router that knows nothing yet.
    #[must_use]
    pub fn new(settings: RouterSettings) -> Arc<Self> {
        let index = Arc::new(Index::new(IndexSettings { byte_budget: settings.index_byte_budget }));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Arc::new(Self {
            text_pool: Arc::new(Semaphore::new(settings.text_threads.max(1))),
            settings,
            cluster: ArcSwap::default(),
            applying: Mutex::default(),
            index,
            reservations: Mutex::default(),
            leases: Mutex::default(),
            records: Records::new(),
            next_request: AtomicU64::new(0),
            life: u64::try_from(now.as_millis()).unwrap_or(0),
            ready: watch::Sender::new(false),
        })
    }

    /// Whether a cluster state was taken in.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Reservations that are open.
    #[must_use]
    pub fn open_reservations(&self) -> usize {
        self.reservations.lock().len()
    }

    /// Names of the models, with the resource's creation in seconds since the Unix epoch.
    #[must_use]
    pub fn model_names(&self) -> Vec<(String, u64)> {
        let cluster = self.cluster.load();
        let mut names: Vec<(String, u64)> = cluster
            .models
            .iter()
            .filter(|(_, entry)| !entry.model.deleting)
            .map(|(name, entry)| {
                let created = entry.model.created_at.as_ref().map_or(0, |at| u64::try_from(at.seconds).unwrap_or(0));
                (name.clone(), created)
            })
            .collect();
        names.sort();
        names
    }

    /// Takes a whole cluster state in. False when it is not newer than the one at hand.
    ///
    /// # Errors
    /// The state is wrong; the one at hand stays.
    pub fn apply_cluster_state(self: &Arc<Self>, encoded: &[u8]) -> Result<bool, KvistError> {
        let state = ClusterState::decode(encoded).map_err(|error| {
            KvistError::new(Code::InvalidArgument, format!("the cluster state cannot be read: {error}"))
        })?;
        let version = validate(&state)?;
        let _one_at_a_time = self.applying.lock();
        let old = self.cluster.load_full();
        if self.is_ready() && version <= old.version {
            return Ok(false);
        }
        let known: HashMap<String, Arc<Worker>> = old
            .models
            .values()
            .flat_map(|entry| &entry.workers)
            .map(|worker| (worker.uid().to_owned(), Arc::clone(worker)))
            .collect();
        let mut workers: HashMap<String, Vec<Arc<Worker>>> = HashMap::new();
        let mut present = HashSet::new();
        for entry in state.workers {
            let worker = self.keep_or_open(&known, entry)?;
            present.insert(worker.uid().to_owned());
            workers.entry(worker.entry.model.clone()).or_default().push(worker);
        }
        for dead in &state.dead_incarnations {
            self.index.close(&dead.worker_uid.as_str().into(), Incarnation(dead.incarnation));
        }
        for uid in known.keys().filter(|uid| !present.contains(*uid)) {
            self.index.remove_worker(&uid.as_str().into());
        }
        let mut models = HashMap::new();
        for model in state.models {
            let workers = workers.remove(&model.name).unwrap_or_default();
            let old_entry = old.models.get(&model.name).filter(|entry| entry.model.uid == model.uid);
            let text = old_entry.map_or_else(|| Arc::new(RwLock::new(None)), |entry| Arc::clone(&entry.text));
            if text.read().is_none() && !workers.is_empty() {
                tokio::spawn(load_text(Arc::clone(&text), workers.clone()));
            }
            let names = std::iter::once(model.name.clone()).chain(model.aliases.iter().cloned()).collect::<Vec<_>>();
            let entry = Arc::new(ModelEntry { model, workers, text });
            models.extend(names.into_iter().map(|name| (name, Arc::clone(&entry))));
        }
        self.cluster.store(Arc::new(Cluster { version, hash_seed: state.hash_seed, models }));
        self.ready.send_replace(true);
        self.index.collect_garbage();
        Ok(true)
    }

    fn keep_or_open(
        &self,
        known: &HashMap<String, Arc<Worker>>,
        entry: WorkerEntry,
    ) -> Result<Arc<Worker>, KvistError> {
        let target = entry.target.clone().unwrap_or_default();
        if let Some(worker) = known.get(&target.worker_uid)
            && worker.address() == target.address
            && worker.incarnation().0 == entry.incarnation
        {
            // Same process: the connection stays. Other facts may have changed.
            if worker.entry == entry {
                return Ok(Arc::clone(worker));
            }
            let (link, follower) = (Arc::clone(&worker.link), Arc::clone(&worker.follower));
            return Ok(Arc::new(Worker { entry, link, follower }));
        }
        let link = Arc::new(WorkerLink::connect(&target.address, LinkSettings::new(&self.settings.name))?);
        let follower = Follower::start(
            Arc::clone(&self.index),
            link.channel(),
            source_key(&target.worker_uid),
            Incarnation(entry.incarnation),
        );
        Ok(Arc::new(Worker { entry, link, follower: Arc::new(follower) }))
    }

    /// A new request id; `own` is the caller's part of it.
    pub(crate) fn new_request_id(&self, own: &str) -> String {
        let number = self.next_request.fetch_add(1, Ordering::Relaxed);
        let (name, life) = (&self.settings.name, self.life);
        if own.is_empty() { format!("{name}-{life:x}-{number:x}") } else { format!("{name}-{life:x}-{number:x}-{own}") }
    }

    /// Renders and encodes a prompt, exactly once for each request.
    pub(crate) async fn tokenize(&self, entry: &ModelEntry, prompt: Option<Prompt>) -> Result<Tokenized, KvistError> {
        let text = entry.text.read().clone().ok_or_else(|| {
            KvistError::new(Code::NoReadyTarget, "no worker of the model has answered yet").before_start()
        })?;
        let form = prompt
            .and_then(|prompt| prompt.form)
            .ok_or_else(|| KvistError::field(Code::InvalidArgument, "prompt", "is missing"))?;
        let bytes = match &form {
            Form::Tokens(_) => 0,
            Form::Text(text) => text.len(),
            Form::Chat(chat) => chat.messages.iter().map(|message| message.content.len()).sum(),
        };
        let ids = if bytes <= INLINE_TEXT_BYTES {
            encode(&text, form)?
        } else {
            let permit = Arc::clone(&self.text_pool).acquire_owned().await;
            let text = Arc::clone(&text);
            let work = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                encode(&text, form)
            });
            work.await.map_err(|_| KvistError::new(Code::Internal, "a prompt could not be encoded"))??
        };
        if ids.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "prompt", "must not be empty"));
        }
        if let Some(unknown) = ids.iter().find(|id| **id as usize >= text.vocabulary_size()) {
            return Err(KvistError::field(
                Code::InvalidArgument,
                "prompt",
                format!("the model has no token {unknown}"),
            ));
        }
        Ok(Tokenized { ids, text })
    }

    /// Chooses a target and, if asked, reserves it: one step under one lock, so that no two requests take the same gap.
    pub(crate) fn choose(
        self: &Arc<Self>,
        cluster: &Cluster,
        entry: &ModelEntry,
        input: DecisionInput<'_>,
        tried: &[String],
    ) -> Result<Chosen, Box<(KvistError, DecisionRecord)>> {
        let began = Instant::now();
        let mut hashed: Vec<(usize, Vec<BlockHash>, Vec<Overlap>)> = Vec::new();
        let mut known = Vec::with_capacity(entry.workers.len());
        let prompt_tokens = input.ids.len();
        for worker in &entry.workers {
            let block_size = worker.entry.block_size_tokens as usize;
            let position = hashed.iter().position(|(size, ..)| *size == block_size).unwrap_or_else(|| {
                let root = worker.namespace(input.adapter, input.cache_salt).root(cluster.seed());
                let mut hashes = block_hashes(root, input.ids, block_size);
                hashes.truncate(usable_blocks(prompt_tokens, block_size));
                let overlaps = self.index.lookup(&hashes);
                hashed.push((block_size, hashes, overlaps));
                hashed.len() - 1
            });
            let overlap = hashed[position].2.iter().find(|overlap| overlap.source.worker.as_str() == worker.uid());
            let matched = overlap.map_or(0, |overlap| overlap.matched_blocks);
            known.push((overlap.cloned(), matched as usize * block_size));
        }
        // Hashing and looking up need no lock; only reading promises and making one must be a single step.
        let mut considered = Vec::with_capacity(entry.workers.len());
        let mut reservations = self.reservations.lock();
        for (worker, (overlap, cached)) in entry.workers.iter().zip(known) {
            let target = TargetId { worker: worker.uid().into(), rank: Rank(0) };
            let load = worker.link.load(0).filter(|(_, age)| *age < LOAD_LIFETIME).map(|(load, _)| load);
            let promised =
                reservations.promised_tokens(&target, load.as_ref().map(|load| load.outstanding_prefill_tokens));
            let own = reservations.of(&target).count;
            let active = load.map_or(own, |load| own.max(u64::from(load.running_requests + load.waiting_requests)));
            let excluded = if worker.entry.draining || worker.link.is_draining() {
                Some("draining")
            } else if worker.link.state() == LinkState::Lost {
                Some("connection_lost")
            } else if tried.iter().any(|uid| uid == worker.uid()) {
                Some("already_tried")
            } else {
                None
            };
            let candidate = Candidate {
                target,
                uncached_tokens: (prompt_tokens - cached) as u64,
                promised_tokens: promised,
                active_requests: active,
                excluded,
            };
            considered.push((candidate, overlap, cached));
        }
        let decision = decide(considered.iter().map(|(candidate, ..)| candidate.clone()).collect(), rand::random());
        let block_size = entry.workers.first().map_or(0, |worker| worker.entry.block_size_tokens);
        let record = DecisionRecord {
            request_id: input.request_id.to_owned(),
            model: entry.model.name.clone(),
            decided_at: Some(convert::timestamp(now_unix_nanos())),
            prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
            prompt_blocks: u32::try_from(usable_blocks(prompt_tokens, block_size as usize)).unwrap_or(u32::MAX),
            block_size_tokens: block_size,
            candidates: decision
                .scored
                .iter()
                .zip(&considered)
                .map(|(scored, (candidate, overlap, _))| {
                    record_candidate(scored.cost_tokens, candidate, overlap.as_ref())
                })
                .collect(),
            chosen_candidate: decision.chosen.and_then(|chosen| u32::try_from(chosen).ok()),
            policy: POLICY_LEAST_TOKENS.to_owned(),
            attempt: input.attempt,
            decision_duration: began.elapsed().try_into().ok(),
            ..DecisionRecord::default()
        };
        let Some(chosen) = decision.chosen else {
            let why = if entry.workers.is_empty() {
                "the model has no workers"
            } else {
                "no worker of the model takes requests"
            };
            return Err(Box::new((KvistError::new(Code::NoReadyTarget, why).before_start(), record)));
        };
        let (candidate, _, cached) = &considered[chosen];
        let reserved = input.reserve.then(|| Reserved {
            core: Arc::clone(self),
            id: reservations.reserve(candidate.target.clone(), candidate.uncached_tokens),
        });
        Ok(Chosen {
            worker: Arc::clone(&entry.workers[chosen]),
            reserved,
            expected_cached_tokens: u32::try_from(*cached).unwrap_or(u32::MAX),
            record,
        })
    }
}

fn record_candidate(cost: Option<u64>, candidate: &Candidate, overlap: Option<&Overlap>) -> RecordCandidate {
    #[expect(clippy::cast_precision_loss, reason = "costs are far below 2^53 tokens")]
    let cost = cost.unwrap_or_else(|| candidate.uncached_tokens + candidate.promised_tokens) as f64;
    RecordCandidate {
        worker_uid: candidate.target.worker.as_str().to_owned(),
        rank: candidate.target.rank.0,
        incarnation: overlap.map_or(0, |overlap| overlap.incarnation.0),
        source_state: overlap.map_or(0, |overlap| convert::state(overlap.state).into()),
        applied_sequence: overlap.and_then(|overlap| overlap.applied_sequence),
        matches: overlap
            .into_iter()
            .flat_map(|overlap| kvist_blocks::Tier::ALL.into_iter().zip(overlap.tier_blocks))
            .filter(|(_, blocks)| *blocks > 0)
            .map(|(tier, blocks)| TierMatch { tier: tier.to_number(), blocks })
            .collect(),
        uncached_tokens: u32::try_from(candidate.uncached_tokens).unwrap_or(u32::MAX),
        promised_tokens: candidate.promised_tokens,
        cost,
        filtered_reason: candidate.excluded.unwrap_or_default().to_owned(),
    }
}

pub(crate) fn text_error(error: TextError) -> KvistError {
    let code = match error {
        TextError::Render(_) => Code::TemplateFailed,
        TextError::NoTemplate => Code::UnsupportedField,
        _ => Code::Internal,
    };
    KvistError::field(code, "prompt", error.to_string())
}

fn encode(text: &ModelText, form: Form) -> Result<Vec<u32>, KvistError> {
    let chat = match form {
        Form::Tokens(tokens) => return Ok(tokens.ids),
        Form::Text(prompt) => return text.encode_prompt(&prompt).map_err(text_error),
        Form::Chat(chat) => chat,
    };
    let messages = chat
        .messages
        .into_iter()
        .map(|message| {
            let mut map = serde_json::Map::new();
            map.insert("role".to_owned(), message.role.into());
            map.insert("content".to_owned(), message.content.into());
            for (key, value) in [("name", message.name), ("tool_call_id", message.tool_call_id)] {
                if !value.is_empty() {
                    map.insert(key.to_owned(), value.into());
                }
            }
            if !message.tool_calls.is_empty() {
                let calls: Vec<serde_json::Value> =
                    message.tool_calls.iter().map(|call| convert::json_map(call).into()).collect();
                map.insert("tool_calls".to_owned(), calls.into());
            }
            serde_json::Value::Object(map)
        })
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let chat = Chat {
        messages,
        tools: chat.tools.iter().map(|tool| convert::json_map(tool).into()).collect(),
        variables: chat.template_variables.as_ref().map(convert::json_map).unwrap_or_default(),
        add_generation_prompt: true,
        now_unix_seconds: i64::try_from(now.as_secs()).unwrap_or(0),
    };
    text.encode_chat(&chat).map_err(text_error)
}

/// Fetches and loads the model's text from the first worker that answers; tries until one does.
async fn load_text(slot: Arc<RwLock<Option<Arc<ModelText>>>>, workers: Vec<Arc<Worker>>) {
    loop {
        for worker in &workers {
            if slot.read().is_some() {
                return;
            }
            if let Some((json, header)) = fetch_text(worker).await {
                let loaded = tokio::task::spawn_blocking(move || ModelText::load(&json, header)).await;
                if let Ok(Ok(text)) = loaded {
                    *slot.write() = Some(Arc::new(text));
                    return;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        // Nobody waits any more when only this task holds the slot.
        if Arc::strong_count(&slot) == 1 {
            return;
        }
    }
}

async fn fetch_text(worker: &Worker) -> Option<(Vec<u8>, TextHeader)> {
    let mut client = EngineServiceClient::new(worker.link.channel());
    let mut stream = client.get_tokenizer(GetTokenizerRequest::default()).await.ok()?.into_inner();
    let (mut json, mut header) = (Vec::new(), TextHeader::default());
    while let Some(message) = stream.message().await.ok()? {
        match message.part? {
            get_tokenizer_response::Part::Header(found) => {
                header = TextHeader {
                    chat_template: found.chat_template,
                    bos_token: found.bos_token,
                    eos_token: found.eos_token,
                    add_bos: found.add_bos,
                    eos_token_ids: found.eos_token_ids,
                };
            }
            get_tokenizer_response::Part::Data(data) => json.extend_from_slice(&data),
        }
    }
    Some((json, header))
}
