"""Load reports."""

from __future__ import annotations

import pytest

from kvist_worker.engines.llamacpp.load import LoadAccount, RequestProgress


def test_a_report_counts_what_runs_and_what_waits() -> None:
    account = LoadAccount(block_size_tokens=32, total_blocks=512, finished_requests=3, generated_tokens=9)
    report = account.report(
        [
            RequestProgress(100, computed_tokens=64, is_running=True),
            RequestProgress(10, computed_tokens=10, generated_tokens=23, is_running=True),
            RequestProgress(50, computed_tokens=32),
        ]
    )
    assert (report.running_requests, report.waiting_requests) == (2, 1)
    assert report.outstanding_prefill_tokens == 36 + 18
    assert (report.active_tokens, report.used_blocks, report.total_blocks) == (64 + 33, 2 + 2, 512)
    assert (report.finished_requests_total, report.generated_tokens_total) == (3, 9)
    assert not report.HasField("prefill_tokens_per_second")
    assert not report.HasField("decode_step_duration")


def test_estimates_follow_the_engine() -> None:
    account = LoadAccount(block_size_tokens=32, total_blocks=1)
    account.observe(prefill_tokens=100, prefill_seconds=1, decode_steps=10, decode_seconds=0.2)
    assert account.report([]).prefill_tokens_per_second == 100
    assert account.report([]).decode_step_duration.ToMilliseconds() == 20
    account.observe(prefill_tokens=200, prefill_seconds=1, decode_steps=0, decode_seconds=0)
    assert account.report([]).prefill_tokens_per_second == pytest.approx(120)
    # One token's time is mostly that of the call.
    account.observe(prefill_tokens=1, prefill_seconds=1, decode_steps=0, decode_seconds=0)
    assert account.report([]).prefill_tokens_per_second == pytest.approx(120)
