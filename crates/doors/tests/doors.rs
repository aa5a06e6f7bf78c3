//! Doors over real sockets: who comes in, who does not, and what happens to those who are inside.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "functions beside the tests")]

mod support;

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use futures::StreamExt as _;
use kvist_doors::{ClientTls, Door, DoorKind, DoorSettings, OpenService, Peer, PeerRole, certificate_expiry, table};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use support::{Authority, Folder, LIMIT, TestServer, channel, client, door};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tonic::{Code, Request, Status, client::Grpc, transport::Channel};
use tonic_health::{
    ServingStatus,
    pb::{
        HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus as HealthStatus,
        health_client::HealthClient,
    },
};

async fn check(channel: Channel) -> Result<(), Status> {
    timeout(LIMIT, HealthClient::new(channel).check(HealthCheckRequest::default())).await.unwrap().map(|_| ())
}

/// Calls a method of any service with an empty message.
async fn call(channel: Channel, path: &str) -> Status {
    let mut grpc = Grpc::new(channel);
    grpc.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let path = path.parse().unwrap();
    timeout(LIMIT, grpc.unary(Request::new(HealthCheckRequest::default()), path, codec)).await.unwrap().unwrap_err()
}

/// The whole text of a failure, causes included.
fn text(status: &Status) -> String {
    let mut text = status.to_string();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_may_call_what_the_table_says_and_nothing_else() {
    let (folder, authority) = (Folder::new("roles"), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let server = TestServer::start(&door(&authority.role(&folder, PeerRole::Controller), Some(ca.clone()))).await;
    for role in PeerRole::ALL {
        let channel = channel(&client(ca.clone(), Some(&authority.role(&folder, *role))), server.address);
        check(channel.clone()).await.unwrap();
        for row in table() {
            let path = format!("/{}/{}", row.service, row.method);
            let status = call(channel.clone(), &path).await;
            if row.roles.contains(role) {
                assert_eq!(Code::Unimplemented, status.code(), "{} {path}: {status}", role.name());
            } else {
                assert_eq!(Code::PermissionDenied, status.code(), "{} {path}: {status}", role.name());
                let error = kvist_errors::from_status(&status);
                assert_eq!(Some(role.name()), error.metadata.get("role").map(String::as_str));
                assert_eq!(path.strip_prefix('/'), error.metadata.get("method").map(String::as_str));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_a_stranger_an_old_one_or_none_is_not_let_in() {
    let (folder, authority, stranger) = (Folder::new("strangers"), Authority::new(), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let server = TestServer::start(&door(&authority.role(&folder, PeerRole::Controller), Some(ca.clone()))).await;
    let uri = &["spiffe://test/kvist/router"];
    let strange = stranger.pair(&folder, "strange", uri);
    let expired = authority.pair_until(&folder, "expired", uri, 2001);
    for own in [Some(&strange), Some(&expired), None] {
        let status = check(channel(&client(ca.clone(), own), server.address)).await.unwrap_err();
        // In TLS 1.3 the client hears of it after its own handshake: at the connection or at the first call.
        assert!(matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled), "{}", text(&status));
    }
    check(channel(&client(ca, Some(&authority.role(&folder, PeerRole::Router))), server.address)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_trusts_no_server_of_another_authority_an_old_certificate_name_or_role() {
    let (folder, authority, stranger) = (Folder::new("servers"), Authority::new(), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let uri = &["spiffe://test/kvist/controller"];
    for (pair, word) in [
        (stranger.pair(&folder, "strange", uri), "invalid peer certificate"),
        (authority.pair_until(&folder, "expired", uri, 2001), "xpired"),
        (authority.pair(&folder, "worker", &["spiffe://test/kvist/worker"]), "the server has the role worker"),
    ] {
        let server = TestServer::start(&door(&pair, None)).await;
        let status = check(channel(&client(ca.clone(), None), server.address)).await.unwrap_err();
        assert!(text(&status).contains(word), "{}", text(&status));
    }
    // A certificate without a role is one of a public authority: its name has to be right, and is all there is.
    let server = TestServer::start(&door(&authority.pair(&folder, "plain", &[]), None)).await;
    check(channel(&client(ca.clone(), None), server.address)).await.unwrap();
    let elsewhere = SocketAddr::from(([127, 0, 0, 2], server.address.port()));
    assert!(check(channel(&client(ca, None), elsewhere)).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_authorities_of_clients_everything_is_open() {
    let (folder, authority) = (Folder::new("open"), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let own = authority.role(&folder, PeerRole::Controller);
    for (settings, tls) in [(door(&own, None), Some(client(ca, None))), (DoorSettings::default(), None)] {
        let server = TestServer::start(&settings).await;
        let address = server.address.to_string();
        let channel = ClientTls::channel(tls.as_ref(), &address, PeerRole::Controller, |endpoint| endpoint).unwrap();
        check(channel.clone()).await.unwrap();
        let status = call(channel, "/kvist.controller.v1.ControllerService/Apply").await;
        assert_eq!(Code::Unimplemented, status.code());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_certificates_are_optional_a_caller_without_one_is_a_client() {
    let (folder, authority, stranger) = (Folder::new("optional"), Authority::new(), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let settings = DoorSettings {
        tls_client_optional: true,
        open_services: vec![OpenService::Health],
        ..door(&authority.role(&folder, PeerRole::Controller), Some(ca.clone()))
    };
    let server = TestServer::start(&settings).await;
    let anonymous = channel(&client(ca.clone(), None), server.address);
    check(anonymous.clone()).await.unwrap();
    for (path, code) in [
        ("/kvist.router.v1.RouterService/Generate", Code::Unimplemented),
        ("/kvist.engine.v1.EngineService/Generate", Code::PermissionDenied),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Code::PermissionDenied),
    ] {
        let status = call(anonymous.clone(), path).await;
        assert_eq!(code, status.code(), "{path}: {status}");
    }
    // One that is shown must be right.
    let strange = stranger.pair(&folder, "strange", &["spiffe://test/kvist/client"]);
    assert!(check(channel(&client(ca, Some(&strange)), server.address)).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_authorities_are_replaced_under_a_stream_that_runs() {
    let (folder, old, new) = (Folder::new("rotation"), Authority::new(), Authority::new());
    let ca = old.write(&folder.path("ca.pem"));
    let own = old.role(&folder, PeerRole::Controller);
    let server = TestServer::start(&door(&own, Some(ca.clone()))).await;
    let router = old.role(&folder, PeerRole::Router);
    let tls = client(ca.clone(), Some(&router));
    let running = channel(&tls, server.address);
    let mut stream =
        HealthClient::new(running.clone()).watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert!(timeout(LIMIT, stream.message()).await.unwrap().unwrap().is_some());

    // A key that does not belong to its certificate, as between two renames, changes nothing.
    let good_key = fs::read(&own.key).unwrap();
    fs::copy(new.pair(&folder, "other", &[]).key, &own.key).unwrap();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    check(channel(&tls, server.address)).await.unwrap();
    fs::write(&own.key, good_key).unwrap();

    // Everything is of another authority now, on both sides, in the same files.
    new.write(&ca);
    new.role(&folder, PeerRole::Controller);
    new.role(&folder, PeerRole::Router);
    let only_new = client(new.write(&folder.path("new.pem")), Some(&router));
    timeout(LIMIT, async {
        while check(channel(&only_new, server.address)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // The client that was there before follows its files too.
        while check(channel(&tls, server.address)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .unwrap();

    // The old stream is still the same stream.
    server.health.set_service_status("", ServingStatus::NotServing).await;
    let heard = timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(HealthStatus::NotServing as i32, heard.status);
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_text_at_an_encrypted_door_ends_at_once() {
    let (folder, authority) = (Folder::new("plain"), Authority::new());
    let server = TestServer::start(&door(&authority.role(&folder, PeerRole::Controller), None)).await;
    for words in ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(words.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // An end or a reset, and long before the handshake's own limit.
        let ended = timeout(Duration::from_secs(3), stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "the connection stays open");
        assert!(answer.len() < 64, "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_never_speak_hold_up_nobody_and_are_shown_out() {
    let (folder, authority) = (Folder::new("silent"), Authority::new());
    let ca = authority.write(&folder.path("ca.pem"));
    let server = TestServer::start(&door(&authority.role(&folder, PeerRole::Controller), None)).await;
    let mut silent = Vec::new();
    // More than the door keeps at once.
    for _ in 0..300 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    check(channel(&client(ca, None), server.address)).await.unwrap();
    let mut buffer = [0; 16];
    for stream in &mut silent {
        let ended = timeout(LIMIT, stream.read(&mut buffer)).await.expect("a silent connection is kept for ever");
        assert!(matches!(ended, Ok(0) | Err(_)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_door_for_http_speaks_what_the_client_prefers_and_the_older_tls_too() {
    use rustls::version::{TLS12, TLS13};
    let (folder, authority) = (Folder::new("http"), Authority::new());
    let own = authority.role(&folder, PeerRole::Router);
    for (kind, version, protocols, agreed) in [
        (DoorKind::Http, &TLS13, &["h2", "http/1.1"][..], Some("h2")),
        (DoorKind::Http, &TLS13, &["http/1.1"], Some("http/1.1")),
        (DoorKind::Http, &TLS12, &["http/1.1"], Some("http/1.1")),
        (DoorKind::Http, &TLS13, &[], Some("")),
        (DoorKind::Grpc, &TLS13, &["h2"], Some("h2")),
        (DoorKind::Grpc, &TLS13, &["http/1.1"], None),
        (DoorKind::Grpc, &TLS12, &["h2"], None),
    ] {
        let door = Door::open(&door(&own, None), kind).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = door.incoming(listener);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let connected = timeout(LIMIT, TlsConnector::from(Arc::new(config)).connect(name, stream)).await.unwrap();
        match agreed {
            None => assert!(connected.is_err(), "{kind:?} {protocols:?}"),
            Some(agreed) => {
                let connected = connected.unwrap();
                assert_eq!(agreed.as_bytes(), connected.get_ref().1.alpn_protocol().unwrap_or_default());
                assert_eq!(Peer::Unasked, timeout(LIMIT, incoming.next()).await.unwrap().unwrap().unwrap().peer());
            }
        }
    }
}

#[tokio::test]
async fn an_address_may_say_by_its_scheme_whether_it_is_encrypted() {
    let (folder, authority) = (Folder::new("addresses"), Authority::new());
    let tls = client(authority.write(&folder.path("ca.pem")), None);
    let open = |tls, address| ClientTls::channel(tls, address, PeerRole::Worker, |endpoint| endpoint);
    for address in ["host:1", "10.0.0.7:1", "[::1]:1", "http://host:1", "http://host:1/"] {
        assert!(open(None, address).is_ok() && open(Some(&tls), address).is_ok(), "{address}");
    }
    assert!(open(Some(&tls), "https://host:1").is_ok());
    assert!(open(None, "https://host:1").unwrap_err().message.contains("tls_ca_file"));
    for address in ["", "a b:1", "ftp://host:1"] {
        assert!(open(None, address).is_err() && open(Some(&tls), address).is_err(), "{address}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_files_are_said_with_their_setting_and_without_their_content() {
    let (folder, authority) = (Folder::new("files"), Authority::new());
    let own = authority.role(&folder, PeerRole::Controller);
    let other = authority.pair(&folder, "other", &[]);
    let nonsense = folder.path("nonsense");
    fs::write(&nonsense, "SECRET").unwrap();
    let good = door(&own, None);
    let with = |set: &dyn Fn(&mut DoorSettings)| {
        let mut settings = good.clone();
        set(&mut settings);
        Door::open(&settings, DoorKind::Grpc).unwrap_err().to_string()
    };
    for (message, words) in [
        (with(&|door| door.tls_key_file = None), "tls_key_file: goes together"),
        (with(&|door| door.tls_key_file = Some(other.key.clone())), "is not the key of tls_certificate_file"),
        (with(&|door| door.tls_key_file = Some(nonsense.clone())), "tls_key_file: holds no key"),
        (
            with(&|door| door.tls_certificate_file = Some(nonsense.clone())),
            "tls_certificate_file: holds no certificate",
        ),
        (with(&|door| door.tls_client_ca_file = Some(nonsense.clone())), "tls_client_ca_file: holds no certificate"),
        (with(&|door| door.tls_client_ca_file = Some(folder.path("absent"))), "tls_client_ca_file: cannot be read"),
        (with(&|door| door.tls_role_uri = "role".to_owned()), "tls_role_uri: must name {role}"),
    ] {
        assert!(message.contains(words), "{message}");
        assert!(!message.contains("SECRET") && !message.contains("PRIVATE"), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_certificate_is_known_and_follows_its_file() {
    let (folder, authority) = (Folder::new("expiry"), Authority::new());
    let own = authority.role(&folder, PeerRole::Controller);
    let first = certificate_expiry(&own.certificate).unwrap();
    let door = Door::open(&door(&own, None), DoorKind::Grpc).unwrap();
    assert_eq!(Some(first), door.certificate_expires_at());
    assert_eq!(None, Door::open(&DoorSettings::default(), DoorKind::Grpc).unwrap().certificate_expires_at());
    let later = authority.pair_until(&folder, "later", &[], 2200);
    fs::copy(&later.key, &own.key).unwrap();
    fs::copy(&later.certificate, &own.certificate).unwrap();
    let second = certificate_expiry(&own.certificate).unwrap();
    assert!(second < first);
    tokio::time::timeout(LIMIT, async {
        while door.certificate_expires_at() != Some(second) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    assert!(certificate_expiry(&own.key).unwrap_err().to_string().contains("tls_certificate_file"));
}
