//! The tokio runtime as an object that Python owns and ends.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// Threads of the Rust side. Nothing starts at import; `close` ends all of it before the interpreter goes.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct Runtime {
    inner: Mutex<Option<Arc<tokio::runtime::Runtime>>>,
}

#[pymethods]
impl Runtime {
    #[new]
    #[pyo3(signature = (*, worker_threads = 2))]
    fn new(worker_threads: usize) -> PyResult<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(worker_threads.max(1))
            .thread_name("kvist-core")
            .enable_all()
            .build()
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Self { inner: Mutex::new(Some(Arc::new(runtime))) })
    }

    /// Ends all tasks. Calling it again does nothing.
    fn close(&self, python: Python<'_>) {
        let runtime = self.inner.lock().take();
        // Ending waits for running tasks.
        python.detach(|| {
            if let Some(runtime) = runtime.and_then(Arc::into_inner) {
                runtime.shutdown_timeout(Duration::from_secs(2));
            }
        });
    }
}

impl Runtime {
    pub(crate) fn get(&self) -> PyResult<Arc<tokio::runtime::Runtime>> {
        self.inner.lock().clone().ok_or_else(|| PyRuntimeError::new_err("the runtime is closed"))
    }
}
