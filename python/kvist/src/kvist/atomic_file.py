"""Files that are replaced as a whole: a reader sees the old or the new content, never a part."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file; it is readable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
