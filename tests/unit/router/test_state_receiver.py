"""Which cluster states a router takes, and which one it finds at its next start."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion
from kvist_router.app import StateReceiver
from kvist_router.state_file import read_state


class FakeDataPlane:
    """Applies newer states, as the real one does, and refuses those of another cluster."""

    def __init__(self) -> None:
        self.applied: list[ClusterState] = []

    def apply_cluster_state(self, encoded: bytes) -> bool:
        state = ClusterState.FromString(encoded)
        if state.cluster != "test":
            raise ValueError("another cluster")
        last = self.applied[-1].version if self.applied else ClusterVersion()
        if (state.version.store_epoch, state.version.revision) <= (last.store_epoch, last.revision):
            return False
        self.applied.append(state)
        return True


def state(epoch: int, revision: int, *, cluster: str = "test") -> ClusterState:
    return ClusterState(cluster=cluster, version=ClusterVersion(store_epoch=epoch, revision=revision))


async def test_older_and_invalid_states_are_told_of_and_the_last_good_one_stays_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "last.json"
    plane = FakeDataPlane()
    receiver = StateReceiver(plane, last_state_file=file)
    with capture_logs() as logs:
        await receiver.take(state(1, 7))
        await receiver.take(state(1, 6))
        await receiver.take(state(1, 7))
        await receiver.take(state(1, 9, cluster="other"))
        # A restored store: an older revision of a newer epoch.
        await receiver.take(state(2, 3))
        await receiver.take(state(1, 100))
    assert [state(1, 7), state(2, 3)] == plane.applied
    assert state(2, 3) == read_state(file)
    assert [("cluster_state_ignored", 6), ("cluster_state_refused", 9), ("cluster_state_ignored", 100)] == [
        (line["event"], line["revision"]) for line in logs if line["log_level"] in {"warning", "error"}
    ]


async def test_the_next_start_begins_with_the_last_good_state(tmp_path: Path) -> None:
    file = tmp_path / "last.json"
    await StateReceiver(FakeDataPlane(), last_state_file=file).take(state(1, 7))
    plane = FakeDataPlane()
    assert await StateReceiver(plane, last_state_file=file).load() == ClusterVersion(store_epoch=1, revision=7)
    assert [state(1, 7)] == plane.applied


@pytest.mark.parametrize("content", ["", "{", '{"cluster": "other"}'])
async def test_a_last_state_that_is_not_right_is_no_reason_not_to_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "last.json"
    file.write_text(content)
    plane = FakeDataPlane()
    assert await StateReceiver(plane, last_state_file=file).load() is None
    assert [] == plane.applied


async def test_a_disk_that_takes_nothing_costs_no_state(tmp_path: Path) -> None:
    plane = FakeDataPlane()
    receiver = StateReceiver(plane, last_state_file=tmp_path / "no" / "such" / "folder" / "last.json")
    with capture_logs() as logs:
        await receiver.take(state(1, 1))
    assert [state(1, 1)] == plane.applied
    assert ["last_state_not_written"] == [line["event"] for line in logs]
