"""What the faults of tests/chaos have in common: the mesh, its load, and the times that are measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from support.control_mesh import ControlMesh
from support.machine_load import MachineLoad
from support.mesh import Mesh
from support.steady_load import SteadyLoad

LIMIT_SECONDS = 60.0
MODEL = "sim"


@dataclass(frozen=True, slots=True)
class Form:
    """How long faults last.

    Attributes:
        is_full: All faults are tried, not only those that are over soon.
        controller_lease_seconds: Of the controllers' leadership.
        outage_seconds: For how long all of etcd, or NATS, is away.
        catch_up_workers: How many workers' ledgers are caught up with after the outage of NATS.
        patience: By how much more time than allowed a step may take. Limits are for a machine that does nothing else;
            where others share it, not all of what they take shows in the share that they left.
    """

    is_full: bool
    controller_lease_seconds: float
    outage_seconds: float
    catch_up_workers: int
    patience: float

    @classmethod
    def of_environment(cls) -> Form:
        """The full form where `KVIST_CHAOS_OUTAGE_SECONDS` is set."""
        seconds = os.environ.get("KVIST_CHAOS_OUTAGE_SECONDS")
        if seconds is None:
            return cls(False, 3.0, 5.0, 4, 3.0)
        return cls(True, 10.0, float(seconds), 8, 1.0)


@dataclass(slots=True)
class Step:
    """A time that is measured, from its beginning or from `begin`."""

    begun_at: float = field(default_factory=time.monotonic)
    seconds: float | None = None

    def begin(self) -> None:
        """It begins now."""
        self.begun_at = time.monotonic()

    def end(self) -> None:
        """It is over now."""
        self.seconds = time.monotonic() - self.begun_at


@dataclass(slots=True)
class Measurement:
    """What is measured on a mesh under load.

    Attributes:
        mesh: Its processes.
        load: Its clients.
        form: How long faults last.
        rows: What was measured.
    """

    mesh: Mesh
    load: SteadyLoad
    form: Form
    rows: list[dict[str, object]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def step(self, name: str, *, limit_seconds: float) -> AsyncIterator[Step]:
        """Measures a fault, from the beginning of the block or `Step.begin` on until `Step.end`."""
        process_ids = await self.mesh.process_ids()
        load = MachineLoad.now(process_ids)
        before = len(self.load.outcomes)
        step = Step()
        yield step
        assert step.seconds is not None
        share = await load.share_left_by_others(await self.mesh.process_ids())
        row = {
            "fault": name,
            "seconds": round(step.seconds, 2),
            "limit_seconds": limit_seconds,
            "share_of_machine": round(share, 2),
            "requests": len(self.load.outcomes) - before,
            "failed_requests": len(self.load.bad(since=before)),
        }
        self.rows.append(row)
        print(row, flush=True)
        assert step.seconds < limit_seconds * self.form.patience / share, row


@dataclass(slots=True)
class Scene(Measurement):
    """A mesh under load whose control plane is doubled.

    Attributes:
        mesh: Its processes.
        workers: Replicas that the model service has.
        killed_engines: `<worker uid>.<incarnation>` of those that ended without a farewell.
    """

    mesh: ControlMesh
    workers: int = 0
    killed_engines: set[str] = field(default_factory=set)

    async def change(self) -> None:
        """Applies the model service with something new, by whichever controller takes it."""
        await self.mesh.change(replicas=self.workers)

    async def until_true(self, what: str, condition: Callable[[], object]) -> None:
        """Waits for a condition that the fault is to bring about."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never came true: {what}") from None
