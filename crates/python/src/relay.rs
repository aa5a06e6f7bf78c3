//! The agent's relay of KV events.

use std::sync::Arc;

use kvist_doors::ClientTlsSettings;
use kvist_errors::{Code, KvistError};
use kvist_events::{BusSettings, EventsError, RelaySettings, RelayWorker};
use parking_lot::Mutex;
use pyo3::prelude::*;
use serde_json::Value;
use tokio::runtime::Handle;

use crate::{
    attached::AttachedEngines,
    doors::open_tls,
    failure::{raise, raise_invalid},
    runtime::{Runtime, block_on},
};

/// Publishes the KV events of a node's workers.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct Relay {
    handle: Handle,
    settings: BusSettings,
    tls: ClientTlsSettings,
    running: Mutex<Option<Arc<kvist_events::Relay>>>,
}

#[pymethods]
impl Relay {
    /// Settings: `nats_url`, `cluster`, `client_name`, `credentials_file`, `tls_ca_file`, and `tls`: how workers are
    /// called.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let wrong = |error| raise_invalid("relay", error);
        let mut bus: serde_json::Map<String, Value> = serde_json::from_str(settings_json).map_err(wrong)?;
        let tls = bus.remove("tls").map(serde_json::from_value).transpose().map_err(wrong)?.unwrap_or_default();
        let settings = serde_json::from_value(Value::Object(bus)).map_err(wrong)?;
        Ok(Self { handle: runtime.handle()?, settings, tls, running: Mutex::new(None) })
    }

    /// Connects in the background; NATS may come later.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        if self.running.lock().is_some() {
            return Ok(());
        }
        let mut settings = RelaySettings::new(self.settings.clone());
        settings.worker_tls = open_tls(&self.handle, &self.tls)?;
        let relay = block_on(py, &self.handle, kvist_events::Relay::start(settings)).map_err(refused)?;
        *self.running.lock() = Some(Arc::new(relay));
        Ok(())
    }

    /// Relays exactly these workers: a JSON array of `{"uid", "address"}`.
    fn set_workers(&self, py: Python<'_>, workers_json: &str) -> PyResult<()> {
        let workers: Vec<RelayWorker> =
            serde_json::from_str(workers_json).map_err(|error| raise_invalid("workers", error))?;
        let relay = self.relay()?;
        py.detach(|| relay.set_workers(workers)).map_err(refused)
    }

    /// Relays attached engines too, from here on.
    fn attach(&self, py: Python<'_>, engines: &AttachedEngines) -> PyResult<()> {
        let (relay, engines) = (self.relay()?, engines.running()?);
        py.detach(|| relay.attach(&engines));
        Ok(())
    }

    /// Numbers of the relay as JSON text.
    fn stats(&self) -> PyResult<String> {
        Ok(serde_json::to_string(&self.relay()?.stats()).unwrap_or_default())
    }

    /// Ends the relay. Idempotent.
    fn stop(&self, py: Python<'_>) {
        let relay = self.running.lock().take();
        py.detach(|| drop(relay));
    }
}

impl Relay {
    fn relay(&self) -> PyResult<Arc<kvist_events::Relay>> {
        self.running.lock().clone().ok_or_else(|| raise(&KvistError::new(Code::NotReady, "the relay is not running")))
    }
}

/// The exception for what the event plane refuses.
pub(crate) fn refused(error: EventsError) -> PyErr {
    let code = match error {
        EventsError::Name { .. }
        | EventsError::Address(_)
        | EventsError::Bus(_)
        | EventsError::File { .. }
        | EventsError::Attach { .. }
        | EventsError::Malformed(_) => Code::InvalidArgument,
        _ => Code::Internal,
    };
    raise(&KvistError::new(code, error.to_string()))
}
