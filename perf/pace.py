"""The client that keeps a pace: a request at each moment of a plan, whether earlier ones were answered or not."""

import asyncio
import time
from collections.abc import Sequence

from perf.load import Connection, Sample
from perf.sse import parse_answer

# Time for the first task to be there when the plan begins.
_HEAD_START_SECONDS = 0.05


async def drive_at_pace(address: str, requests: Sequence[bytes], *, per_second: float) -> tuple[list[Sample], float]:
    """Asks at even intervals and returns the samples and by how much the latest request left behind its plan.

    Connections are kept and used again; one is opened when all others wait for an answer.

    Raises:
        WrongAnswerError: An answer is wrong.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    opened: list[Connection] = []
    answers: list[tuple[float, float, float, bytes]] = []
    latest = 0.0

    async def ask(request: bytes, due: float) -> None:
        nonlocal latest
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(Connection, host, int(port))
            opened.append(connection)
        latest = max(latest, time.perf_counter() - due)
        answers.append(await connection.ask(request))
        idle.append(connection)

    begin = time.perf_counter() + _HEAD_START_SECONDS
    try:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                due = begin + number / per_second
                wait = due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(ask(request, due))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for connection in opened:
            connection.close()
    samples = [Sample(began, first, ended, parse_answer(response)) for began, first, ended, response in answers]
    return samples, latest
