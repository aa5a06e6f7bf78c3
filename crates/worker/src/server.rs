//! The worker's process in Rust: sockets, health, reflection, life cycle.

use std::{sync::Arc, time::Duration};

use kvist_doors::{Door, DoorKind, DoorLayer};
use kvist_errors::{Code, KvistError};
use kvist_history::{HistoryServer, new_incarnation};
use kvist_proto::{
    DESCRIPTOR_SET,
    engine::v1::{Limits, WorkerDescription, engine_service_server::EngineServiceServer},
};
use kvist_telemetry::{AdminServer, GrpcHealth, ReadyFlag, reflection};
use serde::Serialize;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::Server;

use crate::{
    Engine, EngineDescription, EngineHost, WorkerSettings,
    drain::drain,
    host::HostSettings,
    service::Service,
    settings::listen_address,
    worker::{Up, Worker},
};

const SERVICE: &str = "kvist.engine.v1.EngineService";
/// How often numbers are sampled and old side streams dropped.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_millis(500);
/// Calls that one connection may have open; a router needs one for its requests, and some for large prompts and results.
const MOST_CALLS_OF_A_CONNECTION: u32 = 1_024;
/// How long open calls may take to end when the server stops.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Where a worker listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerAddresses {
    /// `host:port` of the gRPC server.
    pub grpc_address: String,
    /// `host:port` of the admin server.
    pub admin_address: String,
    /// This start of the engine.
    pub incarnation: u64,
}

/// A running worker.
#[derive(Debug)]
pub struct WorkerServer {
    worker: Arc<Worker>,
    addresses: WorkerAddresses,
    readiness: Readiness,
    admin: AdminServer,
    stopping: CancellationToken,
    tasks: TaskTracker,
    server: JoinHandle<()>,
}

/// Health and `/readyz`, which say the same.
#[derive(Clone)]
struct Readiness {
    health: GrpcHealth,
    flag: ReadyFlag,
}

impl std::fmt::Debug for Readiness {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.flag.fmt(formatter)
    }
}

impl Readiness {
    async fn set(&self, ready: Result<(), &str>) {
        match ready {
            Ok(()) => self.flag.set_ready(),
            Err(reason) => self.flag.set_not_ready(reason),
        }
        self.health.set_serving(ready.is_ok()).await;
    }
}

impl WorkerServer {
    /// Listens, starts the engine, and returns when it takes requests. Meanwhile health says `NOT_SERVING` and calls are
    /// answered `NOT_READY`. Must be called inside a multi-threaded tokio runtime.
    ///
    /// # Errors
    /// The engine cannot run, or an address cannot be listened on.
    pub async fn start(settings: WorkerSettings, engine: Arc<dyn Engine>) -> Result<Self, KvistError> {
        settings.check_machine()?;
        let admin_listen = listen_address("admin_listen", &settings.admin_listen)?;
        let grpc_listen = listen_address("grpc_listen", &settings.grpc_listen)?;
        let door = Door::open(&settings.door, DoorKind::Grpc)?;
        let listener = TcpListener::bind(grpc_listen).await.map_err(|error| cannot_listen("grpc_listen", &error))?;
        let grpc_address = listener.local_addr().map_err(|error| cannot_listen("grpc_listen", &error))?;
        let digest_interval = Duration::from_millis(settings.digest_interval_ms);
        let worker = Worker::new(settings, engine);
        let flag = ReadyFlag::new("the engine is loading");
        let admin = AdminServer::start(admin_listen, worker.metrics.registry().clone(), flag.clone())
            .await
            .map_err(|error| cannot_listen("admin_listen", &error))?;
        let (health, health_service) = GrpcHealth::start(SERVICE).await;
        let readiness = Readiness { health, flag };
        readiness.set(Err("the engine is loading")).await;
        let stopping = CancellationToken::new();
        let service = Service {
            worker: Arc::clone(&worker),
            kv_events: HistoryServer::new(digest_interval, stopping.clone()),
            stopping: stopping.clone(),
        };
        let service = EngineServiceServer::new(service)
            .max_decoding_message_size(kvist_link::MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(kvist_link::MESSAGE_LIMIT_BYTES);
        let (reflection, reflection_alpha) =
            reflection(DESCRIPTOR_SET, SERVICE).map_err(|error| KvistError::new(Code::Internal, error.to_string()))?;
        let incoming = door.incoming(listener);
        let router = Server::builder()
            .layer(DoorLayer::new(Arc::clone(door.rules())))
            .max_concurrent_streams(MOST_CALLS_OF_A_CONNECTION)
            .http2_keepalive_interval(Some(Duration::from_secs(2)))
            .http2_keepalive_timeout(Some(Duration::from_secs(3)))
            .initial_stream_window_size(4 * 1024 * 1024)
            .initial_connection_window_size(16 * 1024 * 1024)
            .add_service(health_service)
            .add_optional_service(door.serves_reflection().then_some(reflection))
            .add_optional_service(door.serves_reflection().then_some(reflection_alpha))
            .add_service(service);
        let stopped = stopping.clone().cancelled_owned();
        let server = tokio::spawn(async move {
            if let Err(error) = router.serve_with_incoming_shutdown(incoming, stopped).await {
                tracing::error!(error = error.to_string(), "grpc_server_failed");
            }
        });
        let started = Self {
            addresses: WorkerAddresses {
                grpc_address: grpc_address.to_string(),
                admin_address: admin.address().to_string(),
                incarnation: new_incarnation(worker.settings.incarnation_floor),
            },
            worker,
            readiness,
            admin,
            stopping,
            tasks: TaskTracker::new(),
            server,
        };
        match started.start_engine(door).await {
            Ok(()) => Ok(started),
            Err(error) => {
                started.stop().await;
                Err(error)
            }
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> &WorkerAddresses {
        &self.addresses
    }

    /// Whether the engine has failed for good: such a worker is of no use any more.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        *self.worker.watch_failure().borrow()
    }

    /// Takes nothing new and waits for what runs until the limit; then aborts the rest. Returns how many requests ended by
    /// themselves and how many were aborted.
    pub async fn drain(&self, limit: Duration) -> (u32, u32) {
        self.readiness.set(Err("the worker is draining")).await;
        let drained = drain(&self.worker, limit).await;
        (drained.finished_requests, drained.aborted_requests)
    }

    /// Ends the engine and the server. What still runs ends with an error, never as if it were complete.
    pub async fn stop(mut self) {
        self.readiness.set(Err("the worker is being stopped")).await;
        self.readiness.health.close().await;
        self.worker.begin_drain();
        // Ends what follows events and load: such streams have no end of their own.
        self.stopping.cancel();
        // Errors first, so that routers need not find out by the loss of the connection.
        self.worker.link.close();
        let worker = Arc::clone(&self.worker);
        if tokio::task::spawn_blocking(move || worker.engine.close()).await.is_err() {
            tracing::error!("engine_close_panicked");
        }
        self.tasks.close();
        if tokio::time::timeout(STOP_LIMIT, &mut self.server).await.is_err() {
            // A client that reads nothing.
            self.server.abort();
        }
        self.admin.stop();
    }

    async fn start_engine(&self, door: Arc<Door>) -> Result<(), KvistError> {
        let (worker, incarnation) = (Arc::clone(&self.worker), self.addresses.incarnation);
        let runtime = tokio::runtime::Handle::current();
        let starting = tokio::task::spawn_blocking(move || {
            let _runtime = runtime.enter();
            let about = worker.engine.description()?;
            let host = host(&worker, &about, incarnation);
            worker.engine.start(host.clone())?;
            worker.set_up(up(&worker.settings, about, incarnation, host));
            Ok(())
        });
        starting.await.map_err(|_| KvistError::new(Code::EngineFailed, "the engine panicked while it started"))??;
        self.tasks.spawn(end_overdue(Arc::clone(&self.worker), self.stopping.clone()));
        self.tasks.spawn(keep_house(Arc::clone(&self.worker), door, self.readiness.clone(), self.stopping.clone()));
        self.readiness.set(Ok(())).await;
        tracing::info!(grpc_address = self.addresses.grpc_address, incarnation, "worker_ready");
        Ok(())
    }
}

fn host(worker: &Arc<Worker>, about: &EngineDescription, incarnation: u64) -> EngineHost {
    let settings = HostSettings {
        worker_uid: &worker.settings.worker_uid,
        incarnation,
        namespace: worker.settings.effective_namespace(),
        hash_seed: worker.settings.hash_seed,
        block_size_tokens: about.block_size_tokens,
        ranks: about.ranks,
        kv_blocks: about.kv_blocks,
        ring_batches: worker.settings.ring_batches,
    };
    EngineHost::new(&settings, Arc::downgrade(worker))
}

fn up(settings: &WorkerSettings, about: EngineDescription, incarnation: u64, host: EngineHost) -> Up {
    let description = WorkerDescription {
        worker_uid: settings.worker_uid.clone(),
        incarnation,
        model: settings.model.clone(),
        engine: about.engine,
        engine_version: about.version,
        block_size_tokens: about.block_size_tokens,
        ranks: about.ranks.max(1),
        tokenizer_digest: about.tokenizer.as_ref().map(crate::TokenizerFile::digest).unwrap_or_default(),
        template_digest: about.tokenizer.as_ref().map(crate::TokenizerFile::template_digest).unwrap_or_default(),
        namespace: settings.effective_namespace().to_owned(),
        capabilities: Some(about.capabilities),
        limits: Some(Limits {
            context_tokens: about.context_tokens,
            max_running_requests: about.max_running_requests,
            max_waiting_requests: about.max_waiting_requests,
            max_top_logprobs: about.max_top_logprobs,
            kv_blocks: about.kv_blocks,
        }),
        pool_revision: settings.pool_revision.clone(),
        pool_uid: settings.pool_uid.clone(),
        role: settings.role.into(),
        draining: false,
        worker_version: env!("CARGO_PKG_VERSION").to_owned(),
        hash_seed: settings.hash_seed,
        engine_hash_algorithm: about.hash_algorithm,
        kv_layout: about.kv_layout,
    };
    Up {
        description,
        tokenizer: about.tokenizer,
        host,
        claims_hold_for_all: about.claims_hold_for_all,
        makes_choices: about.makes_choices,
    }
}

/// Aborts requests whose time is up.
async fn end_overdue(worker: Arc<Worker>, stopping: CancellationToken) {
    loop {
        let expired = tokio::select! {
            () = stopping.cancelled() => return,
            expired = worker.deadlines.expired() => expired,
        };
        for request_id in expired {
            worker.abort_request(&request_id, kvist_proto::engine::v1::AbortReason::Deadline);
        }
    }
}

async fn keep_house(worker: Arc<Worker>, door: Arc<Door>, readiness: Readiness, stopping: CancellationToken) {
    let mut failure = worker.watch_failure();
    let mut ticks = tokio::time::interval(HOUSEKEEPING_INTERVAL);
    loop {
        tokio::select! {
            () = stopping.cancelled() => return,
            // The value is not kept: it would be a lock.
            true = async { failure.wait_for(|failed| *failed).await.is_ok() } => {
                readiness.set(Err("the engine has failed")).await;
                stopping.cancelled().await;
                return;
            }
            _ = ticks.tick() => {}
        }
        worker.link.expire();
        if let Some(seconds) = door.certificate_expires_at() {
            worker.metrics.certificate_expires(seconds);
        }
        if let Ok(up) = worker.up() {
            worker.metrics.sample(&up.host);
        }
    }
}

fn cannot_listen(field: &str, error: &std::io::Error) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, format!("cannot listen: {error}"))
}
