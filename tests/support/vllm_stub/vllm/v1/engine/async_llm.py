"""Stub: an engine that answers a prompt with its own tokens, one a step, and does what prompts ask for.

A prompt that begins with one of `FAULTS` fails in that way; one that begins with `ENDLESS` goes on until it is aborted.
The embedding of a prompt is its first token and its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

REFUSED, OVERFLOW, DEAD, BROKEN, GIVEN_UP, UNKNOWN, ENDLESS = range(900, 907)
EOS = 2


class _UsageContext:
    """What vLLM calls the way it is used; only its default's words are compared."""

    def __repr__(self) -> str:
        return "<UsageContext.ENGINE_CONTEXT: 'ENGINE_CONTEXT'>"


DEFAULT_CONTEXT = _UsageContext()


class AsyncLLM:
    last: AsyncLLM

    def __init__(self, vllm_config: Any, stat_loggers: list[Callable[..., Any]]) -> None:
        AsyncLLM.last = self
        self.vllm_config = vllm_config
        ranks = vllm_config.parallel_config.data_parallel_size
        self.loggers = [stat_loggers[0](vllm_config, rank) for rank in range(ranks)]
        self.calls: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.adapters: dict[int, str] = {}
        self.is_dead = False
        self.is_shut_down = False
        self.reset_result = True
        self._aborts: dict[str, asyncio.Event] = {}

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: Any = DEFAULT_CONTEXT,
        stat_loggers: list[Any] | None = None,
    ) -> AsyncLLM:
        asyncio.get_running_loop()
        return cls(vllm_config, stat_loggers or [])

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        self.calls.append(
            SimpleNamespace(
                prompt=prompt,
                sampling=sampling_params,
                request_id=request_id,
                lora=lora_request,
                trace=trace_headers,
                priority=priority,
                rank=data_parallel_rank,
                session_id=session_id,
            )
        )
        tokens = prompt["prompt_token_ids"]
        _fail(tokens[0])
        aborted = self._aborts[request_id] = asyncio.Event()
        rank = data_parallel_rank or 0
        count = min(len(tokens), sampling_params.max_tokens or 16)
        try:
            position = 0
            while True:
                if tokens[0] == ENDLESS:
                    await asyncio.wait_for(aborted.wait(), 30) if position else None
                token = tokens[position % len(tokens)]
                is_stop = token == EOS or token in (sampling_params.stop_token_ids or ())
                reason = "stop" if is_stop else "length" if position + 1 == count and tokens[0] != ENDLESS else None
                if tokens[0] == GIVEN_UP:
                    reason = "error"
                self._step(rank, 0 if reason else 1)
                yield _output(token, position, reason, sampling_params)
                position += 1
                if reason is not None:
                    return
                await asyncio.sleep(0)
        finally:
            del self._aborts[request_id]
            self._step(rank, 0)

    async def encode(  # noqa: PLR0917  vLLM's own signature.
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[Any, None]:
        self.calls.append(SimpleNamespace(prompt=prompt, pooling=pooling_params, request_id=request_id))
        tokens = prompt["prompt_token_ids"]
        _fail(tokens[0])
        self._step(0, 1)
        try:
            await asyncio.sleep(30 if tokens[0] == ENDLESS else 0)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        self._step(0, 0)
        vector = [float(tokens[0]), float(len(tokens))]
        data = SimpleNamespace(float=lambda: SimpleNamespace(tolist=lambda: vector))
        yield SimpleNamespace(
            outputs=SimpleNamespace(data=data), prompt_token_ids=tokens, num_cached_tokens=0, finished=True
        )

    async def get_supported_tasks(self) -> tuple[str, ...]:
        arguments = self.vllm_config.arguments
        if arguments.runner != "pooling":
            return ("generate",)
        return ("classify",) if arguments.convert == "classify" else ("embed", "token_embed")

    def _step(self, rank: int, running: int) -> None:
        self.loggers[rank].record(
            SimpleNamespace(
                num_running_reqs=running,
                num_waiting_reqs=0,
                num_skipped_waiting_reqs=0,
                kv_cache_usage=0.25 * running,
                spec_decoding_stats=SimpleNamespace(num_drafts=1, num_draft_tokens=3, num_accepted_tokens=2),
            ),
            SimpleNamespace(
                num_generation_tokens=1,
                num_preempted_reqs=1,
                prompt_token_stats=SimpleNamespace(external_kv_transfer=16),
            ),
        )

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.aborted.append(request_id)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.reset_result

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        if lora_request.lora_path == "/none":
            raise RuntimeError("no such folder")
        self.adapters[lora_request.lora_int_id] = lora_request.lora_path
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.adapters.pop(lora_id, None) is not None

    @property
    def errored(self) -> bool:
        return self.is_dead

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            eos_token_id=EOS,
            bos_token_id=1,
            bos_token="<s>",
            eos_token="</s>",
            chat_template="{{ messages }}",
            encode=lambda text: [1, 7],
            backend_tokenizer=SimpleNamespace(to_str=lambda: "{}"),
        )

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        return {
            rank: KVEventsConfig(True, "zmq", f"tcp://127.0.0.1:{5000 + rank}", f"tcp://127.0.0.1:{6000 + rank}")
            for rank in range(len(self.loggers))
        }

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut_down = True


def _fail(first: int) -> None:
    if first == REFUSED:
        raise VLLMValidationError("that is wrong")
    if first == OVERFLOW:
        raise GracefulHTTPError("busy", HTTPStatus.SERVICE_UNAVAILABLE)
    if first == DEAD:
        raise EngineDeadError
    if first == UNKNOWN:
        raise VLLMNotFoundError("no such adapter")
    if first == BROKEN:
        raise EngineGenerateError from RuntimeError("secret")


def _output(token: int, position: int, reason: str | None, sampling: SamplingParams) -> Any:
    logprobs = None
    if sampling.logprobs is not None:
        # The chosen token is the second best; a third one is not asked for.
        ranked = {token: SimpleNamespace(logprob=-1.5, rank=2), 11: SimpleNamespace(logprob=-0.5, rank=1)}
        logprobs = [ranked]
    completion = SimpleNamespace(
        index=0,
        token_ids=[token],
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=token if reason == "stop" and token != EOS else None,
    )
    return SimpleNamespace(
        outputs=[completion],
        finished=reason is not None,
        num_cached_tokens=16,
        prompt_logprobs=None,
        kv_transfer_params={"remote_block_ids": [[1, 2]]} if reason and sampling.extra_args else None,
        metrics=SimpleNamespace(
            queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.5, last_token_ts=11.5 + 0.25 * position
        ),
    )
