//! Requests to routers of other processes.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt as _, future::BoxFuture, stream};
use kvist_doors::ClientTls;
use kvist_errors::{Code, DOMAIN, KvistError, from_status};
use kvist_proto::router::v1::{self as wire, ModelSummary, router_service_client::RouterServiceClient};
use kvist_router::{
    EmbedInput, EmbedOutput, EventStream, Generate, GenerateEvent, GenerateInput, PROMPT_TOKENS_METADATA, Prompt,
    RequestContext, Tokens,
};
use kvist_telemetry::{Metrics, ReadyFlag, names, propagate};
use prometheus_client::metrics::gauge::Gauge;
use tonic::{Extensions, Request, Response, Status, Streaming, metadata::MetadataMap, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{
    convert::{read_event, write_prompt, write_request},
    fleet::Fleet,
    running::{Counted, Running, draining},
};

const REQUEST_ID_METADATA: &str = "x-request-id";
/// Events that are handed on together when they are at hand.
const MOST_EVENTS_AT_ONCE: usize = 64;
/// Routers that a request is given to at most: a second one where the first was lost before it began.
const MOST_ATTEMPTS: usize = 2;

/// How routers are reached.
#[derive(Clone, Debug, Default)]
pub struct RemoteSettings {
    /// `host:port` of each.
    pub addresses: Vec<String>,
    /// File with the API key by which they know the edge, sent as a bearer; none where they ask for none.
    pub api_key_file: Option<PathBuf>,
}

/// Routers of other processes, as one.
#[derive(Debug)]
pub struct RemoteRouters {
    fleet: Fleet,
    api_key_file: Option<PathBuf>,
    running: Arc<Running>,
}

impl RemoteRouters {
    /// Connects in the background; `ready` says when one of them serves.
    ///
    /// # Errors
    /// An address cannot be one, or the key file cannot be read.
    pub fn connect(
        settings: &RemoteSettings,
        tls: Option<&ClientTls>,
        metrics: &Metrics,
        ready: &ReadyFlag,
    ) -> Result<Arc<Self>, KvistError> {
        let serving: Gauge =
            metrics.register(names::EDGE_REMOTE_ROUTERS, "Remote routers that serve", Gauge::default());
        let active: Gauge =
            metrics.register(names::EDGE_ACTIVE_REQUESTS, "Requests at remote routers", Gauge::default());
        let running = Running::new(active);
        let fleet = Fleet::connect(&settings.addresses, tls, ready, &serving, &running)?;
        let remote = Self { fleet, api_key_file: settings.api_key_file.clone(), running };
        remote.authorization()?;
        Ok(Arc::new(remote))
    }

    /// Takes nothing new, and waits until what runs has ended or the time is over. True when nothing runs any more.
    pub async fn drain(&self, time_limit: Duration) -> bool {
        self.running.begin_draining();
        self.fleet.announce();
        self.running.ended(time_limit).await
    }

    /// Ends what runs: streams end with an error.
    pub fn stop(&self) {
        self.running.stop();
        self.fleet.announce();
    }

    /// The header by which the routers know this edge. Read each time: whoever renews the key need not say so.
    fn authorization(&self) -> Result<Option<String>, KvistError> {
        let Some(file) = &self.api_key_file else { return Ok(None) };
        let key = std::fs::read_to_string(file).map_err(|error| {
            let why = format!("cannot be read: {error}");
            KvistError::field(Code::InvalidArgument, "remote_api_key_file", why)
        })?;
        Ok(Some(format!("Bearer {}", key.trim())))
    }

    /// What comes with each call: the key of this edge, and of a client's request its deadline and its trace.
    fn metadata(&self, context: Option<&RequestContext>) -> Result<MetadataMap, KvistError> {
        let mut metadata = MetadataMap::new();
        if let Some(authorization) = self.authorization()? {
            let value = authorization.parse().map_err(|_| {
                KvistError::field(Code::InvalidArgument, "remote_api_key_file", "holds what no header can")
            })?;
            metadata.insert("authorization", value);
        }
        let Some(context) = context else { return Ok(metadata) };
        let inbound = Some(context.traceparent.as_str()).filter(|trace| !trace.is_empty());
        let trace = propagate(&context.span, inbound).unwrap_or_default();
        for (name, text) in [("traceparent", trace.as_str()), ("tracestate", context.tracestate.as_str())] {
            if let (false, Ok(value)) = (text.is_empty(), text.parse()) {
                metadata.insert(name, value);
            }
        }
        Ok(metadata)
    }

    /// Asks one router, and another one where the first was lost before it answered.
    ///
    /// * `context`: Of the client's request; none for a question of its own.
    async fn ask<M: Clone, T, F>(
        &self,
        context: Option<&RequestContext>,
        message: M,
        call: impl Fn(RouterServiceClient<Channel>, Request<M>) -> F,
    ) -> Result<Response<T>, KvistError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let metadata = self.metadata(context)?;
        let mut lost = unreachable_router("none is configured");
        for remote in self.fleet.in_turn().into_iter().take(MOST_ATTEMPTS) {
            let mut request = Request::from_parts(metadata.clone(), Extensions::new(), message.clone());
            if let Some(deadline) = context.and_then(|context| context.deadline) {
                request.set_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            let asked = tokio::select! {
                asked = call(remote.client(), request) => asked,
                () = self.running.stopped.cancelled() => return Err(draining()),
            };
            match asked.map_err(Failure::from) {
                Ok(answer) => return Ok(answer),
                Err(Failure::Answered(error)) if error.code == Code::Draining => lost = error,
                Err(Failure::Answered(error)) => return Err(error),
                Err(Failure::Lost(reason)) => lost = unreachable_router(&format!("{}: {reason}", remote.address)),
            }
        }
        Err(lost.before_start())
    }
}

impl Generate for RemoteRouters {
    fn generate(
        &self,
        context: RequestContext,
        input: GenerateInput,
    ) -> BoxFuture<'_, Result<EventStream, KvistError>> {
        Box::pin(async move {
            let counted = self.running.begin()?;
            let message = write_request(&context, input);
            let response = self
                .ask(Some(&context), message, |mut client, request| async move { client.generate(request).await })
                .await?;
            Ok(events_of(response, counted, Arc::clone(&self.running)))
        })
    }

    fn embed(&self, context: RequestContext, input: EmbedInput) -> BoxFuture<'_, Result<EmbedOutput, KvistError>> {
        Box::pin(async move {
            let _counted = self.running.begin()?;
            let inputs = input.inputs.into_iter().map(write_prompt).collect();
            let message = wire::EmbedRequest { model: input.model, inputs, request_id: context.request_id.clone() };
            let response = self
                .ask(Some(&context), message, |mut client, request| async move { client.embed(request).await })
                .await?;
            let request_id = text_of(response.metadata(), REQUEST_ID_METADATA).into();
            Ok(EmbedOutput { request_id, embeddings: response.into_inner().embeddings })
        })
    }

    fn detokenize<'a>(&'a self, model: &'a str, token_ids: &'a [u32]) -> BoxFuture<'a, Result<String, KvistError>> {
        Box::pin(async move {
            let message = wire::DetokenizeRequest {
                model: model.to_owned(),
                token_ids: token_ids.to_vec(),
                skip_special_tokens: false,
            };
            let response =
                self.ask(None, message, |mut client, request| async move { client.detokenize(request).await }).await?;
            Ok(response.into_inner().text)
        })
    }

    fn tokenize<'a>(&'a self, model: &'a str, prompt: Prompt) -> BoxFuture<'a, Result<Tokens, KvistError>> {
        Box::pin(async move {
            let message = wire::TokenizeRequest { model: model.to_owned(), prompt: Some(write_prompt(prompt)) };
            let response =
                self.ask(None, message, |mut client, request| async move { client.tokenize(request).await }).await?;
            let tokens = response.into_inner();
            Ok(Tokens { ids: tokens.token_ids, context_tokens: tokens.context_tokens })
        })
    }

    fn models(&self) -> BoxFuture<'_, Result<Vec<ModelSummary>, KvistError>> {
        Box::pin(async move {
            let message = wire::ListModelsRequest {};
            let response =
                self.ask(None, message, |mut client, request| async move { client.list_models(request).await }).await?;
            Ok(response.into_inner().models)
        })
    }
}

/// The events of an answer; the request ends at the router when they are dropped.
fn events_of(
    response: Response<Streaming<wire::GenerateResponse>>,
    counted: Counted,
    running: Arc<Running>,
) -> EventStream {
    let request_id: Arc<str> = text_of(response.metadata(), REQUEST_ID_METADATA).into();
    let prompt_tokens = number_of(response.metadata(), PROMPT_TOKENS_METADATA);
    let messages = response.into_inner().ready_chunks(MOST_EVENTS_AT_ONCE);
    let batches = stream::unfold(Some((messages, counted)), move |state| {
        let stopped = running.stopped.clone();
        async move {
            let (mut messages, counted) = state?;
            let batch = tokio::select! {
                messages = messages.next() => read_batch(messages),
                () = stopped.cancelled() => vec![GenerateEvent::Failed(draining())],
            };
            let has_ended = batch.last().is_some_and(GenerateEvent::is_terminal);
            Some((batch, (!has_ended).then_some((messages, counted))))
        }
    });
    EventStream::new(request_id, prompt_tokens, batches)
}

/// What was at hand, up to the end.
fn read_batch(messages: Option<Vec<Result<wire::GenerateResponse, Status>>>) -> Vec<GenerateEvent> {
    let lost = |reason: &str| KvistError::new(Code::RouterLost, format!("the router was lost: {reason}"));
    let Some(messages) = messages else {
        return vec![GenerateEvent::Failed(lost("its answer ended without an end"))];
    };
    let mut events = Vec::with_capacity(messages.len());
    for message in messages {
        let event = match message.map_err(Failure::from) {
            Ok(message) => read_event(message).unwrap_or_else(GenerateEvent::Failed),
            Err(Failure::Answered(error)) => GenerateEvent::Failed(error),
            Err(Failure::Lost(reason)) => GenerateEvent::Failed(lost(&reason)),
        };
        let is_end = event.is_terminal();
        events.push(event);
        if is_end {
            break;
        }
    }
    events
}

/// Why a router did not answer.
enum Failure {
    /// It said so itself.
    Answered(KvistError),
    /// The connection did.
    Lost(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let is_of_kvist = status.get_details_error_info().is_some_and(|info| info.domain == DOMAIN);
        let may_be_of_the_connection =
            matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled);
        if is_of_kvist || !may_be_of_the_connection {
            Self::Answered(from_status(&status))
        } else {
            Self::Lost(status.message().to_owned())
        }
    }
}

fn unreachable_router(reason: &str) -> KvistError {
    KvistError::new(Code::RouterUnavailable, format!("no router can be reached; the last one was {reason}"))
}

fn number_of(metadata: &MetadataMap, name: &str) -> u32 {
    metadata.get(name).and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn text_of(metadata: &MetadataMap, name: &str) -> String {
    metadata.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}
