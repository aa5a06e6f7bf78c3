//! A request's life: text, schedule, link, retries, Explain; and the gRPC service.
//!
//! [`Router`] implements [`Generate`], which the gRPC service here and the HTTP edge both call. A request is tokenized
//! once, placed on the target that costs least, and followed until exactly one terminal event; whatever ends it also
//! ends its reservation.

mod answer;
mod awareness;
mod cluster;
mod convert;
mod core;
mod explain;
mod feed;
mod follow;
mod generate;
mod keys;
mod leases;
mod life;
mod maintenance;
mod metrics;
mod quarantine;
mod record;
mod routing;
mod select;
mod server;
mod service;
mod settings;
mod target;
mod text;

pub use cluster::StateVersion;
pub use core::{Router, RouterCore, RouterStatus};
pub use generate::{
    ChoiceEnd, EventStream, Generate, GenerateEnd, GenerateEvent, GenerateInput, Prompt, RequestContext, TextDelta,
    TokenLogprob, Tokens, Usage,
};
pub use keys::{ApiKeys, Caller};
pub use maintenance::maintain;
pub use record::record_failure;
pub use routing::RoutingSettings;
pub use server::GrpcServer;
pub use settings::RouterSettings;

/// The chat form of a [`Prompt`].
pub use kvist_text::Chat;
