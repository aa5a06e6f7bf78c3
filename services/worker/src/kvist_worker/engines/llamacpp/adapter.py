"""llama.cpp inside the worker's process, by way of `xllamacpp`.

llama.cpp keeps one token sequence in each of its slots, and tells nobody what it does with them. So that the ledger can
be exact, everything that would change a slot behind the adapter's back is switched off, the adapter alone chooses slots
and pins them, and it keeps an account of each slot (`slots`): blocks beyond the common prefix are taken back before a
request reaches llama.cpp, and blocks are told of when a token that depends on them has come out. The number of cached
tokens in each answer is held against the account.
"""

import bisect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import xllamacpp

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, error
from kvist.events.v1 import events_pb2
from kvist_worker.engine import EngineCapabilities, EngineHost, RequestSink
from kvist_worker.engines.llamacpp.load import LoadAccount, RequestProgress, duration
from kvist_worker.engines.llamacpp.model import LlamaCppArguments, describe, read_model, start_server
from kvist_worker.engines.llamacpp.request import MAX_TOP_LOGPROBS, PreparedRequest, RequestLimits, prepare
from kvist_worker.engines.llamacpp.slots import Placement, Scope, Slot, StoredRun, choose
from kvist_worker.engines.llamacpp.tokens import TokenBytes

_log = logging.getLogger(__name__)

CAPABILITIES = EngineCapabilities(
    logprobs=True,
    json_schema=True,
    grammar=True,
    # Whether this build of llama.cpp reads grammars of llguidance, as those of tags are.
    structural_tag=xllamacpp.json_schema_to_grammar('{"type": "object"}').startswith("%llguidance"),
    kv_events=True,
)
"""What the engine can do; it keeps no account of the cache of models whose memory is not a sequence of tokens."""
_RANK = 0
# Between reports that only say that tokens flow.
_REPORT_INTERVAL_SECONDS = 0.1
# What the OpenAI API gives for "unknown".
_UNKNOWN_LOGPROB = -9999.0
_ERROR_CODES: Mapping[str, str] = {
    "exceed_context_size_error": "CONTEXT_LENGTH_EXCEEDED",
    "invalid_request_error": "INVALID_ARGUMENT",
    "not_supported_error": "UNSUPPORTED_FIELD",
    "unavailable_error": "NOT_READY",
}


class CompletionServer(Protocol):
    """The part of `xllamacpp.Server` that is used."""

    def handle_completions(self, body: dict[str, Any], callback: Callable[[dict[str, Any]], bool]) -> Any:
        """Runs a request to its end. The interpreter is released; the call-back ends the request by `True`."""


@dataclass(slots=True, eq=False)
class _Job:
    prepared: PreparedRequest
    sink: RequestSink
    scope: Scope
    order: int
    progress: RequestProgress
    accepted_at: float
    placed_at: float | None = None
    slot: Slot | None = None
    placement: Placement | None = None
    abort_reason: int | None = None
    # What llama.cpp has said.
    error: Mapping[str, Any] | None = None
    callback_failure: BaseException | None = None
    timings: Mapping[str, Any] = field(default_factory=dict)
    stop_type: str = ""
    stop_token: int | None = None
    drawn_tokens: int = 0
    # Drawn tokens that are certain: those before the first guess.
    certain: list[int] = field(default_factory=list)
    is_certain: bool = True
    # Tokens without text wait: the last one may turn out to be the end token.
    held: list[int] = field(default_factory=list)
    held_logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    has_first_token: bool = False
    has_sent: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.prepared.priority, self.order)


class LlamaCppEngine:
    """The adapter `llamacpp`. See `kvist_worker.engine.EngineAdapter`."""

    def __init__(
        self,
        arguments: LlamaCppArguments,
        *,
        server: Callable[[LlamaCppArguments, Path], CompletionServer] = start_server,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the tokenizer; the model is loaded by `start`."""
        self._start_server = server
        self._clock = clock
        self._model_path, self._tokenizer, self._arguments = read_model(arguments)
        arguments = self._arguments
        self._token_bytes = TokenBytes(self._tokenizer.token_bytes())
        self._context_tokens = arguments.context_tokens
        self._limits = RequestLimits(self._context_tokens, len(self._token_bytes))
        size = arguments.block_size_tokens
        # Guards everything below; the host is called under it where order matters, llama.cpp never.
        self._lock = threading.Lock()
        self._slots = [Slot(index, size) for index in range(arguments.slots)]
        self._idle = {slot.index for slot in self._slots}
        self._waiting: list[_Job] = []
        self._jobs: dict[str, _Job] = {}
        self._orders = itertools.count(1)
        self._load = LoadAccount(size, arguments.slots * (arguments.context_tokens // size))
        self._reported_at = float("-inf")
        self._is_closed = False
        self._host: EngineHost | None = None
        self._server: CompletionServer | None = None
        self._pool: ThreadPoolExecutor | None = None

    def description(self) -> str:
        """What it is, as JSON text."""
        return describe(
            self._arguments,
            self._tokenizer,
            capabilities=replace(CAPABILITIES, kv_events=self._accounts_for_kv),
            kv_blocks=self._load.total_blocks,
            max_top_logprobs=MAX_TOP_LOGPROBS,
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
        """Places a request in a slot, or lets it wait for one."""
        message = engine_pb2.EngineRequest.FromString(request)
        try:
            prepared = prepare(message, limits=self._limits)
            with self._lock:
                self._accept(prepared, sink)
        except KvistError as failure:
            wrong = [(violation.field, violation.description) for violation in failure.fields]
            sink.failed(failure.code, failure.message, not_started=True, fields=wrong)

    def abort(self, request_id: str, reason: int) -> None:
        """Ends a request: at once when it waits, else at the next step."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or job.abort_reason is not None:
                return
            job.abort_reason = reason
            if job.slot is not None:
                # Its thread sees the reason at the next chunk, which comes after each step, in the prefill too.
                return
            self._waiting.remove(job)
            self._leave(job)
        job.sink.finished(self._finished(job).SerializeToString())

    def reset_cache(self) -> int:
        """Nothing that lies in a slot now is used again. What runs goes on and is not claimed."""
        with self._lock:
            removed = 0
            for slot in self._slots:
                blocks = slot.forget()
                removed += len(blocks)
                self._tell_removed(blocks)
            return removed

    def close(self) -> None:
        """Ends all requests and the engine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            for job in waiting:
                self._leave(job)
        for job in waiting:
            job.sink.failed("DRAINING", "the worker is being stopped", not_started=True)
        if self._pool is not None:
            # Running requests end at their next chunk.
            self._pool.shutdown(wait=True)
        self._server = None

    @property
    def _accounts_for_kv(self) -> bool:
        return not self._tokenizer.has_recurrent_state

    def _accept(self, prepared: PreparedRequest, sink: RequestSink) -> None:
        if self._is_closed or self._pool is None:
            raise error("DRAINING", "the worker is being stopped")
        if prepared.request_id in self._jobs:
            raise error("DUPLICATE_REQUEST", "a request of this id is running")
        if not self._idle and len(self._waiting) >= self._arguments.max_waiting_requests:
            raise error("QUEUE_FULL", "too many requests are waiting for a slot")
        scope = Scope(cache_salt=prepared.cache_salt)
        cached = max(slot.cached_tokens(prepared.prompt, scope) for slot in self._slots)
        job = _Job(
            prepared=prepared,
            sink=sink,
            scope=scope,
            order=next(self._orders),
            progress=RequestProgress(len(prepared.prompt), computed_tokens=cached),
            accepted_at=self._clock(),
        )
        self._jobs[prepared.request_id] = job
        bisect.insort(self._waiting, job, key=lambda waiting: waiting.key)
        self._place_waiting()
        self._report()

    def _place_waiting(self) -> None:
        while self._waiting and self._idle and self._pool is not None and not self._is_closed:
            job = self._waiting.pop(0)
            slot = choose((self._slots[index] for index in self._idle), job.prepared.prompt, job.scope)
            if slot is None:
                return
            self._idle.discard(slot.index)
            slot.last_used = next(self._orders)
            job.slot = slot
            job.placed_at = self._clock()
            job.progress.is_running = True
            self._pool.submit(self._run, job, slot)

    def _leave(self, job: _Job) -> None:
        del self._jobs[job.prepared.request_id]
        self._load.finished_requests += 1
        self._report()

    # One thread for each running request.

    def _run(self, job: _Job, slot: Slot) -> None:
        failure: tuple[str, str, bool] | None
        try:
            self._drive(job, slot)
            failure = self._failure(job)
            with self._lock:
                if failure is None:
                    self._account_end(job, slot)
                elif not self._is_untouched(job, was_refused=failure[2]):
                    self._tell_removed(slot.forget())
        except Exception:  # noqa: BLE001  The root of a request: whatever it was, the slot and the sink get their end.
            _log.exception("request_failed")
            failure = ("ENGINE_FAILED", "the engine failed on this request", False)
            with self._lock:
                self._tell_removed(slot.forget())
        timings = job.timings
        with self._lock:
            self._load.observe(
                prefill_tokens=timings.get("prompt_n", 0),
                prefill_seconds=timings.get("prompt_ms", 0.0) / 1000,
                decode_steps=max(timings.get("predicted_n", 0) - 1, 0),
                decode_seconds=timings.get("predicted_ms", 0.0) / 1000,
            )
            self._idle.add(slot.index)
            self._place_waiting()
            self._leave(job)
        if failure is None:
            job.sink.finished(self._finished(job).SerializeToString())
        else:
            code, message, not_started = failure
            job.sink.failed(code, message, not_started=not_started)

    def _drive(self, job: _Job, slot: Slot) -> None:
        server = self._server
        if server is None:
            raise RuntimeError("the engine was not started")
        with self._lock:
            if job.abort_reason is not None:
                return
            placement = slot.place(job.prepared.prompt, job.scope)
            # Before llama.cpp hears of the request: from then on it overwrites.
            self._tell_removed(placement.removed)
            job.placement = placement
            job.progress.computed_tokens = placement.cached_tokens
            self._report()
        body = {**job.prepared.body, "id_slot": slot.index, "cache_prompt": placement.may_reuse}

        def on_chunk(chunk: dict[str, Any]) -> bool:
            # An exception must not travel through C++.
            try:
                return self._on_chunk(job, slot, chunk)
            except Exception as failure:  # noqa: BLE001
                job.callback_failure = failure
                return True

        server.handle_completions(body, on_chunk)
        if job.callback_failure is not None:
            raise job.callback_failure

    def _on_chunk(self, job: _Job, slot: Slot, chunk: Mapping[str, Any]) -> bool:
        if "error" in chunk:
            job.error = chunk["error"]
            return True
        details = chunk["__verbose"]
        job.timings = chunk.get("timings", job.timings)
        progress = chunk.get("prompt_progress")
        if progress is not None:
            self._on_progress(job, slot, progress)
        elif details["stop"]:
            job.stop_type = details["stop_type"]
            job.drawn_tokens = details["tokens_predicted"]
            if details["id_slot"] != slot.index:
                raise RuntimeError(f"llama.cpp used slot {details['id_slot']} instead of {slot.index}")
        elif self._on_tokens(job, slot, chunk, details):
            return True
        return job.abort_reason is not None or self._is_closed

    def _on_progress(self, job: _Job, slot: Slot, progress: Mapping[str, Any]) -> None:
        with self._lock:
            job.progress.computed_tokens = progress["processed"]
            self._correct(job, slot, progress["cache"])
            self._load.engine_steps += 1
            self._report()

    def _on_tokens(self, job: _Job, slot: Slot, chunk: Mapping[str, Any], details: Mapping[str, Any]) -> bool:
        """Takes the tokens of a chunk; true when a stop token ends the request."""
        count = details["tokens_predicted"] - job.drawn_tokens
        job.drawn_tokens = details["tokens_predicted"]
        choice = chunk["choices"][0]
        found = self._token_bytes.resolve(choice["text"], details["tokens"][-1], count)
        token_ids = found.token_ids
        job.is_certain = job.is_certain and found.is_certain
        if job.is_certain:
            job.certain.extend(token_ids)
        with self._lock:
            job.progress.generated_tokens = job.drawn_tokens
            self._load.engine_steps += count
            self._load.generated_tokens += count
            if not job.has_first_token:
                self._correct(job, slot, job.timings["cache_n"])
                job.has_first_token = True
                job.progress.computed_tokens = len(job.prepared.prompt)
                self._grow(job, slot, job.prepared.prompt)
                self._report()
            elif self._clock() - self._reported_at >= _REPORT_INTERVAL_SECONDS:
                self._report()
        logprobs = self._logprobs(job, choice, len(token_ids))
        for position, token_id in enumerate(token_ids):
            if token_id in job.prepared.stop_token_ids:
                self._send(job, (*job.held, *token_ids[:position]), [*job.held_logprobs, *logprobs[:position]])
                job.held, job.held_logprobs = [], []
                job.stop_token = token_id
                return True
        if choice["text"]:
            self._send(job, (*job.held, *token_ids), [*job.held_logprobs, *logprobs])
            job.held, job.held_logprobs = [], []
        else:
            job.held.extend(token_ids)
            job.held_logprobs.extend(logprobs)
        return False

    def _logprobs(self, job: _Job, choice: Mapping[str, Any], count: int) -> list[engine_pb2.TokenLogprobs]:
        wanted = job.prepared.top_logprobs
        if wanted is None:
            return []
        # llama.cpp gives those of the last token of a chunk only.
        entries = [engine_pb2.TokenLogprobs(logprob=_UNKNOWN_LOGPROB) for _ in range(count)]
        content = (choice.get("logprobs") or {}).get("content") or []
        if content and entries:
            last = content[-1]
            entries[-1].logprob = last["logprob"]
            for top in last["top_logprobs"][:wanted]:
                entries[-1].top.add(token_id=top["id"], logprob=top["logprob"])
        return entries

    def _send(self, job: _Job, token_ids: tuple[int, ...], logprobs: list[engine_pb2.TokenLogprobs]) -> None:
        if not token_ids:
            return
        encoded = engine_pb2.TokenDelta(logprobs=logprobs).SerializeToString() if logprobs else None
        cached = None if job.has_sent else int(job.timings["cache_n"])
        job.has_sent = True
        job.sink.tokens(list(token_ids), encoded, cached)

    def _failure(self, job: _Job) -> tuple[str, str, bool] | None:
        """What to fail the request with; none when it has ended."""
        if job.error is not None:
            code = _ERROR_CODES.get(job.error.get("type", ""), "ENGINE_FAILED")
            if code == "ENGINE_FAILED":
                _log.error("engine_error", extra={"engine_error": dict(job.error)})
                return (code, "the engine failed on this request", False)
            # The engine's words on a wrong request: it names fields and numbers, not the prompt.
            return (code, f"llama.cpp: {job.error.get('message', '')}", True)
        if job.abort_reason is not None or job.stop_token is not None or job.stop_type in {"eos", "limit"}:
            return None
        if self._is_closed:
            return ("DRAINING", "the worker is being stopped", not job.has_sent)
        return ("ENGINE_FAILED", "the engine ended the request without a reason", False)

    def _is_untouched(self, job: _Job, *, was_refused: bool) -> bool:
        """Whether a failed request has left its slot as the account has it."""
        if job.placement is None:
            return True
        # A refusal comes before the slot is changed: it still holds what was there, for its own scope only.
        return was_refused and job.error is not None and not job.timings and job.placement.may_reuse

    def _account_end(self, job: _Job, slot: Slot) -> None:
        """What is certainly in the slot after the end."""
        if job.placement is None:
            return
        if job.has_first_token:
            # The last token drawn has not been through the model.
            known = job.certain[: job.drawn_tokens - 1]
            self._grow(job, slot, (*job.prepared.prompt, *known))
        else:
            self._grow(job, slot, job.prepared.prompt[: job.progress.computed_tokens])

    def _finished(self, job: _Job) -> engine_pb2.Finished:
        ended_by: int | None = job.stop_token
        if job.stop_type == "eos" and job.held and job.held[-1] in self._tokenizer.eos_token_ids:
            ended_by = job.held.pop()
            job.held_logprobs = job.held_logprobs[: len(job.held)]
        self._send(job, tuple(job.held), job.held_logprobs)
        if ended_by is not None or job.stop_type == "eos":
            reason = engine_pb2.FINISH_REASON_STOP
        elif job.stop_type == "limit":
            reason = engine_pb2.FINISH_REASON_LENGTH
        elif job.abort_reason == engine_pb2.ABORT_REASON_STOP_STRING:
            reason = engine_pb2.FINISH_REASON_STOP
        else:
            reason = engine_pb2.FINISH_REASON_ABORTED
        timings = job.timings
        placed_at = job.placed_at if job.placed_at is not None else self._clock()
        receipt = events_pb2.Receipt(
            prompt_tokens=len(job.prepared.prompt),
            cached_tokens=timings.get("cache_n", 0),
            completion_tokens=job.drawn_tokens,
            queue_duration=duration(placed_at - job.accepted_at),
            prefill_duration=duration(timings.get("prompt_ms", 0.0) / 1000),
            decode_duration=duration(timings.get("predicted_ms", 0.0) / 1000),
            block_size_tokens=self._arguments.block_size_tokens,
        )
        if timings and job.placement is not None and self._accounts_for_kv:
            receipt.claimed_blocks = job.placement.claimed_blocks
        return engine_pb2.Finished(reason=reason, stop_token_id=ended_by, receipt=receipt)

    # The ledger and the load; all under the lock.

    def _correct(self, job: _Job, slot: Slot, cached_tokens: int) -> None:
        """Takes back what llama.cpp did not find although the account had it."""
        if job.has_first_token or cached_tokens >= len(slot.tokens):
            return
        removed = slot.correct(cached_tokens)
        if removed:
            _log.error("cache_account_was_wrong", extra={"slot": slot.index, "blocks": len(removed)})
            self._tell_removed(removed)

    def _grow(self, job: _Job, slot: Slot, tokens: tuple[int, ...]) -> None:
        host = self._host
        if host is None or not slot.is_known or not self._accounts_for_kv or len(tokens) < len(slot.tokens):
            return
        scope = job.scope
        hashes = host.block_hashes(list(tokens), adapter=scope.adapter, cache_salt=scope.cache_salt)
        run: StoredRun | None = slot.grow(tokens, hashes)
        if run is not None:
            host.stored(
                _RANK,
                list(run.hashes),
                run.parent,
                list(run.tokens),
                adapter=scope.adapter,
                cache_salt=scope.cache_salt,
            )

    def _tell_removed(self, hashes: tuple[int, ...]) -> None:
        if hashes and self._host is not None:
            self._host.removed(_RANK, list(hashes))

    def _report(self) -> None:
        if self._host is not None:
            self._reported_at = self._clock()
            report = self._load.report(job.progress for job in self._jobs.values())
            self._host.report_load(report.SerializeToString())
