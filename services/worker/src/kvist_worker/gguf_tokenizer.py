"""The tokenizer of a GGUF file as `tokenizer.json`.

Built from the file's own metadata, so that the router tokenizes as the engine does; a test compares the two. Only
byte-level BPE with split rules that were compared is taken: a wrong split would be silently wrong everywhere.

The conversion takes seconds, so its result is kept in a cache folder under a name made of the file's path, size, time
of change, and the version of the conversion.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvist.errors import error

_log = logging.getLogger(__name__)

# Change it whenever the conversion of an equal file gives another result.
_CONVERSION_VERSION = 1
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
# Tokens that end generation whatever the metadata says; llama.cpp knows them by their text as well.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "< EOT >",
        "_<EOT>",
        "<|end▁of▁sentence|>",
        "<|end_of_turn|>",
        "<end_of_utterance>",
    }
)
_END_KEYS = ("eos", "eot", "eom")
# Architectures whose state cannot be cut back to a prefix keep it under keys of these kinds.
_RECURRENT_KEY_PARTS = (".ssm.", ".wkv.", ".shortconv.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTokenizer:
    """A tokenizer and what goes with it.

    Attributes:
        json: `tokenizer.json`.
        chat_template: Jinja template; empty when there is none.
        bos_token: Text of the token that begins a sequence; empty when none.
        eos_token: Text of the token that ends a sequence; empty when none.
        add_bos: Whether plain prompts get the beginning token in front.
        eos_token_ids: Tokens that end generation.
        training_context_tokens: What the model was trained for; 0 when unknown.
        has_recurrent_state: Whether part of the model's state cannot be cut back to a prefix.
    """

    json: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    eos_token_ids: tuple[int, ...]
    training_context_tokens: int
    has_recurrent_state: bool

    def token_bytes(self) -> list[bytes]:
        """The bytes of each token; none for those that are not printed."""
        document = json.loads(self.json)
        decoder = _byte_decoder()
        vocabulary: dict[str, int] = document["model"]["vocab"]
        pieces = [b""] * len(vocabulary)
        for text, token_id in vocabulary.items():
            pieces[token_id] = b"".join(decoder.get(character, character.encode()) for character in text)
        for added in document["added_tokens"]:
            pieces[added["id"]] = b"" if added["special"] else added["content"].encode()
        return pieces


def load(model_path: Path, *, cache_folder: Path) -> ConvertedTokenizer:
    """The tokenizer of a GGUF file, from the cache when it was converted before.

    Raises:
        KvistError: `NOT_IMPLEMENTED` for a tokenizer of another kind.
    """
    path = model_path.resolve()
    status = path.stat()
    key = f"{_CONVERSION_VERSION}\n{path}\n{status.st_size}\n{status.st_mtime_ns}"
    folder = cache_folder / hashlib.sha256(key.encode()).hexdigest()[:32]
    cached = _read(folder)
    if cached is not None:
        return cached
    converted = convert(path)
    try:
        _write(folder, converted)
    except OSError as failure:
        # The cache saves time, nothing else.
        _log.warning("tokenizer_cache_not_written: %s", failure.strerror)
    return converted


def default_cache_folder() -> Path:
    """Where conversions are kept: below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvist" / "tokenizers"


def _read(folder: Path) -> ConvertedTokenizer | None:
    try:
        tokenizer = (folder / "tokenizer.json").read_bytes()
        header = json.loads((folder / "header.json").read_text())
        if header.pop("sha256") != hashlib.sha256(tokenizer).hexdigest():
            return None
        header["eos_token_ids"] = tuple(header["eos_token_ids"])
        return ConvertedTokenizer(json=tokenizer, **header)
    except (OSError, ValueError, KeyError, TypeError):
        # Missing, cut short or of another version: it is made again.
        return None


def _write(folder: Path, converted: ConvertedTokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = {name: value for name, value in asdict(converted).items() if name != "json"}
    header["sha256"] = hashlib.sha256(converted.json).hexdigest()
    for name, data in (("tokenizer.json", converted.json), ("header.json", json.dumps(header).encode())):
        # Several workers of one machine may convert at once.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
            temporary.write(data)
        Path(temporary.name).replace(folder / name)


def convert(model_path: Path) -> ConvertedTokenizer:
    """Reads the tokenizer of a GGUF file.

    Raises:
        KvistError: `NOT_IMPLEMENTED` for a tokenizer of another kind, `INVALID_ARGUMENT` for a file that is no GGUF.
    """
    # Imported here: only a conversion needs it.
    import gguf  # noqa: PLC0415

    try:
        reader = gguf.GGUFReader(model_path)
    except ValueError as failure:
        raise error("INVALID_ARGUMENT", "the model file is not a GGUF file") from failure

    def value(key: str, default: Any = None) -> Any:
        entry = reader.get_field(key)
        return default if entry is None else entry.contents()

    kind, split = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre", "")
    if kind != "gpt2" or split not in _SPLITS_DIGITS:
        known = ", ".join(sorted(_SPLITS_DIGITS))
        raise error(
            "NOT_IMPLEMENTED",
            f"the tokenizer is {kind!r} with split rule {split!r}; known are byte-level BPEs with: {known}",
        )
    tokens: list[str] = value("tokenizer.ggml.tokens")
    kinds: Sequence[int] = value("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    document = tokenizer_document(
        tokens, kinds, value("tokenizer.ggml.merges", []), splits_digits=_SPLITS_DIGITS[split]
    )
    architecture = value("general.architecture", "")

    def text(key: str) -> str:
        token_id = value(f"tokenizer.ggml.{key}_token_id")
        return "" if token_id is None else tokens[token_id]

    named = {value(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS} - {None}
    ends = {token_id for token_id, token in enumerate(tokens) if kinds[token_id] != _NORMAL and token in _END_TEXTS}
    return ConvertedTokenizer(
        json=json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(),
        chat_template=value("tokenizer.chat_template", ""),
        bos_token=text("bos"),
        eos_token=text("eos"),
        add_bos=bool(value("tokenizer.ggml.add_bos_token", False)),
        eos_token_ids=tuple(sorted(named | ends)),
        training_context_tokens=int(value(f"{architecture}.context_length", 0)),
        has_recurrent_state=any(part in key for key in reader.fields for part in _RECURRENT_KEY_PARTS),
    )


def tokenizer_document(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], *, splits_digits: bool
) -> dict[str, Any]:
    """A `tokenizer.json` of a byte-level BPE.

    Args:
        tokens: Text of each token, bytes written as GPT-2 does.
        kinds: llama.cpp's type of each token.
        merges: Pairs, separated by a space, best first.
        splits_digits: Whether each digit stands alone.
    """
    split: list[dict[str, Any]] = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]
    split[0]["use_regex"] = True
    if splits_digits:
        split.insert(0, {"type": "Digits", "individual_digits": True})
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[token_id] != _USER_DEFINED,
        }
        for token_id, text in enumerate(tokens)
        if kinds[token_id] in {_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED}
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token_id for token_id, text in enumerate(tokens)},
            "merges": [list(merge.split(" ", 1)) for merge in merges],
        },
    }


@cache
def _byte_decoder() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for bytes, backwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return stand_ins | {chr(256 + position): bytes([byte]) for position, byte in enumerate(others)}
