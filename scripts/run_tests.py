"""Runs the default tier of tests and says what ran where.

Tiers: Rust, unit, contract, integration, faults (short form), chart, end to end. `--only NAME` runs one. The last lines
are a table and the tiers that were not run. Exit code 1 when any tier failed or ran nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a default run leaves out.
NOT_RUN = {
    "deep": "long property runs and faults: ./task test:deep",
    "long outages": "faults under sustained load for minutes: ./task test:chaos",
    "vllm": "a real vLLM engine: ./task test:vllm",
    "kubernetes": "the chart on a control plane",
    "bench": "measurements: ./task bench:mesh",
}


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: its name and the command that runs it."""

    name: str
    command: tuple[str, ...]
    time_limit_seconds: int


def pytest_tier(name: str, folder: str, time_limit_seconds: int) -> Tier:
    """A tier that pytest runs from one folder."""
    return Tier(name, (sys.executable, "-m", "pytest", "-q", f"tests/{folder}"), time_limit_seconds)


TIERS = (
    Tier("rust", ("cargo", "test", "--workspace", "--no-fail-fast"), 2400),
    pytest_tier("unit", "unit", 600),
    pytest_tier("contract", "contract", 600),
    pytest_tier("integration", "integration", 1200),
    pytest_tier("chaos", "chaos", 900),
    pytest_tier("helm", "helm", 600),
    pytest_tier("e2e", "e2e", 1800),
)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|ignored|errors?|error)\b")


@dataclass(slots=True)
class Outcome:
    """What a tier did."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    exit_code: int = 0

    def count(self, line: str) -> None:
        """Adds the numbers of a runner's closing line."""
        for number, word in COUNT.findall(line):
            if word == "passed":
                self.passed += int(number)
            elif word in {"skipped", "ignored"}:
                self.skipped += int(number)
            else:
                self.failed += int(number)


def run(tier: Tier) -> Outcome:
    """Runs one tier, showing its output as it comes."""
    outcome = Outcome()
    started = time.monotonic()
    print(f"\n=== {tier.name}: {' '.join(tier.command)}", flush=True)
    command = ("timeout", "--kill-after=10", str(tier.time_limit_seconds), *tier.command)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            noisy = tier.name == "rust" and (
                line.startswith(("test ", "running ", "     Running", "   Doc-tests")) or not line.strip()
            )
            if not noisy or "FAILED" in line:
                sys.stdout.write(line)
                sys.stdout.flush()
            is_closing = line.startswith("test result:") if tier.name == "rust" else re.search(r" in [\d.]+s", line)
            if is_closing:
                outcome.count(line)
    outcome.exit_code = process.returncode
    outcome.seconds = time.monotonic() - started
    return outcome


def main() -> int:
    """Runs the tiers, prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[tier.name for tier in TIERS], action="append")
    chosen = parser.parse_args().only
    outcomes = {tier.name: run(tier) for tier in TIERS if not chosen or tier.name in chosen}

    print(f"\n{'tier':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for name, outcome in outcomes.items():
        print(f"{name:<14}{outcome.passed:>8}{outcome.failed:>8}{outcome.skipped:>9}{outcome.seconds:>9.0f}")
    print("not run: " + "; ".join(f"{name} ({what})" for name, what in NOT_RUN.items()))
    bad = [name for name, outcome in outcomes.items() if outcome.exit_code or not outcome.passed]
    if bad:
        print(f"failed tiers: {', '.join(bad)}")
    total = [sum(getattr(outcome, field) for outcome in outcomes.values()) for field in ("passed", "failed", "skipped")]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
