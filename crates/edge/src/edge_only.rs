//! An edge alone: HTTP and admin port before routers of other processes.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kvist_doors::{ClientTls, Door, DoorKind};
use kvist_errors::{Code, KvistError};
use kvist_remote::{RemoteRouters, RemoteSettings};
use kvist_router::{ApiKeys, Generate, Listeners, RouterSettings};
use kvist_telemetry::{AdminServer, Metrics, ReadyFlag};
use kvist_upstream::Upstreams;
use serde::Serialize;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    process::{CLOSING_TIME, start_admin, start_edge},
    server::EdgeServer,
};

/// How often listeners are looked after.
const INTERVAL: Duration = Duration::from_secs(1);

/// Where an edge listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EdgeAddresses {
    /// The APIs of OpenAI and Anthropic.
    pub http_address: SocketAddr,
    /// Metrics and health.
    pub admin_address: SocketAddr,
}

/// A running edge without a router.
#[derive(Debug)]
pub struct EdgeProcess {
    remote: Arc<RemoteRouters>,
    addresses: EdgeAddresses,
    edge: EdgeServer,
    admin: AdminServer,
    _looking_after: AbortOnDropHandle<()>,
}

impl EdgeProcess {
    /// Listens, and is ready as soon as one of `remote_routers` serves.
    ///
    /// # Errors
    /// No router is named, an address cannot be listened on or asked, or a file is wrong.
    pub async fn start(settings: RouterSettings) -> Result<Self, KvistError> {
        if settings.remote_routers.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "remote_routers", "must name at least one router"));
        }
        let metrics = Metrics::new();
        let ready = ReadyFlag::new("no remote router serves");
        let keys = Arc::new(ApiKeys::load(settings.api_keys_file.clone())?);
        let tls = ClientTls::open(&settings.tls)?;
        let door = Door::open(&settings.http_door, DoorKind::Http)?;
        let upstreams = Arc::new(Upstreams::new(&settings, &metrics)?);
        let listeners = Listeners::new(&metrics, Arc::clone(&keys), vec![("http", Arc::clone(&door))]);
        let remote = RemoteSettings {
            addresses: settings.remote_routers.clone(),
            api_key_file: settings.remote_api_key_file.clone(),
        };
        let remote = RemoteRouters::connect(&remote, tls.as_ref(), &metrics, &ready)?;
        let admin = start_admin(&settings, metrics, ready.clone()).await?;
        let generate = Arc::clone(&remote) as Arc<dyn Generate>;
        let edge = start_edge(&settings, &door, generate, upstreams, keys, ready).await?;
        let addresses = EdgeAddresses { http_address: edge.address(), admin_address: admin.address() };
        let looking_after = tokio::spawn(async move {
            let mut tick = tokio::time::interval(INTERVAL);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tick.tick().await;
                listeners.look_after();
            }
        });
        Ok(Self { remote, addresses, edge, admin, _looking_after: AbortOnDropHandle::new(looking_after) })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> EdgeAddresses {
        self.addresses
    }

    /// The routers behind it.
    #[must_use]
    pub fn remote(&self) -> &Arc<RemoteRouters> {
        &self.remote
    }

    /// Ends everything: streams that run end with an error event, never with an end mark.
    pub async fn stop(mut self) {
        self.remote.stop();
        self.edge.stop(CLOSING_TIME).await;
        self.admin.stop();
    }
}
