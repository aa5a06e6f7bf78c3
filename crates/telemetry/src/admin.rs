//! The admin port: `/metrics`, `/livez`, `/readyz`.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use parking_lot::RwLock;
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use crate::Metrics;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Whether a process takes work, and if not, why. Clones are the same flag. A new one is not ready.
#[derive(Clone, Debug)]
pub struct ReadyFlag {
    reason: Arc<RwLock<Option<String>>>,
}

impl ReadyFlag {
    /// A flag that is not ready for a reason.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: Arc::new(RwLock::new(Some(reason.into()))) }
    }

    /// Says that the process takes work.
    pub fn set_ready(&self) {
        *self.reason.write() = None;
    }

    /// Says that it does not, and why.
    pub fn set_not_ready(&self, reason: impl Into<String>) {
        *self.reason.write() = Some(reason.into());
    }

    /// Why the process takes no work; none when it does.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.reason.read().clone()
    }
}

/// A running admin server. Dropping it stops it at once.
#[derive(Debug)]
pub struct AdminServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl AdminServer {
    /// Listens, on port 0 for any free one, and serves from then on.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn start(listen: SocketAddr, metrics: Metrics, ready: ReadyFlag) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let routes = Router::new()
            .route("/metrics", get(serve_metrics).with_state(metrics))
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(serve_ready).with_state(ready));
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stopped = async {
                // A dropped sender stops the server as well.
                let _ = stopped.await;
            };
            if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(stopped).await {
                tracing::warn!(error = error.to_string(), "admin_server_failed");
            }
        });
        Ok(Self { address, stop: Some(stop), task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening. Idle connections are closed.
    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve_metrics(State(metrics): State<Metrics>) -> Response {
    ([(header::CONTENT_TYPE, OPEN_METRICS)], metrics.encode()).into_response()
}

async fn serve_ready(State(ready): State<ReadyFlag>) -> Response {
    match ready.reason() {
        None => (StatusCode::OK, "ok\n").into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        time::timeout,
    };

    use super::*;

    async fn fetch(address: SocketAddr, path: &str) -> String {
        let exchange = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        timeout(Duration::from_secs(10), exchange).await.unwrap()
    }

    #[tokio::test]
    async fn readiness_has_a_reason_and_metrics_are_open_metrics() {
        let ready = ReadyFlag::new("waiting for the first cluster state");
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = AdminServer::start(any_port, Metrics::new(), ready.clone()).await.unwrap();
        let not_ready = fetch(server.address(), "/readyz").await;
        assert!(not_ready.starts_with("HTTP/1.1 503"), "{not_ready}");
        assert!(not_ready.contains("waiting for the first cluster state\n"), "{not_ready}");
        ready.set_ready();
        assert!(fetch(server.address(), "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(fetch(server.address(), "/livez").await.starts_with("HTTP/1.1 200"));
        let metrics = fetch(server.address(), "/metrics").await;
        assert!(metrics.contains(OPEN_METRICS) && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(fetch(server.address(), "/other").await.starts_with("HTTP/1.1 404"));
    }
}
