//! The HTTP server over the same core as the gRPC service, and the router's process around both.

mod convert;
mod http;
mod process;

pub use http::{EdgeSettings, http_routes};
pub use process::{RouterAddresses, RouterProcess, RouterProcessSettings};
