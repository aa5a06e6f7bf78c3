//! The other end: connections to doors.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::rt::TokioIo;
use kvist_errors::{Code, KvistError};
use rustls::{ClientConfig, client::Resumption, pki_types::ServerName, sign::SingleCertAndKey, version::TLS13};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use crate::{
    ClientTlsSettings, PeerRole, RolePattern,
    files::{authorities, certified_key, provider, wrong},
    rotation::Rotating,
};

/// TLS of a process that calls others. Cheap to clone; all clones follow the same files.
#[derive(Clone, Debug)]
pub struct ClientTls {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tls: Rotating<ClientConfig>,
    pattern: RolePattern,
}

impl ClientTls {
    /// Reads the files and follows them; none when the settings name no authorities, so that plain text is spoken. Must
    /// be called inside a tokio runtime.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, with the setting that is wrong.
    pub fn open(settings: &ClientTlsSettings) -> Result<Option<Self>, KvistError> {
        if settings.tls_ca_file.is_none() {
            return Ok(None);
        }
        if settings.tls_certificate_file.is_some() != settings.tls_key_file.is_some() {
            return Err(wrong("tls_key_file", "goes together with tls_certificate_file"));
        }
        let pattern = match settings.tls_role_uri.as_str() {
            "" => RolePattern::default(),
            text => RolePattern::new(text)?,
        };
        let files = [
            ("tls_ca_file", settings.tls_ca_file.clone()),
            ("tls_certificate_file", settings.tls_certificate_file.clone()),
            ("tls_key_file", settings.tls_key_file.clone()),
        ];
        let tls = Rotating::start(files, |[ca, certificate, key]| {
            let own = certificate.as_deref().zip(key.as_deref());
            client_config(ca.as_deref().unwrap_or_default(), own)
        })?;
        Ok(Some(Self { inner: Arc::new(Inner { tls, pattern }) }))
    }

    /// A channel to a server of the mesh, `host:port` or a URI, that connects at the first call. `adjust` sets times and
    /// windows.
    ///
    /// With TLS the server's certificate must name the host; and when it states a role, it must be `role`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when the address cannot be one, or asks for TLS that is not set up.
    pub fn channel(
        tls: Option<&Self>,
        address: &str,
        role: PeerRole,
        adjust: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Result<Channel, KvistError> {
        let invalid = || KvistError::field(Code::InvalidArgument, "address", "must be host:port");
        let (scheme, authority) = match address.split_once("://") {
            Some((scheme, authority)) => (scheme, authority.trim_end_matches('/')),
            None => (if tls.is_some() { "https" } else { "http" }, address),
        };
        // The connector encrypts; tonic itself must not try to.
        let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|_| invalid())?;
        match (scheme, tls) {
            ("http", _) => Ok(adjust(endpoint).connect_lazy()),
            ("https", Some(tls)) => {
                let origin: Uri = format!("https://{authority}").parse().map_err(|_| invalid())?;
                let connector = Connector { tls: tls.clone(), role };
                Ok(adjust(endpoint).origin(origin).connect_with_connector_lazy(connector))
            }
            ("https", None) => {
                Err(KvistError::field(Code::InvalidArgument, "address", "asks for TLS, and tls_ca_file is not set"))
            }
            _ => Err(invalid()),
        }
    }
}

/// Makes the encrypted connections of a channel; each with the certificates of its time.
#[derive(Clone)]
struct Connector {
    tls: ClientTls,
    role: PeerRole,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect(&uri).await.map(TokioIo::new) })
    }
}

impl Connector {
    async fn connect(&self, uri: &Uri) -> io::Result<TlsStream<TcpStream>> {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await?;
        stream.set_nodelay(true)?;
        let inner = &self.tls.inner;
        let stream = TlsConnector::from(inner.tls.current()).connect(name, stream).await?;
        let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        // A certificate of a public authority states none, and its host name has to do.
        if let Some(stated) = leaf.and_then(|leaf| inner.pattern.role_of_certificate(leaf))
            && stated != self.role
        {
            let message = format!("the server has the role {}, and not {}", stated.name(), self.role.name());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        Ok(stream)
    }
}

fn client_config(ca: &[u8], own: Option<(&[u8], &[u8])>) -> Result<ClientConfig, KvistError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| KvistError::new(Code::Internal, error.to_string()))?
        .with_root_certificates(authorities("tls_ca_file", ca)?);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let certified = certified_key(certificate, key)?;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    // Servers that ask for certificates resume nothing, and connections are few.
    config.resumption = Resumption::disabled();
    Ok(config)
}
