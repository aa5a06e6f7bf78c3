"""Versions of vLLM, and what the adapter knows of them. Pure."""

import re
from dataclasses import dataclass
from typing import Self

from kvist.errors import error

# The adapter is tested against this release line.
TESTED = (0, 32)
# The newest change that the adapter cannot do without: prompts as token inputs of `vllm.inputs.engine`.
OLDEST = (0, 32)
_PATTERN = re.compile(
    r"v?(?P<major>\d+)\.(?P<minor>\d+)(?:\.(?P<patch>\d+))?"
    r"(?P<pre>(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev(?P<dev>\d+))?(?:\+(?P<local>[A-Za-z0-9.]+))?"
)


@dataclass(frozen=True, slots=True, order=True)
class VllmVersion:
    """A version.

    Attributes:
        major: First number.
        minor: Second number.
        patch: Third number; 0 when there is none.
        is_release: False for a development version or a release candidate, which sorts before its release.
    """

    major: int
    minor: int
    patch: int
    is_release: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a version as packages state it, such as `0.32.0` or `0.30.0.dev0+g1a2b3c`.

        Raises:
            ValueError: It is none.
        """
        found = _PATTERN.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no version of vLLM")
        return cls(
            int(found["major"]),
            int(found["minor"]),
            int(found["patch"] or 0),
            is_release=found["pre"] is None and found["dev"] is None,
        )

    @property
    def line(self) -> tuple[int, int]:
        """The release line, which decides about interfaces; a development version belongs to the line it leads to."""
        return (self.major, self.minor)

    @property
    def is_tested(self) -> bool:
        """Whether the adapter was tested against this line."""
        return self.line == TESTED


def check(text: str) -> VllmVersion:
    """The version, when the adapter can work with it.

    Raises:
        KvistError: `NOT_IMPLEMENTED`: it is too old, or none.
    """
    try:
        version = VllmVersion.parse(text)
    except ValueError as failure:
        raise error("NOT_IMPLEMENTED", str(failure)) from failure
    if version.line < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise error("NOT_IMPLEMENTED", f"vLLM {text} is older than {oldest}: install {oldest}, or attach it as it runs")
    return version
