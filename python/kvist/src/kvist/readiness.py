"""Why a process is not ready."""

from collections.abc import Mapping


class Readiness:
    """Why a process is not ready; ready when nothing is left.

    Each condition has a name and a reason, so that two parts of a process cannot clear each other's.
    """

    def __init__(self, **reasons: str) -> None:
        self._reasons = dict(reasons)

    def block(self, condition: str, reason: str) -> None:
        """States why the process is not ready."""
        self._reasons[condition] = reason

    def clear(self, condition: str) -> None:
        """Withdraws a condition."""
        self._reasons.pop(condition, None)

    @property
    def is_ready(self) -> bool:
        """Whether no condition is left."""
        return not self._reasons

    @property
    def reasons(self) -> Mapping[str, str]:
        """The conditions that are left."""
        return dict(self._reasons)
