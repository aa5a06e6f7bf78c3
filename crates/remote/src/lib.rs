//! Routers of other processes behind an edge: [`RemoteRouters`] is a [`kvist_router::Generate`] over
//! `kvist.router.v1`.
//!
//! A router of the list that serves is taken in turn. Which one does not matter to caches: each knows what all engines
//! hold. A request that has not begun when its router is lost goes to another one, once; a stream that breaks ends with
//! an error.

mod client;
mod convert;
mod fleet;
mod running;

pub use client::{RemoteRouters, RemoteSettings};
