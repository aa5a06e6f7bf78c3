"""A small engine in Python: it answers a prompt with its own tokens, and keeps blocks in an exact cache."""

from __future__ import annotations

import json
import queue
import threading

from kvist import _core
from kvist.engine.v1 import engine_pb2
from kvist.events.v1 import events_pb2

BLOCK_SIZE_TOKENS = 4
# Prompts that begin with these tokens behave badly.
FAULT, REFUSED, SILENT, DROPPED = 1001, 1002, 1003, 1004


class EchoEngine:
    """Answers from a thread of its own, as real engines do."""

    def __init__(self) -> None:
        self.host: _core.EngineHost | None = None
        self.closed = threading.Event()
        self.threads: set[str] = set()
        self._waiting: dict[str, _core.RequestSink] = {}
        self._work: queue.SimpleQueue[tuple[engine_pb2.EngineRequest, _core.RequestSink] | None] = queue.SimpleQueue()
        self._blocks: dict[tuple[int, ...], int] = {}
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)

    def description(self) -> str:
        return json.dumps(
            {
                "engine": "echo",
                "version": "1",
                "context_tokens": 4096,
                "max_running_requests": 8,
                "block_size_tokens": BLOCK_SIZE_TOKENS,
                "kv_blocks": 1000,
                "capabilities": {"kv_events": True},
            }
        )

    def tokenizer_json(self) -> bytes | None:
        return None

    def start(self, host: _core.EngineHost) -> None:
        self.host = host
        self._thread.start()

    def submit(self, request: bytes, sink: _core.RequestSink) -> None:
        self.threads.add(threading.current_thread().name)
        decoded = engine_pb2.EngineRequest.FromString(request)
        first = decoded.tokens.ids[0]
        if first == FAULT:
            raise RuntimeError("secret text")
        if first == REFUSED:
            sink.failed("OVERLOADED", "come back", not_started=True, retry_after_ms=1500)
        elif first == SILENT:
            self._waiting[decoded.request_id] = sink
        elif first != DROPPED:
            self._work.put((decoded, sink))

    def abort(self, request_id: str, reason: int) -> None:
        sink = self._waiting.pop(request_id, None)
        if sink is not None:
            assert sink.is_aborted()
            sink.finished(
                engine_pb2.Finished(
                    reason=engine_pb2.FINISH_REASON_ABORTED, receipt=events_pb2.Receipt(prompt_tokens=reason)
                ).SerializeToString()
            )

    def reset_cache(self) -> int:
        assert self.host is not None
        self.host.cleared(0)
        count = len(self._blocks)
        self._blocks.clear()
        return count

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(5)
        self.closed.set()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._answer(*item)

    def _answer(self, request: engine_pb2.EngineRequest, sink: _core.RequestSink) -> None:
        assert self.host is not None
        prompt = list(request.tokens.ids)
        cached, parent = 0, None
        for end in range(BLOCK_SIZE_TOKENS, len(prompt) + 1, BLOCK_SIZE_TOKENS):
            key = tuple(prompt[:end])
            if key in self._blocks:
                cached = end
            else:
                self._blocks[key] = hash(key) & (2**64 - 1)
                self.host.stored(0, [self._blocks[key]], parent, prompt[end - BLOCK_SIZE_TOKENS : end])
            parent = self._blocks[key]
        cached = min(cached, len(prompt) - 1)
        count = min(request.stop.max_tokens or len(prompt), len(prompt))
        for position, token in enumerate(prompt[:count]):
            sink.tokens([token], None, cached if position == 0 else None)
        self.host.report_load(events_pb2.LoadReport(finished_requests_total=1).SerializeToString())
        sink.finished(
            engine_pb2.Finished(
                reason=engine_pb2.FINISH_REASON_LENGTH,
                receipt=events_pb2.Receipt(prompt_tokens=len(prompt), cached_tokens=cached, completion_tokens=count),
            ).SerializeToString()
        )
