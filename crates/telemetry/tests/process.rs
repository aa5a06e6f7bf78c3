//! One process's whole telemetry, seen from outside: a child process logs, the test reads its stderr.

#![allow(clippy::unwrap_used, clippy::panic, reason = "functions beside the tests are not seen as tests")]

use std::process::Command;

use kvist_telemetry::{LogFormat, RequestLine, TelemetryError, TelemetrySettings, init, names};

const CHILD: &str = "KVIST_TELEMETRY_TEST_CHILD";

/// Runs as a child only: a process can be initialized once.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let settings = TelemetrySettings {
        service_name: "kvist-test".to_owned(),
        instance: "one".to_owned(),
        log_format: LogFormat::Json,
        log_level: "info,quiet=warning".to_owned(),
    };
    let mut guard = init(&settings).unwrap();
    assert!(matches!(init(&settings), Err(TelemetryError::AlreadyInitialized)));
    let span = tracing::info_span!(target: "kvist_test", "kvist.edge");
    assert_eq!(guard.exports_spans(), !span.is_disabled());
    // A span that nobody wants costs no look at its fields: what they hold is not even computed.
    let mut has_looked = false;
    let mut look = || {
        has_looked = true;
        "POST".to_owned()
    };
    drop(kvist_telemetry::request_span!(names::SPAN_EDGE, look().as_str(), { names::HTTP_METHOD } = look().as_str()));
    assert_eq!(guard.exports_spans(), has_looked);
    let inbound = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let sent = kvist_telemetry::propagate(&span, Some(inbound)).unwrap();
    assert_eq!(guard.exports_spans(), sent != inbound);
    tracing::info!(target: "quiet", "not_shown");
    tracing::warn!(target: "kvist_events::feed", gap = 3u64, level = "mine", "kv_gap_detected");
    RequestLine {
        request_id: "r-1".to_owned(),
        model: "m".to_owned(),
        outcome: "stop".to_owned(),
        cached_tokens: Some(32),
        duration_ms: 1.5,
        ..RequestLine::default()
    }
    .emit();
    let inner = tracing::info_span!(target: "kvist_test", "kvist.select", traceparent = inbound);
    inner.in_scope(|| tracing::info!(target: "kvist_test", "inside"));
    guard.shutdown();
}

fn lines_of_child(endpoint: Option<&str>) -> Vec<serde_json::Value> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, "1").env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    if let Some(endpoint) = endpoint {
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint);
    }
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn line<'a>(lines: &'a [serde_json::Value], event: &str) -> &'a serde_json::Value {
    lines.iter().find(|line| line["event"] == event).unwrap_or_else(|| panic!("no {event} in {lines:?}"))
}

#[test]
fn without_an_exporter_lines_have_the_schema_and_spans_are_off() {
    let lines = lines_of_child(None);
    let gap = line(&lines, "kv_gap_detected");
    assert_eq!("warning", gap["level"]);
    assert_eq!("kvist_events.feed", gap["logger"]);
    assert_eq!(3, gap["gap"]);
    assert_eq!("kvist-test", gap["service"]);
    assert_eq!("one", gap["instance"]);
    assert!(gap["timestamp"].as_str().unwrap().ends_with('Z'));
    let request = line(&lines, "request_finished");
    assert_eq!(
        ("r-1", "stop", 32),
        (
            request["request_id"].as_str().unwrap(),
            request["outcome"].as_str().unwrap(),
            request["cached_tokens"].as_i64().unwrap(),
        )
    );
    assert!(request.get("tenant").is_none() && request.get("trace_id").is_none());
    assert!(line(&lines, "inside").get("trace_id").is_none());
    assert!(lines.iter().all(|line| line["event"] != "not_shown"));
}

#[test]
fn with_an_exporter_lines_name_the_trace_they_belong_to() {
    // Nobody listens there: what is configured must not depend on the collector being up.
    let lines = lines_of_child(Some("http://127.0.0.1:9"));
    assert_eq!("4bf92f3577b34da6a3ce929d0e0e4736", line(&lines, "inside")["trace_id"]);
}
