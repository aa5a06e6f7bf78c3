//! `RouterService` over the core.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    DESCRIPTOR_SET,
    router::v1::{
        explain_request::Subject,
        generate_response::Event,
        router_service_server::{RouterService, RouterServiceServer},
        *,
    },
};
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status, service::Routes};
use tonic_health::ServingStatus;

use crate::{
    convert,
    core::{DecisionInput, RouterCore},
    generation::TextEvent,
};

const MESSAGE_BYTES: usize = 64 * 1024 * 1024;
const SERVICE: &str = "kvist.router.v1.RouterService";
const LONGEST_LEASE: Duration = Duration::from_secs(3600);

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

struct Service(Arc<RouterCore>);

/// All gRPC services of a router: its own, health, and reflection. Health is NOT_SERVING until the first cluster state.
///
/// # Errors
/// The descriptors cannot be read.
pub async fn grpc_routes(core: Arc<RouterCore>) -> Result<Routes, KvistError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let reporter = health.clone();
    let set = move |status| {
        let health = reporter.clone();
        async move {
            for name in ["", "readiness", SERVICE] {
                health.set_service_status(name, status).await;
            }
        }
    };
    set(ServingStatus::NotServing).await;
    health.set_service_status("liveness", ServingStatus::Serving).await;
    let mut ready = core.ready.subscribe();
    tokio::spawn(async move {
        loop {
            let status = if *ready.borrow_and_update() { ServingStatus::Serving } else { ServingStatus::NotServing };
            set(status).await;
            if ready.changed().await.is_err() {
                return;
            }
        }
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name("grpc.health.v1.Health")
    };
    let internal = |error: tonic_reflection::server::Error| KvistError::new(Code::Internal, error.to_string());
    let service = RouterServiceServer::new(Service(core))
        .max_decoding_message_size(MESSAGE_BYTES)
        .max_encoding_message_size(MESSAGE_BYTES);
    Ok(Routes::new(service)
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(internal)?)
        .add_service(reflection().build_v1alpha().map_err(internal)?))
}

fn not_implemented(what: &str) -> Status {
    KvistError::new(Code::NotImplemented, format!("{what} is not supported by this version")).into()
}

/// The client's deadline: `grpc-timeout` is digits and a unit.
fn time_left<T>(request: &Request<T>) -> Option<Duration> {
    let value = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[tonic::async_trait]
impl RouterService for Service {
    type GenerateStream = BoxStream<GenerateResponse>;
    type WatchDecisionsStream = BoxStream<WatchDecisionsResponse>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let time_left = time_left(&request);
        let traceparent =
            request.metadata().get("traceparent").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let traceparent = traceparent.to_owned();
        let generation = self.0.generate(request.into_inner(), time_left, traceparent).await.map_err(Status::from)?;
        let request_id = Some(generation.request_id().to_owned());
        let events = stream::unfold((generation, request_id), |(mut generation, mut request_id)| async move {
            let events = generation.next_events().await?;
            let responses: Vec<Result<GenerateResponse, Status>> = events
                .into_iter()
                .map(|event| {
                    let event = match event {
                        TextEvent::Delta(delta) => Event::Delta(delta),
                        TextEvent::Finished(finished) => Event::Finished(*finished),
                        TextEvent::Failed(error) => return Err(error.into()),
                    };
                    Ok(GenerateResponse { request_id: request_id.take().unwrap_or_default(), event: Some(event) })
                })
                .collect();
            Some((stream::iter(responses), (generation, request_id)))
        });
        Ok(Response::new(Box::pin(events.flatten())))
    }

    async fn embed(&self, _: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        Err(not_implemented("Embed"))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        let request = request.into_inner();
        let cluster = self.0.cluster.load_full();
        let entry = cluster.model(&request.model).map_err(Status::from)?;
        let tokenized = self.0.tokenize(entry, request.prompt).await.map_err(Status::from)?;
        Ok(Response::new(TokenizeResponse { token_ids: tokenized.ids, context_tokens: context_tokens(entry) }))
    }

    async fn detokenize(&self, request: Request<DetokenizeRequest>) -> Result<Response<DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let cluster = self.0.cluster.load_full();
        let entry = cluster.model(&request.model).map_err(Status::from)?;
        let text = entry.text.read().clone();
        let text =
            text.ok_or_else(|| KvistError::new(Code::NoReadyTarget, "no worker of the model has answered yet"))?;
        Ok(Response::new(DetokenizeResponse { text: text.decode(&request.token_ids, request.skip_special_tokens) }))
    }

    async fn list_models(&self, _: Request<ListModelsRequest>) -> Result<Response<ListModelsResponse>, Status> {
        let cluster = self.0.cluster.load_full();
        let mut models: Vec<ModelSummary> = cluster
            .models
            .iter()
            .map(|(name, entry)| ModelSummary {
                name: name.clone(),
                ready_targets: u32::try_from(
                    entry
                        .workers
                        .iter()
                        .filter(|worker| !worker.entry.draining && worker.link.state() != kvist_link::LinkState::Lost)
                        .count(),
                )
                .unwrap_or(u32::MAX),
                context_tokens: context_tokens(entry),
                created_at: entry.model.created_at,
            })
            .collect();
        models.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(Response::new(ListModelsResponse { models }))
    }

    async fn select(&self, request: Request<SelectRequest>) -> Result<Response<SelectResponse>, Status> {
        let request = request.into_inner();
        let cluster = self.0.cluster.load_full();
        let entry = cluster.model(&request.model).map_err(Status::from)?;
        let tokenized = self.0.tokenize(entry, request.prompt).await.map_err(Status::from)?;
        let reservation_id = self.0.new_request_id("select");
        let input = DecisionInput {
            request_id: &reservation_id,
            ids: &tokenized.ids,
            adapter: &request.adapter,
            cache_salt: &request.cache_salt,
            attempt: 1,
            reserve: true,
        };
        let chosen = self.0.choose(&cluster, entry, input, &[]).map_err(|refused| Status::from(refused.0))?;
        let lease = request.lease_duration.and_then(|lease| Duration::try_from(lease).ok());
        let lease = lease.unwrap_or(Duration::from_secs(60)).min(LONGEST_LEASE);
        if let Some(reserved) = chosen.reserved {
            let expires = std::time::Instant::now() + lease;
            self.0.leases.lock().insert(reservation_id.clone(), (reserved.into_id(), expires));
            let (core, name) = (Arc::clone(&self.0), reservation_id.clone());
            tokio::spawn(async move {
                tokio::time::sleep(lease).await;
                release(&core, &name);
            });
        }
        self.0.records.add(chosen.record.clone());
        Ok(Response::new(SelectResponse {
            reservation_id,
            target: chosen.worker.entry.target.clone(),
            decision: Some(chosen.record),
            token_ids: tokenized.ids,
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let request = request.into_inner();
        let was_active = release(&self.0, &request.reservation_id);
        self.0.records.complete(&request.reservation_id, "released", request.receipt.as_ref(), None);
        Ok(Response::new(ReleaseResponse { was_active }))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let dry_run = match request.into_inner().subject {
            Some(Subject::RequestId(request_id)) => {
                // Clients know the id with the prefix of the HTTP API.
                let bare = request_id.strip_prefix("chatcmpl-").or_else(|| request_id.strip_prefix("cmpl-"));
                let decisions = self.0.records.get(bare.unwrap_or(&request_id));
                let decisions = decisions.ok_or_else(|| {
                    KvistError::new(Code::NotFound, "this router knows no such request; it remembers the last 10,000")
                })?;
                return Ok(Response::new(ExplainResponse { decisions }));
            }
            Some(Subject::DryRun(dry_run)) => dry_run,
            None => return Err(KvistError::field(Code::InvalidArgument, "subject", "is missing").into()),
        };
        let cluster = self.0.cluster.load_full();
        let entry = cluster.model(&dry_run.model).map_err(Status::from)?;
        let tokenized = self.0.tokenize(entry, dry_run.prompt).await.map_err(Status::from)?;
        let input = DecisionInput {
            request_id: "",
            ids: &tokenized.ids,
            adapter: &dry_run.adapter,
            cache_salt: &dry_run.cache_salt,
            attempt: 1,
            reserve: false,
        };
        let decision = match self.0.choose(&cluster, entry, input, &[]) {
            Ok(chosen) => chosen.record,
            Err(refused) => refused.1,
        };
        Ok(Response::new(ExplainResponse { decisions: vec![decision] }))
    }

    async fn watch_decisions(
        &self,
        request: Request<WatchDecisionsRequest>,
    ) -> Result<Response<Self::WatchDecisionsStream>, Status> {
        let request = request.into_inner();
        let ratio = request.sample_ratio.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&ratio) {
            return Err(KvistError::field(Code::InvalidArgument, "sample_ratio", "must be from 0 to 1").into());
        }
        let decisions = BroadcastStream::new(self.0.records.subscribe()).filter_map(move |decision| {
            let response = match decision {
                Ok(decision) => {
                    let wanted = request.model.is_empty() || request.model == decision.model;
                    (wanted && rand::random::<f64>() < ratio)
                        .then_some(WatchDecisionsResponse { decision: Some(decision), skipped: 0 })
                }
                Err(tokio_stream::wrappers::errors::BroadcastStreamRecvError::Lagged(skipped)) => {
                    Some(WatchDecisionsResponse { decision: None, skipped })
                }
            };
            std::future::ready(response.map(Ok))
        });
        Ok(Response::new(Box::pin(decisions)))
    }

    async fn list_sources(&self, _: Request<ListSourcesRequest>) -> Result<Response<ListSourcesResponse>, Status> {
        let memory = self.0.index.memory();
        let sources = self.0.index.sources().into_iter().map(|source| SourceStatus {
            source: Some(kvist_proto::events::v1::SourceId {
                worker_uid: source.source.worker.as_str().to_owned(),
                rank: source.source.rank.0,
                incarnation: source.incarnation.0,
            }),
            state: convert::state(source.state).into(),
            next_sequence: source.next_sequence,
            tiers: source
                .tiers
                .iter()
                .map(|tier| kvist_proto::events::v1::TierDigest {
                    tier: tier.tier.to_number(),
                    block_count: tier.block_count,
                    digest: tier.digest.to_be_bytes().to_vec().into(),
                })
                .collect(),
            heard_at: Some(convert::timestamp(source.heard_at_unix_nanos)),
            gaps_total: source.gaps,
            snapshots_total: source.snapshots,
            mismatches_total: source.mismatches,
        });
        Ok(Response::new(ListSourcesResponse {
            sources: sources.collect(),
            index_bytes: memory.bytes,
            index_byte_budget: memory.byte_budget,
        }))
    }

    async fn list_targets(&self, _: Request<ListTargetsRequest>) -> Result<Response<ListTargetsResponse>, Status> {
        let cluster = self.0.cluster.load_full();
        let reservations = self.0.reservations.lock();
        let mut targets: Vec<TargetStatus> = Vec::new();
        for entry in cluster.models.iter().filter(|(name, entry)| **name == entry.model.name).map(|(_, entry)| entry) {
            for worker in &entry.workers {
                let target = kvist_schedule::TargetId { worker: worker.uid().into(), rank: kvist_blocks::Rank(0) };
                let promise = reservations.of(&target);
                let excluded_reason = if worker.entry.draining || worker.link.is_draining() {
                    "draining"
                } else if worker.link.state() == kvist_link::LinkState::Lost {
                    "connection_lost"
                } else {
                    ""
                };
                targets.push(TargetStatus {
                    target: worker.entry.target.clone(),
                    excluded_reason: excluded_reason.to_owned(),
                    active_requests: u32::try_from(promise.count).unwrap_or(u32::MAX),
                    reservations: u32::try_from(promise.count).unwrap_or(u32::MAX),
                    reserved_tokens: promise.tokens,
                    load: worker.link.load(0).map(|(load, _)| load),
                    model: entry.model.name.clone(),
                });
            }
        }
        let uid = |status: &TargetStatus| status.target.as_ref().map(|target| target.worker_uid.clone());
        targets.sort_by_key(uid);
        Ok(Response::new(ListTargetsResponse { targets }))
    }
}

fn release(core: &RouterCore, reservation_id: &str) -> bool {
    let lease = core.leases.lock().remove(reservation_id);
    lease.is_some_and(|(id, _)| core.reservations.lock().release(id))
}

fn context_tokens(entry: &crate::cluster::ModelEntry) -> u32 {
    entry
        .workers
        .iter()
        .filter_map(|worker| match worker.link.state() {
            kvist_link::LinkState::Connected(description) => {
                description.limits.as_ref().map(|limits| limits.context_tokens)
            }
            kvist_link::LinkState::Lost => None,
        })
        .min()
        .unwrap_or(0)
}
