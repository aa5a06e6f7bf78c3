"""The metrics of a Python process: one registry, served by `kvist.admin`."""

from prometheus_client import CollectorRegistry, Gauge, PlatformCollector, ProcessCollector

import kvist
from kvist import names


def new_registry(*, service: str) -> CollectorRegistry:
    """A metric registry with the facts of the process."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    build = Gauge(names.BUILD_INFO, "Version of the process.", ["service", "version"], registry=registry)
    build.labels(service, kvist.__version__).set(1)
    return registry
