"""Logs and traces of the Rust core, for the processes that have a data plane."""

import json

from kvist import _core
from kvist.settings import TelemetrySettings


def start_core_telemetry(settings: TelemetrySettings, *, service: str, instance: str) -> None:
    """Lets the core write to the same stream, in the same schema and under the same name as the process.

    Ended by `_core.shutdown_telemetry`.
    """
    _core.init_telemetry(
        json.dumps(
            {
                "service_name": service,
                "instance": instance,
                "log_format": settings.log_format,
                "log_level": settings.log_level,
            }
        )
    )
