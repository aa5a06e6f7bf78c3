"""What vLLM says of a request, as messages. Pure: vLLM's own objects are described by what is read of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.duration_pb2 import Duration

from kvist.engine.v1 import engine_pb2
from kvist.errors import error
from kvist.events.v1 import events_pb2
from kvist_worker.engines.vllm.request import PreparedRequest

_REASONS: Mapping[str, engine_pb2.FinishReason.ValueType] = {
    "stop": engine_pb2.FINISH_REASON_STOP,
    "length": engine_pb2.FINISH_REASON_LENGTH,
    "abort": engine_pb2.FINISH_REASON_ABORTED,
    # vLLM found a pattern that repeats, as it was configured to.
    "repetition": engine_pb2.FINISH_REASON_STOP,
}


class Logprob(Protocol):
    """`vllm.logprobs.Logprob`."""

    logprob: float
    rank: int | None


class Completion(Protocol):
    """`vllm.outputs.CompletionOutput`, of which a delta is read."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    finish_reason: str | None


class Times(Protocol):
    """`vllm.v1.metrics.stats.RequestStateStats`; seconds of the engine core's clock, 0 for what was not yet."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class Output(Protocol):
    """`vllm.outputs.RequestOutput`, as far as it is read."""

    outputs: Sequence[Completion]
    num_cached_tokens: int | None
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None
    kv_transfer_params: Mapping[str, Any] | None
    metrics: Times | None


class Pooled(Protocol):
    """`vllm.outputs.PoolingRequestOutput`, as far as it is read; `outputs.data` is a tensor of one dimension."""

    outputs: Any
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Embedded:
    """What came of one input of a pooling model.

    Attributes:
        values: The vector.
        prompt_tokens: Tokens of the input.
        cached_tokens: Those of them whose KV was found.
    """

    values: Sequence[float]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a choice.

    Attributes:
        choice: Which.
        token_ids: In order.
        logprobs: An encoded `TokenDelta` with one entry for each token; none when nobody asked.
        cached_tokens: Prompt tokens that were found; only with the first tokens of a request.
    """

    choice: int
    token_ids: tuple[int, ...]
    logprobs: bytes | None
    cached_tokens: int | None


@dataclass(slots=True)
class Transcript:
    """The account of one request.

    Attributes:
        request: What was asked.
        completion_tokens: Tokens drawn, those that ended a text included.
        cached_tokens: Prompt tokens that were found; none before the first output.
        times: The last that were told.
    """

    request: PreparedRequest
    completion_tokens: int = 0
    cached_tokens: int | None = None
    times: Times | None = None
    _reasons: dict[int, str] = field(default_factory=dict)
    _stop_token_id: int | None = None
    _prompt_logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    _kv_transfer: Mapping[str, Any] | None = None

    def take(self, output: Output) -> list[Delta]:
        """Takes an output into the account and returns what is new.

        Raises:
            KvistError: vLLM gave the request up.
        """
        self.times = output.metrics or self.times
        self._kv_transfer = output.kv_transfer_params or self._kv_transfer
        # Told once; later outputs have none, or an empty list.
        if output.prompt_logprobs and self.request.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(
                self.request.prompt, output.prompt_logprobs, self.request.prompt_logprobs
            )
        first_cached = output.num_cached_tokens if self.cached_tokens is None else None
        deltas = []
        for completion in output.outputs:
            delta = self._delta(completion, first_cached)
            if delta is not None:
                deltas.append(delta)
                first_cached = None
        if self.cached_tokens is None and output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        return deltas

    def _delta(self, completion: Completion, cached_tokens: int | None) -> Delta | None:
        tokens = list(completion.token_ids)
        self.completion_tokens += len(tokens)
        if completion.finish_reason is not None:
            if completion.finish_reason == "error" and self.request.is_fetched and self.completion_tokens == 0:
                # With `kv_load_failure_policy: fail`, and before anything was drawn.
                failed = "the prompt's KV did not arrive at the decode engine"
                raise error("KV_TRANSFER_FAILED", failed, not_started=True)
            if completion.finish_reason == "error":
                raise error("ENGINE_FAILED", "the engine gave the request up")
            self._reasons[completion.index] = completion.finish_reason
            # Texts are not matched here, so only a token can have ended it: the last one.
            if completion.finish_reason == "stop" and tokens:
                ended_by = tokens.pop()
                if completion.index == 0:
                    self._stop_token_id = ended_by
        if not tokens:
            return None
        encoded = None
        if self.request.top_logprobs is not None and completion.logprobs is not None:
            positions = zip(tokens, completion.logprobs, strict=False)
            logprobs = [token_logprobs(token, position, self.request.top_logprobs) for token, position in positions]
            encoded = engine_pb2.TokenDelta(logprobs=logprobs).SerializeToString()
        return Delta(completion.index, tuple(tokens), encoded, cached_tokens)

    def finished(self, *, block_size_tokens: int, is_aborted: bool = False) -> tuple[bytes, bytes | None]:
        """The end, encoded, and the log-probabilities of the prompt as an encoded `TokenDelta` when there are any."""
        first, *others = self._choice_reasons(is_aborted=is_aborted)
        finished = engine_pb2.Finished(
            reason=first,
            stop_token_id=self._stop_token_id,
            receipt=self.receipt(block_size_tokens=block_size_tokens),
            choice_reasons=others,
        )
        asked = self.request.kv_transfer
        if asked is not None and self._kv_transfer is not None:
            finished.kv_transfer.connector = asked.connector
            finished.kv_transfer.lease_id = asked.lease_id
            finished.kv_transfer.parameters.update(self._kv_transfer)
        prompt = None
        if self._prompt_logprobs:
            prompt = engine_pb2.TokenDelta(logprobs=self._prompt_logprobs).SerializeToString()
        return finished.SerializeToString(), prompt

    def receipt(self, *, block_size_tokens: int) -> events_pb2.Receipt:
        """What it took. Claims are not compared: a removal is published after the step that made it."""
        receipt = events_pb2.Receipt(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=self.completion_tokens,
            block_size_tokens=block_size_tokens,
        )
        times = self.times
        if times is not None:
            phases = (
                (receipt.queue_duration, times.queued_ts, times.scheduled_ts),
                (receipt.prefill_duration, times.scheduled_ts, times.first_token_ts),
                (receipt.decode_duration, times.first_token_ts, times.last_token_ts),
            )
            for duration, begin, end in phases:
                if begin > 0 and end >= begin:
                    set_seconds(duration, end - begin)
        return receipt

    def _choice_reasons(self, *, is_aborted: bool) -> list[engine_pb2.FinishReason.ValueType]:
        choices = max(self.request.sampling.get("n", 1), 1)
        missing = "abort" if is_aborted else ""
        return [
            _REASONS.get(self._reasons.get(choice, missing), engine_pb2.FINISH_REASON_UNSPECIFIED)
            for choice in range(choices)
        ]


def token_logprobs(token: int, position: Mapping[int, Logprob], alternatives: int) -> engine_pb2.TokenLogprobs:
    """One position. vLLM puts the chosen token among the alternatives when it is none of the best."""
    best = sorted(
        (item for item in position.items() if item[1].rank is not None and item[1].rank <= alternatives),
        key=lambda item: item[1].rank or 0,
    )
    chosen = position.get(token)
    return engine_pb2.TokenLogprobs(
        logprob=float("nan") if chosen is None else chosen.logprob,
        top=[engine_pb2.TopLogprob(token_id=one, logprob=value.logprob) for one, value in best],
    )


def prompt_logprobs(
    prompt: Sequence[int], positions: Iterable[Mapping[int, Logprob] | None], alternatives: int
) -> list[engine_pb2.TokenLogprobs]:
    """All positions of a prompt; the first token follows nothing, and has an empty entry."""
    return [
        engine_pb2.TokenLogprobs() if position is None else token_logprobs(token, position, alternatives)
        for token, position in zip(prompt, positions, strict=False)
    ]


def set_seconds(duration: Duration, seconds: float) -> None:
    """Writes seconds into a message."""
    duration.FromNanoseconds(max(round(seconds * 1e9), 0))
