//! The door of a listener.

use std::sync::Arc;

use kvist_errors::{Code, KvistError};
use rustls::{
    ServerConfig, SupportedProtocolVersion,
    server::{NoServerSessionStorage, ServerSessionMemoryCache, WebPkiClientVerifier},
    sign::SingleCertAndKey,
    version::{TLS12, TLS13},
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::{
    DoorRules, DoorSettings, DoorStream, Incoming, Peer, RolePattern,
    complaints::Complaints,
    files::{authorities, certified_key, expiry, provider, wrong},
    rotation::Rotating,
};

/// Sessions of clients without certificates that may be resumed.
const REMEMBERED_SESSIONS: usize = 1_024;

const GRPC_VERSIONS: &[&SupportedProtocolVersion] = &[&TLS13];
const HTTP_VERSIONS: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];

/// What is spoken behind a door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorKind {
    /// gRPC between processes of the mesh and with clients: HTTP/2 over TLS 1.3.
    Grpc,
    /// HTTP for everybody: HTTP/2 and HTTP/1.1, over TLS 1.2 as well.
    Http,
}

impl DoorKind {
    fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Grpc => vec![b"h2".to_vec()],
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        }
    }

    fn versions(self) -> &'static [&'static SupportedProtocolVersion] {
        match self {
            Self::Grpc => GRPC_VERSIONS,
            Self::Http => HTTP_VERSIONS,
        }
    }
}

/// What is made of a door's files.
struct ServerTls {
    config: Arc<ServerConfig>,
    certificate_expires_at: i64,
}

/// The door of one listener.
#[derive(Debug)]
pub struct Door {
    tls: Option<Rotating<ServerTls>>,
    asks_for_certificates: bool,
    rules: Arc<DoorRules>,
    serves_reflection: bool,
    pub(crate) complaints: Complaints,
}

impl Door {
    /// Reads the certificates and follows their files. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, with the setting that is wrong.
    pub fn open(settings: &DoorSettings, kind: DoorKind) -> Result<Arc<Self>, KvistError> {
        let pattern = match settings.tls_role_uri.as_str() {
            "" => RolePattern::default(),
            text => RolePattern::new(text)?,
        };
        let rules = Arc::new(DoorRules::new(settings.open_services.clone(), pattern));
        let files = [
            ("tls_certificate_file", settings.tls_certificate_file.clone()),
            ("tls_key_file", settings.tls_key_file.clone()),
            ("tls_client_ca_file", settings.tls_client_ca_file.clone()),
        ];
        let asks_for_certificates = settings.tls_client_ca_file.is_some();
        let tls = match (&settings.tls_certificate_file, &settings.tls_key_file) {
            (Some(_), Some(_)) => {
                let is_optional = settings.tls_client_optional;
                Some(Rotating::start(files, move |[certificate, key, client_ca]| {
                    let certificate = certificate.as_deref().unwrap_or_default();
                    let config = server_config(kind, certificate, key.as_deref(), client_ca.as_deref(), is_optional)?;
                    Ok(ServerTls { config: Arc::new(config), certificate_expires_at: expiry(certificate)? })
                })?)
            }
            (None, None) if asks_for_certificates => {
                return Err(wrong("tls_client_ca_file", "needs tls_certificate_file"));
            }
            (None, None) => None,
            _ => return Err(wrong("tls_key_file", "goes together with tls_certificate_file")),
        };
        Ok(Arc::new(Self {
            tls,
            asks_for_certificates,
            rules,
            serves_reflection: settings.reflection,
            complaints: Complaints::default(),
        }))
    }

    /// Whether connections are encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Until when its certificate may be used, in Unix seconds; none in plain text.
    #[must_use]
    pub fn certificate_expires_at(&self) -> Option<i64> {
        self.tls.as_ref().map(|tls| tls.current().certificate_expires_at)
    }

    /// Whether gRPC reflection is served behind it.
    #[must_use]
    pub fn serves_reflection(&self) -> bool {
        self.serves_reflection
    }

    /// How the table of who may call what is read here.
    #[must_use]
    pub fn rules(&self) -> &Arc<DoorRules> {
        &self.rules
    }

    /// The connections that come in at a listener. Off loopback, plain text is warned of.
    pub fn incoming(self: &Arc<Self>, listener: TcpListener) -> Incoming {
        if let Ok(address) = listener.local_addr()
            && !self.is_encrypted()
            && !address.ip().is_loopback()
        {
            tracing::warn!(%address, "plain_text_off_loopback");
        }
        if self.is_encrypted() { Incoming::encrypted(listener, Arc::clone(self)) } else { Incoming::plain(listener) }
    }

    /// Makes a connection of a socket.
    pub(crate) async fn receive(&self, stream: TcpStream) -> std::io::Result<DoorStream> {
        let Some(tls) = &self.tls else { return Ok(DoorStream::plain(stream)) };
        let stream = TlsAcceptor::from(Arc::clone(&tls.current().config)).accept(stream).await?;
        let peer = match (self.asks_for_certificates, stream.get_ref().1.peer_certificates()) {
            (false, _) => Peer::Unasked,
            (true, Some([leaf, ..])) => Peer::Certified(self.rules.pattern().role_of_certificate(leaf)),
            (true, _) => Peer::Anonymous,
        };
        Ok(DoorStream::encrypted(stream, peer))
    }
}

fn server_config(
    kind: DoorKind,
    certificate: &[u8],
    key: Option<&[u8]>,
    client_ca: Option<&[u8]>,
    is_optional: bool,
) -> Result<ServerConfig, KvistError> {
    let certified = certified_key(certificate, key.unwrap_or_default())?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(kind.versions())
        .map_err(|error| KvistError::new(Code::Internal, error.to_string()))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(pem) => {
            let roots = authorities("tls_client_ca_file", pem)?;
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = if is_optional { verifier.allow_unauthenticated() } else { verifier };
            let verifier = verifier.build().map_err(|error| wrong("tls_client_ca_file", error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = kind.protocols();
    if client_ca.is_some() {
        // A session that is resumed would be let in on a certificate that was looked at long ago.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    } else {
        config.session_storage = ServerSessionMemoryCache::new(REMEMBERED_SESSIONS);
    }
    Ok(config)
}
