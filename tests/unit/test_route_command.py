"""How `kvist route explain` prints a decision."""

import pytest
from google.protobuf.duration_pb2 import Duration

from kvist.cli.route import print_decision
from kvist.events.v1.events_pb2 import Candidate, CostTerms, DecisionRecord, Receipt, SourceState


def record(**fields: object) -> DecisionRecord:
    terms = CostTerms(queue_seconds=0.02, prefill_seconds=0.1, displacement_seconds=0.2, decode_seconds=0.005)
    chosen = Candidate(worker_uid="a", source_state=SourceState.SOURCE_STATE_EXACT, cost=0.325, cost_terms=terms)
    left_out = Candidate(worker_uid="b", rank=1, filtered_reason="draining")
    return DecisionRecord(model="m", policy="cost, max", candidates=[chosen, left_out], chosen_candidate=0, **fields)


def test_terms_are_in_milliseconds_and_those_left_out_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_decision(record())
    chosen, left_out = (
        line.split() for line in capsys.readouterr().out.splitlines() if " a/0 " in line or " b/1 " in line
    )
    assert chosen[-4:] == ["20.0", "100.0", "205.0", "325.0"]
    assert left_out[-1] == "draining"
    assert "0.0" not in left_out


def test_the_expected_first_token_stands_beside_the_actual(capsys: pytest.CaptureFixture[str]) -> None:
    receipt = Receipt(prompt_tokens=50, cached_tokens=32)
    print_decision(record(outcome="stop", receipt=receipt, time_to_first_token=Duration(nanos=140_000_000)))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "outcome stop: 32 of 50 tokens cached; first token after 140 ms, expected after 120 ms"


def test_the_wait_and_the_expected_cache_are_stated_where_there_were_any(capsys: pytest.CaptureFixture[str]) -> None:
    receipt = Receipt(prompt_tokens=50, cached_tokens=32)
    print_decision(
        record(outcome="stop", receipt=receipt, predicted_cached_tokens=48, queue_duration=Duration(nanos=7_000_000))
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "outcome stop: 32 of 50 tokens cached, expected 48; had waited 7 ms to be let in"


def test_other_scorers_have_a_score(capsys: pytest.CaptureFixture[str]) -> None:
    decision = record()
    decision.candidates[0].ClearField("cost_terms")
    print_decision(decision)
    assert "0.325 (score)" in capsys.readouterr().out
