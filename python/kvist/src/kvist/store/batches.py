"""Records in portions that every state store takes. Pure."""

from collections.abc import Iterator, Mapping

from kvist.store.interface import LARGEST_COMMIT_BYTES, MOST_OPERATIONS


def split_batches(records: Mapping[str, bytes | None], *, last_key: str = "") -> Iterator[dict[str, bytes | None]]:
    """Yields all records, as they are at this moment, in few batches.

    Args:
        records: Values by key; none for a key that is to be deleted.
        last_key: This one comes last, because it tells of the others.
    """
    batch: dict[str, bytes | None] = {}
    size_bytes = 0
    for key, value in sorted(records.items(), key=lambda item: item[0] == last_key):
        record_bytes = len(key.encode()) + len(value or b"")
        if batch and (len(batch) == MOST_OPERATIONS or size_bytes + record_bytes > LARGEST_COMMIT_BYTES):
            yield batch
            batch, size_bytes = {}, 0
        batch[key] = value
        size_bytes += record_bytes
    if batch:
        yield batch
