//! The worker's process, for Python to start and end.

use std::{sync::Arc, time::Duration};

use kvist_worker::{SimWorkerEngine, SimWorkerSettings, WorkerServer as Worker, WorkerSettings};
use parking_lot::Mutex;
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use crate::{errors::to_python, runtime::Runtime};

/// A worker with the simulated engine.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct WorkerServer {
    runtime: Arc<tokio::runtime::Runtime>,
    worker: Mutex<Option<Worker>>,
}

#[pymethods]
impl WorkerServer {
    /// Starts the engine `sim` and listens. Both arguments are JSON text; raises `ValueError` for a wrong one and
    /// `CoreError` when the address is taken.
    #[new]
    #[pyo3(signature = (runtime, *, settings_json, engine_json))]
    fn new(python: Python<'_>, runtime: &Runtime, settings_json: &str, engine_json: &str) -> PyResult<Self> {
        let runtime = runtime.get()?;
        let wrong = |error: serde_json::Error| PyValueError::new_err(error.to_string());
        let settings: WorkerSettings = serde_json::from_str(settings_json).map_err(wrong)?;
        let engine: SimWorkerSettings = serde_json::from_str(engine_json).map_err(wrong)?;
        let worker =
            python.detach(|| runtime.block_on(Worker::start(settings, Arc::new(SimWorkerEngine::new(engine)))));
        let worker = worker.map_err(|error| to_python(&error))?;
        Ok(Self { runtime, worker: Mutex::new(Some(worker)) })
    }

    /// `(host:port, incarnation)`.
    #[getter]
    fn address(&self) -> PyResult<(String, u64)> {
        let worker = self.worker.lock();
        let worker = worker.as_ref().ok_or_else(|| PyRuntimeError::new_err("the worker is stopped"))?;
        Ok((worker.addresses().grpc_address.clone(), worker.addresses().incarnation))
    }

    /// Drains until the limit and ends. Calling it again does nothing.
    fn stop(&self, python: Python<'_>, time_limit_ms: u64) {
        let worker = self.worker.lock().take();
        python.detach(|| {
            if let Some(worker) = worker {
                self.runtime.block_on(async {
                    worker.drain(Duration::from_millis(time_limit_ms)).await;
                    worker.stop().await;
                });
            }
        });
    }
}
