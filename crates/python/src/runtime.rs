//! The tokio runtime, as an object that Python owns, and the end of the process.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use kvist_errors::{Code, KvistError};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::failure::{raise, raise_invalid};

/// How long the end of the process waits for tasks that do not end by themselves.
const CLOSE_TIME_LIMIT: Duration = Duration::from_secs(2);

/// Runtimes that are open, so that the end of the process closes those that nobody closed.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

struct Inner {
    runtime: Mutex<Option<tokio::runtime::Runtime>>,
    process_id: u32,
}

impl Inner {
    fn close(&self, py: Python<'_>) {
        let Some(runtime) = self.runtime.lock().take() else { return };
        if self.process_id == std::process::id() {
            // A thread may be inside a call into Python and needs the interpreter to leave it.
            py.detach(|| runtime.shutdown_timeout(CLOSE_TIME_LIMIT));
        } else {
            // A forked child has the object and none of its threads: there is nothing to wait for.
            std::mem::forget(runtime);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Dropping the last reference must not wait for tasks: nobody would expect a garbage collection to block.
        if let Some(runtime) = self.runtime.get_mut().take() {
            runtime.shutdown_background();
        }
    }
}

/// Threads of the data plane. Closed at the end of the process if not before.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct Runtime {
    inner: Arc<Inner>,
}

#[pymethods]
impl Runtime {
    /// `worker_threads`: none for one for each processor.
    #[new]
    #[pyo3(signature = (worker_threads=None))]
    fn new(worker_threads: Option<usize>) -> PyResult<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.enable_all().thread_name("kvist");
        if let Some(threads) = worker_threads {
            if threads == 0 {
                return Err(raise_invalid("worker_threads", "must be at least 1"));
            }
            builder.worker_threads(threads);
        }
        let runtime = builder.build().map_err(|error| raise(&internal(&format!("no threads: {error}"))))?;
        let inner = Arc::new(Inner { runtime: Mutex::new(Some(runtime)), process_id: std::process::id() });
        let mut open = OPEN.lock();
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// Ends all tasks and threads. Idempotent.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}

impl Runtime {
    /// A handle for spawning, or an error when the runtime is closed or belongs to another process.
    pub(crate) fn handle(&self) -> PyResult<tokio::runtime::Handle> {
        if self.inner.process_id != std::process::id() {
            return Err(raise(&internal("a runtime does not survive a fork: make one in this process")));
        }
        self.inner
            .runtime
            .lock()
            .as_ref()
            .map(|runtime| runtime.handle().clone())
            .ok_or_else(|| raise(&KvistError::new(Code::Draining, "the runtime is closed")))
    }
}

/// Closes every runtime and ends telemetry; registered with `atexit`, so that no thread of ours meets an interpreter
/// that is gone.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) {
    let open: Vec<_> = OPEN.lock().drain(..).collect();
    for inner in open.iter().filter_map(Weak::upgrade) {
        inner.close(py);
    }
    crate::telemetry::shutdown_telemetry(py);
}

fn internal(message: &str) -> KvistError {
    KvistError::new(Code::Internal, message)
}

/// Runs a future to its end with the interpreter released.
pub(crate) fn block_on<F>(py: Python<'_>, handle: &tokio::runtime::Handle, future: F) -> F::Output
where
    F: Future + Send,
    F::Output: Send,
{
    py.detach(|| handle.block_on(future))
}
