//! The HTTP server over the same Generate trait as the gRPC service.
//!
//! Bytes in, bytes out: a request is parsed by `kvist_dialect` and handed to a [`kvist_router::Generate`]; the answer's
//! events are written straight into the frames that the connection sends. [`RouterProcess`] is the whole router,
//! [`EdgeProcess`] the edge of routers in other processes.

mod answer;
mod body;
mod convert;
mod cors;
mod edge_only;
mod embeddings;
mod patient;
mod process;
mod prompts;
mod rate_limits;
mod request_ids;
mod routes;
mod server;
mod stalled;

pub use cors::Cors;
pub use edge_only::{EdgeAddresses, EdgeProcess};
pub use process::{RouterAddresses, RouterProcess};
pub use server::{EdgeServer, EdgeSettings};
