"""Following the cluster state of whichever controller leads, again after each break."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion, WatchClusterRequest, WatchClusterResponse
from kvist.controllers import try_controllers
from kvist.errors import from_rpc_error
from kvist.telemetry import logger

if TYPE_CHECKING:
    from kvist.controller.v1.controller_pb2_grpc import ControllerServiceAsyncStub

# A controller that stands by answers at once; one that is frozen does not.
CONNECT_TIME_LIMIT_SECONDS = 1.5
# A controller that says nothing for so many pulses is frozen or cut off, and another one is asked.
PULSE_SECONDS = 0.4
SILENCE_SECONDS = 1.5

_log = logger(__name__)


class ClusterWatch:
    """Hands on each new cluster state; older ones of a controller that lags are left to the receiver to refuse."""

    def __init__(
        self,
        *,
        subscriber: str,
        on_state: Callable[[ClusterState], Awaitable[None]],
        on_connected: Callable[[bool], None],
        known_version: ClusterVersion | None = None,
    ) -> None:
        self._subscriber = subscriber
        self._on_state = on_state
        self._on_connected = on_connected
        self._known_version = known_version

    async def run(self, controllers: Sequence[grpc.aio.Channel]) -> None:
        """Watches one controller after another, for ever."""
        await try_controllers(controllers, self._watch, failure_event="cluster_watch_failed")

    async def _watch(self, stub: "ControllerServiceAsyncStub") -> bool:
        """One stream to its end; returns whether it was open."""
        request = WatchClusterRequest(subscriber=self._subscriber, known_version=self._known_version)
        request.pulse_interval.FromNanoseconds(int(PULSE_SECONDS * 1e9))
        call = stub.WatchCluster(request)
        is_connected = False
        # A controller answers at once, be it to say that the known version is the present one.
        limit_seconds: float | None = CONNECT_TIME_LIMIT_SECONDS
        try:
            while True:
                try:
                    async with asyncio.timeout(limit_seconds):
                        response = await call.read()
                except TimeoutError:
                    if not is_connected:
                        raise
                    _log.warning("cluster_watch_ended", error_code="DEADLINE_EXCEEDED")
                    return True
                if not isinstance(response, WatchClusterResponse):
                    return is_connected
                if not is_connected:
                    is_connected = True
                    self._on_connected(True)
                    limit_seconds = None
                if response.pulse:
                    # Only a controller that is known to pulse is missed when it does not.
                    limit_seconds = SILENCE_SECONDS
                # A response without a state says that the known one is still the present one.
                if response.HasField("state"):
                    await self._on_state(response.state)
                    self._known_version = response.state.version
        except grpc.aio.AioRpcError as failure:
            if not is_connected:
                raise
            _log.warning("cluster_watch_ended", error_code=from_rpc_error(failure).code)
            return True
        finally:
            call.cancel()
            if is_connected:
                self._on_connected(False)
