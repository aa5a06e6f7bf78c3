"""The name tables of the two languages."""

import re
from pathlib import Path

from kvist import names

ROOT = Path(__file__).parents[2]
RUST = ROOT / "crates" / "telemetry" / "src" / "names.rs"


def of_python() -> dict[str, str]:
    return {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}


def of_rust() -> dict[str, str]:
    return dict(re.findall(r'^\s+([A-Z_]+) = "([^"]+)";', RUST.read_text(), re.MULTILINE))


def test_what_both_languages_emit_has_one_name() -> None:
    python, rust = of_python(), of_rust()
    assert rust
    for name in python.keys() & rust.keys():
        assert python[name] == rust[name], name
    by_value = {value: name for name, value in rust.items()}
    for name, value in python.items():
        assert by_value.get(value, name) == name, value


def test_names_are_unique_and_well_formed() -> None:
    metrics = [value for value in of_python().values() if value.startswith("kvist_")]
    assert len(metrics) == len(set(metrics))
    for metric in metrics:
        assert re.fullmatch(r"kvist_[a-z]+(_[a-z]+)*", metric), metric


def test_no_module_spells_a_metric_by_itself() -> None:
    packages = (Path(names.__file__).parent, *ROOT.glob("services/*/src"))
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        if path.name == "names.py" or path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        spelled = re.findall(r'(?:Counter|Gauge|Histogram)(?:MetricFamily)?\(\s*"(kvist_\w+)"', path.read_text())
        assert not spelled, f"{path}: {spelled}"


def test_no_crate_spells_a_metric_span_or_attribute_by_itself() -> None:
    # Names of one word are labels, which are fields of structures.
    values = {value for value in of_rust().values() if re.search(r"[._]", value)}
    for path in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        if path == RUST:
            continue
        text = path.read_text()
        spelled = {value for value in values if f'"{value}"' in text}
        fields = re.findall(r"\b(?:kvist|gen_ai|http|rpc|url)\.[a-z_.]+ = ", text)
        assert not spelled, f"{path}: {spelled}"
        assert not fields, f"{path}: {fields}"
