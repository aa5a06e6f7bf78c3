"""The stub that the default tier tests the adapter with is what the installed vLLM is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvist import engines

pytestmark = pytest.mark.timeout(300)
COMPARE = Path(__file__).with_name("compare_signatures.py")


def test_the_stub_has_the_signatures_of_vllm(tmp_path: Path) -> None:
    environment = engines.find("vllm")
    assert environment is not None
    described, differences = tmp_path / "stub.json", tmp_path / "differences"
    with described.open("w") as output:
        subprocess.run([sys.executable, COMPARE, "--stub"], check=True, timeout=60, stdout=output)
    assert "AsyncLLM" in described.read_text()
    # Outside of this checkout, so that the stub is not imported instead.
    subprocess.run([environment.python, COMPARE, described, differences], check=True, timeout=240, cwd=tmp_path)
    assert differences.read_text() == ""
