//! A whole router: HTTP edge, gRPC server and admin port over one core.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kvist_doors::{ClientTls, Door, DoorKind};
use kvist_errors::{Code, KvistError};
use kvist_router::{
    ApiKeys, Generate, GrpcServer, Listeners, Router, RouterCore, RouterSettings, RouterStatus, maintain,
};
use kvist_telemetry::{AdminServer, Metrics, ReadyFlag};
use kvist_upstream::Upstreams;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    cors::Cors,
    server::{EdgeServer, EdgeSettings},
};

/// Time for the head of a request.
const HEAD_TIME_LIMIT: Duration = Duration::from_secs(30);

/// Time for connections to carry out the last events when the process stops.
pub(crate) const CLOSING_TIME: Duration = Duration::from_secs(2);

/// The admin port of a process with an edge.
pub(crate) async fn start_admin(
    settings: &RouterSettings,
    metrics: Metrics,
    ready: ReadyFlag,
) -> Result<AdminServer, KvistError> {
    let listen: SocketAddr = settings
        .admin_listen
        .parse()
        .map_err(|_| KvistError::field(Code::InvalidArgument, "admin_listen", "must be an IP address and a port"))?;
    AdminServer::start(listen, metrics, ready).await.map_err(|error| cannot_listen("admin_listen", &error))
}

/// Its HTTP edge, before whatever answers.
pub(crate) async fn start_edge(
    settings: &RouterSettings,
    door: &Arc<Door>,
    generate: Arc<dyn Generate>,
    upstreams: Arc<Upstreams>,
    keys: Arc<ApiKeys>,
    ready: ReadyFlag,
) -> Result<EdgeServer, KvistError> {
    let edge = EdgeSettings {
        listen: settings.http_listen.clone(),
        body_limit_bytes: settings.body_limit_bytes,
        head_timeout: HEAD_TIME_LIMIT,
        body_timeout: Duration::from_millis(settings.body_timeout_ms),
        write_timeout: Duration::from_millis(settings.write_timeout_ms),
        keep_alive_interval: Duration::from_millis(settings.keep_alive_interval_ms),
        cors: Cors::new(&settings.cors_allowed_origins)?,
    };
    let started = EdgeServer::start(&edge, door, generate, upstreams, keys, ready).await;
    started.map_err(|error| cannot_listen("http_listen", &error))
}

fn cannot_listen(field: &'static str, error: &std::io::Error) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, format!("cannot be listened on: {error}"))
}

/// Where a router listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RouterAddresses {
    /// OpenAI's API.
    pub http_address: SocketAddr,
    /// `kvist.router.v1`.
    pub grpc_address: SocketAddr,
    /// Metrics and health.
    pub admin_address: SocketAddr,
}

/// A running router.
#[derive(Debug)]
pub struct RouterProcess {
    handle: Handle,
    core: Arc<RouterCore>,
    addresses: RouterAddresses,
    edge: EdgeServer,
    grpc: GrpcServer,
    admin: AdminServer,
    _maintaining: AbortOnDropHandle<()>,
}

impl RouterProcess {
    /// Listens on all three ports and waits for the first cluster state.
    ///
    /// # Errors
    /// An address cannot be listened on, or the API key file or a file of the bus is wrong.
    pub async fn start(settings: RouterSettings) -> Result<Self, KvistError> {
        Self::start_with(settings, Metrics::new()).await
    }

    /// The same with a registry that other parts of the process share.
    ///
    /// # Errors
    /// As for [`RouterProcess::start`].
    pub async fn start_with(settings: RouterSettings, metrics: Metrics) -> Result<Self, KvistError> {
        settings.check_bus()?;
        let ready = ReadyFlag::new("waiting for the first cluster state");
        let keys = Arc::new(ApiKeys::load(settings.api_keys_file.clone())?);
        let tls = ClientTls::open(&settings.tls)?;
        let grpc_door = Door::open(&settings.grpc_door, DoorKind::Grpc)?;
        let http_door = Door::open(&settings.http_door, DoorKind::Http)?;
        let doors = vec![("grpc", Arc::clone(&grpc_door)), ("http", Arc::clone(&http_door))];
        let listeners = Listeners::new(&metrics, Arc::clone(&keys), doors);
        let upstreams = Arc::new(Upstreams::new(&settings, &metrics)?);
        let core = RouterCore::new(&settings, tls.as_ref(), &metrics, ready.clone());
        let admin = start_admin(&settings, metrics.clone(), ready.clone()).await?;
        let grpc = GrpcServer::start(&settings.grpc_listen, &grpc_door, Arc::clone(&core), Arc::clone(&keys))
            .await
            .map_err(|error| cannot_listen("grpc_listen", &error))?;
        let generate = Arc::new(Router(Arc::clone(&core)));
        let edge = start_edge(&settings, &http_door, generate, upstreams, Arc::clone(&keys), ready).await?;
        let addresses = RouterAddresses {
            http_address: edge.address(),
            grpc_address: grpc.address(),
            admin_address: admin.address(),
        };
        let maintaining = AbortOnDropHandle::new(tokio::spawn(maintain(Arc::clone(&core), listeners)));
        Ok(Self { handle: Handle::current(), core, addresses, edge, grpc, admin, _maintaining: maintaining })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> RouterAddresses {
        self.addresses
    }

    /// The router behind the sockets.
    #[must_use]
    pub fn core(&self) -> &Arc<RouterCore> {
        &self.core
    }

    /// Takes up an encoded `ClusterState`; false when it is no newer than the present one, or is held back. May be called
    /// from any thread.
    ///
    /// # Errors
    /// The state is invalid; the present one stays.
    pub fn apply_cluster_state(&self, state: &[u8]) -> Result<bool, KvistError> {
        let _in_runtime = self.handle.enter();
        self.core.apply_cluster_state(state)
    }

    /// Notes whether a controller can be reached.
    pub fn set_control_plane_connected(&self, connected: bool) {
        self.core.set_control_plane_connected(connected);
    }

    /// Numbers for people and supervisors.
    #[must_use]
    pub fn status(&self) -> RouterStatus {
        self.core.status()
    }

    /// Takes nothing new, and waits until what runs has ended or the time is over. True when nothing runs any more.
    pub async fn drain(&self, time_limit: Duration) -> bool {
        self.core.drain(time_limit).await
    }

    /// Ends everything: streams that run end with an error event, never with an end mark.
    pub async fn stop(mut self) {
        self.core.stop();
        tokio::join!(self.edge.stop(CLOSING_TIME), self.grpc.stop(CLOSING_TIME));
        self.admin.stop();
    }
}
