"""vLLM with a pooling model: whole inputs in, one vector for each out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, error
from kvist_worker.engine import EmbedSink
from kvist_worker.engines.vllm.output import Embedded

_log = logging.getLogger(__name__)

# Between two looks at whether anybody still waits.
_ABANDONED_SECONDS = 0.1


async def answer(
    inputs: Iterable[Sequence[int]], embed: Callable[[Sequence[int]], Awaitable[Embedded]], sink: EmbedSink
) -> None:
    """Runs the inputs of one call together; the first that fails, or a caller who has gone, ends all.

    Args:
        inputs: Token ids.
        embed: Makes the embedding of one input; cancelled, it ends it in the engine too.
        sink: Hears exactly one end, also when the call is cancelled.
    """
    try:
        response = await _together([asyncio.ensure_future(embed(prompt)) for prompt in inputs], sink)
    except KvistError as failure:
        sink.failed(failure.code, failure.message, not_started=failure.not_started)
    except asyncio.CancelledError:
        sink.failed("DRAINING", "the worker is being stopped")
    except Exception:  # noqa: BLE001  vLLM's own; the sink must hear an end whatever it is.
        _log.exception("vllm_embedding_failed")
        sink.failed("ENGINE_FAILED", "the engine failed on these inputs")
    else:
        sink.finished(response.SerializeToString())


async def _together(tasks: Sequence[asyncio.Future[Embedded]], sink: EmbedSink) -> engine_pb2.EmbedResponse:
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_ABANDONED_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if pending and sink.is_abandoned():
                raise error("CANCELLED", "nobody waits for the embeddings")
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    response = engine_pb2.EmbedResponse()
    for task in tasks:
        embedded = task.result()
        response.embeddings.add(values=embedded.values, prompt_tokens=embedded.prompt_tokens)
    return response
