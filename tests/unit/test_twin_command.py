"""`kvist twin run`: policies side by side, in virtual time."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli.app import app

LINE = {"input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty times the same prompt, one a second."""
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"timestamp": 1000 * second, **LINE}) for second in range(20)))
    return file


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["twin", "run", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_each_policy_has_its_hit_rate(trace: Path) -> None:
    code, out, _ = run("--trace", str(trace), "--policies", "cost,round_robin", "--workers", "4", "--json")
    assert code == 0
    study = json.loads(out)
    # Two of three blocks are whole. One worker computes them once, or each of four does.
    assert {name: report["hit_rate"] for name, report in study["policies"].items()} == {
        "cost": pytest.approx(19 * 2 / 60),
        "round_robin": pytest.approx(16 * 2 / 60),
    }
    assert (study["settings"]["workers"], study["settings"]["routers"]) == (4, 1)


def test_people_get_a_table_and_the_parameters_of_the_engine(trace: Path) -> None:
    code, out, _ = run("--trace", str(trace), "--blocks", "100", "--prefill-rate", "5000", "--routers", "2")
    assert code == 0
    first, header, *rows = out.splitlines()
    assert "8 workers of 100 blocks of 512 tokens, 5000 prompt tokens/s in chunks of 2048" in first
    assert header.split()[:3] == ["policy", "hit", "rate"]
    assert [row.split()[0] for row in rows] == ["cost", "least_loaded"]


def test_made_traces_need_no_file() -> None:
    arguments = ("--plain", "--policies", "cost,most_overlap", "--json")
    code, out, _ = run("--trace", "shared-prefix", *arguments)
    reports = json.loads(out)["policies"]
    assert code == 0
    assert reports["cost"]["imbalance"] < 1.5 < reports["most_overlap"]["imbalance"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "/nowhere"), ("cannot be read", "shared-prefix")),
        (("--trace", "multi-turn", "--policies", "nosuch"), ("unknown policy", "least_loaded")),
        (("--trace", "multi-turn", "--incidents", "["), ("--incidents is not JSON",)),
        (("--trace", "multi-turn", "--incidents", '[{"what": "flood"}]'), ("flood", "crash")),
        (("--trace", __file__), ("line 1",)),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert all(word in err for word in words), err
