"""What a llama.cpp worker says of its load. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from kvist.events.v1 import events_pb2

# A new observation counts this much.
_WEIGHT = 0.2
# Rates of shorter prefills say more about fixed costs than about tokens.
_LEAST_PREFILL_TOKENS = 16


@dataclass(slots=True)
class RequestProgress:
    """How far a request is.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        computed_tokens: Prompt tokens that were cached or are computed.
        generated_tokens: Tokens drawn.
        is_running: Whether it has a slot.
    """

    prompt_tokens: int
    computed_tokens: int = 0
    generated_tokens: int = 0
    is_running: bool = False


@dataclass(slots=True)
class LoadAccount:
    """Totals and estimates of one incarnation.

    Attributes:
        block_size_tokens: Tokens a block.
        total_blocks: Blocks there are.
        finished_requests: Requests that ended.
        generated_tokens: Tokens drawn.
        engine_steps: Chunks of the engine, each at most one step.
        prefill_tokens_per_second: Estimate; none before the first prefill.
        decode_step_seconds: Estimate; none before the first decode.
    """

    block_size_tokens: int
    total_blocks: int
    finished_requests: int = 0
    generated_tokens: int = 0
    engine_steps: int = 0
    prefill_tokens_per_second: float | None = field(default=None)
    decode_step_seconds: float | None = field(default=None)

    def observe(self, *, prefill_tokens: int, prefill_seconds: float, decode_steps: int, decode_seconds: float) -> None:
        """Takes the times of one request into the estimates."""
        if prefill_tokens >= _LEAST_PREFILL_TOKENS and prefill_seconds > 0:
            rate = prefill_tokens / prefill_seconds
            self.prefill_tokens_per_second = _blend(self.prefill_tokens_per_second, rate)
        if decode_steps > 0 and decode_seconds > 0:
            self.decode_step_seconds = _blend(self.decode_step_seconds, decode_seconds / decode_steps)

    def report(self, requests: Iterable[RequestProgress]) -> events_pb2.LoadReport:
        """The report; the worker numbers it."""
        report = events_pb2.LoadReport(
            total_blocks=self.total_blocks,
            finished_requests_total=self.finished_requests,
            engine_steps_total=self.engine_steps,
            generated_tokens_total=self.generated_tokens,
        )
        for request in requests:
            report.outstanding_prefill_tokens += max(request.prompt_tokens - request.computed_tokens, 0)
            if request.is_running:
                held = request.computed_tokens + request.generated_tokens
                report.running_requests += 1
                report.active_tokens += held
                report.used_blocks += -(-held // self.block_size_tokens)
            else:
                report.waiting_requests += 1
        if self.prefill_tokens_per_second is not None:
            report.prefill_tokens_per_second = self.prefill_tokens_per_second
        if self.decode_step_seconds is not None:
            report.decode_step_duration.CopyFrom(duration(self.decode_step_seconds))
        return report


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    value = Duration()
    value.FromNanoseconds(max(round(seconds * 1e9), 0))
    return value


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
