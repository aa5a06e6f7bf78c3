//! The connection to NATS.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_nats::{
    AuthError, Client, ConnectOptions, Event,
    rustls::pki_types::{CertificateDer, pem::PemObject as _},
};
use serde::Deserialize;
use tokio::sync::watch;

use crate::{Credentials, EventsError};

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
    /// File with the authorities that sign the servers' certificates, as PEM. With it, a connection without TLS is
    /// refused; without it the system's authorities count.
    #[serde(default)]
    pub tls_ca_file: Option<PathBuf>,
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
        Self {
            nats_url: nats_url.into(),
            cluster: cluster.into(),
            client_name: String::new(),
            credentials_file: None,
            tls_ca_file: None,
        }
    }

    /// Sees to it that a connection could be tried: the URLs and the files are what they should be.
    ///
    /// # Errors
    /// Which setting is wrong, and why.
    pub fn check(&self) -> Result<(), EventsError> {
        self.options().map(drop)
    }

    fn servers(&self) -> Result<Vec<async_nats::ServerAddr>, EventsError> {
        let servers = self.nats_url.split(',').map(|url| url.trim().parse()).collect::<Result<_, _>>();
        // The message is ours: the library's would show the URL, which may hold a password.
        servers.map_err(|_| EventsError::Bus("nats_url is not a URL of NATS".to_owned()))
    }

    fn options(&self) -> Result<ConnectOptions, EventsError> {
        let mut options = ConnectOptions::new();
        if !self.client_name.is_empty() {
            options = options.name(&self.client_name);
        }
        // The library takes no user from the URL.
        if let Some(server) = self.servers()?.iter().find(|server| server.has_user_pass()) {
            let user = server.username().unwrap_or_default().to_owned();
            options = match server.password() {
                Some(password) => options.user_and_password(user, password.to_owned()),
                None => options.token(user),
            };
        }
        if let Some(path) = &self.credentials_file {
            let text = String::from_utf8(read("credentials_file", path)?).unwrap_or_default();
            let credentials = Arc::new(Credentials::parse(&text)?);
            options = options.jwt(credentials.jwt().to_owned(), move |nonce| {
                let credentials = Arc::clone(&credentials);
                async move { credentials.sign(&nonce).map_err(AuthError::new) }
            });
        }
        if let Some(path) = &self.tls_ca_file {
            let field = "tls_ca_file";
            let pem = read(field, path)?;
            let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
            if certificates.map_or(true, |certificates| certificates.is_empty()) {
                return Err(EventsError::File { field, reason: "holds no certificate as PEM".to_owned() });
            }
            options = options.add_root_certificates(path.clone()).require_tls(true);
        }
        Ok(options)
    }
}

/// The message leaves the path out: whoever may read logs need not know where secrets lie.
fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, EventsError> {
    std::fs::read(path).map_err(|error| EventsError::File { field, reason: format!("cannot be read: {error}") })
}

/// A connection that comes back by itself, and whether it stands.
#[derive(Clone)]
pub(crate) struct Bus {
    pub(crate) client: Client,
    /// How many times the connection was made; odd while it stands. A number and not a flag, so that a reader that
    /// was late still sees that it was away.
    state: watch::Receiver<u64>,
    overrun_messages: Arc<AtomicU64>,
}

impl Bus {
    /// Makes a connection in the background: a bus that is away is no reason not to start. A subscription keeps
    /// `most_waiting_messages` for a reader that is behind, and loses what comes beyond.
    pub(crate) async fn connect(settings: &BusSettings, most_waiting_messages: usize) -> Result<Self, EventsError> {
        let (changed, state) = watch::channel(0u64);
        let overrun_messages = Arc::new(AtomicU64::new(0));
        let overrun = Arc::clone(&overrun_messages);
        let options = settings
            .options()?
            .retry_on_initial_connect()
            .connection_timeout(CONNECT_TIME_LIMIT)
            .ping_interval(PING_INTERVAL)
            .max_reconnects(None)
            .subscription_capacity(most_waiting_messages.max(1))
            .reconnect_delay_callback(|attempts| {
                let exponent = u32::try_from(attempts.clamp(1, 8)).unwrap_or(8);
                Duration::from_millis(10 << exponent).min(LONGEST_RECONNECT_DELAY)
            })
            .event_callback(move |event| {
                let (changed, overrun) = (changed.clone(), Arc::clone(&overrun));
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
                        Event::SlowConsumer(_) => {
                            overrun.fetch_add(1, Ordering::Relaxed);
                        }
                        other => tracing::debug!(event = other.to_string(), "bus_event"),
                    }
                }
            });
        let client =
            options.connect(settings.servers()?).await.map_err(|error| EventsError::Bus(error.kind().to_string()))?;
        Ok(Self { client, state, overrun_messages })
    }

    pub(crate) fn is_connected(&self) -> bool {
        *self.state.borrow() % 2 == 1
    }

    /// Messages lost because too many waited, as far as the client has said so.
    pub(crate) fn overrun_messages(&self) -> u64 {
        self.overrun_messages.load(Ordering::Relaxed)
    }

    /// To be told of changes; see [`is_connected_state`].
    pub(crate) fn state_changes(&self) -> watch::Receiver<u64> {
        self.state.clone()
    }
}

pub(crate) fn is_connected_state(state: u64) -> bool {
    state % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_file_or_url_is_found_before_a_connection() {
        let folder = std::env::temp_dir().join(format!("kvist-bus-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let nonsense = folder.join("nonsense");
        std::fs::write(&nonsense, "nonsense").unwrap();
        let missing = folder.join("missing");
        let said = |change: &dyn Fn(&mut BusSettings)| {
            let mut settings = BusSettings::new("nats://127.0.0.1:1", "c");
            change(&mut settings);
            settings.check().map_err(|error| error.to_string())
        };
        assert_eq!(Ok(()), said(&|_| {}));
        for (path, reason) in [(&missing, "cannot be read: No such file"), (&nonsense, "holds no")] {
            for (field, problem) in [
                ("credentials_file", said(&|settings| settings.credentials_file = Some(path.clone()))),
                ("tls_ca_file", said(&|settings| settings.tls_ca_file = Some(path.clone()))),
            ] {
                let problem = problem.unwrap_err();
                assert!(problem.starts_with(&format!("{field} {reason}")), "{problem}");
                assert!(!problem.contains("missing"), "the path is nobody's business: {problem}");
            }
        }
        let url = said(&|settings| settings.nats_url = "nats://user:secret@".to_owned()).unwrap_err();
        assert!(!url.contains("secret"), "{url}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
