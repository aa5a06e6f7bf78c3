"""vLLM behind the worker's server.

vLLM's `AsyncLLM` runs in an event loop on a thread of its own; its engine core and its workers are processes below this
one. Requests and aborts come from the core's courier thread and are handed to the loop. KV events do not pass through
Python: the core reads the engine's sockets itself.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Protocol, TypeVar

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, error
from kvist_worker.engine import EmbedSink, EngineDescription, EngineHost, RequestSink
from kvist_worker.engines.vllm import embeddings
from kvist_worker.engines.vllm.facts import EngineFacts
from kvist_worker.engines.vllm.load import RankLoad, RequestProgress, SchedulerState
from kvist_worker.engines.vllm.output import Embedded, Output, Transcript
from kvist_worker.engines.vllm.request import PreparedRequest, RequestLimits, prepare

_log = logging.getLogger(__name__)

# Between two looks at whether the engine core lives.
_HEALTH_SECONDS = 0.25
# Between reports that only say that tokens flow.
_REPORT_SECONDS = 0.1
_RESET_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_T = TypeVar("_T")


class Binding(Protocol):
    """`kvist_worker.engines.vllm.binding.VllmBinding`, which cannot be imported without vLLM."""

    async def start(self, on_step: Callable[[int, SchedulerState], None]) -> EngineFacts:
        """Holds the loop up until the engine is up."""

    def generate(self, request: PreparedRequest) -> AsyncIterator[Output]:
        """Runs a request."""

    async def embed(self, request_id: str, prompt: Sequence[int]) -> Embedded:
        """Makes the embedding of one input."""

    async def abort(self, request_id: str) -> None:
        """Ends a request."""

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter."""

    async def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter."""

    @property
    def has_died(self) -> bool:
        """Whether the engine core has ended."""

    def shutdown(self) -> None:
        """Ends the engine."""


@dataclass(slots=True, eq=False)
class _Job:
    request: PreparedRequest
    sink: RequestSink
    transcript: Transcript
    progress: RequestProgress
    task: asyncio.Task[None] | None = None
    is_aborted: bool = False


class VllmEngine:
    """The adapter `vllm`. See `kvist_worker.engine.EngineAdapter`."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._facts: EngineFacts | None = None
        self._limits: RequestLimits | None = None
        self._host: EngineHost | None = None
        self._is_closed = False
        # Of the loop's thread alone.
        self._jobs: dict[str, _Job] = {}
        self._embed_calls: set[asyncio.Task[None]] = set()
        self._loads: list[RankLoad] = []
        self._reported_at: list[float] = []
        self._watch: asyncio.Task[None] | None = None

    def description(self) -> str:
        """Starts the engine, which is how it is known what it is, and says it as JSON text."""
        facts = self._up()
        return EngineDescription(
            engine="vllm",
            version=facts.version,
            context_tokens=facts.context_tokens,
            max_running_requests=facts.max_running_requests,
            # vLLM queues without a limit of its own; the router's admission is the limit.
            max_waiting_requests=0,
            max_top_logprobs=facts.max_top_logprobs,
            kv_blocks=facts.kv_blocks,
            block_size_tokens=facts.block_size_tokens,
            ranks=facts.ranks,
            makes_choices=True,
            hash_algorithm=facts.hash_algorithm,
            capabilities=facts.capabilities,
            kv_layout=facts.kv_layout,
            chat_template=facts.chat_template,
            bos_token=facts.bos_token,
            eos_token=facts.eos_token,
            add_bos=facts.add_bos,
            eos_token_ids=facts.eos_token_ids,
        ).to_json()

    def tokenizer_json(self) -> bytes | None:
        """The tokenizer as the engine uses it."""
        found: bytes | None = self._up().tokenizer_json
        return found

    def start(self, host: EngineHost) -> None:
        """Lets the core read the engine's events, from its first batch on, and takes requests."""
        facts = self._up()
        for rank, sockets in facts.event_sockets.items():
            host.follow_vllm(
                rank,
                dumps(
                    {
                        "endpoint": sockets.endpoint,
                        "replay_endpoint": sockets.replay_endpoint,
                        "engine_rank": rank,
                        "hash_algorithm": facts.hash_algorithm,
                    }
                ),
            )
        self._host = host
        self._call(self._begin_watch())

    def submit(self, request: bytes, sink: RequestSink) -> None:
        """Hands a request to the engine."""
        message = engine_pb2.EngineRequest.FromString(request)
        try:
            if self._limits is None or self._is_closed:
                raise error("DRAINING", "the worker is being stopped")
            prepared = prepare(message, limits=self._limits)
        except KvistError as failure:
            _fail(sink, failure, not_started=True)
            return
        self._loop.call_soon_threadsafe(self._accept, prepared, sink)

    def embed(self, request: bytes, sink: EmbedSink) -> None:
        """Hands the inputs of a call to the engine, which runs them together."""
        message = engine_pb2.EmbedRequest.FromString(request)
        if self._limits is None or self._is_closed:
            sink.failed("DRAINING", "the worker is being stopped", not_started=True)
            return
        self._loop.call_soon_threadsafe(self._accept_embeddings, [tokens.ids for tokens in message.inputs], sink)

    def abort(self, request_id: str, reason: int) -> None:
        """Ends a request within a step. The core keeps the reason."""
        del reason
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._cancel, request_id)

    def reset_cache(self) -> int:
        """Empties the prefix cache. Nothing is claimed from before the order on; vLLM says late that it has obeyed."""
        host = self._host
        if host is None or self._is_closed:
            raise error("NOT_READY", "the engine is not up")
        claimed = host.clear_ordered()
        try:
            self._call(self._binding.reset_prefix_cache(), time_limit_seconds=_RESET_SECONDS)
        except BaseException:
            # Whether it will say that it is empty is not known any more.
            host.cache_unknown()
            raise
        return claimed

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter."""
        self._call(self._binding.load_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter."""
        self._call(self._binding.unload_adapter(name))

    def close(self) -> None:
        """Ends all requests and the engine."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._thread.is_alive():
            return
        try:
            self._call(self._end_all(), time_limit_seconds=_CLOSE_SECONDS)
        except TimeoutError:
            _log.warning("vllm_requests_did_not_end")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._binding.shutdown()

    def _call(self, work: Coroutine[Any, Any, _T], *, time_limit_seconds: float | None = None) -> _T:
        """Runs something in the loop and waits for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(time_limit_seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def _up(self) -> EngineFacts:
        if self._facts is None:
            began = time.monotonic()
            _log.info("vllm_loading")
            self._thread.start()
            self._facts = self._call(self._load())
            _log.info("vllm_loaded", extra={"seconds": round(time.monotonic() - began, 1)})
        return self._facts

    async def _load(self) -> EngineFacts:
        facts = await self._binding.start(self._on_step)
        self._loads = [RankLoad(rank, facts.kv_blocks) for rank in range(facts.ranks)]
        self._reported_at = [float("-inf")] * facts.ranks
        self._limits = RequestLimits(
            context_tokens=facts.context_tokens,
            vocabulary_size=facts.vocabulary_size,
            ranks=facts.ranks,
            max_top_logprobs=facts.max_top_logprobs,
            orders_by_priority=facts.orders_by_priority,
            connector="" if facts.kv_layout is None else facts.kv_layout.connector,
        )
        return facts

    async def _begin_watch(self) -> None:
        for rank in range(len(self._loads)):
            self._report(rank)
        self._watch = asyncio.create_task(self._watch_health())

    async def _watch_health(self) -> None:
        """Says once when the engine core has ended; requests hear of it by themselves."""
        while not self._binding.has_died:  # noqa: ASYNC110  vLLM tells nobody who waits for nothing.
            await asyncio.sleep(_HEALTH_SECONDS)
        if self._host is not None and not self._is_closed:
            self._host.failed("vLLM's engine core has ended")

    def _accept(self, prepared: PreparedRequest, sink: RequestSink) -> None:
        if self._is_closed:
            sink.failed("DRAINING", "the worker is being stopped", not_started=True)
            return
        job = _Job(
            prepared, sink, Transcript(prepared), RequestProgress(len(prepared.prompt), prepared.expected_cached_tokens)
        )
        self._jobs[prepared.request_id] = job
        self._loads[prepared.rank].begin(job.progress)
        self._report(prepared.rank)
        job.task = self._loop.create_task(self._drive(job))

    def _accept_embeddings(self, inputs: Sequence[Sequence[int]], sink: EmbedSink) -> None:
        if self._is_closed:
            sink.failed("DRAINING", "the worker is being stopped", not_started=True)
            return
        call = self._loop.create_task(embeddings.answer(inputs, self._embed, sink))
        self._embed_calls.add(call)
        call.add_done_callback(self._embed_calls.discard)

    async def _embed(self, prompt: Sequence[int]) -> Embedded:
        """One input. vLLM chooses its rank by itself; all are accounted for at the first one."""
        load, progress = self._loads[0], RequestProgress(len(prompt))
        cached_tokens = 0
        load.begin(progress)
        self._report(0)
        try:
            embedded = await self._binding.embed(f"embed-{uuid.uuid4()}", prompt)
            cached_tokens = embedded.cached_tokens
            return embedded
        finally:
            load.end(progress, cached_tokens=cached_tokens, times=None)
            self._report(0)

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.task is not None and not job.is_aborted:
            job.is_aborted = True
            job.task.cancel()

    async def _drive(self, job: _Job) -> None:
        """Runs one request to its end; its sink hears exactly one."""
        failure: KvistError | None = None
        try:
            async for output in self._binding.generate(job.request):
                for delta in job.transcript.take(output):
                    job.sink.tokens(list(delta.token_ids), delta.logprobs, delta.cached_tokens, delta.choice)
                job.progress.is_prefilled = True
                job.progress.generated_tokens = job.transcript.completion_tokens
        except asyncio.CancelledError:
            # It may have been cancelled before vLLM had a hold on it, and then vLLM does not end it by itself.
            await self._binding.abort(job.request.request_id)
        except KvistError as raised:
            failure = raised
        except Exception:  # noqa: BLE001  vLLM's own; the sink must hear an end whatever it is.
            _log.exception("vllm_request_failed")
            failure = error("ENGINE_FAILED", "the engine failed")
        finally:
            self._leave(job)
        if failure is not None:
            _fail(job.sink, failure, not_started=failure.not_started)
        elif self._is_closed and job.is_aborted:
            job.sink.failed("DRAINING", "the worker is being stopped")
        else:
            facts = self._up()
            job.sink.finished(
                *job.transcript.finished(block_size_tokens=facts.block_size_tokens, is_aborted=job.is_aborted)
            )

    def _leave(self, job: _Job) -> None:
        # The core may have given the request up before, and its id to another one.
        if self._jobs.get(job.request.request_id) is job:
            del self._jobs[job.request.request_id]
        rank = job.request.rank
        self._loads[rank].end(job.progress, cached_tokens=job.transcript.cached_tokens or 0, times=job.transcript.times)
        self._report(rank)

    async def _end_all(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        tasks += self._embed_calls
        for call in self._embed_calls:
            call.cancel()
        for request_id in list(self._jobs):
            self._cancel(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_step(self, rank: int, state: SchedulerState) -> None:
        """Called in the loop's thread after each step of a rank."""
        load = self._loads[rank] if rank < len(self._loads) else None
        if load is None:
            return
        load.step(state)
        if time.monotonic() - self._reported_at[rank] >= _REPORT_SECONDS:
            self._report(rank)

    def _report(self, rank: int) -> None:
        if self._host is not None:
            self._reported_at[rank] = time.monotonic()
            self._host.report_load(self._loads[rank].report().SerializeToString())


def _fail(sink: RequestSink, failure: KvistError, *, not_started: bool) -> None:
    fields = [(violation.field, violation.description) for violation in failure.fields]
    sink.failed(failure.code, failure.message, not_started=not_started, fields=fields)
