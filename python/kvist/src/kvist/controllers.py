"""Staying with whichever controller leads: one after the other is tried, again after each break."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NoReturn

import grpc

from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.errors import from_rpc_error
from kvist.telemetry import logger

if TYPE_CHECKING:
    from kvist.controller.v1.controller_pb2_grpc import ControllerServiceAsyncStub

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0

_log = logger(__name__)


async def try_controllers(
    controllers: Sequence[grpc.aio.Channel],
    use: "Callable[[ControllerServiceAsyncStub], Awaitable[bool]]",
    *,
    failure_event: str,
) -> NoReturn:
    """Uses one controller after another, for ever.

    Args:
        controllers: Channels to them.
        use: One stream to its end; true when the controller took part, so that the next attempt comes soon.
        failure_event: Name of the log event of an attempt that failed.
    """
    retry_seconds = FIRST_RETRY_SECONDS
    for attempt in count():
        took_part = False
        try:
            took_part = await use(ControllerServiceStub(controllers[attempt % len(controllers)]))
        except grpc.aio.AioRpcError as failure:
            _log.warning(failure_event, error_code=from_rpc_error(failure).code)
        except TimeoutError:
            _log.warning(failure_event, error_code="DEADLINE_EXCEEDED")
        retry_seconds = FIRST_RETRY_SECONDS if took_part else min(retry_seconds * 2, LONGEST_RETRY_SECONDS)
        await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))  # noqa: S311  Jitter, no secret.
    raise AssertionError("there is always another attempt")  # pragma: no cover
