//! Names of metrics, spans and attributes; tracing to OTLP; log lines in structlog's schema; the admin HTTP port.
//!
//! A process calls [`init`] once and keeps the [`TelemetryGuard`]. Without an OTLP endpoint in the standard `OTEL_*`
//! variables no span layer is installed, so every span is disabled at its call site for the price of one load.

mod admin;
mod calendar;
mod clock;
mod grpc;
mod log;
mod metrics;
pub mod names;
mod rarely;
mod request_line;
mod request_span;
mod setup;
mod span;
mod traceparent;

pub use admin::{AdminServer, ReadyFlag};
pub use clock::{now_unix_nanos, timestamp};
pub use grpc::{GrpcHealth, reflection};
pub use log::{LogFormat, LogWriter};
pub use metrics::{Metrics, latency_buckets_seconds};
pub use rarely::Rarely;
pub use request_line::RequestLine;
pub use setup::{TelemetryError, TelemetryGuard, TelemetrySettings, init};
pub use span::{propagate, set_status_error, span_traceparent};
pub use traceparent::{TraceParent, parse_traceparent};
