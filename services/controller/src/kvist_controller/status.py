"""The status of a model service, as people and tools read it. Pure."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """What is true of one pool.

    Attributes:
        name: Its name within the service.
        role: What its workers do.
        desired: Wanted replicas.
        ready: Workers that routers may use and that are not draining.
        updated_ready: Those of the present revision.
        unplaced: Replicas that no node can take.
    """

    name: str
    role: str
    desired: int
    ready: int
    updated_ready: int
    unplaced: int

    @property
    def is_served(self) -> bool:
        """Whether it does what it is there for."""
        return self.updated_ready >= self.desired


@dataclass(frozen=True, slots=True)
class Observation:
    """What is true of a model service at one moment.

    Attributes:
        generation: Generation of the specification that was acted on.
        desired: Wanted replicas.
        active: Worker slots of any revision whose end is not decided.
        ready: Workers that routers may use and that are not draining.
        updated_ready: Those of the present revision.
        draining: Worker slots whose end is decided.
        unplaced: Replicas that no node can take.
        problems: Why workers are not ready, each for people.
        is_deleting: Whether the resource's deletion was asked for.
        pools: Each of its pools.
    """

    generation: int
    desired: int
    active: int
    ready: int
    updated_ready: int
    draining: int
    unplaced: int
    problems: tuple[str, ...] = ()
    is_deleting: bool = False
    pools: tuple[PoolObservation, ...] = ()


def build_status(observed: Observation, *, previous: Mapping[str, Any], now_unix_seconds: float) -> dict[str, Any]:
    """Builds a status; transition times of conditions that did not change are kept."""
    transitions = {
        condition["type"]: (condition["status"], condition["lastTransitionTime"])
        for condition in previous.get("conditions", ())
    }
    now = dt.datetime.fromtimestamp(now_unix_seconds, tz=dt.UTC).isoformat(timespec="milliseconds")

    def condition(kind: str, *, is_true: bool, reason: str, message: str) -> dict[str, Any]:
        value = "True" if is_true else "False"
        last_value, last_time = transitions.get(kind, ("", ""))
        return {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": last_time if last_value == value else now.replace("+00:00", "Z"),
            "observedGeneration": observed.generation,
        }

    message = _message(observed)
    has_enough = observed.ready >= observed.desired and all(pool.ready >= pool.desired for pool in observed.pools)
    is_ready = has_enough and not observed.is_deleting
    return {
        "observedGeneration": observed.generation,
        "replicas": {
            "desired": observed.desired,
            "active": observed.active,
            "ready": observed.ready,
            "updated": observed.updated_ready,
            "draining": observed.draining,
        },
        "pools": [
            {"name": pool.name, "role": pool.role, "desired": pool.desired, "ready": pool.ready}
            for pool in observed.pools
        ],
        "message": message,
        "conditions": [
            condition("Ready", is_true=is_ready, reason=_ready_reason(observed, is_ready=is_ready), message=message),
            condition(
                "Progressing",
                is_true=_progress(observed) not in {"Complete", "Blocked"},
                reason=_progress(observed),
                message=message,
            ),
        ],
    }


def _ready_reason(observed: Observation, *, is_ready: bool) -> str:
    if observed.is_deleting:
        return "Deleting"
    if observed.desired == 0:
        return "ScaledToZero"
    return "EnoughReplicas" if is_ready else "NotEnoughReplicas"


def _progress(observed: Observation) -> str:
    if observed.is_deleting:
        return "Deleting"
    if observed.unplaced:
        return "Blocked"
    if observed.updated_ready < observed.desired:
        return "RollingOut" if observed.ready > observed.updated_ready else "Starting"
    if observed.active > observed.desired or observed.draining:
        return "Draining"
    return "Complete"


def _message(observed: Observation) -> str:
    parts = [f"{observed.ready} of {observed.desired} replicas ready"]
    if len(observed.pools) > 1:
        parts[0] += f" ({', '.join(f'{pool.name} {pool.ready}/{pool.desired}' for pool in observed.pools)})"
    if observed.ready > observed.updated_ready:
        parts.append(f"{observed.ready - observed.updated_ready} of an older revision")
    if observed.unplaced:
        parts.append(f"{observed.unplaced} without a place: no present node offers the engine")
    if observed.draining:
        parts.append(f"{observed.draining} draining")
    parts.extend(observed.problems)
    return "; ".join(parts)
