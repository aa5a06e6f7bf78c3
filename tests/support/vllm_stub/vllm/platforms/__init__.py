"""Stub."""


class _Platform:
    """Where the engine computes."""

    def is_cpu(self) -> bool:
        return True

    def device_count(self) -> int:
        return 0


current_platform = _Platform()
