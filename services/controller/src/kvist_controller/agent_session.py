"""An agent's session with the cluster, at whichever controller the agent happens to be connected to.

The controller that leads serves it from memory. Another one is a relay: it opens a session with the leader, introduces
the node with what its agent has said last, and hands everything on in both directions. When the leader changes the
agent's own stream stays, and only what is behind it is opened anew.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvist import join_token
from kvist.changes import Changes
from kvist.controller.v1 import controller_pb2 as pb
from kvist.errors import KvistError, rpc_errors
from kvist.telemetry import logger
from kvist_controller.control import Controller
from kvist_controller.instance import PASSED_ON, Instance
from kvist_controller.settings import RegistrySettings

RETRY_SECONDS = 0.2

_log = logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class AgentSession:
    """One session; `run` ends with the agent's stream."""

    def __init__(self, instance: Instance, hello: pb.AgentHello, context: _Context, registry: RegistrySettings) -> None:
        self._instance = instance
        self._hello = hello
        self._load: pb.Heartbeat | None = None
        self._context = context
        self._registry = registry
        self._news = Changes()
        self._writing = asyncio.Lock()
        self._written_at = asyncio.get_running_loop().time()

    @property
    def _node_uid(self) -> str:
        return self._hello.inventory.node_uid

    async def run(self, requests: AsyncIterator[pb.RegisterRequest]) -> None:
        """Serves the agent until it hangs up."""
        pulses = self._hello.HasField("pulse_interval")
        try:
            async with asyncio.TaskGroup() as group:
                if pulses:
                    # The first word: an agent whose connection is cut right after it knows what it misses.
                    await self._write(pb.RegisterResponse(pulse=pb.Pulse()))
                tasks = [group.create_task(self._serve())]
                if pulses:
                    seconds = max(0.05, self._hello.pulse_interval.ToNanoseconds() / 1e9)
                    tasks.append(group.create_task(self._pulse(seconds)))
                async for request in requests:
                    if request.WhichOneof("message") == "heartbeat":
                        self._load = request.heartbeat
                        self._news.announce()
                for task in tasks:
                    task.cancel()
        except* grpc.aio.InternalError as failures:
            # Its connection broke while it was being told something, which is an end like another.
            _log.info("agent_hung_up", node_uid=self._node_uid, reason=str(failures.exceptions[0]))

    async def _write(self, response: pb.RegisterResponse) -> None:
        async with self._writing:
            await self._context.write(response)
            self._written_at = asyncio.get_running_loop().time()

    async def _pulse(self, seconds: float) -> None:
        while True:
            silent_seconds = asyncio.get_running_loop().time() - self._written_at
            if silent_seconds >= seconds:
                await self._write(pb.RegisterResponse(pulse=pb.Pulse()))
                silent_seconds = 0.0
            await asyncio.sleep(seconds - silent_seconds)

    async def _serve(self) -> None:
        """Serves by whoever leads, for ever."""
        changes = self._instance.follower.leader_changes
        while True:
            leading, remote = self._instance.leading, self._instance.remote_leader()
            if leading is not None:
                serving = asyncio.create_task(self._serve_here(leading))
            elif remote is not None:
                serving = asyncio.create_task(self._relay())
            else:
                await changes.after(changes.number)
                continue
            try:
                while not serving.done() and (leading, remote) == (
                    self._instance.leading,
                    self._instance.remote_leader(),
                ):
                    changed = asyncio.create_task(changes.after(changes.number))
                    await asyncio.wait({serving, changed}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
            finally:
                serving.cancel()
                results = await asyncio.gather(serving, return_exceptions=True)
            failure = results[0]
            if isinstance(failure, KvistError):
                _log.warning("agent_relay_failed", node_uid=self._node_uid, error_code=failure.code)
            elif isinstance(failure, Exception):
                raise failure
            if (leading, remote) == (self._instance.leading, self._instance.remote_leader()):
                # It ended although nothing has changed here.
                await asyncio.sleep(RETRY_SECONDS)

    def _introduction(self) -> pb.AgentHello:
        """The node as its agent has described it last."""
        hello = pb.AgentHello()
        hello.CopyFrom(self._hello)
        hello.ClearField("pulse_interval")
        if self._load is not None:
            for name in ("workers", "attached"):
                hello.ClearField(name)
                getattr(hello, name).extend(getattr(self._load, name))
        return hello

    async def _serve_here(self, controller: Controller) -> None:
        welcome = pb.RegisterWelcome(cluster=controller.cluster, hash_seed=controller.hash_seed)
        welcome.lease_duration.FromNanoseconds(int(self._registry.lease_seconds * 1e9))
        welcome.heartbeat_interval.FromNanoseconds(int(self._registry.heartbeat_interval_seconds * 1e9))
        await self._write(pb.RegisterResponse(welcome=welcome))
        number = self._news.number
        controller.hello(self._introduction())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_orders(controller))
            while True:
                number = await self._news.after(number)
                beat = self._load
                if beat is not None:
                    load = beat.load if beat.HasField("load") else None
                    controller.heartbeat(self._node_uid, beat.workers, attached=beat.attached, load=load)

    async def _send_orders(self, controller: Controller) -> None:
        """Sends assignment and verdicts whenever they differ from what was sent."""
        sent_number = 0
        sent_verdicts: list[pb.WorkerVerdict] = []
        while True:
            number = controller.order_changes.number
            orders = controller.orders(self._node_uid)
            # A leader that was paused past its lease has nothing to say any more; its agents would refuse it, but an
            # agent that has not yet heard of the next leader could not.
            if not controller.may_command:
                await controller.order_changes.after(number)
                continue
            # Number 0: the node was not reconciled yet, and an empty assignment would end its workers.
            if orders.number > sent_number:
                sent_number = orders.number
                assignment = pb.Assignment(
                    assignment_number=orders.number, fence=controller.fence, workers=orders.workers
                )
                await self._write(pb.RegisterResponse(assignment=assignment))
            verdicts = controller.verdicts(self._node_uid)
            if verdicts != sent_verdicts:
                sent_verdicts = verdicts
                await self._write(pb.RegisterResponse(verdicts=pb.WorkerVerdicts(verdicts=verdicts)))
            await controller.order_changes.after(number)

    async def _relay(self) -> None:
        """Hands everything on between the agent and the controller that leads.

        Raises:
            KvistError: The leader does not answer, or has hung up.
        """
        with rpc_errors():
            stub = await self._instance.leader_stub()
            call = stub.Register(
                self._relayed_requests(),
                metadata=((PASSED_ON, "1"), *join_token.metadata(self._instance.join_token_file)),
            )
            try:
                while isinstance(response := await call.read(), pb.RegisterResponse):
                    await self._write(response)
            finally:
                call.cancel()

    async def _relayed_requests(self) -> AsyncIterator[pb.RegisterRequest]:
        number = self._news.number
        yield pb.RegisterRequest(hello=self._introduction())
        while True:
            number = await self._news.after(number)
            if self._load is not None:
                yield pb.RegisterRequest(heartbeat=self._load)
