//! The only PyO3 crate: converts and forwards, decides nothing.

mod attached;
mod credentials;
mod data_plane;
mod doors;
mod edge_server;
mod embed_sink;
mod engine;
mod engine_host;
mod engine_modes;
mod failure;
mod index_service;
mod pure;
mod relay;
mod router_server;
mod runtime;
mod telemetry;
mod text;
mod twin;
mod worker_server;

use pyo3::prelude::*;

/// A request makes hundreds of small objects on one thread and frees some of them on another, and its prompt lies in
/// buffers that the C library's allocator would give back to the kernel each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CoreError", module.py().get_type::<failure::CoreError>())?;
    module.add_class::<attached::AttachedEngines>()?;
    module.add_class::<attached::AttachedStream>()?;
    module.add_class::<credentials::NatsCredentials>()?;
    module.add_class::<doors::DoorRules>()?;
    module.add_class::<edge_server::EdgeServer>()?;
    module.add_class::<embed_sink::EmbedAnswer>()?;
    module.add_class::<engine_host::Host>()?;
    module.add_class::<engine_host::Sink>()?;
    module.add_class::<index_service::IndexService>()?;
    module.add_class::<index_service::IndexSnapshots>()?;
    module.add_class::<relay::Relay>()?;
    module.add_class::<router_server::RouterServer>()?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<text::ModelText>()?;
    module.add_class::<worker_server::WorkerServer>()?;
    module.add_function(wrap_pyfunction!(doors::access_table, module)?)?;
    module.add_function(wrap_pyfunction!(doors::certificate_expiry, module)?)?;
    module.add_function(wrap_pyfunction!(pure::block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(pure::check_machine, module)?)?;
    module.add_function(wrap_pyfunction!(pure::check_routing, module)?)?;
    module.add_function(wrap_pyfunction!(pure::check_admission, module)?)?;
    module.add_function(wrap_pyfunction!(pure::digest_hex, module)?)?;
    module.add_function(wrap_pyfunction!(pure::reasoning_parsers, module)?)?;
    module.add_function(wrap_pyfunction!(pure::tool_parsers, module)?)?;
    module.add_function(wrap_pyfunction!(pure::error_catalogue, module)?)?;
    module.add_function(wrap_pyfunction!(pure::new_incarnation, module)?)?;
    module.add_function(wrap_pyfunction!(pure::usable_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(engine_modes::engine_mode, module)?)?;
    module.add_function(wrap_pyfunction!(engine_modes::engine_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(telemetry::init_telemetry, module)?)?;
    module.add_function(wrap_pyfunction!(telemetry::shutdown_telemetry, module)?)?;
    module.add_function(wrap_pyfunction!(twin::run_twin, module)?)?;
    let close_all = wrap_pyfunction!(runtime::close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
