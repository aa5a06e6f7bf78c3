//! Credentials of the bus, for the client that Python has.

use pyo3::{prelude::*, types::PyBytes};

use crate::relay::refused;

/// A user's credentials at NATS.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct NatsCredentials(kvist_events::Credentials);

#[pymethods]
impl NatsCredentials {
    /// Reads the text of a credentials file.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        kvist_events::Credentials::parse(text).map(Self).map_err(refused)
    }

    /// The token.
    #[getter]
    fn jwt(&self) -> &str {
        self.0.jwt()
    }

    /// Signs what the server has made up.
    fn sign<'py>(&self, py: Python<'py>, nonce: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        self.0.sign(nonce).map(|signature| PyBytes::new(py, &signature)).map_err(refused)
    }
}
