//! The ledgers of engines that Kvist did not start.

use std::sync::Arc;

use kvist_errors::{Code, KvistError, from_status};
use kvist_events::AttachedSettings;
use kvist_proto::agent::v1::{WatchKvEventsRequest, WatchKvEventsResponse};
use parking_lot::Mutex;
use prost::Message as _;
use pyo3::{prelude::*, types::PyBytes};
use tokio::{runtime::Handle, sync::Semaphore, task::JoinHandle};

use crate::{
    failure::{raise, raise_invalid},
    relay::refused,
    runtime::Runtime,
};

/// Parts of a history that wait for Python's event loop.
const PARTS_ON_THE_WAY: usize = 16;

/// Reads what attached engines publish, and keeps their ledgers.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct AttachedEngines {
    handle: Handle,
    settings: AttachedSettings,
    running: Mutex<Option<Arc<kvist_events::AttachedEngines>>>,
}

#[pymethods]
impl AttachedEngines {
    /// Settings: `hash_seed`, `folder`, `engines`, `ring_batches`, `digest_interval_ms`.
    #[new]
    fn new(runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let settings: AttachedSettings =
            serde_json::from_str(settings_json).map_err(|error| raise_invalid("attach", error))?;
        kvist_events::AttachedEngines::check(&settings).map_err(refused)?;
        Ok(Self { handle: runtime.handle()?, settings, running: Mutex::new(None) })
    }

    /// Begins to read; engines may come later.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        if self.running.lock().is_some() {
            return Ok(());
        }
        let engines = py.detach(|| {
            let _in_runtime = self.handle.enter();
            kvist_events::AttachedEngines::start(&self.settings)
        });
        *self.running.lock() = Some(Arc::new(engines.map_err(refused)?));
        Ok(())
    }

    /// Encoded `AttachedEngine`s, of those that were reached.
    fn descriptions<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let engines = self.running()?;
        let described = engines.engines().iter().filter_map(|engine| engine.description());
        Ok(described.map(|engine| PyBytes::new(py, &engine.encode_to_vec())).collect())
    }

    /// Encoded `LedgerDigest`s of the ledgers of an engine; none for an engine that is not attached.
    fn digests<'py>(&self, py: Python<'py>, worker_uid: &str) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        let engines = self.running()?;
        let Some(engine) = engines.engine(worker_uid) else { return Ok(None) };
        let digests = py.detach(|| engine.digests());
        Ok(Some(digests.iter().map(|digest| PyBytes::new(py, &digest.encode_to_vec())).collect()))
    }

    /// Answers an encoded `kvist.agent.v1.WatchKvEventsRequest`: `on_part` is called with each encoded response, at last
    /// with the name of an error code, or with none. Whoever has sent a part on calls `taken`.
    fn watch(&self, py: Python<'_>, request: &[u8], on_part: Py<PyAny>) -> PyResult<AttachedStream> {
        let request = WatchKvEventsRequest::decode(request).map_err(|error| raise_invalid("request", error))?;
        let engines = self.running()?;
        let Some(engine) = engines.engine(&request.worker_uid) else {
            return Err(raise(&KvistError::new(Code::NotFound, "this agent has attached no such engine")));
        };
        let wanted = request.request.unwrap_or_default();
        let room = Arc::new(Semaphore::new(PARTS_ON_THE_WAY));
        let opened = py.detach(|| {
            let _in_runtime = self.handle.enter();
            engine.watch(&wanted)
        });
        let mut parts = opened.map_err(|error| raise(&error))?;
        let held_up = Arc::clone(&room);
        let task = self.handle.spawn(async move {
            while let Some(part) = parts.recv().await {
                // Never closed.
                let Ok(permit) = held_up.acquire().await else { return };
                permit.forget();
                let is_last = part.is_err();
                let is_heard = Python::attach(|py| match part {
                    Ok(response) => {
                        let response = WatchKvEventsResponse { response: Some(response) };
                        on_part.call1(py, (PyBytes::new(py, &response.encode_to_vec()),)).is_ok()
                    }
                    Err(status) => on_part.call1(py, (from_status(&status).code.name(),)).is_ok(),
                });
                if is_last || !is_heard {
                    return;
                }
            }
            // The loop that is called may be closed by now.
            Python::attach(|py| drop(on_part.call1(py, (py.None(),))));
        });
        Ok(AttachedStream { room, task })
    }

    /// Numbers of all engines as JSON text.
    fn stats(&self) -> PyResult<String> {
        let stats: Vec<_> = self.running()?.engines().iter().map(|engine| engine.stats()).collect();
        Ok(serde_json::to_string(&stats).unwrap_or_default())
    }

    /// Ends the readers. Idempotent.
    fn stop(&self, py: Python<'_>) {
        let engines = self.running.lock().take();
        py.detach(|| drop(engines));
    }
}

impl AttachedEngines {
    pub(crate) fn running(&self) -> PyResult<Arc<kvist_events::AttachedEngines>> {
        let running = self.running.lock().clone();
        running.ok_or_else(|| raise(&KvistError::new(Code::NotReady, "no engine is attached yet")))
    }
}

/// A history on its way. Closed when it is dropped.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct AttachedStream {
    room: Arc<Semaphore>,
    task: JoinHandle<()>,
}

#[pymethods]
impl AttachedStream {
    /// A part was sent on: there is room for another.
    fn taken(&self) {
        self.room.add_permits(1);
    }

    /// Nobody wants the rest. Idempotent.
    fn close(&self) {
        self.task.abort();
    }
}

impl Drop for AttachedStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}
