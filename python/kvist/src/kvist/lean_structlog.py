"""structlog without rich.

Where structlog finds rich it loads it, with what that needs: 5 MiB of each process, for a form of tracebacks that shows
local variables and that no process of Kvist writes.
"""

import sys

__all__ = ["structlog"]

_has_rich = "rich" in sys.modules
if not _has_rich:
    # By Python's rules for this table, None is a module that cannot be imported.
    sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402

if not _has_rich:
    del sys.modules["rich"]
