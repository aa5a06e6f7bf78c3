"""What a streamed answer must be: status 200, chunks, events, a finish reason, usage, the end mark."""

import json
from dataclasses import dataclass

HEAD_END = b"\r\n\r\n"
# The last chunk of a chunked body. No event can hold it: JSON escapes line ends.
BODY_END = b"\r\n0\r\n\r\n"
_PREFIX = "data: "
_END_MARK = "[DONE]"


class WrongAnswerError(Exception):
    """An answer is not what was asked for; the benchmark ends, since its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer held.

    Attributes:
        events: Events that carried text. Fewer than tokens when tokens shared one.
        finish_reason: Why it ended.
        prompt_tokens: Tokens of the prompt, as the usage says.
        completion_tokens: Tokens of the answer, as the usage says.
        cached_tokens: Tokens of the prompt that the engine had in its cache.
    """

    events: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def parse_answer(response: bytes) -> Answer:
    """Reads a whole response of a stream of chat completion chunks.

    Raises:
        WrongAnswerError: It is an error, has no end, or lacks a part.
    """
    head, separator, body = response.partition(HEAD_END)
    if not separator or not head.startswith(b"HTTP/1.1 200 "):
        raise WrongAnswerError(response[:500].decode(errors="replace"))
    events = 0
    finish_reason = ""
    usage: dict[str, object] | None = None
    has_ended = False
    for event in _events(unchunk(body)):
        if has_ended:
            raise WrongAnswerError(f"an event after the end mark: {event}")
        if event == _END_MARK:
            has_ended = True
            continue
        chunk = json.loads(event)
        if "error" in chunk:
            raise WrongAnswerError(event)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            events += bool(choice["delta"].get("content"))
            finish_reason = choice["finish_reason"] or finish_reason
    if not has_ended or not finish_reason or usage is None:
        raise WrongAnswerError("the answer has no end mark, no finish reason or no usage")
    details = usage.get("prompt_tokens_details")
    return Answer(
        events=events,
        finish_reason=finish_reason,
        prompt_tokens=int(str(usage["prompt_tokens"])),
        completion_tokens=int(str(usage["completion_tokens"])),
        cached_tokens=int(details.get("cached_tokens", 0)) if isinstance(details, dict) else 0,
    )


def unchunk(body: bytes) -> bytes:
    """The content of a chunked body.

    Raises:
        WrongAnswerError: It is cut off.
    """
    content = bytearray()
    position = 0
    while True:
        line_end = body.find(b"\r\n", position)
        if line_end < 0:
            raise WrongAnswerError("the body is cut off")
        size = int(body[position:line_end], 16)
        if size == 0:
            return bytes(content)
        start = line_end + 2
        content += body[start : start + size]
        position = start + size + 2


def _events(content: bytes) -> list[str]:
    lines = content.decode().split("\n\n")
    return [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
