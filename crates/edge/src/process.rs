//! The router's process in Rust: both servers over one core.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kvist_errors::{Code, KvistError};
use kvist_router::{RouterCore, RouterSettings, grpc_routes};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use crate::http::{EdgeSettings, http_routes};

/// What a router is told at its start.
#[derive(Clone, Debug)]
pub struct RouterProcessSettings {
    /// The core's part.
    pub router: RouterSettings,
    /// `host:port` of the HTTP edge; port 0 takes a free one.
    pub http_listen: String,
    /// `host:port` of the gRPC server; port 0 takes a free one.
    pub grpc_listen: String,
    /// Largest body of the edge.
    pub body_limit_bytes: usize,
}

/// Where a router listens, as `host:port`.
#[derive(Clone, Debug)]
pub struct RouterAddresses {
    /// The HTTP edge.
    pub http: String,
    /// The gRPC server.
    pub grpc: String,
}

/// A running router.
#[derive(Debug)]
pub struct RouterProcess {
    core: Arc<RouterCore>,
    addresses: RouterAddresses,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl RouterProcess {
    /// Listens on both addresses.
    ///
    /// # Errors
    /// An address cannot be listened on; the error names the setting.
    pub async fn start(settings: RouterProcessSettings) -> Result<Self, KvistError> {
        let core = RouterCore::new(settings.router);
        let http = listen("http_listen", &settings.http_listen).await?;
        let grpc = listen("grpc_listen", &settings.grpc_listen).await?;
        let address =
            |listener: &TcpListener| listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
        let addresses = RouterAddresses { http: address(&http), grpc: address(&grpc) };
        let (stop, stopped) = watch::channel(false);
        let until = |mut stopped: watch::Receiver<bool>| async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let edge = EdgeSettings { body_limit_bytes: settings.body_limit_bytes };
        let routes = http_routes(Arc::clone(&core), edge);
        let http_until = until(stopped.clone());
        let http_task = tokio::spawn(async move {
            use axum::serve::ListenerExt as _;
            let listener = http.tap_io(|stream| {
                let _ = stream.set_nodelay(true);
            });
            let _ = axum::serve(listener, routes).with_graceful_shutdown(http_until).await;
        });
        let routes = grpc_routes(Arc::clone(&core)).await?;
        let grpc_until = until(stopped);
        let grpc_task = tokio::spawn(async move {
            let server = Server::builder()
                .tcp_nodelay(true)
                .http2_keepalive_interval(Some(Duration::from_secs(15)))
                .http2_keepalive_timeout(Some(Duration::from_secs(10)))
                .add_routes(routes);
            let _ = server.serve_with_incoming_shutdown(TcpListenerStream::new(grpc), grpc_until).await;
        });
        Ok(Self { core, addresses, stop, tasks: vec![http_task, grpc_task] })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> &RouterAddresses {
        &self.addresses
    }

    /// The core.
    #[must_use]
    pub fn core(&self) -> &Arc<RouterCore> {
        &self.core
    }

    /// Takes no new connections, lets running requests end until the limit, then cuts them: a cut stream ends without
    /// an end mark, so no client takes it for whole.
    pub async fn stop(self, limit: Duration) {
        let _ = self.stop.send(true);
        let deadline = tokio::time::Instant::now() + limit;
        for mut task in self.tasks {
            if tokio::time::timeout_at(deadline, &mut task).await.is_err() {
                task.abort();
            }
        }
    }
}

async fn listen(setting: &str, address: &str) -> Result<TcpListener, KvistError> {
    let wrong = |why: String| KvistError::field(Code::InvalidArgument, setting, why);
    let parsed: SocketAddr = address.parse().map_err(|_| wrong("must be host:port with a numeric host".to_owned()))?;
    TcpListener::bind(parsed).await.map_err(|error| wrong(format!("cannot listen on {parsed}: {error}")))
}
