"""Stub."""

from __future__ import annotations

from typing import Any


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt_token_ids}
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made
