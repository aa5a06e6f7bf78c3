//! A worker with real ledgers and a scripted engine: `WatchKvEvents` and `Describe`, and nothing else.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures::Stream;
use kvist_blocks::{BlockHash, Incarnation, Rank, SourceKey, Tier};
use kvist_events::convert;
use kvist_ledger::{EngineEvent, EngineHash, Ledger, LedgerSettings, StoredBlocks};
use kvist_proto::{
    engine::v1::{
        engine_service_server::{EngineService, EngineServiceServer},
        watch_kv_events_response::Part,
        *,
    },
    events::v1::SourceId,
};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::{StreamExt as _, wrappers::UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming, transport::server::TcpIncoming};

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

struct State {
    uid: String,
    incarnation: u64,
    ledgers: Vec<Ledger>,
    followers: Vec<mpsc::UnboundedSender<Part>>,
    is_alive: bool,
    snapshots: u64,
    questions: u64,
    open_questions: Gauge,
    may_answer: watch::Sender<bool>,
    broken_answers: u64,
}

/// How many of something there are, and have been at most.
#[derive(Clone, Default)]
struct Gauge(Arc<Mutex<(u64, u64)>>);

/// One of them.
struct Counted(Gauge);

impl Gauge {
    fn enter(&self) -> Counted {
        let mut numbers = self.0.lock();
        numbers.0 += 1;
        numbers.1 = numbers.1.max(numbers.0);
        Counted(self.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.lock().0 -= 1;
    }
}

impl State {
    fn source(&self, rank: u32) -> SourceId {
        let key = SourceKey { worker: self.uid.as_str().into(), rank: Rank(rank) };
        convert::source_to(&key, Incarnation(self.incarnation))
    }

    fn digest(&self, rank: u32) -> Part {
        let digest = self.ledgers[rank as usize].digest();
        Part::Digest(convert::digest_to(&self.source(rank), &digest, 1))
    }

    fn send(&mut self, part: &Part) {
        self.followers.retain(|follower| follower.send(part.clone()).is_ok());
    }
}

/// A worker process of the script.
pub(crate) struct ScriptedWorker {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl ScriptedWorker {
    pub(crate) async fn start(uid: &str, incarnation: u64, ranks: u32, ring_batches: usize) -> Self {
        let settings = LedgerSettings { ring_batches, block_size_tokens: 2 };
        let state = Arc::new(Mutex::new(State {
            uid: uid.to_owned(),
            incarnation,
            ledgers: (0..ranks).map(|_| Ledger::new(settings)).collect(),
            followers: Vec::new(),
            is_alive: true,
            snapshots: 0,
            questions: 0,
            open_questions: Gauge::default(),
            may_answer: watch::channel(true).0,
            broken_answers: 0,
        }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = EngineServiceServer::new(Service(Arc::clone(&state)));
        let server = tokio::spawn(async move {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self { state, address, server }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// A prompt of four blocks is computed.
    pub(crate) fn store(&self, rank: u32, prompt: u32) {
        self.store_blocks(rank, prompt, 4);
    }

    /// A prompt of so many blocks is computed, all in one batch.
    pub(crate) fn store_blocks(&self, rank: u32, prompt: u32, blocks: u32) {
        let hashes = (0..blocks).map(|block| EngineHash(u64::from(prompt) * 10 + u64::from(block))).collect();
        let tokens = (0..2 * blocks).map(|position| prompt * 100 + position).collect();
        let root = BlockHash(1);
        let stored = StoredBlocks { hashes, parent: None, tokens, tier: Tier::Device, root };
        self.apply(rank, &EngineEvent::Stored(stored));
    }

    /// One copy of the blocks of a prompt is gone.
    pub(crate) fn remove(&self, rank: u32, prompt: u32) {
        let hashes = (0..4).map(|block| EngineHash(u64::from(prompt) * 10 + block)).collect();
        self.apply(rank, &EngineEvent::Removed { hashes, tier: Tier::Device });
    }

    pub(crate) fn clear(&self, rank: u32) {
        self.apply(rank, &EngineEvent::Cleared);
    }

    fn apply(&self, rank: u32, event: &EngineEvent) {
        let state = &mut *self.state.lock();
        if let Some(batch) = state.ledgers[rank as usize].apply(1, std::slice::from_ref(event)) {
            let part = Part::Batch(convert::batch_to(&state.source(rank), &batch));
            state.send(&part);
        }
    }

    pub(crate) fn say_digests(&self) {
        let state = &mut *self.state.lock();
        for rank in 0..u32::try_from(state.ledgers.len()).unwrap() {
            let digest = state.digest(rank);
            state.send(&digest);
        }
    }

    pub(crate) fn digest(&self, rank: u32) -> kvist_ledger::LedgerDigest {
        self.state.lock().ledgers[rank as usize].digest()
    }

    pub(crate) fn followers(&self) -> usize {
        let state = &mut *self.state.lock();
        state.followers.retain(|follower| !follower.is_closed());
        state.followers.len()
    }

    /// Snapshots sent, and questions without `follow` answered.
    pub(crate) fn snapshots_and_questions(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.snapshots, state.questions)
    }

    /// Questions without `follow` are answered only after [`ScriptedWorker::answer_again`].
    pub(crate) fn hold_answers(&self) {
        self.state.lock().may_answer.send_replace(false);
    }

    pub(crate) fn answer_again(&self) {
        self.state.lock().may_answer.send_replace(true);
    }

    /// So many answers to questions without `follow` end before their end.
    pub(crate) fn break_off_answers(&self, answers: u64) {
        self.state.lock().broken_answers = answers;
    }

    /// Questions that wait for their answers, and most that ever did at once.
    pub(crate) fn open_questions(&self) -> (u64, u64) {
        *self.state.lock().open_questions.0.lock()
    }

    /// The process is gone: its streams end and nobody answers.
    pub(crate) fn die(&self) {
        let mut state = self.state.lock();
        state.is_alive = false;
        state.followers.clear();
        self.server.abort();
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.die();
    }
}

struct Service(Arc<Mutex<State>>);

impl Service {
    fn history(state: &mut State, rank: u32, resume: Option<&ResumePosition>) -> Vec<Part> {
        let source = state.source(rank);
        let ledger = &state.ledgers[rank as usize];
        let range = resume
            .filter(|position| position.incarnation == state.incarnation)
            .and_then(|position| ledger.range_after(position.sequence).ok());
        let mut parts: Vec<Part> = match range {
            Some(batches) => batches.iter().map(|batch| Part::Batch(convert::batch_to(&source, batch))).collect(),
            None => {
                state.snapshots += 1;
                convert::snapshot_to(&source, &ledger.snapshot()).into_iter().map(Part::Snapshot).collect()
            }
        };
        let next_sequence = state.ledgers[rank as usize].next_sequence();
        parts.push(state.digest(rank));
        parts.push(Part::CaughtUp(CaughtUp { source: Some(source), next_sequence }));
        parts
    }
}

macro_rules! not_scripted {
    ($($name:ident: $request:ty => $response:ty;)*) => {
        $(
            fn $name<'life, 'future>(
                &'life self,
                _: Request<$request>,
            ) -> Pin<Box<dyn Future<Output = Result<Response<$response>, Status>> + Send + 'future>>
            where
                'life: 'future,
                Self: 'future,
            {
                Box::pin(async { Err(Status::unimplemented("not scripted")) })
            }
        )*
    };
}

impl EngineService for Service {
    type GetTokenizerStream = BoxStream<GetTokenizerResponse>;
    type ConnectStream = BoxStream<ConnectResponse>;
    type GetResultStream = BoxStream<GetResultResponse>;
    type GenerateStream = BoxStream<GenerateResponse>;
    type WatchKvEventsStream = BoxStream<WatchKvEventsResponse>;
    type WatchLoadStream = BoxStream<WatchLoadResponse>;

    fn describe<'life, 'future>(
        &'life self,
        _: Request<DescribeRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<DescribeResponse>, Status>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(async {
            let state = self.0.lock();
            if !state.is_alive {
                return Err(Status::unavailable("dead"));
            }
            let worker = WorkerDescription {
                worker_uid: state.uid.clone(),
                incarnation: state.incarnation,
                ranks: u32::try_from(state.ledgers.len()).unwrap(),
                ..WorkerDescription::default()
            };
            Ok(Response::new(DescribeResponse { worker: Some(worker) }))
        })
    }

    fn watch_kv_events<'life, 'future>(
        &'life self,
        request: Request<WatchKvEventsRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Self::WatchKvEventsStream>, Status>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(async {
            let request = request.into_inner();
            let (open_questions, mut may_answer) = {
                let state = self.0.lock();
                (state.open_questions.clone(), state.may_answer.subscribe())
            };
            if !request.follow {
                let _open = open_questions.enter();
                may_answer.wait_for(|may| *may).await.unwrap();
            }
            let state = &mut *self.0.lock();
            if !state.is_alive {
                return Err(Status::unavailable("dead"));
            }
            state.questions += u64::from(!request.follow);
            let (sender, receiver) = mpsc::unbounded_channel();
            for rank in 0..u32::try_from(state.ledgers.len()).unwrap() {
                if !request.ranks.is_empty() && !request.ranks.contains(&rank) {
                    continue;
                }
                let resume = request.resume_after.iter().find(|position| position.rank == rank);
                let mut parts = Self::history(state, rank, resume);
                if !request.follow && state.broken_answers > 0 {
                    state.broken_answers -= 1;
                    parts.pop();
                }
                for part in parts {
                    sender.send(part).unwrap();
                }
            }
            if request.follow {
                state.followers.push(sender);
            }
            let parts = UnboundedReceiverStream::new(receiver);
            let responses = parts.map(|part| Ok(WatchKvEventsResponse { part: Some(part) }));
            Ok(Response::new(Box::pin(responses) as Self::WatchKvEventsStream))
        })
    }

    not_scripted! {
        get_tokenizer: GetTokenizerRequest => Self::GetTokenizerStream;
        connect: Streaming<ConnectRequest> => Self::ConnectStream;
        put_prompt: Streaming<PutPromptRequest> => PutPromptResponse;
        get_result: GetResultRequest => Self::GetResultStream;
        generate: GenerateRequest => Self::GenerateStream;
        embed: EmbedRequest => EmbedResponse;
        abort: AbortRequest => AbortResponse;
        watch_load: WatchLoadRequest => Self::WatchLoadStream;
        drain: DrainRequest => DrainResponse;
        reset_cache: ResetCacheRequest => ResetCacheResponse;
        load_adapter: LoadAdapterRequest => LoadAdapterResponse;
        unload_adapter: UnloadAdapterRequest => UnloadAdapterResponse;
        start_profile: StartProfileRequest => StartProfileResponse;
        stop_profile: StopProfileRequest => StopProfileResponse;
    }
}
