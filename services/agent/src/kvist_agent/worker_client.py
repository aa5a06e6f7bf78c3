"""What the agent asks its workers over gRPC."""

from google.protobuf.duration_pb2 import Duration

from kvist.engine.v1.engine_pb2 import (
    DescribeRequest,
    DrainRequest,
    WatchKvEventsRequest,
    WorkerDescription,
)
from kvist.engine.v1.engine_pb2_grpc import EngineServiceStub
from kvist.errors import rpc_errors
from kvist.events.v1.events_pb2 import LedgerDigest
from kvist.grpc import TlsFiles, open_channel

DESCRIBE_TIME_LIMIT_SECONDS = 2.0
DIGEST_TIME_LIMIT_SECONDS = 2.0
# An answer to Drain may come a little after the limit that the worker was given.
DRAIN_SLACK_SECONDS = 5.0


class GrpcWorkerClient:
    """Speaks `kvist.engine.v1`. Calls are rare, so each opens a channel of its own and none can go stale."""

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    async def describe(
        self, address: str, *, time_limit_seconds: float = DESCRIBE_TIME_LIMIT_SECONDS
    ) -> WorkerDescription:
        """What the worker is.

        Raises:
            KvistError: It is not up yet, or does not answer in time.
        """
        with rpc_errors():
            async with open_channel(address, tls=self._tls, retries=False) as channel:
                response = await EngineServiceStub(channel).Describe(DescribeRequest(), timeout=time_limit_seconds)
        return response.worker

    async def drain(self, address: str, *, time_limit_seconds: float, fence: int) -> None:
        """Lets running requests end.

        Raises:
            KvistError: It could not be asked.
        """
        limit = Duration()
        limit.FromNanoseconds(int(time_limit_seconds * 1e9))
        with rpc_errors():
            async with open_channel(address, tls=self._tls, retries=False) as channel:
                await EngineServiceStub(channel).Drain(
                    DrainRequest(time_limit=limit, fence=fence), timeout=time_limit_seconds + DRAIN_SLACK_SECONDS
                )

    async def digests(self, address: str, *, ranks: int) -> list[LedgerDigest]:
        """What the ledgers of all ranks say of themselves now.

        Raises:
            KvistError: It could not be asked, or did not answer for all ranks in time.
        """
        found: dict[int, LedgerDigest] = {}
        with rpc_errors():
            async with open_channel(address, tls=self._tls, retries=False) as channel:
                # Following, since a digest is sent at once after subscribing; the snapshot before it is dropped.
                call = EngineServiceStub(channel).WatchKvEvents(
                    WatchKvEventsRequest(follow=True), timeout=DIGEST_TIME_LIMIT_SECONDS
                )
                async for response in call:
                    if response.WhichOneof("part") == "digest":
                        found[response.digest.source.rank] = response.digest
                        if len(found) >= max(1, ranks):
                            break
                call.cancel()
        return [found[rank] for rank in sorted(found)]
