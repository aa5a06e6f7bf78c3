//! Logs and traces of the data plane.

use kvist_errors::{Code, KvistError};
use kvist_telemetry::{TelemetryError, TelemetryGuard, TelemetrySettings};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::failure::{raise, raise_invalid};

/// What was installed, until the end of the process.
static GUARD: Mutex<Option<TelemetryGuard>> = Mutex::new(None);

/// Installs logs and, when an OTLP endpoint is configured, traces of the data plane. Once a process.
#[pyfunction]
pub(crate) fn init_telemetry(py: Python<'_>, settings_json: &str) -> PyResult<()> {
    let settings: TelemetrySettings =
        serde_json::from_str(settings_json).map_err(|error| raise_invalid("telemetry", error))?;
    let guard = py.detach(|| kvist_telemetry::init(&settings)).map_err(|error| match error {
        TelemetryError::LogLevel(_) => raise_invalid("telemetry.log_level", error),
        TelemetryError::AlreadyInitialized => raise(&KvistError::new(Code::AlreadyExists, error.to_string())),
        _ => raise(&KvistError::new(Code::Internal, error.to_string())),
    })?;
    *GUARD.lock() = Some(guard);
    Ok(())
}

/// Sends what is left. Idempotent.
#[pyfunction]
pub(crate) fn shutdown_telemetry(py: Python<'_>) {
    if let Some(mut guard) = GUARD.lock().take() {
        py.detach(|| guard.shutdown());
    }
}
