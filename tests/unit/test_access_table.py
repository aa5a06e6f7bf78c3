"""The page about security states the table of who may call what, and nothing else."""

import json
import re
from pathlib import Path

from kvist import _core

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "security.md"
ROW = re.compile(r"^\| (\w+Service) \| ([\w, ]+) \| ([\w, ]+) \|$", re.MULTILINE)


def test_the_page_has_each_method_with_its_roles() -> None:
    table = {
        (row["service"].rpartition(".")[2], row["method"]): set(row["roles"])
        for row in json.loads(_core.access_table())
    }
    stated = {
        (service, method): set(roles.split(", "))
        for service, methods, roles in ROW.findall(PAGE.read_text())
        for method in methods.split(", ")
    }
    assert stated == table
