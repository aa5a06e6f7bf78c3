"""What every engine asks of a prompt of token ids."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, error, invalid_field


@contextmanager
def before_start() -> Iterator[None]:
    """Marks what is refused within as not started, so that another worker may be asked.

    Raises:
        KvistError: What was raised within, marked.
    """
    try:
        yield
    except KvistError as failure:
        failure.not_started = True
        raise


def checked_prompt(
    request: engine_pb2.EngineRequest, *, vocabulary_size: int, context_tokens: int
) -> tuple[tuple[int, ...], int]:
    """The token ids of a request's prompt, and for how many more tokens the context has room.

    Raises:
        KvistError: There are none, one is not of the vocabulary, or the context cannot hold one token more.
    """
    prompt = tuple(request.tokens.ids)
    if not prompt:
        raise invalid_field("tokens", "must not be empty")
    if max(prompt) >= vocabulary_size:
        raise invalid_field("tokens", f"token ids are below {vocabulary_size}")
    room = context_tokens - len(prompt)
    if room < 1:
        raise error(
            "CONTEXT_LENGTH_EXCEEDED",
            f"the prompt has {len(prompt)} tokens, and the context of {context_tokens} must hold one more",
        )
    return prompt, room
