"""What a rank says of its load, from what it was given and what its scheduler states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvist.events.v1 import events_pb2
from kvist_worker.engines.vllm.load import RankLoad, RequestProgress, SchedulerState


def times(scheduled: float, first: float, last: float) -> SimpleNamespace:
    return SimpleNamespace(queued_ts=1.0, scheduled_ts=scheduled, first_token_ts=first, last_token_ts=last)


def test_a_rank_without_requests_is_idle_whatever_the_last_step_said() -> None:
    load = RankLoad(1, 100)
    load.step(SchedulerState(3, 2, 0.5, 4))
    assert load.report() == events_pb2.LoadReport(
        rank=1, total_blocks=100, engine_steps_total=1, generated_tokens_total=4
    )


def test_preemptions_and_drafts_add_up() -> None:
    load = RankLoad(0, 100)
    load.step(SchedulerState(1, 0, 0.5, 3, preemptions=1, drafts=1, draft_tokens=4, accepted_draft_tokens=2))
    load.step(SchedulerState(1, 0, 0.5, 4, drafts=1, draft_tokens=4, accepted_draft_tokens=3))
    report = load.report()
    assert (report.preemptions_total, report.drafts_total) == (1, 2)
    # Acceptance and what a draft brings, as whoever looks at them divides.
    assert report.accepted_draft_tokens_total / report.draft_tokens_total == 5 / 8
    assert report.accepted_draft_tokens_total / report.drafts_total == 2.5


def test_what_was_handed_over_waits_until_a_step_takes_it() -> None:
    load = RankLoad(0, 100)
    requests = [RequestProgress(50, expected_cached_tokens=32), RequestProgress(10)]
    for request in requests:
        load.begin(request)
    report = load.report()
    assert (report.running_requests, report.waiting_requests, report.outstanding_prefill_tokens) == (0, 2, 28)
    load.step(SchedulerState(1, 0, 0.25, 1))
    requests[0].is_prefilled, requests[0].generated_tokens = True, 3
    report = load.report()
    assert (report.running_requests, report.waiting_requests, report.used_blocks) == (1, 1, 25)
    assert (report.outstanding_prefill_tokens, report.active_tokens) == (10, 53)
    for request in requests:
        load.end(request, cached_tokens=0, times=None)
    assert load.report().finished_requests_total == 2


def test_rates_come_from_what_requests_took() -> None:
    load = RankLoad(0, 100)
    for computed_seconds, step_seconds in ((1.0, 0.1), (3.0, 0.2)):
        request = RequestProgress(164, generated_tokens=11)
        load.begin(request)
        load.end(
            request,
            cached_tokens=64,
            times=times(2.0, 2.0 + computed_seconds, 2.0 + computed_seconds + 10 * step_seconds),
        )
    report = load.report()
    # 100 tokens a second, then a fifth of the way to 33.
    assert report.prefill_tokens_per_second == pytest.approx(100 + 0.2 * (100 / 3 - 100))
    assert report.decode_step_duration.ToMilliseconds() == 120


@pytest.mark.parametrize("told", [None, times(0.0, 0.0, 0.0), times(5.0, 4.0, 6.0)])
def test_times_that_were_not_told_say_nothing(told: SimpleNamespace | None) -> None:
    load = RankLoad(0, 100)
    request = RequestProgress(100, generated_tokens=1)
    load.begin(request)
    load.end(request, cached_tokens=0, times=told)
    # A second end of the same request is none.
    load.end(request, cached_tokens=0, times=told)
    report = load.report()
    assert (report.finished_requests_total, report.HasField("prefill_tokens_per_second")) == (1, False)
    assert not report.HasField("decode_step_duration")
