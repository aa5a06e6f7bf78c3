//! `kvist.router.v1.RouterService`.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures::{Stream, StreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::router::v1::{self as wire, router_service_server::RouterService};
use kvist_schedule::BreakerState;
use kvist_telemetry::names;
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status, metadata::MetadataMap};
use tracing::field::Empty;

use crate::{
    convert::{read_grpc_timeout, read_prompt, read_request, write_call, write_delta, write_end, write_reasoning},
    core::RouterCore,
    door::{Entry, Ticket},
    explain::SeenDecision,
    generate::{EmbedInput, Generate as _, GenerateEvent, RequestContext},
    keys::{ApiKeys, Caller},
    leases::{DEFAULT_LEASE, LONGEST_LEASE, Lease},
    parts::{Choice, Intent},
    record::record_failure,
    start::{Router, join_salts},
    target::WorkerNode,
};

/// Metadata, and HTTP header, with the session of a request.
pub const SESSION_METADATA: &str = "kvist-session";
/// Metadata, and HTTP header, with the class of a request.
pub const CLASS_METADATA: &str = "kvist-class";

/// Metadata of a response with the tokens of its prompt, before anything is generated.
pub const PROMPT_TOKENS_METADATA: &str = "kvist-prompt-tokens";

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service over one router.
pub(crate) struct Service {
    pub(crate) core: Arc<RouterCore>,
    pub(crate) keys: Arc<ApiKeys>,
}

fn text_of<'a>(metadata: &'a MetadataMap, name: &str) -> &'a str {
    metadata.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The request id within an id of the OpenAI API, so that people can paste either.
fn without_kind(id: &str) -> &str {
    id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")).unwrap_or(id)
}

fn now_unix_seconds() -> i64 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    i64::try_from(seconds).unwrap_or(0)
}

/// What a request may say of itself in its fields or in its metadata.
#[derive(Default)]
struct Named {
    request_id: String,
    session_id: String,
    class: String,
}

impl Service {
    fn caller(&self, metadata: &MetadataMap) -> Result<Caller, KvistError> {
        let authorization = metadata.get("authorization").and_then(|value| value.to_str().ok());
        self.keys.check(authorization)
    }

    /// What comes with a request: in its fields, or where they are empty in its metadata.
    fn context(
        &self,
        metadata: &MetadataMap,
        fields: Named,
        span: tracing::Span,
    ) -> Result<RequestContext, KvistError> {
        let caller = self.caller(metadata)?;
        let field_or =
            |field: String, name: &str| if field.is_empty() { text_of(metadata, name).to_owned() } else { field };
        Ok(RequestContext {
            request_id: field_or(fields.request_id, "x-request-id"),
            session_id: field_or(fields.session_id, SESSION_METADATA),
            class: field_or(fields.class, CLASS_METADATA),
            deadline: read_grpc_timeout(text_of(metadata, "grpc-timeout")).map(|left| Instant::now() + left),
            span,
            traceparent: text_of(metadata, "traceparent").to_owned(),
            tracestate: text_of(metadata, "tracestate").to_owned(),
            caller: caller.name,
            caller_salt: caller.cache_salt,
            door: "grpc",
        })
    }
}

#[tonic::async_trait]
impl RouterService for Service {
    type GenerateStream = BoxStream<wire::GenerateResponse>;
    type WatchDecisionsStream = BoxStream<wire::WatchDecisionsResponse>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, _, mut request) = request.into_parts();
        let span = kvist_telemetry::request_span!(
            names::SPAN_GENERATE,
            text_of(&metadata, "traceparent"),
            { names::RPC_SYSTEM_NAME } = "grpc",
            { names::RPC_METHOD } = names::SPAN_GENERATE,
            { names::RPC_RESPONSE_STATUS_CODE } = Empty,
        );
        let read = || {
            let named = Named {
                request_id: std::mem::take(&mut request.request_id),
                session_id: std::mem::take(&mut request.session_id),
                class: std::mem::take(&mut request.class),
            };
            let context = self.context(&metadata, named, span.clone())?;
            Ok((context, read_request(request, now_unix_seconds())?))
        };
        let (context, input) = read().inspect_err(|error: &KvistError| record_failure(&span, error.code))?;
        let events = Router(Arc::clone(&self.core)).generate(context, input).await?;
        let request_id = events.request_id.to_string();
        let prompt_tokens = events.prompt_tokens;
        let mut first_id = Some(request_id.clone());
        let messages = events.flat_map(stream::iter).map(move |event| {
            let event = match event {
                GenerateEvent::Delta(delta) => wire::generate_response::Event::Delta(write_delta(delta)),
                GenerateEvent::Reasoning(delta) => wire::generate_response::Event::Reasoning(write_reasoning(delta)),
                GenerateEvent::Call(delta) => wire::generate_response::Event::Call(write_call(delta)),
                GenerateEvent::Finished(end) => wire::generate_response::Event::Finished(write_end(end)),
                GenerateEvent::Failed(error) => return Err(error.into()),
            };
            Ok(wire::GenerateResponse { request_id: first_id.take().unwrap_or_default(), event: Some(event) })
        });
        let mut response = Response::new(Box::pin(messages) as Self::GenerateStream);
        if let Ok(value) = request_id.parse() {
            response.metadata_mut().insert("x-request-id", value);
        }
        response.metadata_mut().insert(PROMPT_TOKENS_METADATA, prompt_tokens.into());
        Ok(response)
    }

    async fn embed(&self, request: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let span = kvist_telemetry::request_span!(
            names::SPAN_EMBED,
            text_of(&metadata, "traceparent"),
            { names::RPC_SYSTEM_NAME } = "grpc",
            { names::RPC_METHOD } = names::SPAN_EMBED,
            { names::RPC_RESPONSE_STATUS_CODE } = Empty,
        );
        let read = || {
            let named = Named { request_id: request.request_id, ..Named::default() };
            let context = self.context(&metadata, named, span.clone())?;
            let now = now_unix_seconds();
            let inputs = request.inputs.into_iter().map(|prompt| read_prompt(Some(prompt), now));
            Ok((context, EmbedInput { model: request.model, inputs: inputs.collect::<Result<_, KvistError>>()? }))
        };
        let (context, input) = read().inspect_err(|error: &KvistError| record_failure(&span, error.code))?;
        let output = Router(Arc::clone(&self.core)).embed(context, input).await?;
        let mut response = Response::new(wire::EmbedResponse { embeddings: output.embeddings });
        if let Ok(value) = output.request_id.parse() {
            response.metadata_mut().insert("x-request-id", value);
        }
        Ok(response)
    }

    async fn tokenize(
        &self,
        request: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeResponse>, Status> {
        self.caller(request.metadata())?;
        let request = request.into_inner();
        let model = self.core.model(&self.core.view(), &request.model)?;
        let prompt = read_prompt(request.prompt, now_unix_seconds())?;
        let token_ids = self.core.tokenize(&model, prompt).await?;
        Ok(Response::new(wire::TokenizeResponse { token_ids, context_tokens: model.context_tokens() }))
    }

    async fn detokenize(
        &self,
        request: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeResponse>, Status> {
        self.caller(request.metadata())?;
        let request = request.into_inner();
        let model = self.core.model(&self.core.view(), &request.model)?;
        let text = model.text().ok_or_else(|| {
            KvistError::new(Code::NoReadyTarget, "no worker of this model has brought its tokenizer yet")
        })?;
        let text = text.decode(&request.token_ids, request.skip_special_tokens);
        Ok(Response::new(wire::DetokenizeResponse { text }))
    }

    async fn list_models(
        &self,
        request: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsResponse>, Status> {
        self.caller(request.metadata())?;
        let models = Router(Arc::clone(&self.core)).models().await?;
        Ok(Response::new(wire::ListModelsResponse { models }))
    }

    async fn select(&self, request: Request<wire::SelectRequest>) -> Result<Response<wire::SelectResponse>, Status> {
        let caller = self.caller(request.metadata())?;
        let deadline = read_grpc_timeout(text_of(request.metadata(), "grpc-timeout"));
        let request = request.into_inner();
        let lease = match request.lease_duration {
            None => DEFAULT_LEASE,
            Some(duration) => Duration::try_from(duration)
                .ok()
                .filter(|lease| !lease.is_zero() && *lease <= LONGEST_LEASE)
                .ok_or_else(|| {
                    KvistError::field(Code::InvalidArgument, "lease_duration", "must be above 0 and at most 1 h")
                })?,
        };
        if self.core.is_draining() {
            return Err(KvistError::new(Code::Draining, "the router is being stopped").into());
        }
        let view = self.core.view();
        let model = self.core.model(&view, &request.model)?;
        let prompt = read_prompt(request.prompt, now_unix_seconds())?;
        let salt = join_salts(&caller.cache_salt, &request.cache_salt);
        let max_tokens = (request.max_tokens > 0).then_some(request.max_tokens);
        let mut demand =
            self.core.demand(&model, prompt, request.adapter, salt, max_tokens, &request.session_id).await?;
        let ticket = Ticket {
            class: &request.class,
            priority: request.priority,
            deadline: Instant::now() + deadline.unwrap_or(self.core.default_deadline()),
            tokens: demand.expected_tokens(),
        };
        let (place, queued_for) = match model.state.door.enter(ticket)? {
            Entry::Admitted(place) => (place, Duration::ZERO),
            Entry::Queued(mut waiting) => {
                tokio::select! {
                    ended = waiting.end() => ended?,
                    () = self.core.stopped.cancelled() => {
                        return Err(KvistError::new(Code::Draining, "the router is being stopped").into());
                    }
                }
                waiting.into_place()
            }
        };
        demand.queued_for = Some(queued_for);
        // Targets may have come and gone meanwhile.
        let view = self.core.view();
        let model = self.core.model(&view, &request.model)?;
        let Choice { decision, placement: result, .. } =
            self.core.selector.select(&view, &model, &demand, &[], 1, Intent::Whole);
        place.placed();
        self.core.metrics.decisions.decided(&decision);
        self.core.explanations.add(&decision);
        let placement = result?;
        let reservation = placement
            .reservation
            .ok_or_else(|| KvistError::new(Code::Internal, "a target was chosen without a reservation"))?;
        let reservation_id = demand.request_id.to_string();
        let expires_at = Instant::now() + lease;
        let lease = Lease { reservation, place, decision: Arc::clone(&decision), expires_at };
        self.core.leases.add(reservation_id.clone(), lease);
        Ok(Response::new(wire::SelectResponse {
            reservation_id,
            target: Some(wire::Target { rank: placement.rank, ..placement.node.target.clone() }),
            decision: Some(decision.to_record()),
            token_ids: demand.tokens.to_vec(),
        }))
    }

    async fn release(&self, request: Request<wire::ReleaseRequest>) -> Result<Response<wire::ReleaseResponse>, Status> {
        self.caller(request.metadata())?;
        let request = request.into_inner();
        let was_active = self.core.leases.release(&request.reservation_id, request.receipt);
        Ok(Response::new(wire::ReleaseResponse { was_active }))
    }

    async fn explain(&self, request: Request<wire::ExplainRequest>) -> Result<Response<wire::ExplainResponse>, Status> {
        let caller = self.caller(request.metadata())?;
        let decisions = match request.into_inner().subject {
            None => return Err(KvistError::field(Code::InvalidArgument, "subject", "is missing").into()),
            Some(wire::explain_request::Subject::RequestId(id)) => {
                self.core.explanations.of(without_kind(&id)).ok_or_else(|| {
                    KvistError::new(Code::NotFound, "this router knows no decision of that request id")
                })?
            }
            Some(wire::explain_request::Subject::DryRun(run)) => {
                let view = self.core.view();
                let model = self.core.model(&view, &run.model)?;
                let prompt = read_prompt(run.prompt, now_unix_seconds())?;
                let salt = join_salts(&caller.cache_salt, &run.cache_salt);
                let demand = self.core.demand(&model, prompt, run.adapter, salt, None, "").await?;
                // A refusal is an answer too: the reasons are in its candidates.
                let choice = self.core.selector.select(&view, &model, &demand, &[], 1, Intent::Explain);
                choice.decisions().map(|decision| decision.to_record()).collect()
            }
        };
        Ok(Response::new(wire::ExplainResponse { decisions }))
    }

    async fn watch_decisions(
        &self,
        request: Request<wire::WatchDecisionsRequest>,
    ) -> Result<Response<Self::WatchDecisionsStream>, Status> {
        self.caller(request.metadata())?;
        let request = request.into_inner();
        let ratio = request.sample_ratio.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&ratio) {
            return Err(KvistError::field(Code::InvalidArgument, "sample_ratio", "must be from 0 to 1").into());
        }
        let state = (self.core.explanations.watch(), self.core.stopped.clone(), 0u64);
        let model = request.model;
        let wanted = move |decision: &SeenDecision| {
            (model.is_empty() || *decision.model == *model) && (ratio >= 1.0 || rand::random::<f64>() < ratio)
        };
        let decisions = stream::unfold((state, wanted), |((mut decisions, stopped, mut skipped), wanted)| async move {
            loop {
                let next = tokio::select! {
                    () = stopped.cancelled() => return None,
                    next = decisions.recv() => next,
                };
                match next {
                    Ok(decision) if wanted(&decision) => {
                        let response = wire::WatchDecisionsResponse { decision: Some(decision.to_record()), skipped };
                        return Some((Ok(response), ((decisions, stopped, 0), wanted)));
                    }
                    Ok(_) => {}
                    Err(RecvError::Lagged(count)) => skipped += count,
                    Err(RecvError::Closed) => return None,
                }
            }
        });
        Ok(Response::new(Box::pin(decisions)))
    }

    async fn list_sources(
        &self,
        request: Request<wire::ListSourcesRequest>,
    ) -> Result<Response<wire::ListSourcesResponse>, Status> {
        self.caller(request.metadata())?;
        let index = self.core.index();
        let memory = index.memory();
        Ok(Response::new(wire::ListSourcesResponse {
            sources: index.sources().iter().map(kvist_events::convert::status_to).collect(),
            index_bytes: memory.bytes,
            index_byte_budget: memory.byte_budget,
        }))
    }

    async fn list_targets(
        &self,
        request: Request<wire::ListTargetsRequest>,
    ) -> Result<Response<wire::ListTargetsResponse>, Status> {
        self.caller(request.metadata())?;
        let view = self.core.view();
        let of_node = |node: &Arc<WorkerNode>| -> Vec<wire::TargetStatus> {
            (0..node.ranks()).map(|rank| self.target_status(node, rank)).collect()
        };
        let targets = view.workers.values().flat_map(of_node).collect();
        Ok(Response::new(wire::ListTargetsResponse { targets }))
    }
}

impl Service {
    fn target_status(&self, node: &WorkerNode, rank: u32) -> wire::TargetStatus {
        let promise = self.core.selector.promise(&node.target_id(rank));
        let connection = node.connection.as_ref();
        let fault = connection.and_then(|connection| connection.fault.load_full());
        let model = self.core.view().models.get(&node.entry.model).cloned();
        let breaker = model.map_or(BreakerState::Closed, |model| model.state.health.state(&node.target_id(rank)));
        let count = u32::try_from(promise.count).unwrap_or(u32::MAX);
        wire::TargetStatus {
            target: Some(wire::Target { rank, ..node.target.clone() }),
            excluded_reason: match (node.excluded(), fault) {
                (Some("description_differs"), Some(error)) => format!("description_differs: {}", error.message),
                (None, _) if breaker == BreakerState::Open => "breaker_open".to_owned(),
                (reason, _) => reason.unwrap_or_default().to_owned(),
            },
            active_requests: count,
            reservations: count,
            reserved_tokens: promise.tokens,
            load: connection.and_then(|connection| connection.link.load(rank)).map(|load| load.report),
            model: node.entry.model.clone(),
        }
    }
}
