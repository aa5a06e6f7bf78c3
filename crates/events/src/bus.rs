//! The connection to NATS.

use std::{fmt, path::PathBuf, time::Duration};

use async_nats::{Client, ConnectOptions, Event};
use serde::Deserialize;
use tokio::sync::watch;

use crate::EventsError;

const PING_INTERVAL: Duration = Duration::from_secs(2);
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
const LONGEST_RECONNECT_DELAY: Duration = Duration::from_secs(2);

/// Where the bus is and who we are there.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BusSettings {
    /// URL of a server, or several with commas between.
    pub nats_url: String,
    /// Name of the cluster; part of every subject.
    pub cluster: String,
    /// Name of the connection, for people who look at the server.
    #[serde(default)]
    pub client_name: String,
    /// File with a user's credentials; none for servers that ask for none or find them in the URL.
    #[serde(default)]
    pub credentials_file: Option<PathBuf>,
}

impl fmt::Debug for BusSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        formatter.debug_struct("BusSettings").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl BusSettings {
    /// Settings without credentials.
    #[must_use]
    pub fn new(nats_url: impl Into<String>, cluster: impl Into<String>) -> Self {
        Self { nats_url: nats_url.into(), cluster: cluster.into(), client_name: String::new(), credentials_file: None }
    }
}

/// A connection that comes back by itself, and whether it stands.
#[derive(Clone)]
pub(crate) struct Bus {
    pub(crate) client: Client,
    /// How many times the connection was made; odd while it stands. A number and not a flag, so that a reader that
    /// was late still sees that it was away.
    state: watch::Receiver<u64>,
}

impl Bus {
    /// Makes a connection in the background: a bus that is away is no reason not to start.
    pub(crate) async fn connect(settings: &BusSettings) -> Result<Self, EventsError> {
        let (changed, state) = watch::channel(0u64);
        let mut options = ConnectOptions::new()
            .retry_on_initial_connect()
            .connection_timeout(CONNECT_TIME_LIMIT)
            .ping_interval(PING_INTERVAL)
            .max_reconnects(None)
            .reconnect_delay_callback(|attempts| {
                let exponent = u32::try_from(attempts.clamp(1, 8)).unwrap_or(8);
                Duration::from_millis(10 << exponent).min(LONGEST_RECONNECT_DELAY)
            })
            .event_callback(move |event| {
                let changed = changed.clone();
                async move {
                    match event {
                        Event::Connected => {
                            tracing::info!("bus_connected");
                            changed.send_modify(|count| *count += if *count % 2 == 0 { 1 } else { 2 });
                        }
                        Event::Disconnected | Event::Closed => {
                            tracing::warn!("bus_disconnected");
                            changed.send_modify(|count| *count += *count % 2);
                        }
                        other => tracing::debug!(event = other.to_string(), "bus_event"),
                    }
                }
            });
        if !settings.client_name.is_empty() {
            options = options.name(&settings.client_name);
        }
        if let Some(file) = &settings.credentials_file {
            // The message is ours: the library's would show the path.
            let unreadable = |_| EventsError::Bus("the credentials file cannot be read".to_owned());
            options = options.credentials_file(file).await.map_err(unreadable)?;
        }
        let addresses: Vec<async_nats::ServerAddr> = settings
            .nats_url
            .split(',')
            .map(|url| url.trim().parse())
            .collect::<Result<_, _>>()
            .map_err(|_| EventsError::Bus("nats_url is not a URL of NATS".to_owned()))?;
        let client = options.connect(addresses).await.map_err(|error| EventsError::Bus(error.kind().to_string()))?;
        Ok(Self { client, state })
    }

    pub(crate) fn is_connected(&self) -> bool {
        *self.state.borrow() % 2 == 1
    }

    /// To be told of changes; see [`is_connected_state`].
    pub(crate) fn state_changes(&self) -> watch::Receiver<u64> {
        self.state.clone()
    }
}

pub(crate) fn is_connected_state(state: u64) -> bool {
    state % 2 == 1
}
