"""What indexes claim under faults, held against the whole history of every ledger.

Eight simulated engines on two nodes serve requests with shared prefixes from caches that are far too small, so blocks
come and go all the time. Between NATS and everybody else stand proxies that lose, repeat and delay single messages;
meanwhile agents, NATS and a worker are killed and started again, and one of each kind of process is frozen for a while.

The test reads each ledger straight from its worker and so knows what was held after each batch. At random instants it
asks router and KV master what they hold and where they stand: everything they say must have been true there.

`KVIST_HISTORY_SECONDS` makes the faults last longer, `KVIST_HISTORY_SEED` makes them others.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from kvist import _core, names
from kvist.engine.v1.engine_pb2 import StopConditions, TokenIds
from kvist.events.v1.events_pb2 import (
    SOURCE_STATE_EXACT,
    SOURCE_STATE_TRUNCATED,
    KvEventMessage,
    SourceState,
    TierMatch,
)
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2 import BlockHashes, LookupRequest
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.router.v1.router_pb2 import DryRun, ExplainRequest, GenerateRequest, Prompt, SourceStatus
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.ledger_history import Histories, Key, account_of
from support.machine_load import MachineLoad
from support.mesh import Mesh, running_mesh, until
from support.nats_proxy import Message, Mischief, NatsProxy
from support.scrape import scrape

FAULT_SECONDS = float(os.environ.get("KVIST_HISTORY_SECONDS", "0"))
SEED = int(os.environ.get("KVIST_HISTORY_SEED", "7"))

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240 + 3 * FAULT_SECONDS)]

WORKERS = 8
CLIENTS = 6
BLOCK_TOKENS = 16
# The simulated engine's words.
FIRST_WORD, WORDS = 256, 32
# A request needs some 26 blocks, and four run at once.
ENGINE = {"blocks": 160, "maxRunning": 4, "decodeStepMs": 5, "prefillTokensPerSecond": 100_000}
MOST_SECONDS_TO_EXACT = 5.0
ASK_SECONDS = 2.0
PROMPTS_A_LOOK = 3


class Prompts:
    """Prompts of four families, thirty topics each, and an end of their own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._families = [self._tokens(12) for _ in range(4)]
        self._topics = [[self._tokens(8) for _ in range(30)] for _ in self._families]

    def _tokens(self, blocks: int) -> list[int]:
        return [FIRST_WORD + self._random.randrange(WORDS) for _ in range(blocks * BLOCK_TOKENS)]

    def draw(self) -> list[int]:
        family = self._random.randrange(len(self._families))
        topic = self._random.choice(self._topics[family])
        return [*self._families[family], *topic, *self._tokens(self._random.randrange(6))]


@dataclass
class Load:
    """Requests of some clients until they are told to stop."""

    router: RouterServiceStub
    prompts: Prompts
    answered: int = 0
    failed: int = 0
    is_stopped: bool = False

    async def ask(self) -> None:
        while not self.is_stopped:
            await self.ask_once(self.prompts.draw())
            await asyncio.sleep(0.02)

    async def ask_once(self, tokens: list[int]) -> None:
        request = GenerateRequest(
            model="sim", prompt=Prompt(tokens=TokenIds(ids=tokens)), stop=StopConditions(max_tokens=4)
        )
        try:
            async for response in self.router.Generate(request, timeout=20):
                if response.WhichOneof("event") == "finished":
                    self.answered += 1
        except grpc.aio.AioRpcError:
            self.failed += 1
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Statement:
    """An index's account of a source: so many blocks with this digest after so many batches."""

    view: str
    key: Key
    state: str
    batches: int
    account: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Claim:
    """An index's word that a source held the beginning of a prompt after so many batches."""

    view: str
    key: Key
    batches: int
    tier: int
    blocks: list[int]


@dataclass
class Witness:
    """Notes what indexes say, and judges it when the history has come so far."""

    histories: Histories
    dead: set[tuple[str, int]] = field(default_factory=set)
    waiting: list[Statement | Claim] = field(default_factory=list)
    proven: Counter[str] = field(default_factory=Counter)
    unproven: int = 0

    def hear_sources(self, view: str, sources: Iterable[SourceStatus]) -> None:
        for status in sources:
            if status.state != SOURCE_STATE_TRUNCATED:
                state = SourceState.Name(status.state).removeprefix("SOURCE_STATE_")
                account = account_of(status.tiers)
                self.waiting.append(Statement(view, _key(status), state, status.next_sequence, account))

    def hear_matches(self, view: str, key: Key, batches: int, matches: Iterable[TierMatch], hashes: list[int]) -> None:
        for match in matches:
            self.waiting.append(Claim(view, key, batches, match.tier, hashes[: match.blocks]))

    def judge(self) -> None:
        """Judges what can be judged."""
        later = []
        for said in self.waiting:
            history = self.histories.by_key.get(said.key)
            if history is None or history.batches < said.batches:
                # A worker that was killed may have said its last words to others alone.
                if (said.key[0], said.key[2]) in self.dead:
                    self.unproven += 1
                else:
                    later.append(said)
            elif isinstance(said, Statement):
                assert history.account(said.batches) == said.account, said
                self.proven[f"{said.view} {said.state}"] += 1
            else:
                false = [block for block in said.blocks if not history.holds(said.tier, block, said.batches)]
                assert not false, (said, false)
                self.proven[f"{said.view} claim"] += 1
        self.waiting = later


def _key(status: SourceStatus) -> Key:
    return status.source.worker_uid, status.source.rank, status.source.incarnation


@dataclass
class Scene:
    """Everything that the acts below play with."""

    mesh: Mesh
    random: random.Random
    router: RouterServiceStub
    kvmaster: KvMasterServiceStub
    witness: Witness
    load: Load
    mischief: Mischief

    # Looking.

    async def look(self) -> None:
        """Notes what both indexes hold, and what they claim of some prompts."""
        for view, sources in (await self.mesh.sources(self.router, self.kvmaster, seconds=ASK_SECONDS)).items():
            self.witness.hear_sources(view, sources)
        for _ in range(PROMPTS_A_LOOK):
            await self.look_up(self.load.prompts.draw())

    async def look_up(self, tokens: list[int]) -> None:
        """Notes what both indexes claim of a prompt."""
        state = self.mesh.state
        hashes = _core.block_hashes(state.hash_seed, "sim", "", "", tokens, BLOCK_TOKENS)
        with suppress(grpc.aio.AioRpcError):
            request = LookupRequest(blocks=BlockHashes(hashes=hashes))
            for match in (await self.kvmaster.Lookup(request, timeout=ASK_SECONDS)).matches:
                key = (match.source.worker_uid, match.source.rank, match.source.incarnation)
                self.witness.hear_matches("kvmaster", key, match.next_sequence, match.matches, hashes)
        with suppress(grpc.aio.AioRpcError):
            dry_run = DryRun(model="sim", prompt=Prompt(tokens=TokenIds(ids=tokens)))
            for decision in (await self.router.Explain(ExplainRequest(dry_run=dry_run), timeout=ASK_SECONDS)).decisions:
                for one in decision.candidates:
                    if one.incarnation:
                        batches = one.applied_sequence + 1 if one.HasField("applied_sequence") else 0
                        key = (one.worker_uid, one.rank, one.incarnation)
                        self.witness.hear_matches("router", key, batches, one.matches, hashes)

    async def look_around(self) -> None:
        while True:
            await self.look()
            self.witness.judge()
            await asyncio.sleep(self.random.uniform(0.0, 0.15))

    async def is_exact(self) -> dict[str, bool]:
        """Whether each index has all workers' present incarnations, and all EXACT."""
        wanted = {(worker.target.worker_uid, 0, worker.incarnation) for worker in self.mesh.state.workers}
        seen = await self.mesh.sources(self.router, self.kvmaster, seconds=ASK_SECONDS)
        for view, sources in seen.items():
            self.witness.hear_sources(view, sources)
        return {
            view: len(wanted) == WORKERS
            and wanted == {_key(status) for status in sources if status.state == SOURCE_STATE_EXACT}
            for view, sources in seen.items()
        }

    async def until_exact(self, what: str) -> dict[str, float]:
        """Seconds until each index was exact."""
        began, at = time.monotonic(), {}
        async with asyncio.timeout(60):
            while len(at) < 2:
                exact = await self.is_exact()
                at |= {view: time.monotonic() - began for view, is_so in exact.items() if is_so and view not in at}
                await asyncio.sleep(0.02)
        print(f"{what}: " + ", ".join(f"{view} {seconds:.2f} s" for view, seconds in sorted(at.items())))
        return at

    # Faults.

    async def kill_agent(self) -> None:
        await self.mesh.kill_and_start_again("agent-0", pause_seconds=0.5)

    async def kill_nats(self) -> None:
        await self.mesh.kill_and_start_again("nats", pause_seconds=1.0)

    async def freeze_agent(self) -> None:
        await self.mesh.freeze(self.mesh.process_id("agent-1"), seconds=2.0)

    async def freeze_nats(self) -> None:
        await self.mesh.freeze(self.mesh.process_id("nats"), seconds=3.0)

    async def freeze_index(self) -> None:
        name = self.random.choice(["router", "kvmaster"])
        await self.mesh.freeze(self.mesh.process_id(name), seconds=1.5)

    async def freeze_worker(self) -> None:
        workers = [worker for worker in (await self.mesh.workers()).values() if worker.process_id]
        await self.mesh.freeze(self.random.choice(workers).process_id, seconds=1.5)

    async def kill_worker(self) -> None:
        workers = await self.mesh.workers()
        victim = self.random.choice(list(self.mesh.state.workers))
        uid, incarnation = victim.target.worker_uid, victim.incarnation
        psutil.Process(workers[uid].process_id).kill()
        self.witness.dead.add((uid, incarnation))
        self.witness.histories.over(uid, incarnation)

        def is_back() -> bool:
            present = {worker.target.worker_uid: worker.incarnation for worker in self.mesh.state.workers}
            return present.get(uid, 0) > incarnation

        await until(f"{uid} is back", is_back)

    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        """One of each, in the order of the seed."""
        faults = [
            self.kill_agent, self.kill_nats, self.kill_worker,
            self.freeze_agent, self.freeze_nats, self.freeze_index, self.freeze_worker,
        ]  # fmt: skip
        self.random.shuffle(faults)
        return faults


class Corruption:
    """Takes the events out of one message and leaves its sequence; keeps digests back, which would tell."""

    def __init__(self) -> None:
        self.sources: set[str] = set()

    def __call__(self, message: Message) -> Message | None:
        if ".kv." not in message.subject:
            return message
        decoded = KvEventMessage.FromString(message.payload)
        decoded.ClearField("digest")
        if not decoded.batches:
            return None
        if not self.sources:
            self.sources.add(decoded.batches[0].source.worker_uid)
            for batch in decoded.batches:
                batch.ClearField("events")
        return Message(message.words, message.headers, decoded.SerializeToString())


async def test_every_claim_was_true_at_its_position_whatever_happened_on_the_way(tmp_path: Path) -> None:
    """R20, R21, R22, R23, R24: what an index claims was so, and it heals by itself.

    All sources are EXACT again within five seconds of the last fault on a machine that has nothing else to do. A busy
    one gets as much more as others take of its processors in that time: with half of them taken, ten seconds. Nothing
    but this limit depends on the machine; what is claimed has to be true on any.
    """
    print(f"seed {SEED}")
    mesh, mischief = Mesh(tmp_path), Mischief(SEED, lose=0.04, repeat=0.04, delay=0.06, is_on=False)
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(NatsProxy(mesh.nats.port, mischief=mischief))
            for name in ("router", "kvmaster", "agent-0", "agent-1")
        }
        urls = {name: proxy.url for name, proxy in proxies.items()}
        await stack.enter_async_context(running_mesh(mesh, agents=2, bus_urls=urls))
        router = RouterServiceStub(await stack.enter_async_context(open_channel(mesh.services["router"].address)))
        kvmaster = KvMasterServiceStub(await stack.enter_async_context(open_channel(mesh.services["kvmaster"].address)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        histories = Histories(tasks)
        mesh.on_state = histories.follow
        load = Load(router, Prompts(SEED))
        scene = Scene(mesh, random.Random(SEED), router, kvmaster, Witness(histories), load, mischief)
        await mesh.apply(replicas=WORKERS, engine_arguments=ENGINE)
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        await scene.until_exact("exact after the start")
        try:
            await faults_under_load(scene, tasks)
            await recovery(scene)
            await divergence(scene, proxies["router"])
        finally:
            load.is_stopped = True
            histories.stop()


async def faults_under_load(scene: Scene, tasks: asyncio.TaskGroup) -> None:
    """Everything goes wrong once, or for as long as it shall; the load goes on after it."""
    for _ in range(CLIENTS):
        tasks.create_task(scene.load.ask())
    await until("caches overflow", lambda: sum(h.removals for h in scene.witness.histories.by_key.values()) > 500)
    scene.mischief.is_on = True
    looking = tasks.create_task(scene.look_around())
    ends_at = time.monotonic() + FAULT_SECONDS
    count = 0
    while count == 0 or time.monotonic() < ends_at:
        for fault in scene.faults():
            answered = scene.load.answered
            await fault()
            await until("requests go on", lambda before=answered: scene.load.answered > before + 5)
            count += 1
    await until("all workers are there", lambda: scene.mesh.sees_workers(WORKERS))
    looking.cancel()
    scene.mischief.is_on = False
    print(f"{count} faults, messages {dict(scene.mischief.done)}, {scene.load.answered} requests answered")


async def recovery(scene: Scene) -> None:
    """All is exact soon, though the load goes on; everything that was ever said is proven."""
    before = MachineLoad.now(await scene.mesh.process_ids())
    at = await scene.until_exact("exact after the last fault")
    share = await before.share_left_by_others(await scene.mesh.process_ids())
    print(f"others left {share:.0%} of the machine")
    assert max(at.values()) <= MOST_SECONDS_TO_EXACT / share
    await scene.look()
    scene.load.is_stopped = True
    await until_settled(scene)

    async with asyncio.timeout(30):
        while scene.witness.waiting:
            scene.witness.judge()
            await asyncio.sleep(0.05)
    histories, witness, done = scene.witness.histories, scene.witness, scene.mischief.done
    print(f"proven {dict(witness.proven)}, last words of the dead {witness.unproven}")
    # Nothing of this means anything unless it happened.
    assert min(done[name] for name in ("lost", "repeated", "delayed")) > 10, done
    for view in ("router", "kvmaster"):
        proven = {what: witness.proven[f"{view} {what}"] for what in ("EXACT", "CATCHING_UP", "STALE", "claim")}
        assert min(proven["EXACT"], proven["claim"]) > 50, proven
        assert min(proven["CATCHING_UP"], proven["STALE"]) > 0, proven
    assert witness.unproven < sum(witness.proven.values()) / 10
    assert all(history.digests_compared for history in histories.by_key.values() if history.batches > 50)
    for name in ("router", "kvmaster"):
        metrics = await scrape(scene.mesh.services[name].admin_address)
        assert metrics[names.INDEX_GAPS] > 0, name
        assert metrics[f"{names.INDEX_SKIPPED_BATCHES} duplicate"] > 0, name
        assert metrics[names.INDEX_DIGEST_MISMATCHES] == 0, name
    code, said = await scene.mesh.kvist("audit")
    assert (0, WORKERS) == (code, said.count(" EQUAL at batch ")), said


async def until_settled(scene: Scene) -> None:
    """Both indices have heard the last word of every ledger."""
    async with asyncio.timeout(30):
        while True:
            ends = {key: history.batches for key, history in scene.witness.histories.by_key.items()}
            seen = await scene.mesh.sources(scene.router, scene.kvmaster)
            if all(
                len(sources) == WORKERS and all(status.next_sequence == ends.get(_key(status)) for status in sources)
                for sources in seen.values()
            ):
                return
            await asyncio.sleep(0.05)


async def divergence(scene: Scene, proxy: NatsProxy) -> None:
    """R22: a message that was changed on its way is found by arithmetic, by us and by the index."""
    corruption = Corruption()
    proxy.change = corruption
    # A prompt that nobody has: whoever gets it stores it.
    await scene.load.ask_once([FIRST_WORD + number % 7 for number in range(10 * BLOCK_TOKENS)])
    await until("a message was changed", lambda: corruption.sources)
    await until_settled(scene)
    code, said = await scene.mesh.kvist("audit")
    lines = said.splitlines()
    assert (1, WORKERS) == (code, len(lines)), said
    [different] = [line for line in lines if " EQUAL " not in line]
    assert different.startswith(f"{corruption.sources.pop()}/0 DIFFERENT at batch "), said

    proxy.change = None
    began = time.monotonic()
    async with asyncio.timeout(60):
        while (await scene.mesh.kvist("audit"))[0]:
            await asyncio.sleep(0.1)
    print(f"healed {time.monotonic() - began:.1f} s after the digests were let through")
    # The router takes its feed's numbers over once a second.
    async with asyncio.timeout(30):
        while not (await scrape(scene.mesh.services["router"].admin_address))[names.INDEX_DIGEST_MISMATCHES]:
            await asyncio.sleep(0.1)
    assert all((await scene.is_exact()).values())
