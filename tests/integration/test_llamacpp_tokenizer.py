"""The converted tokenizer against llama.cpp's own, on the model of the package."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

xllamacpp = pytest.importorskip("xllamacpp")

from kvist import _core  # noqa: E402
from kvist_worker import gguf_tokenizer  # noqa: E402
from kvist_worker.engines.llamacpp.model import packaged_model_path  # noqa: E402

pytestmark = pytest.mark.integration

CORPUS = (
    "",
    " ",
    "Hello, world!",
    "  two spaces, a tab\t, and\n\n\nthree lines \r\n end  ",
    "12345 1,234.56 0x1F 3rd ½ ٣ Ⅷ ²",
    "It's we're I'll don't they've 'quoted' 'S 'RE",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # why?\n\tif x != 0: pass",
    "naïve café Straße ÅÄÖ Ελληνικά Русский עברית العربية हिन्दी ไทย",
    "漢字かな交じり文 한국어 中文\uff0c标点。",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\u2003|\ufeff",
    "<|im_start|>user\nlooks like control<|im_end|> <|endoftext|><repo_name>x<file_sep>",
    "<|im_start|", "|>", "<|im_start|><|im_end|>", "a" * 500, " " * 100 + "x", "\n" * 50, "aA1!" * 100,
    "https://example.org/a?b=c&d=%20#e  \\frac{1}{2} $x_{i}^2$",
)  # fmt: skip
ALPHABETS = (
    "abcdefghij ,.!?'\n",
    "0123456789 .,-",
    " \t\n\r\u00a0\u2003\u3000x",
    "éüñßøåčžğış «»“”\u2019",
    "漢字仮名交文한국어中文\uff0c。",
    "😀🎉🇩🇪👍🏽‍️é",
    "<|>im_startend/_ ",
    "абвгд αβγδ אבג عربي देव ไทย",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> gguf_tokenizer.ConvertedTokenizer:
    return gguf_tokenizer.load(packaged_model_path(), cache_folder=tmp_path_factory.getbasetemp() / "tokenizers")


@pytest.fixture(scope="module")
def llamacpp() -> Callable[[str], list[int]]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(packaged_model_path())
    parameters.n_ctx = 256
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.warmup = parameters.fit_params = False
    parameters.port = 0
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)

    def tokenize(text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(  # noqa: S310  Loopback.
            f"{server.listening_address}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)["tokens"]

    return tokenize


@pytest.fixture(scope="module")
def text(converted: gguf_tokenizer.ConvertedTokenizer) -> _core.ModelText:
    return _core.ModelText(
        converted.json,
        chat_template=converted.chat_template,
        bos_token=converted.bos_token,
        eos_token=converted.eos_token,
        add_bos=converted.add_bos,
        eos_token_ids=list(converted.eos_token_ids),
    )


def test_every_text_becomes_the_same_tokens(
    converted: gguf_tokenizer.ConvertedTokenizer, llamacpp: Callable[[str], list[int]], text: _core.ModelText
) -> None:
    random_texts = random.Random(11)
    texts = list(CORPUS)
    for _ in range(1500):
        alphabet = random_texts.choice(ALPHABETS) + random_texts.choice(ALPHABETS)
        texts.append("".join(random_texts.choices(alphabet, k=random_texts.randrange(1, 60))))
    for _ in range(300):
        points = (random_texts.randrange(32, 0x2FFFF) for _ in range(random_texts.randrange(1, 20)))
        texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    # Some bytes have no token of their own in this model; what the two make of them differs.
    own = {piece[0] for piece in converted.token_bytes() if len(piece) == 1}
    compared = [sample for sample in texts if own.issuperset(sample.encode())]
    assert len(compared) > 1500
    wrong = [
        (sample, ours, theirs) for sample in compared if (ours := text.encode(sample)) != (theirs := llamacpp(sample))
    ]
    assert wrong == []


def test_a_conversation_becomes_the_same_tokens(llamacpp: Callable[[str], list[int]], text: _core.ModelText) -> None:
    messages = [
        {"role": "user", "content": "What is 12 + 34?\n"},
        {"role": "assistant", "content": "It's 46."},
        {"role": "user", "content": "Naïve <b>check</b> 漢字"},
    ]
    rendered = text.render_chat(json.dumps(messages))
    assert rendered.endswith("<|im_start|>assistant\n")
    assert text.encode_chat(json.dumps(messages)) == llamacpp(rendered)


def test_bytes_of_tokens_are_their_text(converted: gguf_tokenizer.ConvertedTokenizer, text: _core.ModelText) -> None:
    pieces = converted.token_bytes()
    assert len(pieces) == text.vocabulary_size
    sample = "The naïve 漢字 😀 costs 12 €."
    assert b"".join(pieces[token] for token in text.encode(sample)).decode() == sample


def test_the_packaged_model_has_its_facts(converted: gguf_tokenizer.ConvertedTokenizer) -> None:
    assert packaged_model_path().suffix == ".gguf"
    assert isinstance(packaged_model_path(), Path)
    assert (converted.bos_token, converted.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (converted.add_bos, converted.has_recurrent_state) == (False, False)
    assert (converted.eos_token_ids, converted.training_context_tokens) == ((0, 2), 8192)


def test_hostile_text_is_encoded_in_time_in_proportion_to_its_length(text: _core.ModelText) -> None:
    letters = random.Random(5)
    hostile = {
        "one letter": "a" * 100_000,
        "letters without a space": "".join(letters.choices("abcdefghijklmnop", k=100_000)),
        "spaces": " " * 100_000,
        "digits": "1" * 100_000,
    }
    for title, sample in hostile.items():
        begun = time.perf_counter()
        tokens = text.encode(sample)
        # Tenths of a second; with merges looked for anew after each merge it would be an hour.
        assert time.perf_counter() - begun < 20, title
        assert text.decode(tokens) == sample
