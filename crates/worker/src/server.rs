//! The worker's process in Rust: sockets, health, reflection, life cycle.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kvist_blocks::Incarnation;
use kvist_errors::{Code, KvistError};
use kvist_proto::{
    DESCRIPTOR_SET,
    engine::v1::{Limits, WorkerDescription, engine_service_server::EngineServiceServer},
};
use serde::{Deserialize, Serialize};
use tokio::{net::TcpListener, sync::watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::{
    Engine, EngineHost,
    service::{Service, Shared, drain},
};

const MESSAGE_BYTES: usize = 64 * 1024 * 1024;
const SERVICE: &str = "kvist.engine.v1.EngineService";

/// What a worker is told at its start.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerSettings {
    /// UID of the slot.
    pub worker_uid: String,
    /// Name of the served model.
    pub model: String,
    /// Namespace of block hashes; the model's name when empty.
    pub namespace: String,
    /// UID of the pool.
    pub pool_uid: String,
    /// Generation of the pool's contract.
    pub pool_revision: String,
    /// Number of `kvist.engine.v1.Role`.
    pub role: i32,
    /// Seed of the cluster's block hashes.
    pub hash_seed: u64,
    /// `host:port` of the gRPC server; port 0 takes a free one.
    pub grpc_listen: String,
    /// The incarnation is larger than this.
    pub incarnation_floor: u64,
    /// Batches that the ledger's ring holds.
    pub ring_batches: usize,
    /// Milliseconds between digests.
    pub digest_interval_ms: u64,
    /// Milliseconds that running requests may take when draining.
    pub drain_time_limit_ms: u64,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self {
            worker_uid: "worker-0".to_owned(),
            model: "model".to_owned(),
            namespace: String::new(),
            pool_uid: String::new(),
            pool_revision: String::new(),
            role: 1,
            hash_seed: 0,
            grpc_listen: "127.0.0.1:0".to_owned(),
            incarnation_floor: 0,
            ring_batches: 16_384,
            digest_interval_ms: 2_000,
            drain_time_limit_ms: 30_000,
        }
    }
}

/// Where a worker listens.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerAddresses {
    /// `host:port` of the gRPC server.
    pub grpc_address: String,
    /// This start of the engine.
    pub incarnation: u64,
}

/// An incarnation above a floor and, on a clock that does not step back, above all earlier ones of any slot.
#[must_use]
pub fn new_incarnation(floor: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX).max(floor.saturating_add(1))
}

/// A running worker.
pub struct WorkerServer {
    shared: Arc<Shared>,
    addresses: WorkerAddresses,
    health: HealthReporter,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl WorkerServer {
    /// Starts the engine and serves it.
    ///
    /// # Errors
    /// The engine cannot run, or the address cannot be listened on.
    pub async fn start(settings: WorkerSettings, engine: Arc<dyn Engine>) -> Result<Self, KvistError> {
        let about = engine.description();
        let incarnation = new_incarnation(settings.incarnation_floor);
        let namespace = if settings.namespace.is_empty() { settings.model.clone() } else { settings.namespace.clone() };
        let block_size = about.block_size_tokens as usize;
        let host = EngineHost::new(
            &namespace,
            settings.hash_seed,
            Incarnation(incarnation),
            block_size,
            settings.ring_batches,
        );
        let hex = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
        let tokenizer = about.tokenizer.clone();
        let template =
            tokenizer.as_ref().map(|file| file.chat_template.as_str()).filter(|template| !template.is_empty());
        let description = WorkerDescription {
            worker_uid: settings.worker_uid,
            incarnation,
            model: settings.model,
            engine: about.engine,
            engine_version: about.version,
            block_size_tokens: about.block_size_tokens,
            ranks: 1,
            tokenizer_digest: tokenizer.as_ref().map(|file| hex(&file.json)).unwrap_or_default(),
            template_digest: template.map(|template| hex(template.as_bytes())).unwrap_or_default(),
            namespace,
            capabilities: Some(about.capabilities),
            limits: Some(Limits {
                context_tokens: about.context_tokens,
                max_running_requests: about.max_running_requests,
                max_waiting_requests: about.max_waiting_requests,
                max_top_logprobs: about.max_top_logprobs,
                kv_blocks: about.kv_blocks,
            }),
            pool_revision: settings.pool_revision,
            pool_uid: settings.pool_uid,
            role: settings.role,
            draining: false,
            worker_version: env!("CARGO_PKG_VERSION").to_owned(),
            hash_seed: settings.hash_seed,
        };
        let shared = Arc::new(Shared {
            engine: Arc::clone(&engine),
            host: host.clone(),
            description,
            tokenizer,
            digest_interval: Duration::from_millis(settings.digest_interval_ms.max(10)),
            drain_time_limit: Duration::from_millis(settings.drain_time_limit_ms),
            running: Arc::default(),
            prompts: parking_lot::Mutex::default(),
        });
        let listener = listen(&settings.grpc_listen).await?;
        let address = listener.local_addr().map_err(|error| KvistError::new(Code::Internal, error.to_string()))?;
        let (health, health_service) = tonic_health::server::health_reporter();
        set_health(&health, ServingStatus::NotServing).await;
        let service = EngineServiceServer::new(Service(Arc::clone(&shared)))
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                .with_service_name(SERVICE)
                .with_service_name("grpc.health.v1.Health")
        };
        let internal = |error: tonic_reflection::server::Error| KvistError::new(Code::Internal, error.to_string());
        let (stop, mut stopped) = watch::channel(false);
        let router = Server::builder()
            .tcp_nodelay(true)
            .http2_keepalive_interval(Some(Duration::from_secs(2)))
            .http2_keepalive_timeout(Some(Duration::from_secs(3)))
            .add_service(health_service)
            .add_service(reflection().build_v1().map_err(internal)?)
            .add_service(reflection().build_v1alpha().map_err(internal)?)
            .add_service(service);
        let task = tokio::spawn(async move {
            let until = async move {
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            let serving = router.serve_with_incoming_shutdown(TcpListenerStream::new(listener), until);
            // Open `Connect` streams would keep the server for ever; requests have ended by now.
            let _ = serving.await;
        });
        engine.start(host)?;
        set_health(&health, ServingStatus::Serving).await;
        let addresses = WorkerAddresses { grpc_address: address.to_string(), incarnation };
        Ok(Self { shared, addresses, health, stop, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> &WorkerAddresses {
        &self.addresses
    }

    /// Takes nothing new and waits for what runs until the limit; then aborts the rest.
    pub async fn drain(&self, limit: Duration) {
        set_health(&self.health, ServingStatus::NotServing).await;
        drain(&self.shared, limit).await;
    }

    /// Ends the engine and the server.
    pub async fn stop(self) {
        self.shared.engine.close();
        let _ = self.stop.send(true);
        let mut task = self.task;
        if tokio::time::timeout(Duration::from_millis(500), &mut task).await.is_err() {
            task.abort();
        }
    }
}

async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for name in ["", "liveness", "readiness", SERVICE] {
        // A process that answers is alive, ready or not.
        let status = if name == "liveness" { ServingStatus::Serving } else { status };
        health.set_service_status(name, status).await;
    }
}

/// Listens on `host:port` with a message that helps.
async fn listen(address: &str) -> Result<TcpListener, KvistError> {
    let parsed: SocketAddr = address.parse().map_err(|_| {
        KvistError::field(Code::InvalidArgument, "grpc_listen", "must be host:port with a numeric host")
    })?;
    TcpListener::bind(parsed).await.map_err(|error| {
        KvistError::field(Code::InvalidArgument, "grpc_listen", format!("cannot listen on {parsed}: {error}"))
    })
}
