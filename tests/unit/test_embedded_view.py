"""What people read about an embedded cluster."""

from kvist.embedded.observe import Observation
from kvist.embedded.view import unaware_lines
from kvist.router.v1.router_pb2 import KvAwareness, ModelSummary


def test_a_model_whose_caches_are_known_or_not_yet_judged_is_no_news() -> None:
    known = ModelSummary(name="m", kv_awareness=KvAwareness(aware=True))
    assert [] == unaware_lines(Observation(models=(known, ModelSummary(name="new"))))


def test_a_line_says_what_is_too_low() -> None:
    few = KvAwareness(reason="few_exact_sources", sources=8, exact_sources=3)
    lost = KvAwareness(reason="few_hits_delivered", predicted_cached_tokens=9000, delivered_cached_tokens=100)
    lines = unaware_lines(
        Observation(models=(ModelSummary(name="a", kv_awareness=few), ModelSummary(name="b", kv_awareness=lost)))
    )
    assert lines[0].startswith("a ")
    assert "3 of 8" in lines[0]
    assert lines[1].startswith("b ")
    assert "100 of 9000" in lines[1]
