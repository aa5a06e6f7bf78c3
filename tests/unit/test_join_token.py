"""The join token: read from its file each time, several at once while it is being replaced, and never said."""

from pathlib import Path

import pytest

from kvist import join_token
from kvist.errors import KvistError

OLD, NEW = "0" * 32, "1" * 32


def test_without_a_file_nobody_is_asked(tmp_path: Path) -> None:
    assert join_token.metadata(None) == ()
    join_token.check(None, [])


def test_any_of_the_tokens_is_right_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OLD}\n\n{NEW}\n")
    for token in (OLD, NEW):
        join_token.check(file, [("x-other", "y"), (join_token.METADATA_KEY, token)])
    for wrong in (OLD[:-1], OLD + "0", "", OLD.replace("0", "ä"), f"{OLD}\n{NEW}"):
        with pytest.raises(KvistError, match="wrong") as caught:
            join_token.check(file, [(join_token.METADATA_KEY, wrong)])
        assert caught.value.code == "PERMISSION_DENIED"
        assert OLD not in str(caught.value)
        assert NEW not in str(caught.value)
    with pytest.raises(KvistError, match="join_token_file"):
        join_token.check(file, [])
    # One call shows one.
    with pytest.raises(KvistError):
        join_token.check(file, [(join_token.METADATA_KEY, "no"), (join_token.METADATA_KEY, OLD)])


def test_a_replaced_file_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(OLD)
    assert join_token.metadata(file) == ((join_token.METADATA_KEY, OLD),)
    file.write_text(NEW)
    assert join_token.metadata(file) == ((join_token.METADATA_KEY, NEW),)
    with pytest.raises(KvistError):
        join_token.check(file, [(join_token.METADATA_KEY, OLD)])


@pytest.mark.parametrize("content", [None, "", "short", "ä" * 40])
def test_an_unusable_file_lets_nobody_in_and_is_not_said(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(KvistError, match="join_token_file") as caught:
        join_token.check(file, [(join_token.METADATA_KEY, content or "")])
    assert str(file) not in str(caught.value)
    with pytest.raises(KvistError):
        join_token.metadata(file)
