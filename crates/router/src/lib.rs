//! A request's life: text, schedule, link, retries, Explain; and the gRPC service.
//!
//! [`RouterCore`] holds what is known of the cluster and answers requests; the gRPC service and the HTTP edge both call
//! it, so a request is the same whichever way it came.

mod cluster;
mod convert;
mod core;
mod follow;
mod generation;
mod record;
mod service;

pub use crate::core::{RouterCore, RouterSettings};
pub use generation::{Generation, TextEvent};
pub use service::grpc_routes;
