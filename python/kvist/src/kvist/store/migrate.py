"""Copying a cluster's state from one store to another, so that a set-up of one machine can grow."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.store.batches import split_batches
from kvist.store.interface import Delete, KeyValue, Put, StateStore

ROOT = "/kvist/"
_ELECTIONS = "/elections/"


class MigrationRefusedError(Exception):
    """Nothing was written; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Migration:
    """What was done.

    Attributes:
        copied: Keys that were written.
        deleted: Keys of the target that the source does not have.
        left_out: Keys of the source that live with a lease, or say who leads.
    """

    copied: int
    deleted: int
    left_out: int


async def migrate(source: StateStore, target: StateStore, *, may_replace: bool, is_trial: bool = False) -> Migration:
    """Copies everything that outlives processes: resources, nodes, worker slots, contracts, settings, named prefixes.

    Leases and elections stay behind. The target begins a new epoch, so that no router takes what it gets from there for
    older than what it has, and no agent a new leader for an old one.

    Args:
        source: Whose controllers have been stopped.
        target: Where nobody works yet.
        may_replace: Whether the target may hold a state already, which is lost then.
        is_trial: Only say what would be done.

    Raises:
        MigrationRefusedError: Somebody leads in one of the stores, the source is empty, or the target is not.
        StoreError: A store has failed; the target may hold a part.
    """
    items = (await source.list(ROOT)).items
    present = (await target.list(ROOT)).items
    for name, found in (("source", items), ("target", present)):
        if any(_ELECTIONS in item.key for item in found):
            raise MigrationRefusedError(f"somebody leads in the {name}: stop its controllers and KV masters first")
    kept = [item for item in items if not _is_left_out(item)]
    if not kept:
        raise MigrationRefusedError("the source holds no state")
    foreign = [item for item in present if not _is_left_out(item)]
    if foreign and not may_replace:
        raise MigrationRefusedError(f"the target holds {len(foreign)} keys already, such as {foreign[0].key}")
    wanted: dict[str, bytes | None] = {item.key: item.value for item in kept}
    gone = {item.key: None for item in foreign if item.key not in wanted}
    done = Migration(copied=len(kept), deleted=len(gone), left_out=len(items) - len(kept))
    if is_trial:
        return done
    for batch in split_batches({**wanted, **gone}):
        await target.commit([Delete(key) if value is None else Put(key, value) for key, value in batch.items()])
    await target.declare_restored()
    return done


def _is_left_out(item: KeyValue) -> bool:
    return item.lease_id != 0 or _ELECTIONS in item.key
