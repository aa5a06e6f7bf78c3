//! Who may come in and call what, for servers in Python.

use std::path::PathBuf;

use kvist_doors::{ClientTls, ClientTlsSettings, OpenService, Peer, RolePattern};
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::failure::{raise, raise_invalid};

/// The table of who may call what, as JSON text: `[{"service", "method", "roles"}]`.
#[pyfunction]
pub(crate) fn access_table() -> String {
    serde_json::to_string(&kvist_doors::table().collect::<Vec<_>>()).unwrap_or_default()
}

/// Until when the first certificate of a PEM file may be used, in Unix seconds.
#[pyfunction]
pub(crate) fn certificate_expiry(path: PathBuf) -> PyResult<i64> {
    kvist_doors::certificate_expiry(&path).map_err(|error| raise(&error))
}

/// The table as one server reads it.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct DoorRules(kvist_doors::DoorRules);

#[pymethods]
impl DoorRules {
    /// `open_services`: of `health` and `reflection`, those that are open to all who are let in; `role_uri`: how
    /// certificates state roles, the usual form when empty.
    #[new]
    fn new(open_services: Vec<String>, role_uri: &str) -> PyResult<Self> {
        let pattern = match role_uri {
            "" => RolePattern::default(),
            text => RolePattern::new(text).map_err(|error| raise(&error))?,
        };
        let open_services: Vec<OpenService> = serde_json::to_value(open_services)
            .and_then(serde_json::from_value)
            .map_err(|error| raise_invalid("open_services", error))?;
        Ok(Self(kvist_doors::DoorRules::new(open_services, pattern)))
    }

    /// Refuses a call of `service/method` by a peer whose certificate has these URIs.
    fn check(&self, method: &str, uris: Vec<String>) -> PyResult<()> {
        let peer = Peer::Certified(self.0.pattern().role_of(uris.iter().map(String::as_str)));
        self.0.check(method, peer).map_err(|error| raise(&error))
    }
}

/// The TLS of a part that calls workers.
pub(crate) fn open_tls(handle: &Handle, settings: &ClientTlsSettings) -> PyResult<Option<ClientTls>> {
    let _in_runtime = handle.enter();
    ClientTls::open(settings).map_err(|error| raise(&error))
}
