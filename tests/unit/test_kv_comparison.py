"""What `kvist kv` makes of three parties' views of one source."""

import pytest

from kvist.cli.kv import Row, View

KEY = ("w-0", 0)


def view(*, incarnation: int = 5, next_sequence: int = 3, blocks: int = 2, digest: str = "ab") -> View:
    return View(incarnation, next_sequence, "EXACT", blocks, digest)


@pytest.mark.parametrize(
    ("ledger", "router", "kvmaster", "verdict"),
    [
        (view(), view(), view(), "EQUAL"),
        (view(), view(), view(digest="cd"), "DIFFERENT"),
        (view(), view(blocks=9), view(next_sequence=2), "DIFFERENT"),
        (view(), view(), view(next_sequence=2, digest="cd"), "MOVING"),
        (view(), view(incarnation=4, digest="cd"), view(), "MOVING"),
        (view(), None, view(), "UNKNOWN TO ROUTER"),
        (view(), view(), None, "UNKNOWN TO KV MASTER"),
        (None, view(), view(), "NO LEDGER ANSWERS"),
    ],
)
def test_verdicts(ledger: View | None, router: View | None, kvmaster: View | None, verdict: str) -> None:
    row = Row(KEY, ledger, router, kvmaster)
    assert row.verdict == verdict
    assert row.line().startswith(f"w-0/0 {verdict}")
    assert row.document()["verdict"] == verdict
