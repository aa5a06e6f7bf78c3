"""`kvist twin run`: policies side by side, in virtual time."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

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


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """Twenty prompts that share nothing, one a second."""
    file = tmp_path / "strangers.jsonl"
    lines = [{"timestamp": 1000 * n, **LINE, "hash_ids": [3 * n, 3 * n + 1, 3 * n + 2]} for n in range(20)]
    file.write_text("\n".join(map(json.dumps, lines)))
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
    assert [row.split()[0] for row in rows] == ["cost", "least_loaded", "most_overlap"]


def test_made_traces_need_no_file() -> None:
    arguments = ("--plain", "--policies", "cost,most_overlap", "--json")
    code, out, _ = run("--trace", "shared-prefix", *arguments)
    reports = json.loads(out)["policies"]
    assert code == 0
    assert reports["cost"]["imbalance"] < 1.5 < reports["most_overlap"]["imbalance"]


def test_a_plot_has_one_series_for_each_policy(strangers: Path, tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    policies = ["cost", "cost:recomputeWeight=1", "least_loaded", "round_robin"]
    arguments = ("--trace", str(strangers), "--workers", "1", "--speed", "100", "--plot", str(file))
    code, out, _ = run(*arguments, "--policies", ",".join(policies), "--json")
    assert code == 0
    assert list(json.loads(out)["policies"]) == policies
    svg = "{http://www.w3.org/2000/svg}"
    picture = ET.parse(file).getroot()  # noqa: S314 - our own
    assert picture.tag == f"{svg}svg"
    series = picture.findall(f"{svg}g[@class='series']")
    assert [one.get("data-policy") for one in series] == policies
    assert len({one.get("stroke") for one in series}) == len(policies)
    for one in series:
        # A dot in each of the upper panels, and the backlog over time.
        assert len(one.findall(f"{svg}circle")) == 2
        line = one.find(f"{svg}polyline")
        assert line is not None
        points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        assert len(points) == 200
        assert points == sorted(points, key=lambda point: point[0])
        assert len({height for _, height in points}) > 1


def test_a_part_of_a_trace_and_another_speed(strangers: Path) -> None:
    def backlog_and_requests(*arguments: str) -> tuple[float, int]:
        code, out, _ = run(
            "--trace", str(strangers), "--workers", "1", "--policies", "cost", "--plain", "--json", *arguments
        )
        assert code == 0
        report = json.loads(out)["policies"]["cost"]
        return report["worst_backlog_seconds"], report["requests"]

    one = (1100 / 15_000, 20)
    assert backlog_and_requests() == pytest.approx(one, abs=1e-3)
    assert backlog_and_requests("--from", "5", "--until", "15")[1] == 10
    # All twenty at once.
    assert backlog_and_requests("--speed", "1e9")[0] == pytest.approx(20 * 1100 / 15_000, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "/nowhere"), ("cannot be read", "shared-prefix")),
        (("--trace", "multi-turn", "--policies", "nosuch"), ("unknown policy", "least_loaded")),
        (("--trace", "multi-turn", "--incidents", "["), ("--incidents is not JSON",)),
        (("--trace", "multi-turn", "--incidents", '[{"what": "flood"}]'), ("flood", "crash")),
        (("--trace", __file__), ("line 1",)),
        (("--trace", "multi-turn", "--policies", "cost:nosuch=1"), ("nosuch", "recomputeWeight")),
        (("--trace", "multi-turn", "--from", "1e9"), ("no request",)),
        (("--trace", "multi-turn", "--speed", "0"), ("speed",)),
        (("--trace", "multi-turn", "--policies", "round_robin", "--plot", "/nowhere/x.svg"), ("cannot be written",)),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert all(word in err for word in words), err
