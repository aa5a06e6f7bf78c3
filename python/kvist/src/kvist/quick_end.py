"""The end of a process without the interpreter's last collection of garbage.

That collection walks every object of every module, for the tenths of a second that the rest of an idle process's end
does not take; the kernel takes the memory back either way.
"""

import atexit
import gc


def skip_last_collection() -> None:
    """Makes the end of this process quick. May be called again."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
