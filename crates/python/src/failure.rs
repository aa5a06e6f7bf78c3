//! Errors on their way to Python.

use std::time::Duration;

use kvist_errors::{Code, FieldViolation, KvistError};
use pyo3::{create_exception, exceptions::PyException, prelude::*};

create_exception!(
    kvist._core,
    CoreError,
    PyException,
    "A failure of the core: (code, message, details as JSON text). `kvist.errors.from_core` reads it."
);

/// The exception for an error of the catalogue.
pub(crate) fn raise(error: &KvistError) -> PyErr {
    let fields: Vec<_> = error
        .fields
        .iter()
        .map(|violation| serde_json::json!({"field": violation.field, "description": violation.description}))
        .collect();
    let details = serde_json::json!({
        "fields": fields,
        "retry_after_ms": error.retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        "not_started": error.not_started,
        "metadata": error.metadata,
    });
    CoreError::new_err((error.code.name(), error.message.clone(), details.to_string()))
}

/// The exception for settings or a message that cannot be read.
pub(crate) fn raise_invalid(what: &str, error: impl std::fmt::Display) -> PyErr {
    raise(&KvistError::field(Code::InvalidArgument, what, error.to_string()))
}

/// The error that an engine states, with a code of the catalogue and a public text.
pub(crate) fn error_of(
    code: &str,
    message: &str,
    not_started: bool,
    retry_after_ms: Option<u64>,
    fields: Vec<(String, String)>,
) -> PyResult<KvistError> {
    let known = Code::from_name(code).ok_or_else(|| raise_invalid("code", "is not in the catalogue"))?;
    let mut error = KvistError::new(known, message);
    error.not_started = not_started;
    error.retry_after = retry_after_ms.map(Duration::from_millis);
    error.fields = fields.into_iter().map(|(field, description)| FieldViolation { field, description }).collect();
    Ok(error)
}

/// The error that an exception stands for: itself when it is one of the catalogue, else `ENGINE_FAILED` with a public
/// text, and the traceback in the log.
pub(crate) fn from_python(py: Python<'_>, exception: &PyErr, public_text: &str) -> KvistError {
    let value = exception.value(py);
    let text = |name: &str| value.getattr(name).and_then(|attribute| attribute.extract::<String>());
    if let (Ok(name), Ok(message)) = (text("code"), text("message"))
        && let Some(code) = Code::from_name(&name)
    {
        let mut error = KvistError::new(code, message);
        error.not_started = value.getattr("not_started").and_then(|flag| flag.extract()).unwrap_or(false);
        return error;
    }
    let traceback = exception.traceback(py).and_then(|traceback| traceback.format().ok()).unwrap_or_default();
    tracing::error!(exception = exception.to_string(), traceback, "engine_raised");
    KvistError::new(Code::EngineFailed, public_text)
}
