"""A worker without an engine: describes itself, drains, and can be told to misbehave by its engine arguments.

`engine_arguments`: `exit_code` ends it at once; `never_ready` keeps it silent; any other field of `description`
overrides the description. It ends by itself after a while, so that a broken test leaves nothing behind.
"""

import argparse
import asyncio
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import grpc
from google.protobuf import json_format

from kvist.engine.v1 import engine_pb2 as pb
from kvist.engine.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from kvist.events.v1.events_pb2 import LedgerDigest, SourceId

LIFE_SECONDS = 90.0


class FakeWorker(EngineServiceServicer):
    def __init__(self, description: pb.WorkerDescription) -> None:
        self.description = description

    async def Describe(self, request, context):  # noqa: N802
        return pb.DescribeResponse(worker=self.description)

    async def Drain(self, request, context):  # noqa: N802
        self.description.draining = True
        Path("drained").write_text(str(request.fence))
        return pb.DrainResponse()

    async def WatchKvEvents(self, request, context):  # noqa: N802
        source = SourceId(worker_uid=self.description.worker_uid, incarnation=self.description.incarnation)
        yield pb.WatchKvEventsResponse(digest=LedgerDigest(source=source, next_sequence=3, complete=True))
        await asyncio.sleep(LIFE_SECONDS)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings-file", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    flags = parser.parse_args()
    settings = json.loads(flags.settings_file.read_text())
    arguments = settings["engine_arguments"]
    print("fake worker", os.getpid(), flush=True)
    if "exit_code" in arguments:
        sys.exit(int(arguments["exit_code"]))
    if arguments.get("never_ready"):
        await asyncio.sleep(LIFE_SECONDS)
    incarnation = max(time.time_ns() // 1_000, settings["incarnation_floor"] + 1)
    description = pb.WorkerDescription(
        worker_uid=settings["worker_uid"],
        incarnation=incarnation,
        model=settings["model"],
        engine=settings["engine"],
        block_size_tokens=16,
        ranks=1,
        tokenizer_digest="aa",
        namespace=settings["namespace"],
        pool_uid=settings["pool_uid"],
        pool_revision=settings["pool_revision"],
        hash_seed=settings["hash_seed"],
        capabilities=pb.Capabilities(kv_events=True),
    )
    json_format.ParseDict(arguments.get("description", {}), description)
    server = grpc.aio.server()
    add_EngineServiceServicer_to_server(FakeWorker(description), server)
    host = settings.get("grpc_listen", "127.0.0.1:0").rpartition(":")[0]
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    record = {"event": "listening", "grpc_address": f"{host}:{port}", "incarnation": incarnation}
    temporary = flags.ready_file.with_suffix(".part")
    temporary.write_text(json.dumps(record))
    temporary.replace(flags.ready_file)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, functools.partial(stopping.set))
    try:
        async with asyncio.timeout(LIFE_SECONDS):
            await stopping.wait()
    except TimeoutError:
        pass
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
