//! Meshes in virtual time.

use kvist_twin::StudyRequest;
use pyo3::prelude::*;

use crate::failure::raise_invalid;

/// Runs policies on a trace: JSON of a `StudyRequest` in, JSON of a `Study`, a table for people, and an SVG out.
#[pyfunction]
pub(crate) fn run_twin(py: Python<'_>, request: &str, trace: &str) -> PyResult<(String, String, String)> {
    let request: StudyRequest =
        serde_json::from_str(request).map_err(|error| raise_invalid("request", error.to_string()))?;
    let study = py.detach(|| request.run(trace)).map_err(|reason| raise_invalid("request", reason))?;
    let json = serde_json::to_string(&study).unwrap_or_default();
    Ok((json, kvist_twin::table(&study.policies), kvist_twin::plot(&study)))
}
