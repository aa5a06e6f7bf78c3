"""A stub of vLLM's public classes, as far as the adapter uses them.

Names, parameters and defaults are vLLM 0.32's; `tests/vllm` holds them against the installed package. What it does is
scripted by the tests: it knows no model.
"""

__version__ = "0.32.0"
