"""What all parts of a specification are made of."""

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

_DURATION_PATTERN = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>ms|s|m|h)")
_SECONDS_BY_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Section(BaseModel):
    """Base of all parts of a specification: camel case outside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)


def _seconds_from_text(value: object) -> object:
    """Turns `1m30s`-style single-unit durations such as `90s` into seconds."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a duration such as 30s, 500ms or 2m")  # noqa: TRY004 - pydantic collects ValueError alone.
    if isinstance(value, int | float):
        return float(value)
    match = _DURATION_PATTERN.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a duration such as 30s, 500ms or 2m")
    return float(match["number"]) * _SECONDS_BY_UNIT[match["unit"]]


DurationSeconds = Annotated[float, BeforeValidator(_seconds_from_text), Field(ge=0, le=86_400)]


def seconds_to_text(seconds: float) -> str:
    """A duration as people write it."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds * 1000:.0f}ms"
