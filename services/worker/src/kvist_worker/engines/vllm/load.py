"""What a vLLM worker says of the load of each rank. Pure.

The scheduler states what runs, what waits and how full its cache is after each step, and says nothing while it is idle;
what a rank was given and has not ended is known here. Where the two differ, a rank without requests is idle.
"""

from dataclasses import dataclass

from kvist.events.v1 import events_pb2
from kvist_worker.engines.vllm.output import Times, set_seconds

# A new observation counts this much.
_WEIGHT = 0.2
# Rates of shorter prefills say more about fixed costs than about tokens.
_LEAST_PREFILL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A rank after a step.

    Attributes:
        running_requests: Requests in the batch.
        waiting_requests: Requests that wait, whatever for.
        cache_usage_ratio: Part of the blocks that running requests use.
        generated_tokens: Tokens drawn in this step.
        external_tokens: Prompt tokens whose KV came from another engine in this step.
        preemptions: Requests that had to give up their slot in this step.
        drafts: Drafts of speculative decoding in this step.
        draft_tokens: Tokens that they proposed.
        accepted_draft_tokens: Those of them that were right.
    """

    running_requests: int
    waiting_requests: int
    cache_usage_ratio: float
    generated_tokens: int
    external_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(slots=True)
class RequestProgress:
    """How far a request of a rank is.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        expected_cached_tokens: Those that the router expects in the cache.
        is_prefilled: Whether a token has come out.
        generated_tokens: Tokens drawn.
    """

    prompt_tokens: int
    expected_cached_tokens: int = 0
    is_prefilled: bool = False
    generated_tokens: int = 0


class RankLoad:
    """Totals and estimates of one rank of one incarnation."""

    def __init__(self, rank: int, total_blocks: int) -> None:
        self._rank = rank
        self._total_blocks = total_blocks
        self._progress: dict[int, RequestProgress] = {}
        self._scheduler: SchedulerState | None = None
        self._finished_requests = 0
        self._generated_tokens = 0
        self._external_tokens = 0
        self._engine_steps = 0
        self._preemptions = 0
        self._drafts = 0
        self._draft_tokens = 0
        self._accepted_draft_tokens = 0
        self._prefill_tokens_per_second: float | None = None
        self._decode_step_seconds: float | None = None

    def begin(self, progress: RequestProgress) -> None:
        """A request was given to the rank."""
        self._progress[id(progress)] = progress

    def end(self, progress: RequestProgress, *, cached_tokens: int, times: Times | None) -> None:
        """A request has ended; what it took goes into the estimates."""
        if self._progress.pop(id(progress), None) is None:
            return
        self._finished_requests += 1
        if times is None or not 0 < times.scheduled_ts <= times.first_token_ts:
            return
        computed = progress.prompt_tokens - cached_tokens
        seconds = times.first_token_ts - times.scheduled_ts
        if computed >= _LEAST_PREFILL_TOKENS and seconds > 0:
            self._prefill_tokens_per_second = _blend(self._prefill_tokens_per_second, computed / seconds)
        steps = progress.generated_tokens - 1
        seconds = times.last_token_ts - times.first_token_ts
        if steps > 0 and seconds > 0:
            self._decode_step_seconds = _blend(self._decode_step_seconds, seconds / steps)

    def step(self, state: SchedulerState) -> None:
        """The scheduler has made a step."""
        self._scheduler = state
        self._engine_steps += 1
        self._generated_tokens += state.generated_tokens
        self._external_tokens += state.external_tokens
        self._preemptions += state.preemptions
        self._drafts += state.drafts
        self._draft_tokens += state.draft_tokens
        self._accepted_draft_tokens += state.accepted_draft_tokens

    def report(self) -> events_pb2.LoadReport:
        """The report; the worker numbers it."""
        progress = self._progress.values()
        report = events_pb2.LoadReport(
            rank=self._rank,
            total_blocks=self._total_blocks,
            finished_requests_total=self._finished_requests,
            engine_steps_total=self._engine_steps,
            generated_tokens_total=self._generated_tokens,
            external_tokens_total=self._external_tokens,
            preemptions_total=self._preemptions,
            drafts_total=self._drafts,
            draft_tokens_total=self._draft_tokens,
            accepted_draft_tokens_total=self._accepted_draft_tokens,
            outstanding_prefill_tokens=sum(
                one.prompt_tokens - one.expected_cached_tokens for one in progress if not one.is_prefilled
            ),
            active_tokens=sum(one.prompt_tokens + one.generated_tokens for one in progress if one.is_prefilled),
        )
        if self._progress:
            known = self._scheduler or SchedulerState(0, 0, 0.0, 0)
            report.running_requests = min(known.running_requests, len(self._progress))
            # What was handed over and is in no step yet waits too.
            report.waiting_requests = len(self._progress) - report.running_requests
            report.used_blocks = round(known.cache_usage_ratio * self._total_blocks)
        if self._prefill_tokens_per_second is not None:
            report.prefill_tokens_per_second = self._prefill_tokens_per_second
        if self._decode_step_seconds is not None:
            set_seconds(report.decode_step_duration, self._decode_step_seconds)
        return report


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
