"""Enforces the rules of the code layout that neither cargo nor import-linter can see, and that stated rules are tested.

Pure crates have no I/O and no clock; the arrows between crates are those of ARCHITECTURE.md; only one crate knows
Python; each numbered rule of the docs has a test, and each dependency a reason. Prints each violation and ends with 1
when there is one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What each crate may use of the workspace.
ALLOWED: dict[str, set[str]] = {
    "proto": set(),
    "errors": set(),
    "doors": {"errors"},
    "blocks": set(),
    "index": {"blocks"},
    "ledger": {"blocks"},
    "schedule": {"blocks", "index"},
    "text": set(),
    "dialect": {"errors"},
    "twin": {"schedule", "index", "ledger", "blocks"},
    "telemetry": set(),
    "link": {"proto", "errors", "doors"},
    "history": {"proto", "errors", "blocks", "ledger", "telemetry"},
    "events": {"history", "index", "ledger", "blocks", "proto", "errors", "doors", "telemetry"},
    "worker": {"proto", "errors", "doors", "blocks", "ledger", "history", "events", "twin", "link", "telemetry"},
    "attached": {"proto", "errors", "text", "telemetry", "worker"},
    "router": {"proto", "errors", "doors", "blocks", "index", "schedule", "text", "link", "events", "telemetry"},
    "upstream": {"proto", "errors", "blocks", "schedule", "router", "telemetry"},
    "remote": {"proto", "errors", "doors", "router", "telemetry"},
    "edge": {"proto", "errors", "doors", "dialect", "router", "remote", "upstream", "telemetry"},
}
PURE = ("blocks", "index", "ledger", "schedule", "text", "dialect", "twin")
IMPURE = re.compile(r"\b(std::(net|fs|process|env)\b|tokio::|SystemTime::now|Instant::now|thread::sleep|rand::rng\(\))")


def product_code(path: Path) -> str:
    """Returns the text of a Rust file up to its test module."""
    return path.read_text().split("#[cfg(test)]", 1)[0]


def rules_without_tests() -> list[str]:
    """Returns the numbered rules of how-kvist-knows.md that no test cites."""
    stated = re.findall(r"^\*\*(R\d+)\.\*\*", (ROOT / "docs/concepts/how-kvist-knows.md").read_text(), re.MULTILINE)
    tests = [path for path in ROOT.glob("crates/*/**/*.rs") if "tests" in path.stem or "tests" in path.parts]
    tests += ROOT.glob("tests/**/*.py")
    cited = {rule for path in tests for rule in re.findall(r"\bR\d+\b", path.read_text())}
    return [f"docs/concepts/how-kvist-knows.md: no test cites {rule}" for rule in stated if rule not in cited]


def dependencies_without_reasons() -> list[str]:
    """Returns the direct dependencies of both languages that the ADR about them does not name."""
    page = ROOT / "docs/adr/0003-dependencies.md"
    named = set(re.findall(r"[A-Za-z0-9_.-]+", page.read_text().lower()))
    used = set(tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["dependencies"])
    for path in (
        ROOT / "pyproject.toml",
        *ROOT.glob("python/*/pyproject.toml"),
        *ROOT.glob("services/*/pyproject.toml"),
    ):
        manifest = tomllib.loads(path.read_text())
        project = manifest.get("project", {})
        lists = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
        lists += manifest.get("dependency-groups", {}).values()
        used |= {re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0] for texts in lists for text in texts}
    unknown = sorted(name for name in used if name.lower() not in named and not name.startswith("kvist"))
    return [f"{page.relative_to(ROOT)}: no reason for {name}" for name in unknown]


def main() -> int:
    """Checks all crates and returns the exit code."""
    violations: list[str] = []
    for manifest_path in sorted(ROOT.glob("crates/*/Cargo.toml")):
        crate = manifest_path.parent.name
        used = {
            name.removeprefix("kvist-")
            for name in tomllib.loads(manifest_path.read_text()).get("dependencies", {})
            if name.startswith("kvist-")
        }
        if crate == "python":
            continue
        if crate not in ALLOWED:
            violations.append(f"crates/{crate}: not in the table of scripts/check_layout.py")
            continue
        violations += [f"crates/{crate}: may not use crates/{other}" for other in sorted(used - ALLOWED[crate])]
        names_python = any("pyo3" in line for line in manifest_path.read_text().splitlines())
        if names_python:
            violations.append(f"crates/{crate}: only crates/python may use pyo3")
    for crate in PURE:
        for path in sorted(ROOT.glob(f"crates/{crate}/src/**/*.rs")):
            if path.name == "tests.rs" or "tests" in path.parts:
                continue
            for number, line in enumerate(product_code(path).splitlines(), 1):
                if IMPURE.search(line) and not line.lstrip().startswith("//"):
                    violations.append(
                        f"{path.relative_to(ROOT)}:{number}: a pure crate has no I/O and no clock: {line.strip()}"
                    )
    violations += rules_without_tests()
    violations += dependencies_without_reasons()
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
