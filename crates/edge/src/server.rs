//! The HTTP server: connections and their ends.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use futures::StreamExt as _;
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use kvist_doors::{Door, Incoming};
use kvist_router::{ApiKeys, Generate};
use kvist_telemetry::ReadyFlag;
use kvist_upstream::Upstreams;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    answer::Answerer,
    cors::Cors,
    patient::PatientIo,
    routes::{BodyLimits, Routes},
    stalled::ServedBody,
};

/// Requests at once on one HTTP/2 connection.
const STREAMS: u32 = 1024;
/// Wait after an accept that failed, as when file descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How an edge serves.
#[derive(Clone, Debug)]
pub struct EdgeSettings {
    /// `host:port`; port 0 for any free one.
    pub listen: String,
    /// Largest body.
    pub body_limit_bytes: usize,
    /// Time for the head of a request.
    pub head_timeout: Duration,
    /// Time for the body of a request, once its head has come.
    pub body_timeout: Duration,
    /// Time for which a client may take nothing of what is to be written to it.
    pub write_timeout: Duration,
    /// Time without an event after which a stream gets a comment line.
    pub keep_alive_interval: Duration,
    /// Which web pages may ask.
    pub cors: Cors,
}

/// A running HTTP server. Dropping it ends its connections.
#[derive(Debug)]
pub struct EdgeServer {
    address: SocketAddr,
    closing: CancellationToken,
    ending: CancellationToken,
    connections: TaskTracker,
    _accepting: AbortOnDropHandle<()>,
}

impl EdgeServer {
    /// Listens and serves from then on.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn start(
        settings: &EdgeSettings,
        door: &Arc<Door>,
        generate: Arc<dyn Generate>,
        upstreams: Arc<Upstreams>,
        keys: Arc<ApiKeys>,
        ready: ReadyFlag,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(&settings.listen).await?;
        let address = listener.local_addr()?;
        let limits = BodyLimits { bytes: settings.body_limit_bytes, time: settings.body_timeout };
        let answerer = Answerer::new(generate, upstreams, settings.keep_alive_interval);
        let routes = Arc::new(Routes::new(answerer, keys, ready, limits, settings.cors.clone()));
        let times = ConnectionTimes { head: settings.head_timeout, write: settings.write_timeout };
        let (closing, ending, connections) = (CancellationToken::new(), CancellationToken::new(), TaskTracker::new());
        let accepting = tokio::spawn(accept(
            door.incoming(listener),
            routes,
            times,
            closing.clone(),
            ending.clone(),
            connections.clone(),
        ));
        Ok(Self { address, closing, ending, connections, _accepting: AbortOnDropHandle::new(accepting) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no new connections, lets requests end for as long as given, then ends them.
    pub async fn stop(self, time_limit: Duration) {
        self.closing.cancel();
        self.connections.close();
        if tokio::time::timeout(time_limit, self.connections.wait()).await.is_err() {
            self.ending.cancel();
            self.connections.wait().await;
        }
    }
}

impl Drop for EdgeServer {
    fn drop(&mut self) {
        self.closing.cancel();
        self.ending.cancel();
    }
}

/// Times of a connection.
#[derive(Clone, Copy, Debug)]
struct ConnectionTimes {
    head: Duration,
    write: Duration,
}

async fn accept(
    mut incoming: Incoming,
    routes: Arc<Routes>,
    times: ConnectionTimes,
    closing: CancellationToken,
    ending: CancellationToken,
    connections: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => return,
            accepted = incoming.next() => accepted,
        };
        match accepted {
            None => return,
            Some(Ok(stream)) => {
                connections.spawn(serve(stream, Arc::clone(&routes), times, closing.clone(), ending.clone()));
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "accept_failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve<S>(
    stream: S,
    routes: Arc<Routes>,
    times: ConnectionTimes,
    closing: CancellationToken,
    ending: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // Events are small: copying one behind its chunk's size is cheaper than a list of buffers for each write.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(times.head).writev(false);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS);
    let service = service_fn(move |request| {
        let routes = Arc::clone(&routes);
        async move {
            let is_one_of_several = request.version() == http::Version::HTTP_2;
            let response = routes.serve(request).await?;
            Ok::<_, Infallible>(response.map(|body| {
                if is_one_of_several { ServedBody::watched(body, times.write) } else { ServedBody::Plain(body) }
            }))
        }
    });
    let connection = builder.serve_connection(TokioIo::new(PatientIo::new(stream, times.write)), service);
    tokio::pin!(connection);
    tokio::select! {
        biased;
        // How a connection ends is the client's business: a broken one is no event of ours.
        _ = connection.as_mut() => return,
        // Never later than the other signal, and each that is watched costs a look whenever an event is written.
        () = closing.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = connection => {}
        () = ending.cancelled() => {}
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
