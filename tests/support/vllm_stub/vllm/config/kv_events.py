"""Stub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KVEventsConfig:
    """Where KV events are published."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
