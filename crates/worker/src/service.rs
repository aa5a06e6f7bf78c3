//! `EngineService` over any engine.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_history::HistoryServer;
use kvist_link::{ConnectFrames, EventReceiver, RequestEvent, event_buffer};
use kvist_proto::engine::v1::{
    AbortReason, AbortRequest, AbortResponse, ConnectRequest, DescribeRequest, DescribeResponse, DrainRequest,
    DrainResponse, EmbedRequest, EmbedResponse, GenerateRequest, GenerateResponse, GetResultRequest, GetResultResponse,
    GetTokenizerRequest, GetTokenizerResponse, LoadAdapterRequest, LoadAdapterResponse, PutPromptRequest,
    PutPromptResponse, ResetCacheRequest, ResetCacheResponse, StartProfileRequest, StartProfileResponse,
    StopProfileRequest, StopProfileResponse, UnloadAdapterRequest, UnloadAdapterResponse, WatchKvEventsRequest,
    WatchKvEventsResponse, WatchLoadRequest, WatchLoadResponse, engine_service_server::EngineService,
    generate_response, get_tokenizer_response,
};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    drain::drain,
    sink::Output,
    worker::{Acceptor, Worker, stopped},
};

/// Largest chunk of a tokenizer file.
const TOKENIZER_CHUNK_BYTES: usize = 256 * 1024;
/// Least time between two load reports to one watcher.
const LEAST_LOAD_INTERVAL: Duration = Duration::from_millis(10);

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service.
pub(crate) struct Service {
    pub(crate) worker: Arc<Worker>,
    pub(crate) kv_events: HistoryServer,
    pub(crate) stopping: CancellationToken,
}

fn not_implemented(what: &str) -> Status {
    KvistError::new(Code::NotImplemented, format!("this engine does not support {what}")).into()
}

#[tonic::async_trait]
impl EngineService for Service {
    type GetTokenizerStream = BoxStream<GetTokenizerResponse>;
    type ConnectStream = ConnectFrames;
    type GetResultStream = BoxStream<GetResultResponse>;
    type GenerateStream = GenerateStream;
    type WatchKvEventsStream = ReceiverStream<Result<WatchKvEventsResponse, Status>>;
    type WatchLoadStream = BoxStream<WatchLoadResponse>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(DescribeResponse { worker: Some(self.worker.describe()?) }))
    }

    async fn get_tokenizer(
        &self,
        request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let up = self.worker.up()?;
        let Some(tokenizer) = &up.tokenizer else {
            return Err(KvistError::new(Code::NotFound, "the engine has no tokenizer of its own").into());
        };
        let digest = up.description.tokenizer_digest.clone();
        let is_known = request.into_inner().known_digest == digest;
        let json = if is_known { Bytes::new() } else { tokenizer.json.clone() };
        let header = get_tokenizer_response::Part::Header(tokenizer.header(digest));
        let chunks = (0..json.len()).step_by(TOKENIZER_CHUNK_BYTES).map(move |start| {
            get_tokenizer_response::Part::Data(json.slice(start..json.len().min(start + TOKENIZER_CHUNK_BYTES)))
        });
        let parts = std::iter::once(header).chain(chunks).map(|part| Ok(GetTokenizerResponse { part: Some(part) }));
        Ok(Response::new(stream::iter(parts).boxed()))
    }

    async fn connect(&self, request: Request<Streaming<ConnectRequest>>) -> Result<Response<ConnectFrames>, Status> {
        let acceptor = Arc::new(Acceptor(Arc::clone(&self.worker)));
        Ok(Response::new(self.worker.link.connect(acceptor, request.into_inner()).await?))
    }

    async fn put_prompt(
        &self,
        request: Request<Streaming<PutPromptRequest>>,
    ) -> Result<Response<PutPromptResponse>, Status> {
        Ok(Response::new(self.worker.link.put_prompt(request.into_inner()).await?))
    }

    async fn get_result(&self, request: Request<GetResultRequest>) -> Result<Response<Self::GetResultStream>, Status> {
        let parts = self.worker.link.get_result(&request.into_inner().request_id)?;
        Ok(Response::new(stream::iter(parts).map(Ok).boxed()))
    }

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<GenerateStream>, Status> {
        let Some(mut request) = request.into_inner().request else {
            return Err(KvistError::field(Code::InvalidArgument, "request", "must be set").into());
        };
        if request.request_id.is_empty() {
            request.request_id = format!("direct-{}", self.worker.next_direct_number());
        }
        let request_id = request.request_id.clone();
        let (sender, receiver) = event_buffer(self.worker.settings.generate_buffer_tokens);
        self.worker.submit(request, Output::Call(sender));
        Ok(Response::new(GenerateStream { worker: Arc::clone(&self.worker), request_id, receiver }))
    }

    async fn embed(&self, request: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        Ok(Response::new(self.worker.embed(request.into_inner()).await?))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let request = request.into_inner();
        let was_running = self.worker.abort_request(&request.request_id, request.reason());
        Ok(Response::new(AbortResponse { was_running }))
    }

    async fn watch_kv_events(
        &self,
        request: Request<WatchKvEventsRequest>,
    ) -> Result<Response<Self::WatchKvEventsStream>, Status> {
        let host = &self.worker.up()?.host;
        Ok(Response::new(ReceiverStream::new(self.kv_events.watch(host.ledgers(), request.get_ref())?)))
    }

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        let host = self.worker.up()?.host.clone();
        let interval = request.into_inner().interval.and_then(|interval| Duration::try_from(interval).ok());
        let interval = interval.unwrap_or(Duration::from_secs(1)).max(LEAST_LOAD_INTERVAL);
        let changes = host.watch_load();
        let reports = stream::unfold((host, changes, None::<Instant>), move |(host, mut changes, last)| async move {
            if let Some(last) = last {
                tokio::time::sleep_until(last + LEAST_LOAD_INTERVAL).await;
                let _ = tokio::time::timeout_at(last + interval, changes.changed()).await;
            }
            changes.mark_unchanged();
            let report = WatchLoadResponse { loads: host.loads() };
            Some((Ok(report), (host, changes, Some(Instant::now()))))
        });
        let stopping = self.stopping.clone().cancelled_owned();
        let end = stream::once(std::future::ready(Err(stopped().into())));
        Ok(Response::new(reports.take_until(stopping).chain(end).boxed()))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let request = request.into_inner();
        self.worker.check_fence(request.fence)?;
        let limit = request.time_limit.and_then(|limit| Duration::try_from(limit).ok());
        let limit = limit.unwrap_or(Duration::from_millis(self.worker.settings.drain_time_limit_ms));
        Ok(Response::new(drain(&self.worker, limit).await))
    }

    async fn reset_cache(&self, _: Request<ResetCacheRequest>) -> Result<Response<ResetCacheResponse>, Status> {
        self.worker.up()?;
        let removed_blocks = self.worker.engine.reset_cache()?;
        Ok(Response::new(ResetCacheResponse { removed_blocks }))
    }

    async fn load_adapter(
        &self,
        request: Request<LoadAdapterRequest>,
    ) -> Result<Response<LoadAdapterResponse>, Status> {
        self.worker.up()?;
        let LoadAdapterRequest { name, path } = request.into_inner();
        for (field, value) in [("name", &name), ("path", &path)] {
            if value.is_empty() {
                return Err(KvistError::field(Code::InvalidArgument, field, "must not be empty").into());
            }
        }
        self.worker.engine.load_adapter(&name, &path)?;
        Ok(Response::new(LoadAdapterResponse {}))
    }

    async fn unload_adapter(
        &self,
        request: Request<UnloadAdapterRequest>,
    ) -> Result<Response<UnloadAdapterResponse>, Status> {
        self.worker.up()?;
        self.worker.engine.unload_adapter(&request.into_inner().name)?;
        Ok(Response::new(UnloadAdapterResponse {}))
    }

    async fn start_profile(&self, _: Request<StartProfileRequest>) -> Result<Response<StartProfileResponse>, Status> {
        Err(not_implemented("profiling"))
    }

    async fn stop_profile(&self, _: Request<StopProfileRequest>) -> Result<Response<StopProfileResponse>, Status> {
        Err(not_implemented("profiling"))
    }
}

/// The answer to `Generate`. Dropping it before the end aborts the request.
pub(crate) struct GenerateStream {
    worker: Arc<Worker>,
    request_id: String,
    receiver: EventReceiver,
}

impl Stream for GenerateStream {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_next(context).map(|event| {
            let event = match event? {
                RequestEvent::Delta(delta) => generate_response::Event::Delta(delta),
                RequestEvent::Finished(finished) => generate_response::Event::Finished(finished),
                RequestEvent::Failed(error) => return Some(Err(error.into())),
            };
            Some(Ok(GenerateResponse { event: Some(event) }))
        })
    }
}

impl Drop for GenerateStream {
    fn drop(&mut self) {
        // A request that was refused as a duplicate has ended, and the id is another's.
        if !self.receiver.has_ended() {
            self.worker.abort_request(&self.request_id, AbortReason::Cancelled);
        }
    }
}
