//! The router's process, for Python to start and end.

use std::{sync::Arc, time::Duration};

use kvist_edge::{RouterProcess, RouterProcessSettings};
use kvist_router::RouterSettings;
use parking_lot::Mutex;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::{errors::to_python, runtime::Runtime};

/// A router: HTTP edge and gRPC server.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct RouterServer {
    runtime: Arc<tokio::runtime::Runtime>,
    process: Mutex<Option<RouterProcess>>,
}

#[pymethods]
impl RouterServer {
    /// Listens at once; raises `CoreError` when an address is taken.
    #[new]
    #[pyo3(signature = (runtime, *, name, http_listen, grpc_listen, body_limit_bytes, index_byte_budget, default_deadline_ms))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one for each setting")]
    fn new(
        python: Python<'_>,
        runtime: &Runtime,
        name: String,
        http_listen: String,
        grpc_listen: String,
        body_limit_bytes: usize,
        index_byte_budget: u64,
        default_deadline_ms: u64,
    ) -> PyResult<Self> {
        let runtime = runtime.get()?;
        let mut router = RouterSettings::new(name);
        router.index_byte_budget = index_byte_budget;
        router.default_deadline = Duration::from_millis(default_deadline_ms);
        let settings = RouterProcessSettings { router, http_listen, grpc_listen, body_limit_bytes };
        let process = python.detach(|| runtime.block_on(RouterProcess::start(settings)));
        let process = process.map_err(|error| to_python(&error))?;
        Ok(Self { runtime, process: Mutex::new(Some(process)) })
    }

    /// `(http, grpc)` as `host:port`.
    #[getter]
    fn addresses(&self) -> PyResult<(String, String)> {
        self.with(|process| (process.addresses().http.clone(), process.addresses().grpc.clone()))
    }

    /// Takes an encoded `kvist.controller.v1.ClusterState` in; false when it is not newer.
    fn apply_cluster_state(&self, python: Python<'_>, state: Vec<u8>) -> PyResult<bool> {
        let core = self.with(|process| Arc::clone(process.core()))?;
        python
            .detach(|| {
                let _entered = self.runtime.enter();
                core.apply_cluster_state(&state)
            })
            .map_err(|error| to_python(&error))
    }

    /// Reservations that are open.
    #[getter]
    fn open_reservations(&self) -> PyResult<usize> {
        self.with(|process| process.core().open_reservations())
    }

    /// Lets running requests end until the limit, then cuts them. Calling it again does nothing.
    fn stop(&self, python: Python<'_>, time_limit_ms: u64) {
        let process = self.process.lock().take();
        python.detach(|| {
            if let Some(process) = process {
                self.runtime.block_on(process.stop(Duration::from_millis(time_limit_ms)));
            }
        });
    }
}

impl RouterServer {
    fn with<T>(&self, read: impl FnOnce(&RouterProcess) -> T) -> PyResult<T> {
        self.process.lock().as_ref().map(read).ok_or_else(|| PyRuntimeError::new_err("the router is stopped"))
    }
}
