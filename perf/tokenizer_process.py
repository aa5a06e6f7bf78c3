"""How much memory a worker's tokenizer takes in a process: `python -m perf.tokenizer_process ADDRESS THREADS`.

Prints the bytes by which the process grew when it loaded the tokenizer and used it on so many threads, each of which
has a table of its own.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil

from kvist import _core
from kvist.engine.v1.engine_pb2 import GetTokenizerRequest, TokenizerHeader
from kvist.engine.v1.engine_pb2_grpc import EngineServiceStub

TIME_LIMIT_SECONDS = 60.0


def fetch(address: str) -> tuple[TokenizerHeader, bytes]:
    """The tokenizer of a worker, as its routers get it."""
    header, file = TokenizerHeader(), bytearray()
    with grpc.insecure_channel(address) as channel:
        for part in EngineServiceStub(channel).GetTokenizer(GetTokenizerRequest(), timeout=TIME_LIMIT_SECONDS):
            if part.HasField("header"):
                header = part.header
            file += part.data
    return header, bytes(file)


def growth(header: TokenizerHeader, file: bytes, *, threads: int) -> int:
    """Loads it on a thread that ends, as a router does, uses it on others, and returns what stayed."""
    process = psutil.Process()
    before: int = process.memory_info().rss
    with ThreadPoolExecutor(1) as loading:
        loaded = loading.submit(_core.ModelText, file, chat_template=header.chat_template)
    text = loaded.result()
    are_all_there = threading.Barrier(threads + 1)

    def use() -> None:
        text.encode("to of in")
        are_all_there.wait()
        are_all_there.wait()

    with ThreadPoolExecutor(threads) as using:
        for _ in range(threads):
            using.submit(use)
        are_all_there.wait()
        after: int = process.memory_info().rss
        are_all_there.wait()
    return after - before


if __name__ == "__main__":
    sys.stdout.write(f"{growth(*fetch(sys.argv[1]), threads=int(sys.argv[2]))}\n")
