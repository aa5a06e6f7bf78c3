"""Structural tags as a grammar of llama.cpp: free text, in which what follows a trigger keeps to a schema.

The grammar is written for llguidance, which the builds of `xllamacpp` bring: a rule with a suffix ends at the first
trigger, and the text outside may hold none, so that a trigger cannot be written without what has to follow it.
"""

import json
import re
from typing import Any

from kvist.errors import KvistError, invalid_field

_FIELD = "structured_output.structural_tag"
_HEAD = "%llguidance {}\n"


def structural_grammar(text: str) -> str:
    """The grammar of a structural tag `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`.

    Raises:
        KvistError: The tag is none, or is one of the newer kind.
    """
    try:
        tag = json.loads(text)
    except json.JSONDecodeError:
        raise _wrong("is not JSON") from None
    if not isinstance(tag, dict) or not _is_list(tag.get("structures"), dict) or not _is_list(tag.get("triggers"), str):
        raise _wrong("must have lists of structures and of triggers; `format` is not supported by llama.cpp")
    triggers: list[str] = tag["triggers"]
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    rules = []
    for number, structure in enumerate(tag["structures"]):
        begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema")
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise _wrong(f"structures[{number}] must have a begin and an end, which are texts, and a schema")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise _wrong(f"structures[{number}] begins with none of the triggers")
        parts = [_literal(begin.removeprefix(trigger)), f"schema{number}", _literal(end)]
        rules += [f"structure{number}: {' '.join(filter(None, parts))}", f"schema{number}: %json {json.dumps(schema)}"]
        bodies[trigger].append(f"structure{number}")
    starts = []
    for number, (trigger, structures) in enumerate(bodies.items()):
        if not structures:
            raise _wrong(f"triggers[{number}] begins no structure")
        starts.append(f"open{number} ( {' | '.join(structures)} )")
        rules.append(f"open{number}[suffix={json.dumps(trigger)}]: /(.|\\n)*/")
    outside = " & ".join(f"~/(.|\\n)*{_pattern(trigger)}(.|\\n)*/" for trigger in triggers)
    start = f"start: ( {' | '.join(starts)} )* OUTSIDE"
    return _HEAD + "\n".join([start, *rules, f"OUTSIDE: /(.|\\n)*/ & {outside}"]) + "\n"


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) and item for item in value)


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _pattern(text: str) -> str:
    """A regular expression of exactly this text, within slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _wrong(why: str) -> KvistError:
    return invalid_field(_FIELD, why)
