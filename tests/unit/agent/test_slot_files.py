"""What the agent keeps on disk."""

import json
from pathlib import Path

import pytest

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist_agent.process import ProcessIdentity
from kvist_agent.slot_files import SessionRecord, SlotRecord, StateFolder


def test_the_identity_of_the_node_stays(tmp_path: Path) -> None:
    assert StateFolder(tmp_path).node_uid() == StateFolder(tmp_path).node_uid()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = WorkerSpec(worker_uid="w-0", model="smol", engine="sim", hash_seed=2**64 - 1)
    spec.engine_arguments.update({"slots": 4, "nested": {"a": [1.5, True]}})
    record = SlotRecord(spec, ProcessIdentity(7, 12.25), "127.0.0.1:1", "127.0.0.1:2", 2**63, 3, is_stopping=True)
    folder = StateFolder(tmp_path).slot("w-0")
    folder.make()
    folder.write(record)
    assert folder.read() == record
    assert [known.path for known in StateFolder(tmp_path).slots()] == [folder.path]


@pytest.mark.parametrize("content", ["", "{}", '{"schema_version": 99}', '{"schema_version": 1, "spec": {}}'])
def test_a_damaged_record_is_no_record(tmp_path: Path, content: str) -> None:
    folder = StateFolder(tmp_path).slot("w-0")
    folder.make()
    (folder.path / "slot.json").write_text(content)
    assert folder.read() is None


@pytest.mark.parametrize("uid", ["", "..", "a/b", "A", "-a", "a" * 200])
def test_a_uid_that_could_leave_the_folder_is_refused(tmp_path: Path, uid: str) -> None:
    with pytest.raises(ValueError, match="worker UID"):
        StateFolder(tmp_path).slot(uid)


def test_a_lower_fence_is_refused_and_the_highest_is_remembered(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_session(SessionRecord(cluster="c", hash_seed=1, fence=4))
    assert folder.accept_fence(5)
    assert folder.accept_fence(5)
    assert not StateFolder(tmp_path).accept_fence(4)
    assert StateFolder(tmp_path).read_session() == SessionRecord(cluster="c", hash_seed=1, fence=5)


def test_the_log_of_the_last_start_is_put_aside(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).slot("w-0")
    folder.make()
    for text in ("first", "second"):
        folder.log_path.write_text(text)
        folder.rotate_log()
    assert (folder.path / "worker.log.1").read_text() == "second"
    assert not folder.log_path.exists()


def test_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_session(SessionRecord())
    assert (tmp_path / "session.json").stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "session.json").read_text())["fence"] == 0
