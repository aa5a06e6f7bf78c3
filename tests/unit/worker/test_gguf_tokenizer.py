"""The conversion of a GGUF file's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf")

from kvist.errors import KvistError  # noqa: E402
from kvist_worker import gguf_tokenizer  # noqa: E402

TOKENS = ["<end>", "<tool>", "a", "b", "ab", "Ġ", "1", "2", "Ã", "©", "Ã©", "<|im_end|>"]
KINDS = [3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]


def write(path: Path, split: str = "smollm", model: str = "gpt2") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["a b", "Ã ©"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_becomes_a_tokenizer(tmp_path: Path) -> None:
    converted = gguf_tokenizer.convert(write(tmp_path / "m.gguf"))
    document = json.loads(converted.json)
    added = {token["content"]: token["special"] for token in document["added_tokens"]}
    assert added == {"<end>": True, "<tool>": False, "<|im_end|>": True}
    assert document["model"]["merges"] == [["a", "b"], ["Ã", "©"]]
    assert [part["type"] for part in document["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]
    assert (converted.eos_token, converted.bos_token, converted.add_bos) == ("<end>", "", False)
    assert (converted.eos_token_ids, converted.training_context_tokens) == ((0, 11), 2048)
    assert (converted.chat_template, converted.has_recurrent_state) == ("{{ messages }}", False)
    assert converted.token_bytes() == [
        *(b"", b"<tool>", b"a", b"b", b"ab", b" ", b"1", b"2"),
        *("é".encode()[:1], "é".encode()[1:], "é".encode(), b""),
    ]


@pytest.mark.parametrize(("split", "model"), [("qwen2", "gpt2"), ("smollm", "llama")])
def test_another_kind_of_tokenizer_is_refused(tmp_path: Path, split: str, model: str) -> None:
    with pytest.raises(KvistError) as caught:
        gguf_tokenizer.convert(write(tmp_path / "m.gguf", split, model))
    assert caught.value.code == "NOT_IMPLEMENTED"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense" * 10)
    with pytest.raises(KvistError) as caught:
        gguf_tokenizer.convert(path)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_the_conversion_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write(tmp_path / "m.gguf"), tmp_path / "cache"
    first = gguf_tokenizer.load(path, cache_folder=folder)
    conversions: list[Path] = []
    convert = gguf_tokenizer.convert
    monkeypatch.setattr(gguf_tokenizer, "convert", lambda path: conversions.append(path) or convert(path))
    assert gguf_tokenizer.load(path, cache_folder=folder) == first
    assert conversions == []
    # A file that was cut short is not believed.
    [kept] = folder.glob("*/tokenizer.json")
    kept.write_bytes(first.json[:-1])
    assert gguf_tokenizer.load(path, cache_folder=folder) == first
    write(path, "gpt-2")
    assert gguf_tokenizer.load(path, cache_folder=folder) != first
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    converted = gguf_tokenizer.load(write(tmp_path / "m.gguf"), cache_folder=blocked / "cache")
    assert converted.eos_token_ids == (0, 11)
