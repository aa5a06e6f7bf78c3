//! An edge without a router.

use std::{sync::Arc, time::Duration};

use kvist_edge::EdgeProcess;
use kvist_errors::{Code, KvistError};
use kvist_router::RouterSettings;
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::{
    failure::raise,
    runtime::{Runtime, block_on},
};

/// HTTP edge and admin port before routers of other processes.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct EdgeServer {
    handle: Handle,
    /// Until the start.
    settings: Mutex<Option<RouterSettings>>,
    /// From the start to the stop.
    process: RwLock<Option<EdgeProcess>>,
}

#[pymethods]
impl EdgeServer {
    /// Settings as `kvist_router.settings` writes them, with `remote_routers`.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let settings = RouterSettings::from_json(settings_json).map_err(|error| raise(&error))?;
        Ok(Self { handle: runtime.handle()?, settings: Mutex::new(Some(settings)), process: RwLock::new(None) })
    }

    /// Listens; not ready until a remote router serves. Returns `http_address` and `admin_address` as JSON text.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        let settings = self.settings.lock().take().ok_or_else(|| not_running("was started before"))?;
        let started = py.detach(|| self.handle.block_on(EdgeProcess::start(settings)));
        let process = started.map_err(|error| raise(&error))?;
        let addresses = serde_json::to_string(&process.addresses()).unwrap_or_default();
        py.detach(|| *self.process.write() = Some(process));
        Ok(addresses)
    }

    /// Takes nothing new and waits for what runs; true when nothing runs any more.
    fn drain(&self, py: Python<'_>, time_limit_ms: u64) -> PyResult<bool> {
        // The connections alone are kept meanwhile, so that a stop need not wait for a drain.
        let remote = py.detach(|| self.process.read().as_ref().map(|process| Arc::clone(process.remote())));
        let remote = remote.ok_or_else(|| not_running("is not running"))?;
        Ok(block_on(py, &self.handle, async move { remote.drain(Duration::from_millis(time_limit_ms)).await }))
    }

    /// Ends everything: streams that run end with an error, never as if they were complete. Idempotent.
    fn stop(&self, py: Python<'_>) {
        let process = py.detach(|| self.process.write().take());
        if let Some(process) = process {
            block_on(py, &self.handle, process.stop());
        }
    }
}

fn not_running(what: &str) -> PyErr {
    raise(&KvistError::new(Code::NotReady, format!("the edge {what}")))
}
