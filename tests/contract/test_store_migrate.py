"""A set-up of one machine grows: its state goes from SQLite to etcd."""

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.store import Put
from kvist.store.interface import MOST_OPERATIONS
from kvist.store.sqlite import SqliteStore
from support.etcd_process import EtcdProcess, etcd_process, free_ports

LIMIT_SECONDS = 60
ROOT = "/kvist/default/v1/"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as member:
        yield member


async def kvist_store(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvist.cli", "store", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
    return process.returncode or 0, output.decode()


async def test_everything_but_leases_and_elections_goes_to_etcd_and_a_filled_target_is_spared(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    path = tmp_path / "state.sqlite"
    wanted = {f"{ROOT}workers/w{number}": bytes([number % 256]) * 20_000 for number in range(MOST_OPERATIONS + 50)}
    wanted[f"{ROOT}settings/hash_seed"] = b"17"
    async with SqliteStore(path) as old:
        for key, value in wanted.items():
            await old.put(key, value)
        lease = await old.grant_lease(600)
        await old.put(f"{ROOT}presence/node-a", b"here", lease_id=lease)
        old_epoch = old.epoch
    namespace = f"/{uuid.uuid4()}"
    target = (f"sqlite:{path}", f"etcd:{etcd.address}", "--namespace", namespace)
    store = EtcdStore(EtcdOptions((etcd.address,)), namespace=namespace)

    code, output = await kvist_store("migrate", *target, "--dry-run", "--json")
    assert (code, json.loads(output)["copied"]) == (0, len(wanted)), output
    async with store as new:
        assert not (await new.list("")).items, "a trial wrote"
    code, output = await kvist_store("migrate", *target)
    assert (code, f"{len(wanted)} keys copied, 0 deleted in the target, 1 left out\n") == (0, output)
    async with EtcdStore(EtcdOptions((etcd.address,)), namespace=namespace) as new:
        assert wanted == {item.key: item.value for item in (await new.list("")).items}
        assert new.epoch > old_epoch
        # Somebody has gone on working there.
        await new.put(f"{ROOT}workers/late", b"1")
        code, output = await kvist_store("migrate", *target)
        assert code == 1
        assert "the target holds" in output
        assert await new.get(f"{ROOT}workers/late") is not None
        code, output = await kvist_store("migrate", *target, "--replace")
        assert code == 0, output
        assert wanted == {item.key: item.value for item in (await new.list("")).items}


async def test_a_member_that_is_down_does_not_garble_the_answer(etcd: EtcdProcess, tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    async with SqliteStore(path) as old:
        await old.put(f"{ROOT}settings/hash_seed", b"17")
    (closed,) = free_ports(1)
    target = f"etcd:127.0.0.1:{closed},{etcd.address}"
    code, output = await kvist_store("migrate", f"sqlite:{path}", target, "--namespace", f"/{uuid.uuid4()}", "--json")
    assert (code, json.loads(output)["copied"]) == (0, 1), output


async def test_a_store_that_is_in_use_is_not_copied(etcd: EtcdProcess, tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    async with SqliteStore(path) as old:
        lease = await old.grant_lease(600)
        await old.commit([Put(f"{ROOT}elections/controller", b"{}", lease), Put(f"{ROOT}settings/hash_seed", b"1")])
        code, output = await kvist_store("migrate", f"sqlite:{path}", f"etcd:{etcd.address}")
    assert (code, "somebody leads in the source" in output) == (1, True), output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("migrate", "sqlite:/no/such/file", "etcd:127.0.0.1:1"), "there is no file"),
        (("migrate", "zookeeper:x", "etcd:127.0.0.1:1"), "is neither"),
        (("declare-restored", "etcd:db.example:2379"), "is not loopback"),
    ],
)
async def test_wrong_places_are_named(arguments: tuple[str, ...], words: str) -> None:
    code, output = await kvist_store(*arguments)
    assert (code, words in output) == (2, True), output


async def test_a_restored_store_is_declared_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    async with SqliteStore(path) as store:
        before = store.epoch
    code, output = await kvist_store("declare-restored", f"sqlite:{path}")
    assert code == 0, output
    async with SqliteStore(path) as store:
        assert f"epoch {store.epoch}\n" == output
        assert store.epoch > before
