//! Errors of the catalogue as one Python exception.

use kvist_errors::KvistError;
use pyo3::{create_exception, exceptions::PyException, prelude::*};

create_exception!(
    kvist._core,
    CoreError,
    PyException,
    "An error of the catalogue: `args` are its code and its message."
);

pub(crate) fn to_python(error: &KvistError) -> PyErr {
    CoreError::new_err((error.code.name(), error.message.clone()))
}
