//! Functions without state.

use kvist_blocks::{HashSeed, Namespace};
use kvist_router::ConfigError;
use pyo3::prelude::*;

/// Kvist's block hashes of the whole blocks of a prompt.
#[pyfunction]
pub(crate) fn block_hashes(
    py: Python<'_>,
    hash_seed: u64,
    namespace: &str,
    adapter: &str,
    cache_salt: &str,
    tokens: Vec<u32>,
    block_size_tokens: usize,
) -> PyResult<Vec<u64>> {
    if block_size_tokens == 0 {
        return Err(crate::failure::raise_invalid("block_size_tokens", "must be at least 1"));
    }
    // Long prompts take longer than other threads should wait.
    Ok(py.detach(|| {
        let root = Namespace::new(namespace, adapter, cache_salt).root(HashSeed(hash_seed));
        kvist_blocks::block_hashes(root, &tokens, block_size_tokens).into_iter().map(|hash| hash.0).collect()
    }))
}

/// Blocks of a prompt that a cache can serve.
#[pyfunction]
pub(crate) fn usable_blocks(prompt_tokens: usize, block_size_tokens: usize) -> PyResult<usize> {
    if block_size_tokens == 0 {
        return Err(crate::failure::raise_invalid("block_size_tokens", "must be at least 1"));
    }
    Ok(kvist_blocks::usable_blocks(prompt_tokens, block_size_tokens))
}

/// Refuses a routing pipeline, as JSON text, that no router would take.
#[pyfunction]
pub(crate) fn check_routing(routing: &str) -> PyResult<()> {
    check("routing", routing, kvist_router::RoutingSettings::from_value)
}

/// Refuses an admission, as JSON text, that no router would take.
#[pyfunction]
pub(crate) fn check_admission(admission: &str) -> PyResult<()> {
    check("admission", admission, kvist_router::AdmissionSettings::from_value)
}

/// The error names the path of what is wrong.
fn check<T>(what: &str, text: &str, read: fn(&serde_json::Value) -> Result<T, ConfigError>) -> PyResult<()> {
    let value = serde_json::from_str(text).map_err(|error| crate::failure::raise_invalid(what, error))?;
    match read(&value) {
        Ok(_) => Ok(()),
        Err(error) if error.path().is_empty() => Err(crate::failure::raise_invalid(what, error)),
        Err(error) => Err(crate::failure::raise_invalid(&format!("{what}.{}", error.path()), error)),
    }
}

/// Refuses a worker's settings, as JSON text, that this machine cannot honor.
#[pyfunction]
pub(crate) fn check_machine(worker_settings: &str) -> PyResult<()> {
    let settings = kvist_worker::WorkerSettings::from_json(worker_settings);
    settings.and_then(|settings| settings.check_machine()).map_err(|error| crate::failure::raise(&error))
}

/// The error catalogue as JSON text.
#[pyfunction]
pub(crate) fn error_catalogue() -> String {
    serde_json::to_string(&kvist_errors::catalogue()).unwrap_or_default()
}

/// A new incarnation: microseconds of the Unix time, and above `floor` whatever the clock says.
#[pyfunction]
pub(crate) fn new_incarnation(floor: u64) -> u64 {
    kvist_history::new_incarnation(floor)
}

/// Names of the parsers of tool calls that a model's resource may give.
#[pyfunction]
pub(crate) fn tool_parsers() -> Vec<&'static str> {
    kvist_text::ToolFamily::ALL.map(|(name, _)| name).to_vec()
}

/// Names of the parsers of thoughts that a model's resource may give.
#[pyfunction]
pub(crate) fn reasoning_parsers() -> Vec<&'static str> {
    kvist_text::ReasoningFamily::ALL.map(|(name, _)| name).to_vec()
}

/// BLAKE3 of a file's bytes, lower-case hex: the digest that pools compare.
#[pyfunction]
pub(crate) fn digest_hex(py: Python<'_>, data: &[u8]) -> String {
    py.detach(|| kvist_text::digest_hex(data))
}
