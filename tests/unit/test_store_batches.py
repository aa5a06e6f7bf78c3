"""Records in portions for the store."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvist.store.batches import split_batches
from kvist.store.interface import LARGEST_COMMIT_BYTES, MOST_OPERATIONS

RECORDS = st.dictionaries(
    st.integers(0, 999).map(lambda number: f"/k/{number}"),
    st.one_of(st.none(), st.sampled_from([0, 10, 200_000, 900_000]).map(bytes)),
    max_size=250,
)


@given(records=RECORDS)
def test_all_records_come_once_in_portions_that_a_store_takes_and_the_last_one_last(
    records: dict[str, bytes | None],
) -> None:
    records["/last"] = b"state"
    batches = list(split_batches(records, last_key="/last"))
    keys = [key for batch in batches for key in batch]
    assert sorted(records) == sorted(keys)
    assert keys[-1] == "/last"
    assert {key: records[key] for key in keys} == {key: value for batch in batches for key, value in batch.items()}
    for batch in batches:
        assert 0 < len(batch) <= MOST_OPERATIONS
        assert sum(len(key) + len(value or b"") for key, value in batch.items()) <= LARGEST_COMMIT_BYTES
    # No portion could have taken the first record of the next one.
    for earlier, later in itertools.pairwise(batches):
        key = next(iter(later))
        size = sum(len(name) + len(value or b"") for name, value in (*earlier.items(), (key, later[key])))
        assert len(earlier) == MOST_OPERATIONS or size > LARGEST_COMMIT_BYTES
