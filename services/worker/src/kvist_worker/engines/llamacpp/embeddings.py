"""llama.cpp started for embeddings: whole inputs in, one vector for each out, and nothing kept between calls."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, error
from kvist_worker.engine import EmbedSink, EngineCapabilities, EngineHost, RequestSink
from kvist_worker.engines.llamacpp.load import LoadAccount, RequestProgress
from kvist_worker.engines.llamacpp.model import LlamaCppArguments, describe, read_model, start_server

_log = logging.getLogger(__name__)
CAPABILITIES = EngineCapabilities(embeddings=True)


class EmbeddingServer(Protocol):
    """The part of `xllamacpp.Server` that is used."""

    def handle_embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        """Embeds a list of inputs. The interpreter is released meanwhile."""


class LlamaCppEmbedder:
    """The adapter `llamacpp` with `embeddings`. See `kvist_worker.engine.EngineAdapter`."""

    def __init__(
        self,
        arguments: LlamaCppArguments,
        *,
        server: Callable[[LlamaCppArguments, Path], EmbeddingServer] = start_server,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the tokenizer; the model is loaded by `start`."""
        self._start_server = server
        self._clock = clock
        self._model_path, self._tokenizer, self._arguments = read_model(arguments)
        # Guards everything below.
        self._lock = threading.Lock()
        self._calls: dict[int, RequestProgress] = {}
        self._call_numbers = itertools.count()
        self._load = LoadAccount(arguments.block_size_tokens, total_blocks=0)
        self._is_closed = False
        self._host: EngineHost | None = None
        self._server: EmbeddingServer | None = None
        self._pool: ThreadPoolExecutor | None = None

    def description(self) -> str:
        """What it is, as JSON text."""
        return describe(
            self._arguments, self._tokenizer, capabilities=CAPABILITIES, kv_blocks=0, max_top_logprobs=0
        ).to_json()

    def tokenizer_json(self) -> bytes | None:
        """The converted tokenizer."""
        return self._tokenizer.json

    def start(self, host: EngineHost) -> None:
        """Loads the model."""
        self._server = self._start_server(self._arguments, self._model_path)
        self._pool = ThreadPoolExecutor(self._arguments.slots, thread_name_prefix="llamacpp")
        self._host = host
        with self._lock:
            self._report()

    def submit(self, request: bytes, sink: RequestSink) -> None:
        """Refuses: llama.cpp that was started for embeddings generates nothing."""
        del request
        sink.failed("NOT_IMPLEMENTED", "this engine was started for embeddings", not_started=True)

    def embed(self, request: bytes, sink: EmbedSink) -> None:
        """Embeds the inputs of one call, as soon as a thread is free."""
        message = engine_pb2.EmbedRequest.FromString(request)
        inputs = [list(tokens.ids) for tokens in message.inputs]
        most_calls = self._arguments.slots + self._arguments.max_waiting_requests
        with self._lock:
            if self._pool is None or self._is_closed:
                sink.failed("DRAINING", "the worker is being stopped", not_started=True)
                return
            if len(self._calls) >= most_calls:
                sink.failed("QUEUE_FULL", "too many requests are waiting", not_started=True, retry_after_ms=1000)
                return
            number = next(self._call_numbers)
            self._calls[number] = RequestProgress(sum(map(len, inputs)))
            self._report()
            self._pool.submit(self._run, number, inputs, sink)

    def abort(self, request_id: str, reason: int) -> None:
        """Nothing runs that has an id; whoever no longer waits for embeddings is seen by its sink."""

    def reset_cache(self) -> int:
        """Nothing is kept."""
        return 0

    def close(self) -> None:
        """Ends all calls, the running ones after the inputs that are in llama.cpp."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._server = None

    def _run(self, number: int, inputs: Sequence[list[int]], sink: EmbedSink) -> None:
        """The root of a call: whatever happens, the sink gets its end."""
        try:
            response = self._embed(self._calls[number], inputs, sink)
        except KvistError as failure:
            sink.failed(failure.code, failure.message)
        except Exception:  # noqa: BLE001  Also what the binding threw from C++.
            _log.exception("embedding_failed")
            sink.failed("ENGINE_FAILED", "the engine failed on these inputs")
        else:
            sink.finished(response.SerializeToString())
        finally:
            with self._lock:
                del self._calls[number]
                self._load.finished_requests += 1
                self._report()

    def _embed(
        self, progress: RequestProgress, inputs: Sequence[list[int]], sink: EmbedSink
    ) -> engine_pb2.EmbedResponse:
        with self._lock:
            progress.is_running = True
            self._report()
        response = engine_pb2.EmbedResponse()
        # As many at once as llama.cpp has slots; between two groups a call can end whose caller has gone.
        for group in _groups(inputs, self._arguments.slots):
            if sink.is_abandoned():
                raise error("CANCELLED", "nobody waits for the embeddings")
            if self._is_closed or self._server is None:
                raise error("DRAINING", "the worker is being stopped")
            began = self._clock()
            answer = self._server.handle_embeddings({"input": group})
            seconds = self._clock() - began
            failure = answer.get("error")
            if failure is not None:
                # The engine's words on a wrong input: they name numbers, not the text.
                raise error("ENGINE_FAILED", f"llama.cpp: {failure.get('message', '')}")
            vectors = {item["index"]: item["embedding"] for item in answer["data"]}
            for position, tokens in enumerate(group):
                response.embeddings.add(values=vectors[position], prompt_tokens=len(tokens))
            tokens_of_group = sum(map(len, group))
            with self._lock:
                progress.computed_tokens += tokens_of_group
                self._load.engine_steps += 1
                self._load.observe(
                    prefill_tokens=tokens_of_group, prefill_seconds=seconds, decode_steps=0, decode_seconds=0.0
                )
                self._report()
        return response

    def _report(self) -> None:
        """Under the lock."""
        if self._host is not None:
            self._host.report_load(self._load.report(self._calls.values()).SerializeToString())


def _groups(inputs: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    return (list(inputs[start : start + size]) for start in range(0, len(inputs), size))
