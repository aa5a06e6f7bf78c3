//! A request's life: text, schedule, link, retries, Explain; and the gRPC service.
//!
//! [`Router`] implements [`Generate`], which the gRPC service here and the HTTP edge both call. A request is tokenized
//! once, let in by its model's door, placed on the target that costs least, and followed until exactly one terminal event;
//! whatever ends it also ends its reservation and its place.

mod answer;
mod awareness;
mod cluster;
mod conclude;
mod convert;
mod core;
mod decision_metrics;
mod door;
mod embed;
mod explain;
mod feed;
mod follow;
mod generate;
mod hand_over;
mod health;
mod held_state;
mod keys;
mod leases;
mod life;
mod listeners;
mod maintenance;
mod metrics;
mod model_state;
mod needs;
mod parsing;
mod parts;
mod policy;
mod quarantine;
mod record;
mod routing;
mod select;
mod server;
mod service;
mod settings;
mod stages;
mod start;
mod take_state;
mod target;
mod text;
mod upstream_settings;

pub use cluster::StateVersion;
pub use core::{RouterCore, RouterStatus};
pub use generate::{
    AnswerForm, CallDelta, CallHead, ChoiceEnd, EmbedInput, EmbedOutput, EventStream, Generate, GenerateEnd,
    GenerateEvent, GenerateInput, Prompt, ReasoningDelta, RequestContext, TextDelta, TokenLogprob, Tokens, ToolChoice,
    Usage,
};
pub use keys::{ApiKeys, Caller, RateLimit, RateLimits};
pub use listeners::Listeners;
pub use maintenance::maintain;
pub use record::record_failure;
pub use routing::{AdmissionSettings, RoutingSettings};
pub use server::GrpcServer;
pub use service::{CLASS_METADATA, PROMPT_TOKENS_METADATA, SESSION_METADATA};
pub use settings::RouterSettings;
pub use stages::{StageLimits, StageTimer};
pub use start::{Router, join_salts};
pub use upstream_settings::UpstreamSettings;

/// Why settings of routing or admission are refused.
pub use kvist_schedule::ConfigError;

/// The chat form of a [`Prompt`].
pub use kvist_text::Chat;
