//! The only PyO3 crate: converts and forwards, decides nothing.

mod errors;
mod router;
mod runtime;
mod worker;

use kvist_blocks::{HashSeed, Namespace};
use pyo3::prelude::*;

/// Kvist's block hashes of the whole blocks of a prompt.
#[pyfunction]
fn block_hashes(
    hash_seed: u64,
    namespace: &str,
    adapter: &str,
    cache_salt: &str,
    tokens: Vec<u32>,
    block_size_tokens: usize,
) -> Vec<u64> {
    let root = Namespace::new(namespace, adapter, cache_salt).root(HashSeed(hash_seed));
    kvist_blocks::block_hashes(root, &tokens, block_size_tokens).into_iter().map(|hash| hash.0).collect()
}

/// Blocks of a prompt that a cache can serve.
#[pyfunction]
fn usable_blocks(prompt_tokens: usize, block_size_tokens: usize) -> usize {
    kvist_blocks::usable_blocks(prompt_tokens, block_size_tokens)
}

/// The error catalogue as JSON text.
#[pyfunction]
fn error_catalogue() -> String {
    serde_json::to_string(&kvist_errors::catalogue()).unwrap_or_default()
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(usable_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(error_catalogue, module)?)?;
    module.add("CoreError", module.py().get_type::<errors::CoreError>())?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<router::RouterServer>()?;
    module.add_class::<worker::WorkerServer>()
}
