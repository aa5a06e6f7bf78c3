//! The gRPC server of a router.

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, time::Duration};

use kvist_doors::{Door, DoorLayer};
use kvist_proto::router::v1::router_service_server::RouterServiceServer;
use kvist_telemetry::{GrpcHealth, reflection};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{core::RouterCore, keys::ApiKeys, service::Service};

const MESSAGE_LIMIT_BYTES: usize = 64 * 1024 * 1024;
/// Calls that one connection may have open; further ones wait at the client. How many requests run is for admission.
const MOST_CALLS_OF_A_CONNECTION: u32 = 4_096;
const SERVICE: &str = "kvist.router.v1.RouterService";

/// A running gRPC server. Dropping it ends its connections.
#[derive(Debug)]
pub struct GrpcServer {
    address: SocketAddr,
    closing: CancellationToken,
    task: AbortOnDropHandle<()>,
    health: GrpcHealth,
    following: [AbortOnDropHandle<()>; 2],
}

impl GrpcServer {
    /// Listens and serves from then on; NOT_SERVING until the first cluster state.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn start(listen: &str, door: &Arc<Door>, core: Arc<RouterCore>, keys: Arc<ApiKeys>) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let (health, health_service) = GrpcHealth::start(SERVICE).await;
        let mut serving = core.watch_serving();
        health.set_serving(*serving.borrow_and_update()).await;
        let following = tokio::spawn(follow_serving(health.clone(), serving));
        let following_awareness = tokio::spawn(follow_awareness(health.clone(), core.watch_awareness()));
        let (reflection, reflection_alpha) =
            reflection(kvist_proto::DESCRIPTOR_SET, SERVICE).map_err(|error| io::Error::other(error.to_string()))?;
        let closing = CancellationToken::new();
        let closed = closing.clone().cancelled_owned();
        let service = RouterServiceServer::new(Service { core, keys })
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        let incoming = door.incoming(listener);
        let routes = tonic::transport::Server::builder()
            .layer(DoorLayer::new(Arc::clone(door.rules())))
            .tcp_nodelay(true)
            .max_concurrent_streams(MOST_CALLS_OF_A_CONNECTION)
            .http2_keepalive_interval(Some(Duration::from_secs(30)))
            .http2_keepalive_timeout(Some(Duration::from_secs(10)))
            .add_service(health_service)
            .add_optional_service(door.serves_reflection().then_some(reflection))
            .add_optional_service(door.serves_reflection().then_some(reflection_alpha))
            .add_service(service);
        let task = tokio::spawn(async move {
            if let Err(error) = routes.serve_with_incoming_shutdown(incoming, closed).await {
                tracing::error!(%error, "grpc_server_failed");
            }
        });
        let task = AbortOnDropHandle::new(task);
        let following = [following, following_awareness].map(AbortOnDropHandle::new);
        Ok(Self { address, closing, task, health, following })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no new connections, lets calls end for as long as given, then ends them.
    pub async fn stop(self, time_limit: Duration) {
        // Nothing may set the health anew once it is closed.
        self.following.iter().for_each(|following| following.abort());
        self.health.close().await;
        self.closing.cancel();
        // What has not ended in time is aborted with the task.
        let _ = tokio::time::timeout(time_limit, self.task).await;
    }
}

async fn follow_serving(health: GrpcHealth, mut serving: watch::Receiver<bool>) {
    while serving.changed().await.is_ok() {
        let is_serving = *serving.borrow_and_update();
        health.set_serving(is_serving).await;
    }
}

/// Keeps a health service for each model that says whether its caches are known. It has a name of its own, so that no
/// load balancer takes a router out for it.
async fn follow_awareness(health: GrpcHealth, mut awareness: watch::Receiver<BTreeMap<Arc<str>, bool>>) {
    let mut known: BTreeMap<Arc<str>, bool> = BTreeMap::new();
    loop {
        let models = awareness.borrow_and_update().clone();
        for model in known.keys().filter(|model| !models.contains_key(*model)) {
            health.set_condition(&awareness_service(model), None).await;
        }
        for (model, is_aware) in models.iter().filter(|(model, is_aware)| known.get(*model) != Some(is_aware)) {
            health.set_condition(&awareness_service(model), Some(*is_aware)).await;
        }
        known = models;
        if awareness.changed().await.is_err() {
            return;
        }
    }
}

fn awareness_service(model: &str) -> String {
    format!("kvist.kv_awareness/{model}")
}
