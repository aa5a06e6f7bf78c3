"""The state store: one interface, and SQLite for one machine with several processes."""

from kvist.store.interface import (
    Batch,
    CompactedError,
    Compare,
    Delete,
    Event,
    EventType,
    KeyValue,
    LeaseGoneError,
    Listing,
    Outcome,
    Put,
    StateStore,
    StoreError,
)

__all__ = [
    "Batch",
    "CompactedError",
    "Compare",
    "Delete",
    "Event",
    "EventType",
    "KeyValue",
    "LeaseGoneError",
    "Listing",
    "Outcome",
    "Put",
    "StateStore",
    "StoreError",
]
