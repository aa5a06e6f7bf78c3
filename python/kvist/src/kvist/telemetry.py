"""Logs and traces of a Python process.

Logs are structlog's: a console form for terminals and JSON lines otherwise, standard library loggers included. Tracing
exists only when an OTLP endpoint is configured by the standard `OTEL_*` variables; without one, spans cost a no-op.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

from opentelemetry import trace

import kvist
from kvist import names
from kvist.lean_structlog import structlog
from kvist.settings import TelemetrySettings

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Libraries that say at `info` what is of no interest to an operator.
_QUIET_LOGGERS = ("asyncio", "grpc", "nats", "opentelemetry")


def configure_logging(
    settings: TelemetrySettings, *, service: str, instance: str = "", stream: TextIO | None = None
) -> None:
    """Sends all logs of the process to one stream, stderr by default."""
    output = stream or sys.stderr
    is_console = settings.log_format == "console" or (settings.log_format == "auto" and output.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace,
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.typing.Processor]
    if is_console:
        colors = output.isatty() and "NO_COLOR" not in os.environ
        # Plain tracebacks: the richer form shows local variables, which may hold prompts.
        renderer = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    else:
        renderer = [
            structlog.processors.format_exc_info,
            _identity(service, instance),
            structlog.processors.JSONRenderer(default=str),
        ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module. Event names are stable snake_case; values are fields."""
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound


def log_canonical_line(log: structlog.stdlib.BoundLogger, *, outcome: str, **fields: object) -> None:
    """Writes the one line of a finished request: what it was, where it went, how long it took, how it ended."""
    log.info(names.CANONICAL_EVENT, outcome=outcome, **fields)


def start_tracing(*, service: str, instance: str = "") -> bool:
    """Starts the export of spans when an OTLP endpoint is configured; returns whether it was."""
    if not is_tracing_configured(os.environ):
        return False
    # Imported here: without an endpoint a process pays neither their import nor their threads.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    attributes = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", service),
        "service.namespace": "kvist",
        "service.version": kvist.__version__,
    }
    if instance:
        attributes["service.instance.id"] = instance
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def stop_tracing() -> None:
    """Sends what is left and ends the exporter."""
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        shutdown()


def is_tracing_configured(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for the export of spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ENDPOINT_VARIABLES)


def _add_trace(_log: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event[names.TRACE_ID] = trace.format_trace_id(context.trace_id)
        event[names.SPAN_ID] = trace.format_span_id(context.span_id)
    return event


def _identity(service: str, instance: str) -> structlog.typing.Processor:
    def add(_log: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        if instance:
            event.setdefault("instance", instance)
        return event

    return add
