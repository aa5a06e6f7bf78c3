//! A process of the data plane behind an object of Python: settings until its start, and itself from there to its stop.

use std::future::Future;

use kvist_errors::{Code, KvistError};
use kvist_router::RouterSettings;
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use serde::Serialize;
use tokio::runtime::Handle;

use crate::{
    failure::raise,
    runtime::{Runtime, block_on},
};

/// A router or an edge, whichever part of its life it is in.
pub(crate) struct DataPlane<P> {
    /// What errors call it.
    name: &'static str,
    handle: Handle,
    /// Until the start.
    settings: Mutex<Option<RouterSettings>>,
    /// From the start to the stop.
    process: RwLock<Option<P>>,
}

impl<P: Send + Sync> DataPlane<P> {
    /// Settings as `kvist_router.settings` writes them.
    pub(crate) fn new(name: &'static str, runtime: &Runtime, settings_json: &str) -> PyResult<Self> {
        let settings = RouterSettings::from_json(settings_json).map_err(|error| raise(&error))?;
        let handle = runtime.handle()?;
        Ok(Self { name, handle, settings: Mutex::new(Some(settings)), process: RwLock::new(None) })
    }

    /// Starts it, once, and returns its addresses as JSON text.
    pub(crate) fn start<A: Serialize, F: Future<Output = Result<P, KvistError>>>(
        &self,
        py: Python<'_>,
        start: impl FnOnce(RouterSettings) -> F + Send,
        addresses: impl FnOnce(&P) -> A,
    ) -> PyResult<String> {
        let settings = self.settings.lock().take().ok_or_else(|| self.not_running("was started before"))?;
        let started = py.detach(|| self.handle.block_on(start(settings)));
        let process = started.map_err(|error| raise(&error))?;
        let addresses = serde_json::to_string(&addresses(&process)).unwrap_or_default();
        py.detach(|| *self.process.write() = Some(process));
        Ok(addresses)
    }

    /// Uses it with the interpreter released: its locks are those of the data plane.
    pub(crate) fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&P) -> T + Send) -> PyResult<T> {
        py.detach(|| self.process.read().as_ref().map(work)).ok_or_else(|| self.not_running("is not running"))
    }

    /// Waits for something of it, with the interpreter released. What is waited for is taken out of the process first, so
    /// that a stop need not wait as well.
    pub(crate) fn wait<T: Send>(&self, py: Python<'_>, work: impl Future<Output = T> + Send) -> T {
        block_on(py, &self.handle, work)
    }

    /// Ends it, where it runs.
    pub(crate) fn stop<F: Future<Output = ()> + Send>(&self, py: Python<'_>, stop: impl FnOnce(P) -> F) {
        let process = py.detach(|| self.process.write().take());
        if let Some(process) = process {
            block_on(py, &self.handle, stop(process));
        }
    }

    fn not_running(&self, what: &str) -> PyErr {
        raise(&KvistError::new(Code::NotReady, format!("the {} {what}", self.name)))
    }
}
