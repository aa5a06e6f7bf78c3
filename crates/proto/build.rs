//! Compiles `proto/` with a pure-Rust compiler, so that a build needs no `protoc`.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 6] = [
    "kvist/agent/v1/agent.proto",
    "kvist/controller/v1/controller.proto",
    "kvist/engine/v1/engine.proto",
    "kvist/events/v1/events.proto",
    "kvist/kvmaster/v1/kvmaster.proto",
    "kvist/router/v1/router.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo::rerun-if-changed={}", root.display());
    let descriptors = protox::compile(FILES, [&root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Without the transport helpers: their `connect` would clash with the RPC `Connect`. Clients use `new(channel)`.
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .extern_path(".kvist.engine.v1.TokenIds", "crate::token_ids::TokenIds")
        .compile_fds(descriptors)?;
    Ok(())
}
