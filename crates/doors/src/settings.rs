//! What doors and clients are told.

use std::path::PathBuf;

use serde::Deserialize;

use crate::OpenService;

/// The door of one listener. Without a certificate it is plain text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DoorSettings {
    /// PEM chain of the server's certificate.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM key of the certificate.
    pub tls_key_file: Option<PathBuf>,
    /// PEM of the authorities whose clients are let in; without it no client certificate is asked for.
    pub tls_client_ca_file: Option<PathBuf>,
    /// Let in clients that show no certificate; one that is shown must be right.
    pub tls_client_optional: bool,
    /// How a client's certificate states its role; the usual form when empty.
    pub tls_role_uri: String,
    /// Services that are open to all who are let in; the others are for operators.
    pub open_services: Vec<OpenService>,
    /// Serve gRPC reflection at all.
    pub reflection: bool,
}

impl Default for DoorSettings {
    fn default() -> Self {
        Self {
            tls_certificate_file: None,
            tls_key_file: None,
            tls_client_ca_file: None,
            tls_client_optional: false,
            tls_role_uri: String::new(),
            open_services: vec![OpenService::Health, OpenService::Reflection],
            reflection: true,
        }
    }
}

/// How a process calls others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientTlsSettings {
    /// PEM of the authorities that sign the servers' certificates; plain text without it.
    pub tls_ca_file: Option<PathBuf>,
    /// PEM chain of the process's own certificate, for servers that ask for one.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM key of that certificate.
    pub tls_key_file: Option<PathBuf>,
    /// How a server's certificate states its role; the usual form when empty.
    pub tls_role_uri: String,
}
