//! The gRPC server of a router.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use kvist_proto::router::v1::router_service_server::RouterServiceServer;
use kvist_telemetry::{GrpcHealth, reflection};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{core::RouterCore, keys::ApiKeys, service::Service};

const MESSAGE_LIMIT_BYTES: usize = 64 * 1024 * 1024;
const SERVICE: &str = "kvist.router.v1.RouterService";

/// A running gRPC server. Dropping it ends its connections.
#[derive(Debug)]
pub struct GrpcServer {
    address: SocketAddr,
    closing: CancellationToken,
    task: AbortOnDropHandle<()>,
    health: GrpcHealth,
    following: AbortOnDropHandle<()>,
}

impl GrpcServer {
    /// Listens and serves from then on; NOT_SERVING until the first cluster state.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn start(listen: &str, core: Arc<RouterCore>, keys: Arc<ApiKeys>) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let (health, health_service) = GrpcHealth::start(SERVICE).await;
        let mut serving = core.watch_serving();
        health.set_serving(*serving.borrow_and_update()).await;
        let following = tokio::spawn({
            let health = health.clone();
            async move {
                while serving.changed().await.is_ok() {
                    let is_serving = *serving.borrow_and_update();
                    health.set_serving(is_serving).await;
                }
            }
        });
        let (reflection, reflection_alpha) =
            reflection(kvist_proto::DESCRIPTOR_SET, SERVICE).map_err(|error| io::Error::other(error.to_string()))?;
        let closing = CancellationToken::new();
        let closed = closing.clone().cancelled_owned();
        let service = RouterServiceServer::new(Service { core, keys })
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        let routes = tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .http2_keepalive_interval(Some(Duration::from_secs(30)))
            .http2_keepalive_timeout(Some(Duration::from_secs(10)))
            .add_service(health_service)
            .add_service(reflection)
            .add_service(reflection_alpha)
            .add_service(service);
        let incoming = tokio_stream::StreamExt::map(TcpListenerStream::new(listener), |connection| {
            // Frames are small and wait for nothing.
            connection.inspect(|stream| drop(stream.set_nodelay(true)))
        });
        let task = tokio::spawn(async move {
            if let Err(error) = routes.serve_with_incoming_shutdown(incoming, closed).await {
                tracing::error!(%error, "grpc_server_failed");
            }
        });
        let (task, following) = (AbortOnDropHandle::new(task), AbortOnDropHandle::new(following));
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
        self.following.abort();
        self.health.close().await;
        self.closing.cancel();
        // What has not ended in time is aborted with the task.
        let _ = tokio::time::timeout(time_limit, self.task).await;
    }
}
