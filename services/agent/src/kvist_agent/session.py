"""The agent's session with the controller that leads: heartbeats out, assignments in, again after each break."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvist import join_token
from kvist.agent.v1.agent_pb2 import NodeInventory
from kvist.controller.v1.controller_pb2 import (
    AgentHello,
    Heartbeat,
    RegisterRequest,
    RegisterResponse,
    RegisterWelcome,
    WorkerVerdict,
)
from kvist.controllers import try_controllers
from kvist.errors import KvistError, PreconditionError, from_rpc_error
from kvist.telemetry import logger
from kvist_agent.attached import AttachedEngines
from kvist_agent.inventory import read_load
from kvist_agent.slots import WorkerSlots

if TYPE_CHECKING:
    from kvist.controller.v1.controller_pb2_grpc import ControllerServiceAsyncStub

DEFAULT_HEARTBEAT_SECONDS = 2.0
# Without any answer to an open session for this long, another controller is tried.
WELCOME_TIME_LIMIT_SECONDS = 5.0
# Without any pulse for so long it is frozen or cut off, and another one is asked.
PULSE_SECONDS = 0.4
SILENCE_SECONDS = 1.5

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Introduction:
    """How the node introduces itself.

    Attributes:
        inventory: What the node is.
        address: `host:port` of the agent's gRPC server.
        admin_address: `host:port` of its admin server.
    """

    inventory: NodeInventory
    address: str
    admin_address: str


class ControllerSession:
    """Keeps one session open with whichever controller leads."""

    def __init__(
        self,
        introduction: Introduction,
        *,
        slots: WorkerSlots,
        attached: AttachedEngines,
        on_welcome: Callable[[RegisterWelcome], None],
        join_token_file: Path | None = None,
    ) -> None:
        self._join_token_file = join_token_file
        self._introduction = introduction
        self._slots = slots
        self._attached = attached
        self._on_welcome = on_welcome
        self._heartbeat_seconds = DEFAULT_HEARTBEAT_SECONDS
        self._assignment_number = 0
        self._verdicts: dict[str, WorkerVerdict] = {}

    async def run(self, controllers: Sequence[grpc.aio.Channel]) -> None:
        """Registers with one controller after another, for ever."""
        await try_controllers(controllers, self._register, failure_event="session_failed")

    async def _register(self, stub: "ControllerServiceAsyncStub") -> bool:
        """One session to its end; returns whether the controller took part."""
        ended = asyncio.Event()
        try:
            metadata = join_token.metadata(self._join_token_file)
        except KvistError as failure:
            _log.warning("join_token_unusable", reason=failure.message)
            return False
        call = stub.Register(self._requests(ended), metadata=metadata)
        is_welcome = pulses = False
        welcome_until = asyncio.get_running_loop().time() + WELCOME_TIME_LIMIT_SECONDS
        limit_seconds: float | None = SILENCE_SECONDS
        try:
            while True:
                try:
                    async with asyncio.timeout(limit_seconds):
                        response = await call.read()
                except TimeoutError:
                    if not is_welcome:
                        raise
                    _log.warning("session_ended", error_code="DEADLINE_EXCEEDED")
                    return True
                if not isinstance(response, RegisterResponse):
                    return is_welcome
                if response.HasField("pulse"):
                    # Only a controller that is known to pulse is missed when it does not. One that pulses without a
                    # welcome knows no leader, and another one may.
                    pulses, limit_seconds = True, SILENCE_SECONDS
                    if not is_welcome and asyncio.get_running_loop().time() > welcome_until:
                        return False
                    continue
                if not is_welcome:
                    is_welcome, limit_seconds = True, SILENCE_SECONDS if pulses else None
                self._take(response)
        except grpc.aio.AioRpcError as failure:
            if not is_welcome:
                raise
            _log.warning("session_ended", error_code=from_rpc_error(failure).code)
            return True
        finally:
            ended.set()
            call.cancel()
            # What an earlier session was told says nothing to the next controller.
            self._assignment_number = 0

    async def _requests(self, ended: asyncio.Event) -> AsyncIterator[RegisterRequest]:
        """Hello, then a heartbeat on each change and at each interval."""
        number = self._slots.changes.number
        hello = AgentHello(
            inventory=self._introduction.inventory,
            address=self._introduction.address,
            admin_address=self._introduction.admin_address,
            workers=self._slots.statuses(),
            attached=self._attached.descriptions(),
        )
        hello.pulse_interval.FromNanoseconds(int(PULSE_SECONDS * 1e9))
        yield RegisterRequest(hello=hello)
        while not ended.is_set():
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    number = await self._slots.changes.after(number)
            except TimeoutError:
                number = self._slots.changes.number
            yield RegisterRequest(
                heartbeat=Heartbeat(
                    workers=self._slots.statuses(),
                    load=read_load(),
                    assignment_number=self._assignment_number,
                    attached=self._attached.descriptions(),
                )
            )

    def _take(self, response: RegisterResponse) -> None:
        match response.WhichOneof("message"):
            case "welcome":
                welcome = response.welcome
                self._heartbeat_seconds = welcome.heartbeat_interval.ToNanoseconds() / 1e9 or DEFAULT_HEARTBEAT_SECONDS
                self._slots.enter_cluster(welcome.cluster, hash_seed=welcome.hash_seed)
                self._on_welcome(welcome)
                _log.info("session_opened", cluster=welcome.cluster)
            case "assignment":
                assignment = response.assignment
                try:
                    self._slots.assign(assignment.workers, fence=assignment.fence)
                    self._assignment_number = assignment.assignment_number
                except PreconditionError as failure:
                    _log.warning("assignment_refused", error_code=failure.code, fence=assignment.fence)
            case "verdicts":
                self._take_verdicts(list(response.verdicts.verdicts))

    def _take_verdicts(self, verdicts: list[WorkerVerdict]) -> None:
        for verdict in verdicts:
            if self._verdicts.get(verdict.worker_uid) == verdict:
                continue
            self._verdicts[verdict.worker_uid] = verdict
            if verdict.refused_reason:
                _log.error("worker_refused", worker_uid=verdict.worker_uid, reason=verdict.refused_reason)
            for warning in verdict.warnings:
                _log.warning("worker_odd", worker_uid=verdict.worker_uid, reason=warning)
