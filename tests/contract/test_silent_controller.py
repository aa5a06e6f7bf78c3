"""A controller that is frozen says nothing: agents and routers leave it within two seconds."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from kvist.cluster_watch import ClusterWatch
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceServicer, add_ControllerServiceServicer_to_server
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.settings import ListenSettings
from kvist_agent.slot_files import StateFolder
from support.agent_session import agent_of

LIMIT_SECONDS = 30
MOST_SECONDS_TO_SWITCH = 2.0


class PulsingController(ControllerServiceServicer):
    """Pulses until it is silenced; its streams stay open then.

    Args:
        begins_with_pulse: As controllers do that are up to date.
    """

    def __init__(self, *, begins_with_pulse: bool = False) -> None:
        self.joined = asyncio.Event()
        self.streams = 0
        self.pulses = 0
        self.is_silent = False
        self._begins_with_pulse = begins_with_pulse

    async def _pulse_until_silent(self, interval_seconds: float) -> AsyncIterator[None]:
        self.streams += 1
        self.joined.set()
        while True:
            while self.is_silent:
                await asyncio.sleep(0.05)
            self.pulses += 1
            yield
            await asyncio.sleep(interval_seconds)

    async def WatchCluster(  # noqa: N802
        self, request: pb.WatchClusterRequest, context: object
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        yield pb.WatchClusterResponse(pulse=self._begins_with_pulse)
        async for _ in self._pulse_until_silent(request.pulse_interval.ToNanoseconds() / 1e9):
            yield pb.WatchClusterResponse(pulse=True)

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: object
    ) -> AsyncIterator[pb.RegisterResponse]:
        first = await anext(aiter(request_iterator))
        if self._begins_with_pulse:
            yield pb.RegisterResponse(pulse=pb.Pulse())
        yield pb.RegisterResponse(welcome=pb.RegisterWelcome(cluster="test"))
        async for _ in self._pulse_until_silent(first.hello.pulse_interval.ToNanoseconds() / 1e9):
            yield pb.RegisterResponse(pulse=pb.Pulse())


@contextlib.asynccontextmanager
async def serving(controller: PulsingController) -> AsyncIterator[str]:
    add = functools.partial(add_ControllerServiceServicer_to_server, controller)
    registration = Registration("kvist.controller.v1.ControllerService", add)
    async with GrpcServer(ListenSettings(), services=[registration], registry=CollectorRegistry()) as server:
        yield server.address


async def switch_seconds(first: PulsingController, second: PulsingController) -> float:
    """From the silence of the first until the second is asked."""
    await first.joined.wait()
    while first.pulses < 3:
        await asyncio.sleep(0.01)
    assert not second.joined.is_set(), "a controller that pulses was left"
    first.is_silent = True
    silenced_at = time.monotonic()
    await second.joined.wait()
    return time.monotonic() - silenced_at


async def test_a_watch_of_the_cluster_goes_on_elsewhere() -> None:
    first, second = PulsingController(), PulsingController()

    async def ignore(_: pb.ClusterState) -> None:
        """There is none."""

    async with (
        asyncio.timeout(LIMIT_SECONDS),
        serving(first) as one,
        serving(second) as two,
        open_channel(one, retries=False) as channel,
        open_channel(two, retries=False) as other,
    ):
        watch = ClusterWatch(subscriber="test", on_state=ignore, on_connected=lambda _: None)
        task = asyncio.create_task(watch.run([channel, other]))
        assert await switch_seconds(first, second) < MOST_SECONDS_TO_SWITCH
        task.cancel()


async def test_an_agent_goes_on_elsewhere(tmp_path) -> None:
    first, second = PulsingController(), PulsingController()
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        serving(first) as one,
        serving(second) as two,
        agent_of(tmp_path, [one, two]),
    ):
        assert await switch_seconds(first, second) < MOST_SECONDS_TO_SWITCH


async def test_a_controller_whose_first_word_was_its_last_is_left(tmp_path) -> None:
    """The connection was cut right after it: nobody waits for the keep-alive of the transport."""
    first, second = PulsingController(begins_with_pulse=True), PulsingController()
    first.is_silent = True

    async def ignore(_: pb.ClusterState) -> None:
        """There is none."""

    async with (
        asyncio.timeout(LIMIT_SECONDS),
        serving(first) as one,
        serving(second) as two,
        open_channel(one, retries=False) as channel,
        open_channel(two, retries=False) as other,
    ):
        watch = ClusterWatch(subscriber="test", on_state=ignore, on_connected=lambda _: None)
        task = asyncio.create_task(watch.run([channel, other]))
        await second.joined.wait()
        task.cancel()
        second.joined.clear()
        async with agent_of(tmp_path, [one, two]):
            await second.joined.wait()


async def test_a_controller_that_never_pulses_is_not_left(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """An older one does not know how to."""
    monkeypatch.setattr("kvist_agent.session.SILENCE_SECONDS", 0.2)
    older = PulsingController()
    older.is_silent = True
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        serving(older) as one,
        # Whoever leaves it comes back to it.
        agent_of(tmp_path, [one, one]),
    ):
        # On a busy machine the first streams may end before their welcome.
        while StateFolder(tmp_path).read_session().cluster != "test":
            await asyncio.sleep(0.02)
        streams = older.streams
        await asyncio.sleep(1)
        assert streams == older.streams
