//! An edge without a router.

use std::{sync::Arc, time::Duration};

use kvist_edge::EdgeProcess;
use pyo3::prelude::*;

use crate::{data_plane::DataPlane, runtime::Runtime};

/// HTTP edge and admin port before routers of other processes.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct EdgeServer(DataPlane<EdgeProcess>);

#[pymethods]
impl EdgeServer {
    /// Settings as `kvist_router.settings` writes them, with `remote_routers`.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        Ok(Self(DataPlane::new("edge", runtime, settings_json)?))
    }

    /// Listens; not ready until a remote router serves. Returns `http_address` and `admin_address` as JSON text.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        self.0.start(py, EdgeProcess::start, EdgeProcess::addresses)
    }

    /// Takes nothing new and waits for what runs; true when nothing runs any more.
    fn drain(&self, py: Python<'_>, time_limit_ms: u64) -> PyResult<bool> {
        let remote = self.0.with(py, |process| Arc::clone(process.remote()))?;
        Ok(self.0.wait(py, async move { remote.drain(Duration::from_millis(time_limit_ms)).await }))
    }

    /// Ends everything: streams that run end with an error, never as if they were complete. Idempotent.
    fn stop(&self, py: Python<'_>) {
        self.0.stop(py, EdgeProcess::stop);
    }
}
