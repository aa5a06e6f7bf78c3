"""Which workers of silent nodes do not answer either.

A node whose lease has ended may be dead, or only its agent is: workers outlive their agent and go on serving. So the
controller asks the workers themselves. One that does not answer leaves the cluster state, and with it every index; it
comes back with its node, as the same incarnation if it is. Its incarnation is not closed: nobody has seen it die.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from kvist.engine.v1.engine_pb2 import DescribeRequest
from kvist.engine.v1.engine_pb2_grpc import EngineServiceStub
from kvist.errors import KvistError, rpc_errors
from kvist.grpc import TlsFiles, open_channel
from kvist.telemetry import logger

ANSWER_TIME_LIMIT_SECONDS = 1.0
PAUSE_SECONDS = 0.5
# One question may be lost on a machine that is busy with something else.
MISSES_OF_THE_SILENT = 2
# Many workers of a large node are asked a few at a time.
MOST_QUESTIONS = 16

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker whose node is silent.

    Attributes:
        worker_uid: UID of its slot.
        address: Where it was last known to listen.
        incarnation: The one that was last known to run there.
    """

    worker_uid: str
    address: str
    incarnation: int


async def answers(suspect: Suspect, *, tls: TlsFiles | None = None) -> bool:
    """Whether the worker lives, as the incarnation that is known of it."""
    try:
        with rpc_errors():
            async with open_channel(suspect.address, tls=tls, retries=False) as channel:
                call = EngineServiceStub(channel).Describe(DescribeRequest(), timeout=ANSWER_TIME_LIMIT_SECONDS)
                description = (await call).worker
    except KvistError:
        return False
    return (description.worker_uid, description.incarnation) == (suspect.worker_uid, suspect.incarnation)


class Silence:
    """Who is silent at the moment."""

    def __init__(self, ask: Callable[[Suspect], Awaitable[bool]] = answers) -> None:
        self._ask = ask
        # Questions in a row without an answer.
        self._misses: dict[Suspect, int] = {}

    def workers(self, suspects: Collection[Suspect]) -> frozenset[str]:
        """UIDs of the suspects that no longer answer."""
        return frozenset(suspect.worker_uid for suspect in suspects if self._is_silent(suspect))

    async def watch(self, suspects: Callable[[], Sequence[Suspect]], on_change: Callable[[], None]) -> None:
        """Asks all suspects again and again, for ever."""
        limit = asyncio.Semaphore(MOST_QUESTIONS)

        async def ask(suspect: Suspect) -> bool:
            async with limit:
                return await self._ask(suspect)

        while True:
            asked = suspects()
            answered = await asyncio.gather(*(ask(suspect) for suspect in asked))
            before = {suspect for suspect in self._misses if self._is_silent(suspect)}
            self._misses = {
                suspect: self._misses.get(suspect, 0) + 1
                for suspect, is_alive in zip(asked, answered, strict=True)
                if not is_alive
            }
            silent = {suspect for suspect in self._misses if self._is_silent(suspect)}
            for suspect in sorted(silent - before, key=lambda suspect: suspect.worker_uid):
                _log.warning(
                    "worker_lost_with_its_node", worker_uid=suspect.worker_uid, incarnation=suspect.incarnation
                )
            if silent != before:
                on_change()
            await asyncio.sleep(PAUSE_SECONDS)

    def _is_silent(self, suspect: Suspect) -> bool:
        return self._misses.get(suspect, 0) >= MISSES_OF_THE_SILENT
