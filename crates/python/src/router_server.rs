//! The router.

use std::{sync::Arc, time::Duration};

use kvist_edge::RouterProcess;
use kvist_errors::{Code, KvistError};
use kvist_router::RouterSettings;
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::{
    failure::raise,
    runtime::{Runtime, block_on},
};

/// A whole router: HTTP edge, gRPC server and admin port.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct RouterServer {
    handle: Handle,
    /// Until the start.
    settings: Mutex<Option<RouterSettings>>,
    /// From the start to the stop.
    process: RwLock<Option<RouterProcess>>,
}

#[pymethods]
impl RouterServer {
    /// Settings as `kvist_router.settings` writes them.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let settings = RouterSettings::from_json(settings_json).map_err(|error| raise(&error))?;
        Ok(Self { handle: runtime.handle()?, settings: Mutex::new(Some(settings)), process: RwLock::new(None) })
    }

    /// Listens; not ready until the first cluster state. Returns `http_address`, `grpc_address` and `admin_address` as
    /// JSON text.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        let settings = self.settings.lock().take().ok_or_else(|| not_running("was started before"))?;
        let started = py.detach(|| self.handle.block_on(RouterProcess::start(settings)));
        let process = started.map_err(|error| raise(&error))?;
        let addresses = serde_json::to_string(&process.addresses()).unwrap_or_default();
        py.detach(|| *self.process.write() = Some(process));
        Ok(addresses)
    }

    /// Takes up an encoded `ClusterState`; false when it is no newer than the present one, or is held back.
    fn apply_cluster_state(&self, py: Python<'_>, state: &[u8]) -> PyResult<bool> {
        self.with_process(py, |process| process.apply_cluster_state(state))?.map_err(|error| raise(&error))
    }

    /// Notes whether a controller can be reached.
    fn set_control_plane_connected(&self, py: Python<'_>, connected: bool) -> PyResult<()> {
        self.with_process(py, |process| process.set_control_plane_connected(connected))
    }

    /// Numbers for people and supervisors, as JSON text.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = self.with_process(py, RouterProcess::status)?;
        Ok(serde_json::to_string(&status).unwrap_or_default())
    }

    /// Takes nothing new and waits for what runs; true when nothing runs any more.
    fn drain(&self, py: Python<'_>, time_limit_ms: u64) -> PyResult<bool> {
        // The core alone is kept meanwhile, so that a stop need not wait for a drain.
        let core = self.with_process(py, |process| Arc::clone(process.core()))?;
        Ok(block_on(py, &self.handle, async move { core.drain(Duration::from_millis(time_limit_ms)).await }))
    }

    /// Ends everything: streams that run end with an error, never as if they were complete. Idempotent.
    fn stop(&self, py: Python<'_>) {
        let process = py.detach(|| self.process.write().take());
        if let Some(process) = process {
            block_on(py, &self.handle, process.stop());
        }
    }
}

impl RouterServer {
    /// Uses the process with the interpreter released: its locks are those of the data plane.
    fn with_process<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&RouterProcess) -> T + Send) -> PyResult<T> {
        py.detach(|| self.process.read().as_ref().map(work)).ok_or_else(|| not_running("is not running"))
    }
}

fn not_running(what: &str) -> PyErr {
    raise(&KvistError::new(Code::NotReady, format!("the router {what}")))
}
