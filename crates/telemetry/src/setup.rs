//! Installing it all, once a process.

use std::{env, io, time::Duration};

use opentelemetry::{KeyValue, trace::TracerProvider as _};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use serde::Deserialize;
use tracing::{Metadata, Subscriber, subscriber::NoSubscriber};
use tracing_subscriber::{
    Layer as _,
    filter::{FilterExt as _, Targets, filter_fn},
    layer::SubscriberExt as _,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use crate::{
    log::{Identity, LogFormat, LogLayer, LogWriter},
    span::SpanLayer,
};

const FLUSH_TIME_LIMIT: Duration = Duration::from_secs(2);
const ENDPOINT_VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// How a process says what it does. The exporter of spans is configured by the standard `OTEL_*` variables alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetrySettings {
    /// Kind of process, such as `kvist-router`.
    pub service_name: String,
    /// Name of this process among its kind.
    pub instance: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// A level, or levels by target: `info,kvist_events=debug`. Python's `warning` and `critical` are understood.
    pub log_level: String,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            service_name: "kvist".to_owned(),
            instance: String::new(),
            log_format: LogFormat::Auto,
            log_level: "info".to_owned(),
        }
    }
}

/// Why telemetry was not installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// The level is none; correct the setting.
    #[error("log_level {0:?} is neither a level nor a list of target=level")]
    LogLevel(String),
    /// The process has a tracing subscriber; initialize once.
    #[error("telemetry was initialized before in this process")]
    AlreadyInitialized,
    /// The `OTEL_*` variables do not make an exporter; correct them.
    #[error("the span exporter cannot be built: {0}")]
    Exporter(String),
    /// A thread cannot be started.
    #[error("a telemetry thread cannot be started: {0}")]
    Thread(#[from] io::Error),
}

/// Spans on their way out, and the thread that carries them.
struct Exporting {
    provider: SdkTracerProvider,
    // The exporter's channel lives on this runtime, so that it works in processes that have none when they start.
    runtime: tokio::runtime::Runtime,
}

/// Keeps what was installed; [`TelemetryGuard::shutdown`] sends what is left.
pub struct TelemetryGuard {
    writer: Option<LogWriter>,
    exporting: Option<Exporting>,
}

impl TelemetryGuard {
    /// Whether spans are exported.
    #[must_use]
    pub fn exports_spans(&self) -> bool {
        self.exporting.is_some()
    }

    /// Log lines dropped because the output was too slow.
    #[must_use]
    pub fn dropped_lines(&self) -> u64 {
        self.writer.as_ref().map_or(0, LogWriter::dropped_lines)
    }

    /// Sends and writes what is left, for a few seconds at most. Later lines are still written.
    pub fn shutdown(&mut self) {
        if let Some(exporting) = self.exporting.take() {
            if let Err(error) = exporting.provider.shutdown_with_timeout(FLUSH_TIME_LIMIT) {
                tracing::warn!(error = error.to_string(), "span_export_failed");
            }
            exporting.runtime.shutdown_background();
        }
        if let Some(writer) = &self.writer {
            writer.flush(FLUSH_TIME_LIMIT);
        }
    }
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Installs logging and, when an OTLP endpoint is configured, tracing for the whole process.
///
/// # Errors
/// A setting or variable is wrong, or the process has a subscriber already.
pub fn init(settings: &TelemetrySettings) -> Result<TelemetryGuard, TelemetryError> {
    let levels = parse_levels(&settings.log_level)?;
    let exporting = if exporter_is_configured(|name| env::var(name).ok()) { Some(exporting(settings)?) } else { None };
    let format = settings.log_format.resolved();
    let writer = if format == LogFormat::Off { None } else { Some(LogWriter::start(io::stderr())?) };

    let with_spans = exporting.is_some();
    let log_layer = writer.clone().map(|writer| {
        let identity = Identity { service: settings.service_name.clone(), instance: settings.instance.clone() };
        // Spans pass only while they are exported: then a line can name its trace. Else nobody wants a span and each
        // call site is switched off for good.
        let kinds = filter_fn(move |metadata| metadata.is_event());
        let own_spans = filter_fn(move |metadata| with_spans && is_own_span(metadata));
        LogLayer::new(writer, format, identity).with_filter(levels.and(kinds).or(own_spans))
    });
    // An absent layer must not be given as `None`: beside it a span that every filter refuses would still be made.
    let installed = match (log_layer, &exporting) {
        (Some(log), Some(exporting)) => tracing_subscriber::registry().with(log).with(span_layer(exporting)).try_init(),
        (Some(log), None) => tracing_subscriber::registry().with(log).try_init(),
        (None, Some(exporting)) => tracing_subscriber::registry().with(span_layer(exporting)).try_init(),
        (None, None) => NoSubscriber::new().try_init(),
    };
    installed.map_err(|_| TelemetryError::AlreadyInitialized)?;
    Ok(TelemetryGuard { writer, exporting })
}

fn span_layer<S>(exporting: &Exporting) -> impl tracing_subscriber::Layer<S> + use<S>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    SpanLayer::new(exporting.provider.tracer("kvist"))
        .with_filter(filter_fn(|metadata| is_own_span(metadata) || is_own_event(metadata)))
}

/// Spans of the libraries below us would multiply every request's trace.
fn is_own_span(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && metadata.target().starts_with("kvist")
}

fn is_own_event(metadata: &Metadata<'_>) -> bool {
    metadata.is_event() && metadata.target().starts_with("kvist") && *metadata.level() <= tracing::Level::INFO
}

fn parse_levels(text: &str) -> Result<Targets, TelemetryError> {
    let translated: Vec<String> = text
        .split(',')
        .map(|directive| {
            let (target, level) = directive.split_once('=').map_or((None, directive), |(t, l)| (Some(t), l));
            let level = match level.trim().to_ascii_lowercase().as_str() {
                "warning" => "warn".to_owned(),
                "critical" => "error".to_owned(),
                other => other.to_owned(),
            };
            // A bare word that is no level would be taken for a target and open it for every level.
            let known = ["off", "error", "warn", "info", "debug", "trace"].contains(&level.as_str());
            known.then(|| target.map_or_else(|| level.clone(), |target| format!("{}={level}", target.trim())))
        })
        .collect::<Option<_>>()
        .ok_or_else(|| TelemetryError::LogLevel(text.to_owned()))?;
    // What a library says at `info` has another schema and is of no interest to an operator. A directive of the
    // caller's own about it comes later and counts.
    let is_verbose = translated.iter().any(|directive| ["info", "debug", "trace"].contains(&directive.as_str()));
    let quiet = is_verbose.then(|| "async_nats=warn".to_owned());
    quiet
        .into_iter()
        .chain(translated)
        .collect::<Vec<_>>()
        .join(",")
        .parse()
        .map_err(|_| TelemetryError::LogLevel(text.to_owned()))
}

fn exporter_is_configured(variable: impl Fn(&str) -> Option<String>) -> bool {
    if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return false;
    }
    if variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value != "otlp") {
        return false;
    }
    ENDPOINT_VARIABLES.iter().any(|name| variable(name).is_some_and(|value| !value.is_empty()))
}

fn exporting(settings: &TelemetrySettings) -> Result<Exporting, TelemetryError> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("kvist-otlp").enable_all().build()?;
    let exporter = {
        let _entered = runtime.enter();
        opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .build()
            .map_err(|error| TelemetryError::Exporter(error.to_string()))?
    };
    let service_name = env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| settings.service_name.clone());
    let mut resource = Resource::builder()
        .with_service_name(service_name)
        .with_attribute(KeyValue::new("service.namespace", "kvist"))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if !settings.instance.is_empty() {
        resource = resource.with_attribute(KeyValue::new("service.instance.id", settings.instance.clone()));
    }
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
    Ok(Exporting { provider, runtime })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_both_languages_are_understood_and_nonsense_is_refused() {
        for text in ["info", "WARNING", "critical", "info,kvist_events=debug", "off"] {
            assert!(parse_levels(text).is_ok(), "{text}");
        }
        for text in ["", "loud", "kvist_events=loud", "kvist_events"] {
            assert!(parse_levels(text).is_err(), "{text}");
        }
    }

    #[test]
    fn spans_are_exported_only_when_the_standard_variables_ask_for_it() {
        let with = |pairs: &'static [(&str, &str)]| {
            exporter_is_configured(|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");
        assert!(!with(&[]));
        assert!(!with(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]));
        assert!(exporter_is_configured(|name| (name == endpoint.0).then(|| endpoint.1.to_owned())));
        assert!(!with(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"), ("OTEL_SDK_DISABLED", "TRUE")]));
        assert!(!with(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"), ("OTEL_TRACES_EXPORTER", "none")]));
    }

    #[test]
    fn unknown_settings_are_refused() {
        assert!(serde_json::from_str::<TelemetrySettings>(r#"{"log_levle":"info"}"#).is_err());
        let settings: TelemetrySettings =
            serde_json::from_str(r#"{"log_format":"json","service_name":"kvist-worker"}"#).unwrap();
        assert_eq!((LogFormat::Json, "info"), (settings.log_format, settings.log_level.as_str()));
    }
}
