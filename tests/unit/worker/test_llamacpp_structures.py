"""Structural tags in the words of llama.cpp's grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

from kvist.errors import KvistError
from kvist_worker.engines.llamacpp.structures import structural_grammar

CALL = {"begin": '<call>\n"f": ', "schema": {"type": "object"}, "end": "</call>"}


def tag(**changes: Any) -> str:
    return json.dumps({"structures": [CALL], "triggers": ["<call>"], **changes})


def test_free_text_surrounds_what_follows_a_trigger() -> None:
    other = {"begin": "[x/y]", "schema": {"type": "array"}}
    grammar = structural_grammar(tag(structures=[CALL, other], triggers=["<call>", "[x/y]"]))
    assert grammar.splitlines() == [
        "%llguidance {}",
        "start: ( open0 ( structure0 ) | open1 ( structure1 ) )* OUTSIDE",
        'structure0: "\\n\\"f\\": " schema0 "</call>"',
        'schema0: %json {"type": "object"}',
        "structure1: schema1",
        'schema1: %json {"type": "array"}',
        'open0[suffix="<call>"]: /(.|\\n)*/',
        'open1[suffix="[x/y]"]: /(.|\\n)*/',
        r"OUTSIDE: /(.|\n)*/ & ~/(.|\n)*<call>(.|\n)*/ & ~/(.|\n)*\[x\/y\](.|\n)*/",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must have lists"),
        (tag(triggers=[]), "must have lists"),
        (json.dumps({"type": "structural_tag", "format": {"type": "any_text"}}), "`format` is not supported"),
        (tag(triggers=["<other>"]), "begins with none of the triggers"),
        (tag(triggers=["<call>", "<other>"]), "triggers[1] begins no structure"),
        (tag(structures=[CALL | {"schema": "{}"}]), "structures[0] must have"),
    ],
)
def test_what_is_no_tag_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(KvistError, match="structural_tag") as refused:
        structural_grammar(text)
    assert "INVALID_ARGUMENT" == refused.value.code
    assert why in refused.value.message
