//! The router.

use std::{sync::Arc, time::Duration};

use kvist_edge::RouterProcess;
use pyo3::prelude::*;

use crate::{data_plane::DataPlane, failure::raise, runtime::Runtime};

/// A whole router: HTTP edge, gRPC server and admin port.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct RouterServer(DataPlane<RouterProcess>);

#[pymethods]
impl RouterServer {
    /// Settings as `kvist_router.settings` writes them.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        Ok(Self(DataPlane::new("router", runtime, settings_json)?))
    }

    /// Listens; not ready until the first cluster state. Returns `http_address`, `grpc_address` and `admin_address` as
    /// JSON text.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        self.0.start(py, RouterProcess::start, RouterProcess::addresses)
    }

    /// Takes up an encoded `ClusterState`; false when it is no newer than the present one, or is held back.
    fn apply_cluster_state(&self, py: Python<'_>, state: &[u8]) -> PyResult<bool> {
        self.0.with(py, |process| process.apply_cluster_state(state))?.map_err(|error| raise(&error))
    }

    /// Notes whether a controller can be reached.
    fn set_control_plane_connected(&self, py: Python<'_>, connected: bool) -> PyResult<()> {
        self.0.with(py, |process| process.set_control_plane_connected(connected))
    }

    /// Numbers for people and supervisors, as JSON text.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = self.0.with(py, RouterProcess::status)?;
        Ok(serde_json::to_string(&status).unwrap_or_default())
    }

    /// Takes nothing new and waits for what runs; true when nothing runs any more.
    fn drain(&self, py: Python<'_>, time_limit_ms: u64) -> PyResult<bool> {
        let core = self.0.with(py, |process| Arc::clone(process.core()))?;
        Ok(self.0.wait(py, async move { core.drain(Duration::from_millis(time_limit_ms)).await }))
    }

    /// Ends everything: streams that run end with an error, never as if they were complete. Idempotent.
    fn stop(&self, py: Python<'_>) {
        self.0.stop(py, RouterProcess::stop);
    }
}
