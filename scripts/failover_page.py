"""Writes the table of docs/reference/failover.md from results/failover.json, or checks that it is current.

With `--check` nothing is written; the exit code is 1 when the page differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "failover.json"
PAGE = ROOT / "docs" / "reference" / "failover.md"
BEGIN = "<!-- results/failover.json -->\n"
END = "<!-- end -->\n"


def table(results: dict[str, Any]) -> str:
    """The results as the page shows them."""
    machine = results["machine"]
    memory_gib = machine["memory_bytes"] / 2**30
    lines = [
        (
            f"{results['streaming_requests']} streaming requests; {results['failed_requests']} did not finish, all of "
            f"them begun at a worker that was killed or frozen; {results['retried_requests']} were sent a second time. "
            f"Controllers' lease {results['controller_lease_seconds']:g} s, KV masters' 2 s; all of etcd, and NATS, "
            f"away for {results['outage_seconds']:g} s. {machine['cores']} cores, {memory_gib:.0f} GiB, "
            f"Linux {machine['kernel']}."
        ),
        "",
        "| fault | seconds | may take | share of the machine that others left | requests ended | did not finish |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['fault']} | {row['seconds']:.2f} | {row['limit_seconds']:g} | {row['share_of_machine']:.0%} | "
        f"{row['requests']} | {row['failed_requests']} |"
        for row in results["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    is_check = parser.parse_args().check
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    current = f"{before}{BEGIN}{table(json.loads(RESULTS.read_text()))}{END}{after}"
    if is_check:
        if current != page:
            print(f"{PAGE.relative_to(ROOT)}: not current; run `python scripts/failover_page.py`")
        return int(current != page)
    PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
