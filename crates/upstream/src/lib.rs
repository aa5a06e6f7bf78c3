//! OpenAI-compatible servers outside the mesh as targets of a model: providers, and stock servers.
//!
//! Where client and server speak the same API, the bytes of an answer are relayed; the one thing that is looked at is
//! how it ends, since a stream must not look finished when it broke off. Where they do not, the request goes on as a
//! chat completion and its events come back as those of an engine. Nothing here counts as load of the mesh; a server
//! that fails, or asks for a pause, is left alone for a while when another one has the model.

mod client;
mod fleet;
mod metrics;
mod relay;
mod scan;
mod source;
mod translate;

pub use client::{Ask, Upstreams};
pub use relay::{Relayed, RelayedBody, Whole};
