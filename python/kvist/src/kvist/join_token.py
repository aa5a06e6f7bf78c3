"""The secret that agents show when they register, in a mesh without client certificates.

It is read from its file for each session, so that it can be replaced without a restart: the controller's file may hold
several, one a line, of which the agents show one.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from kvist.errors import KvistError, error

METADATA_KEY = "kvist-join-token"
# 16 bytes from a random source, in hexadecimal.
LEAST_CHARACTERS = 32


def metadata(file: Path | None) -> tuple[tuple[str, str], ...]:
    """What an agent sends along; nothing without a file.

    Raises:
        KvistError: The file cannot be used.
    """
    return () if file is None else ((METADATA_KEY, _tokens(file)[0]),)


def check(file: Path | None, sent: Iterable[tuple[str, str | bytes]]) -> None:
    """Lets a caller pass whose metadata hold a right token. Comparing takes the same time for each wrong one.

    Raises:
        KvistError: `PERMISSION_DENIED`: the token is missing or wrong; or the file cannot be used.
    """
    if file is None:
        return
    shown = [value for key, value in sent if key == METADATA_KEY and isinstance(value, str)]
    wanted = _tokens(file)
    # All are compared, so that the time does not tell which one was near.
    matches = [hmac.compare_digest(one.encode(), token.encode()) for one in shown[:1] for token in wanted]
    if not any(matches):
        raise _refused(
            "the join token is wrong" if shown else "a join token is asked for: set join_token_file of the agent"
        )


def _tokens(file: Path) -> list[str]:
    try:
        tokens = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as failure:
        raise _refused("join_token_file cannot be read") from failure
    if not tokens or any(len(token) < LEAST_CHARACTERS or not token.isascii() for token in tokens):
        raise _refused(f"join_token_file must hold at least {LEAST_CHARACTERS} ASCII characters")
    return tokens


def _refused(message: str) -> KvistError:
    return error("PERMISSION_DENIED", message, metadata={"method": "kvist.controller.v1.ControllerService/Register"})
