"""A benchmark's client takes complete answers alone."""

import json

import pytest

from perf.sse import Answer, WrongAnswerError, parse_answer, unchunk

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(content: str | None = None, finish_reason: str | None = None) -> dict:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def response(*events: dict | str, head: bytes = HEAD) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    parts = [f"data: {text}\n\n".encode() for text in texts]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


WHOLE = (chunk(""), chunk("a"), chunk("b"), chunk(finish_reason="length"), {"choices": [], "usage": USAGE}, "[DONE]")


def test_a_whole_answer_is_read() -> None:
    expected = Answer(events=2, finish_reason="length", prompt_tokens=9, completion_tokens=2, cached_tokens=4)
    assert expected == parse_answer(response(*WHOLE))


def test_an_event_may_be_spread_over_chunks() -> None:
    whole = response(*WHOLE)
    content = unchunk(whole.removeprefix(HEAD))
    spread = HEAD + b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    assert parse_answer(whole) == parse_answer(spread)


@pytest.mark.parametrize(
    "wrong",
    [
        response(*WHOLE, head=b"HTTP/1.1 503 Service Unavailable\r\n\r\n"),
        response(*WHOLE[:-1]),
        response(*WHOLE[:3], *WHOLE[4:]),
        response(*WHOLE[:4], "[DONE]"),
        response(*WHOLE, chunk("c")),
        response(*WHOLE[:2], {"error": {"code": "ENGINE_LOST"}}),
        response(*WHOLE)[:-5],
        b"",
    ],
    ids=["status", "no end mark", "no finish reason", "no usage", "more after the end", "error", "cut off", "empty"],
)
def test_anything_else_is_wrong(wrong: bytes) -> None:
    with pytest.raises(WrongAnswerError):
        parse_answer(wrong)
