"""Benchmarks are no package that is installed: their folder is found from the root of the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))
