//! Authorities, certificates, and a server behind a door.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "functions beside the tests")]

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kvist_doors::{ClientTls, ClientTlsSettings, Door, DoorKind, DoorLayer, DoorSettings, PeerRole};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType, date_time_ymd,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tonic::transport::{Channel, Server};
use tonic_health::server::HealthReporter;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A folder that goes with the test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvist-doors-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Who signs.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

/// A certificate and its key as files.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, &self.pem).unwrap();
        path.to_owned()
    }

    /// A certificate of loopback with these URIs; valid until a year.
    pub(crate) fn pair_until(&self, folder: &Folder, name: &str, uris: &[&str], year: i32) -> Pair {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let pair = Pair { certificate: folder.path(&format!("{name}.pem")), key: folder.path(&format!("{name}.key")) };
        fs::write(&pair.certificate, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }

    pub(crate) fn pair(&self, folder: &Folder, name: &str, uris: &[&str]) -> Pair {
        self.pair_until(folder, name, uris, 4000)
    }

    pub(crate) fn role(&self, folder: &Folder, role: PeerRole) -> Pair {
        let name = role.name();
        self.pair(folder, name, &[&format!("spiffe://test/kvist/{name}")])
    }
}

/// A gRPC server with health alone; what the guard lets through to other services ends as UNIMPLEMENTED.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) health: HealthReporter,
    task: JoinHandle<()>,
}

impl TestServer {
    pub(crate) async fn start(settings: &DoorSettings) -> Self {
        let door = Door::open(settings, DoorKind::Grpc).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (health, service) = tonic_health::server::health_reporter();
        let server = Server::builder()
            .layer(DoorLayer::new(Arc::clone(door.rules())))
            .add_service(service)
            .serve_with_incoming(door.incoming(listener));
        let task = tokio::spawn(async move { server.await.unwrap() });
        Self { address, health, task }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn door(own: &Pair, client_ca: Option<PathBuf>) -> DoorSettings {
    DoorSettings {
        tls_certificate_file: Some(own.certificate.clone()),
        tls_key_file: Some(own.key.clone()),
        tls_client_ca_file: client_ca,
        ..DoorSettings::default()
    }
}

pub(crate) fn client(ca: PathBuf, own: Option<&Pair>) -> ClientTls {
    let settings = ClientTlsSettings {
        tls_ca_file: Some(ca),
        tls_certificate_file: own.map(|own| own.certificate.clone()),
        tls_key_file: own.map(|own| own.key.clone()),
        ..ClientTlsSettings::default()
    };
    ClientTls::open(&settings).unwrap().unwrap()
}

/// A channel to a server that is expected to be a controller.
pub(crate) fn channel(tls: &ClientTls, address: SocketAddr) -> Channel {
    let adjust = |endpoint: tonic::transport::Endpoint| endpoint.connect_timeout(Duration::from_secs(10));
    ClientTls::channel(Some(tls), &address.to_string(), PeerRole::Controller, adjust).unwrap()
}
