//! Names of metrics, spans and attributes; tracing to OTLP; log lines in structlog's schema.
