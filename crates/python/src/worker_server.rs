//! The worker's server.

use std::{sync::Arc, time::Duration};

use kvist_attached::AttachedEngine;
use kvist_errors::{Code, KvistError};
use kvist_worker::{Engine, SimWorkerEngine, WorkerSettings};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::{
    engine::PythonEngine,
    failure::raise,
    runtime::{Runtime, block_on},
};

enum State {
    New(Box<WorkerSettings>, Arc<dyn Engine>),
    Busy,
    Running(Box<kvist_worker::WorkerServer>),
    Stopped,
}

/// One engine behind the gRPC server of a worker.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct WorkerServer {
    handle: Handle,
    state: Mutex<State>,
}

#[pymethods]
impl WorkerServer {
    /// `engine`: an adapter, or none for an engine of the core: `sim`, `attached`.
    #[new]
    #[pyo3(signature = (runtime, settings_json, engine=None))]
    fn new(runtime: &Runtime, settings_json: &str, engine: Option<Py<PyAny>>) -> PyResult<Self> {
        let settings = WorkerSettings::from_json(settings_json).map_err(|error| raise(&error))?;
        let engine: Arc<dyn Engine> = match engine {
            Some(adapter) => Arc::new(PythonEngine::new(adapter)),
            None if settings.engine == "attached" => {
                Arc::new(AttachedEngine::new(&settings.engine_arguments).map_err(|error| raise(&error))?)
            }
            None => Arc::new(SimWorkerEngine::of(&settings)),
        };
        Ok(Self { handle: runtime.handle()?, state: Mutex::new(State::New(Box::new(settings), engine)) })
    }

    /// Starts the engine, which may take minutes, and serves. Returns `grpc_address`, `admin_address` and `incarnation`
    /// as JSON text.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        let State::New(settings, engine) = self.take(|state| matches!(state, State::New(..)))? else {
            return Err(wrong_state());
        };
        match block_on(py, &self.handle, kvist_worker::WorkerServer::start(*settings, engine)) {
            Ok(server) => {
                let addresses = serde_json::to_string(server.addresses()).unwrap_or_default();
                *self.state.lock() = State::Running(Box::new(server));
                Ok(addresses)
            }
            Err(error) => {
                *self.state.lock() = State::Stopped;
                Err(raise(&error))
            }
        }
    }

    /// Whether the engine has failed for good.
    fn has_failed(&self) -> bool {
        matches!(&*self.state.lock(), State::Running(server) if server.has_failed())
    }

    /// Takes nothing new, waits for what runs and aborts the rest. Returns how many ended by themselves and how many
    /// were aborted.
    fn drain(&self, py: Python<'_>, time_limit_ms: u64) -> PyResult<(u32, u32)> {
        let State::Running(server) = self.take(|state| matches!(state, State::Running(_)))? else {
            return Err(wrong_state());
        };
        let drained = block_on(py, &self.handle, server.drain(Duration::from_millis(time_limit_ms)));
        *self.state.lock() = State::Running(server);
        Ok(drained)
    }

    /// Ends the engine and the server. Idempotent.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        if matches!(&*self.state.lock(), State::Stopped) {
            return Ok(());
        }
        let state = self.take(|state| !matches!(state, State::Busy))?;
        if let State::Running(server) = state {
            block_on(py, &self.handle, server.stop());
        }
        *self.state.lock() = State::Stopped;
        Ok(())
    }
}

impl WorkerServer {
    /// Takes the state out for a call that changes it; another call meanwhile finds it busy.
    fn take(&self, is_wanted: impl Fn(&State) -> bool) -> PyResult<State> {
        let mut state = self.state.lock();
        if is_wanted(&state) { Ok(std::mem::replace(&mut *state, State::Busy)) } else { Err(wrong_state()) }
    }
}

fn wrong_state() -> PyErr {
    raise(&KvistError::new(Code::NotReady, "the worker is not in a state for this call"))
}
