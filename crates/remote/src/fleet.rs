//! The routers of the list: connections, and which of them serve.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvist_doors::{ClientTls, PeerRole};
use kvist_errors::KvistError;
use kvist_proto::router::v1::router_service_client::RouterServiceClient;
use kvist_telemetry::ReadyFlag;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::running::Running;

const SERVICE: &str = "kvist.router.v1.RouterService";
const MESSAGE_LIMIT_BYTES: usize = 64 * 1024 * 1024;
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// A connection on which nothing is heard for as long is given up, so that a router that froze is noticed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIME: Duration = Duration::from_secs(3);
/// Between two attempts to reach a router.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Windows that hold a long prompt, so that it is sent without waiting for its receiver.
const WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// One router.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) address: String,
    channel: Channel,
    is_serving: AtomicBool,
}

impl Remote {
    pub(crate) fn client(&self) -> RouterServiceClient<Channel> {
        RouterServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES)
    }
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Fleet {
    remotes: Vec<Arc<Remote>>,
    next: AtomicUsize,
    changed: watch::Sender<()>,
    _watching: Vec<AbortOnDropHandle<()>>,
}

impl Fleet {
    /// Connects in the background, and is ready as soon as one of them serves.
    ///
    /// # Errors
    /// An address cannot be one.
    pub(crate) fn connect(
        addresses: &[String],
        tls: Option<&ClientTls>,
        ready: &ReadyFlag,
        serving: &Gauge,
        running: &Arc<Running>,
    ) -> Result<Self, KvistError> {
        let (changed, _) = watch::channel(());
        let mut remotes = Vec::with_capacity(addresses.len());
        let mut watching = Vec::with_capacity(addresses.len() + 1);
        for address in addresses {
            let channel = ClientTls::channel(tls, address, PeerRole::Router, |endpoint| {
                endpoint
                    .connect_timeout(CONNECT_TIME)
                    .tcp_nodelay(true)
                    .initial_stream_window_size(WINDOW_BYTES)
                    .initial_connection_window_size(WINDOW_BYTES)
                    .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                    .keep_alive_timeout(KEEP_ALIVE_TIME)
                    .keep_alive_while_idle(true)
            })?;
            let remote = Arc::new(Remote { address: address.clone(), channel, is_serving: AtomicBool::new(false) });
            let watched = watch_health(Arc::clone(&remote), changed.clone());
            watching.push(AbortOnDropHandle::new(tokio::spawn(watched)));
            remotes.push(remote);
        }
        let announcer = Announcer {
            remotes: remotes.clone(),
            running: Arc::clone(running),
            ready: ready.clone(),
            serving: serving.clone(),
        };
        watching.push(AbortOnDropHandle::new(tokio::spawn(announcer.run(changed.subscribe()))));
        Ok(Self { remotes, next: AtomicUsize::new(0), changed, _watching: watching })
    }

    /// Says anew whether requests are taken.
    pub(crate) fn announce(&self) {
        self.changed.send_replace(());
    }

    /// The routers in the order in which they are to be asked: those that serve, beginning with the one whose turn it is,
    /// then the others, of which one may have come back a moment ago.
    pub(crate) fn in_turn(&self) -> Vec<&Arc<Remote>> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.remotes.len().max(1);
        let (behind, ahead) = self.remotes.split_at(first.min(self.remotes.len()));
        let (mut serving, others): (Vec<_>, Vec<_>) =
            ahead.iter().chain(behind).partition(|remote| remote.is_serving.load(Ordering::Acquire));
        serving.extend(others);
        serving
    }
}

/// Follows what a router says of itself, until it is dropped.
async fn watch_health(remote: Arc<Remote>, changed: watch::Sender<()>) {
    let set = |is_serving: bool| {
        if remote.is_serving.swap(is_serving, Ordering::AcqRel) != is_serving {
            tracing::info!(router = remote.address, is_serving, "remote_router");
            changed.send_replace(());
        }
    };
    loop {
        let mut client = HealthClient::new(remote.channel.clone());
        if let Ok(response) = client.watch(HealthCheckRequest { service: SERVICE.to_owned() }).await {
            let mut states = response.into_inner();
            while let Ok(Some(state)) = states.message().await {
                set(state.status() == ServingStatus::Serving);
            }
        }
        set(false);
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// The one who says whether requests are taken.
struct Announcer {
    remotes: Vec<Arc<Remote>>,
    running: Arc<Running>,
    ready: ReadyFlag,
    serving: Gauge,
}

impl Announcer {
    async fn run(self, mut changed: watch::Receiver<()>) {
        loop {
            let serving = self.remotes.iter().filter(|remote| remote.is_serving.load(Ordering::Acquire)).count();
            self.serving.set(i64::try_from(serving).unwrap_or(i64::MAX));
            if self.running.is_draining() {
                self.ready.set_not_ready("the edge is being stopped");
            } else if serving == 0 {
                self.ready.set_not_ready("no remote router serves");
            } else {
                self.ready.set_ready();
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }
}
