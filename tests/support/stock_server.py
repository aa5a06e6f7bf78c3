"""A small stand-in for vLLM's own HTTP server, as a process that tests may kill, freeze and script.

`python -m support.stock_server FOLDER [--no-generate …]` writes a tokenizer and `ready.json` to the folder and serves.
It has a prefix cache and publishes its KV events as vLLM does; its answers repeat the end of the prompt. What it was
asked, and what it shall do wrong, is at `/script`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist import _core
from kvist.atomic_file import write_atomically
from support.fake_vllm import FakeVllm

MODEL = "stock"
ADAPTER = "poet"
CONTEXT_TOKENS = 4_096
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer in which each byte is a token."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    added = [
        {"id": 256 + number, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for number, text in enumerate(SPECIAL)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"chat_template": TEMPLATE, "eos_token": SPECIAL[2], "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))


@dataclass(slots=True)
class Rank:
    """A rank's cache, without a limit: blocks by the chain of tokens up to their end."""

    number: int
    block_size: int
    sockets: FakeVllm = field(default_factory=FakeVllm)
    held: set[tuple[int, ...]] = field(default_factory=set)
    running: int = 0

    async def take(self, prompt: list[int], *, adapter: str, salt: str) -> int:
        """Caches a prompt and returns how many of its tokens were cached before."""
        root = (hash((adapter, salt)),)
        ends = range(self.block_size, len(prompt) + 1, self.block_size)
        chains = [root + tuple(prompt[:end]) for end in ends]
        cached = next((at for at, chain in enumerate(chains) if chain not in self.held), len(chains))
        if cached < len(chains):
            self.held.update(chains[cached:])
            stored = {
                "type": "BlockStored",
                "block_hashes": [name(chain) for chain in chains[cached:]],
                "parent_block_hash": name(chains[cached - 1]) if cached else None,
                "token_ids": prompt[cached * self.block_size : len(chains) * self.block_size],
                "block_size": self.block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": adapter or None,
                "extra_keys": [
                    ([adapter] if adapter else []) + ([salt] if salt and at == 0 else []) or None
                    for at in range(cached, len(chains))
                ],
            }
            await self.sockets.publish(packed([time.time(), [stored], self.number]))
        return min(cached, (len(prompt) - 1) // self.block_size) * self.block_size

    async def reset(self) -> None:
        """Empties the cache, and says so at once: there is no next step to wait for."""
        self.held.clear()
        await self.sockets.publish(packed([time.time(), [{"type": "AllBlocksCleared"}], self.number]))


def name(chain: tuple[int, ...]) -> int:
    """The engine's name of a block."""
    return hash(chain) & (2**64 - 1)


def packed(value: Any) -> bytes:
    """MessagePack, as far as events need it."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return b"\xcf" + value.to_bytes(8)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xda" + len(value.encode()).to_bytes(2) + value.encode()
        case list():
            return b"\xdd" + len(value).to_bytes(4) + b"".join(map(packed, value))
        case dict():
            return b"\xdf" + len(value).to_bytes(4) + b"".join(packed(k) + packed(v) for k, v in value.items())
    raise TypeError(value)


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a page, and the connection that it came by."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def json(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.body)
        return read


class RefusedError(Exception):
    """An answer of another status than 200."""

    def __init__(self, status: int, message: str, *headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class StockServer:
    """The server."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.ranks = [Rank(number, flags.block_size) for number in range(flags.ranks)]
        write_tokenizer(flags.folder)
        self.text = _core.ModelText((flags.folder / "tokenizer.json").read_bytes(), eos_token=SPECIAL[2])
        self.script: dict[str, Any] = {"mode": ""}
        self.seen: list[dict[str, Any]] = []
        self.aborted = 0

    async def serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for rank in self.ranks:
                await stack.enter_async_context(rank.sockets.running())
            server = await asyncio.start_server(self._connected, "127.0.0.1", self.flags.port, limit=1 << 24)
            port = server.sockets[0].getsockname()[1]
            write_atomically(self.flags.folder / "ready.json", json.dumps({"port": port}))
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split()
                headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                try:
                    path = target.partition("?")[0]
                    answer = await self._answer(Call(method, path, headers, body, reader, writer))
                except RefusedError as refused:
                    error = {"error": {"message": str(refused), "code": refused.status}}
                    _whole(writer, refused.status, json.dumps(error).encode(), *refused.headers)
                else:
                    if answer is not None:
                        _whole(writer, 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
                await writer.drain()
        writer.close()

    async def _answer(self, call: Call) -> dict[str, Any] | bytes | None:
        is_guarded = call.path.startswith(("/v1", "/inference"))
        if is_guarded and self.flags.api_key and call.headers.get("authorization") != f"Bearer {self.flags.api_key}":
            raise RefusedError(401, "Unauthorized")
        match call.method, call.path:
            case "GET", "/health":
                if self.script["mode"] == "dead":
                    raise RefusedError(503, "")
                return b""
            case "GET", "/version":
                return {"version": "0.32.0"}
            case "GET", "/v1/models":
                return {"data": [
                    {"id": MODEL, "root": "/models/stock", "parent": None, "max_model_len": CONTEXT_TOKENS},
                    {"id": ADAPTER, "root": "/adapters/poet", "parent": MODEL},
                ]}  # fmt: skip
            case "GET", "/metrics":
                return self._metrics()
            case "GET", "/kv_event_sources":
                return self._sources()
            case "GET", "/script":
                return {"seen": self.seen, "aborted": self.aborted, "running": sum(rank.running for rank in self.ranks)}
            case "GET", "/is_sleeping" if self.flags.dev_mode:
                return {"is_sleeping": False}
            case "POST", "/reset_prefix_cache" if self.flags.dev_mode:
                for rank in self.ranks:
                    await rank.reset()
                return b""
            case "POST", "/script":
                self.script = {"mode": "", **call.json()}
                return {}
            case "POST", "/tokenize":
                ids = list(self.text.encode(call.json()["prompt"]))
                return {"tokens": ids[1:] if self.flags.other_tokenizer else ids}
            case "POST", "/inference/v1/generate" if not self.flags.no_generate:
                asked = call.json()
                words, prompt = asked["sampling_params"], asked["token_ids"]
            case "POST", "/v1/completions":
                asked = call.json()
                words, prompt = asked, asked["prompt"]
            case _, "/inference/v1/generate":
                raise RefusedError(403, "started without --enable-scale-out")
            case _:
                raise RefusedError(404, "there is no such page")
        return await self._generate(call, asked, words, prompt)

    def _metrics(self) -> bytes:
        lines = []
        for rank in self.ranks:
            size = "" if self.flags.silent else f'block_size="{self.flags.block_size}",'
            lines += [
                f'vllm:cache_config_info{{{size}engine="{rank.number}",num_gpu_blocks="1000"}} 1.0',
                f'vllm:num_requests_running{{engine="{rank.number}",model_name="{MODEL}"}} {rank.running}.0',
                f'vllm:kv_cache_usage_perc{{engine="{rank.number}",model_name="{MODEL}"}} 0.0',
            ]
        return "\n".join(lines).encode()

    def _sources(self) -> dict[str, Any]:
        if self.flags.no_events:
            return {}
        return {
            str(rank.number): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": rank.sockets.events_endpoint.replace("127.0.0.1", "*"),
                "replay_endpoint": None if self.flags.no_replay else rank.sockets.replay_endpoint,
            }
            for rank in self.ranks
        }

    def _check(self, asked: dict[str, Any], headers: dict[str, str]) -> Rank:
        """What vLLM refuses, and the rank that computes."""
        if asked["model"] not in {MODEL, ADAPTER}:
            raise RefusedError(404, "The model does not exist.")
        if asked.get("cache_salt") == "":
            raise RefusedError(400, "cache_salt must be a non-empty string")
        if not isinstance(asked.get("priority", 0), int):
            raise RefusedError(400, "priority must be a number")
        number = int(headers.get("x-data-parallel-rank", 0))
        if number >= len(self.ranks):
            raise RefusedError(400, "data_parallel_rank is out of range")
        return self.ranks[number]

    async def _generate(
        self, call: Call, asked: dict[str, Any], words: dict[str, Any], prompt: list[int]
    ) -> dict[str, Any] | None:
        writer = call.writer
        rank = self._check(asked, call.headers)
        mode = self.script["mode"] if asked.get("stream") else ""
        if asked.get("stream"):
            self.seen.append({"body": asked, "headers": call.headers})
        match mode:
            case "429":
                raise RefusedError(429, "busy", "Retry-After: 3")
            case "503" | "500":
                raise RefusedError(int(mode), "no")
            case "400":
                raise RefusedError(400, "top_k must be at least -1")
        cached = await rank.take(
            prompt, adapter=asked["model"] if asked["model"] != MODEL else "", salt=asked.get("cache_salt", "")
        )
        tokens = [prompt[-1 - at % len(prompt)] for at in range(words.get("max_tokens", 16))]
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if not self.flags.no_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        has_ids = not self.flags.text_only
        if not asked.get("stream"):
            choice = {"index": 0, "finish_reason": "length", **({"token_ids": tokens} if has_ids else {"text": "a"})}
            return {"choices": [choice], "usage": usage}
        leaving = asyncio.create_task(call.reader.read(1))
        rank.running += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for at, token in enumerate(tokens):
                await self._misbehave(mode, at, writer, leaving)
                last = at + 1 == len(tokens) and mode != "no reason"
                choice = {"index": 0, "token_ids": [token], "finish_reason": "length" if last else None}
                _event(writer, json.dumps({"choices": [choice]}))
                await writer.drain()
                await asyncio.wait({leaving}, timeout=self.script.get("step_seconds", 0.002))
                if leaving.done():
                    self.aborted += 1
                    raise ConnectionAbortedError
            _event(writer, json.dumps({"choices": [], "usage": usage}))
            _event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
        finally:
            rank.running -= 1
            leaving.cancel()
        # What was read ahead of the next request is lost: the connection ends with its answer.
        raise ConnectionAbortedError

    async def _misbehave(self, mode: str, at: int, writer: asyncio.StreamWriter, leaving: asyncio.Task[bytes]) -> None:
        """After two tokens, unless nothing shall come at all."""
        if mode == "silent" or (mode == "hang" and at == 2):
            await writer.drain()
            await leaving
            self.aborted += 1
            raise ConnectionAbortedError
        if at != 2:
            return
        match mode:
            case "die":
                await writer.drain()
                os._exit(9)
            case "cut":
                raise ConnectionAbortedError
            case "garbage":
                writer.write(b"9\r\n\x00\xff\n data\n\r\n")
                _event(writer, "{]")
            case "error event":
                _event(writer, json.dumps({"error": {"message": "it broke", "code": 500}}))


def _event(writer: asyncio.StreamWriter, data: str) -> None:
    encoded = f"data: {data}\n\n".encode()
    writer.write(f"{len(encoded):x}\r\n".encode() + encoded + b"\r\n")


def _whole(writer: asyncio.StreamWriter, status: int, body: bytes, *headers: str) -> None:
    lines = [f"HTTP/1.1 {status} -", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--api-key", default="")
    for flag in (
        "no-generate", "no-events", "no-replay", "no-cached-tokens", "other-tokenizer", "silent", "text-only",
        "dev-mode",
    ):  # fmt: skip
        parser.add_argument(f"--{flag}", action="store_true")
    asyncio.run(StockServer(parser.parse_args()).serve())


if __name__ == "__main__":
    main()
