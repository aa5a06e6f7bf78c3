"""Logs of a process as machines and people read them."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from kvist import telemetry
from kvist.settings import TelemetrySettings


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def written(**settings: str) -> io.StringIO:
    stream = io.StringIO()
    telemetry.configure_logging(TelemetrySettings(**settings), service="demo", instance="d-1", stream=stream)
    return stream


def test_a_line_is_one_json_object_with_the_common_fields() -> None:
    stream = written(log_format="json")
    telemetry.log_canonical_line(telemetry.logger("kvist.test"), outcome="stop", tokens=3)
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert {
        "event": "request_finished",
        "level": "info",
        "logger": "kvist.test",
        "service": "demo",
        "instance": "d-1",
        "outcome": "stop",
        "tokens": 3,
    } == line


def test_the_standard_library_goes_the_same_way() -> None:
    stream = written(log_format="json")
    logging.getLogger("other").warning("late by %d s", 3, extra={"peer": "x"})
    line = json.loads(stream.getvalue())
    assert ("late by 3 s", "warning", "other", "x") == (line["event"], line["level"], line["logger"], line["peer"])


def test_levels_hold_and_noisy_libraries_are_quiet() -> None:
    stream = written(log_format="json", log_level="warning")
    telemetry.logger("kvist.test").info("unseen")
    assert stream.getvalue() == ""
    stream = written(log_format="json", log_level="debug")
    logging.getLogger("nats").info("unseen")
    assert stream.getvalue() == ""


def test_a_traceback_never_shows_variables() -> None:
    stream = written(log_format="console")
    prompt = "never to be seen"
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        telemetry.logger("kvist.test").exception("call_failed")
    assert "RuntimeError: broken" in stream.getvalue()
    assert prompt not in stream.getvalue()


def test_a_line_names_its_span() -> None:
    stream = written(log_format="json")
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        telemetry.logger("kvist.test").info("inside")
    assert f"{span.get_span_context().trace_id:032x}" == json.loads(stream.getvalue())["trace_id"]


@pytest.mark.parametrize(
    ("environment", "is_configured"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_tracing_follows_the_standard_variables(environment: dict[str, str], is_configured: bool) -> None:
    assert telemetry.is_tracing_configured(environment) is is_configured
