"""The proxy of the fault tests: it has to read what NATS and its clients say to the byte."""

import asyncio

import pytest

from support.nats_proxy import Message, Mischief, read_frame


async def frames(data: bytes) -> list[Message | bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while not reader.at_eof():
        found.append(await read_frame(reader))
    return found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PUB a.b 5\r\nhe\r\no\r\n", Message((b"PUB", b"a.b"), b"", b"he\r\no")),
        (b"PUB a.b reply 0\r\n\r\n", Message((b"PUB", b"a.b", b"reply"), b"", b"")),
        (b"MSG a.b 9 2\r\nhi\r\n", Message((b"MSG", b"a.b", b"9"), b"", b"hi")),
        (b"MSG a.b 9 reply 2\r\nhi\r\n", Message((b"MSG", b"a.b", b"9", b"reply"), b"", b"hi")),
        (
            b"HPUB a.b 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
            Message((b"HPUB", b"a.b"), b"NATS/1.0\r\n\r\n", b"hi"),
        ),
        (
            b"HMSG a.b 9 reply 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
            Message((b"HMSG", b"a.b", b"9", b"reply"), b"NATS/1.0\r\n\r\n", b"hi"),
        ),
    ],
)
async def test_a_message_is_read_and_written_as_it_is(data: bytes, message: Message) -> None:
    assert await frames(b"PING\r\n" + data + b"+OK\r\n") == [b"PING\r\n", message, b"+OK\r\n"]
    assert message.subject == "a.b"
    assert message.encode() == data


async def test_a_message_that_breaks_off_is_none() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await frames(b"PUB a.b 5\r\nhe")


def test_mischief_is_the_same_for_the_same_seed_and_stops_when_told() -> None:
    one, same, other = (Mischief(seed, lose=0.2, repeat=0.2, delay=0.2) for seed in (1, 1, 2))
    first = [one.delays() for _ in range(1_000)]
    assert first == [same.delays() for _ in range(1_000)]
    assert first != [other.delays() for _ in range(1_000)]
    assert all(count > 100 for count in one.done.values())
    assert {"lost", "repeated", "delayed"} == set(one.done)
    one.is_on = False
    assert [0.0] == one.delays()
