"""Chat templates of nine families of models, rendered by the core and by Jinja2 as Hugging Face sets it up."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from kvist import _core
from kvist.errors import from_core
from support.chat_templates import DIGESTS, ChatTemplate, TemplatesMissingError, fetch

pytestmark = pytest.mark.integration

# A tokenizer with no control tokens at all: rendering alone is compared.
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
).encode()

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, “now”.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name <of> the city & more"},
                "days": {"type": "integer", "description": "How many", "default": 1},
            },
            "required": ["city"],
        },
        # Command R's template wants its own form beside the common one.
        "parameter_definitions": {},
    },
    "name": "get_weather",
    "description": "Weather",
    "parameter_definitions": {"city": {"type": "str", "description": "Name", "required": True}},
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Malmö", "days": 2, "deep": {"a": [1.5, True, None]}}},
}
USER = {"role": "user", "content": "What's the weather in Malmö?\n\n<b>Now</b>  "}
SYSTEM = {"role": "system", "content": "Be brief. 'Quote' \"this\" \\ {{ not_a_variable }}"}
ANSWER = {"role": "assistant", "content": "Rain."}
THOUGHT = {"role": "assistant", "content": "Rain.", "reasoning_content": "It is in Sweden.\n"}
INLINE = {"role": "assistant", "content": "<think>\nIt is in Sweden.\n</think>\n\nRain."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"rain": true}'}
LISTED = {"role": "user", "content": [{"type": "text", "text": "In parts."}]}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "a system prompt": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER],
    "thoughts of the past": [USER, THOUGHT, USER],
    "thoughts within the text": [USER, INLINE, USER],
    "a call and its result": [USER, CALLING, RESULT],
    "two results": [SYSTEM, USER, CALLING, RESULT, RESULT],
    "a call among turns": [USER, CALLING, RESULT, ANSWER, USER],
    "parts of content": [LISTED],
    "turns out of order": [ANSWER, USER, USER],
    "an unknown role": [{"role": "alien", "content": "x"}],
    "nothing": [],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "date_string": "26 Jul 2024"},
]


# Families whose template writes calls only of messages without content, with arguments as text: the core sees to it.
TEXT_OF_CALLS = {"deepseek_v3"}


class TemplateRefusedError(Exception):
    """`raise_exception` was called."""


def hugging_face(template: ChatTemplate) -> Callable[..., str]:
    """Renders as `apply_chat_template` of transformers does."""

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    def raise_exception(message: str) -> None:
        raise TemplateRefusedError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now(UTC).strftime(layout)
    compiled = environment.from_string(template.source)
    return lambda **variables: compiled.render(
        bos_token=template.bos_token, eos_token=template.eos_token, documents=None, **variables
    )


def smollm2(folder: Path) -> dict[str, ChatTemplate]:
    """The template within the model file that the tests of the engine use."""
    gguf_tokenizer = pytest.importorskip("kvist_worker.gguf_tokenizer")
    llamacpp = pytest.importorskip("kvist_worker.engines.llamacpp.model")
    converted = gguf_tokenizer.load(llamacpp.packaged_model_path(), cache_folder=folder)
    return {"default": ChatTemplate(converted.chat_template, converted.bos_token, converted.eos_token)}


def templates_of(family: str, folder: Path) -> dict[str, ChatTemplate]:
    if family == "smollm2":
        return smollm2(folder)
    try:
        return fetch(family)
    except TemplatesMissingError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("family", [*DIGESTS, "smollm2"])
def test_a_template_renders_as_jinja_renders_it(family: str, tmp_path: Path) -> None:
    compared = refused = 0
    for name, template in templates_of(family, tmp_path).items():
        text = _core.ModelText(
            TOKENIZER, chat_template=template.source, bos_token=template.bos_token, eos_token=template.eos_token
        )
        oracle = hugging_face(template)
        for title, messages in CONVERSATIONS.items():
            wanted = [with_text_of_calls(message) for message in messages] if family in TEXT_OF_CALLS else messages
            for tools in ([], [WEATHER], [WEATHER, WEATHER]):
                for variables in VARIABLES:
                    for opens in (True, False):
                        place = f"{family}/{name}: {title}, {len(tools)} tools, {variables}, {opens}"
                        expected = expected_of(oracle, wanted, tools, variables, opens)
                        if isinstance(expected, TemplateRefusedError):
                            with pytest.raises(_core.CoreError) as caught:
                                render(text, messages, tools, variables, opens)
                            assert str(expected) in from_core(caught.value).message, place
                            refused += 1
                            continue
                        if expected is None:
                            # What Jinja2 cannot do either is nobody's promise; it must be refused or rendered, and not
                            # end the process.
                            assert refusal_of(text, messages, tools, variables, opens) in {None, "TEMPLATE_FAILED"}
                            continue
                        rendered = render(text, messages, tools, variables, opens)
                        if rendered != expected:
                            # Some write the date, which may have changed in between.
                            expected = expected_of(oracle, wanted, tools, variables, opens)
                        assert rendered == expected, place
                        compared += 1
    assert compared > 50, f"{compared} compared, {refused} refused"


def render(text: _core.ModelText, messages: list[Any], tools: list[Any], variables: dict[str, Any], opens: bool) -> str:
    return text.render_chat(
        json.dumps(messages),
        tools_json=json.dumps(tools),
        variables_json=json.dumps(variables),
        add_generation_prompt=opens,
    )


def with_text_of_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def expected_of(
    oracle: Callable[..., str], messages: list[Any], tools: list[Any], variables: dict[str, Any], opens: bool
) -> str | TemplateRefusedError | None:
    """What Jinja2 makes of a conversation: a text, the template's refusal, or nothing where it fails itself."""
    try:
        return oracle(messages=messages, tools=tools or None, add_generation_prompt=opens, **variables)
    except TemplateRefusedError as refusal:
        return refusal
    except (jinja2.TemplateError, TypeError):
        return None


def refusal_of(
    text: _core.ModelText, messages: list[Any], tools: list[Any], variables: dict[str, Any], opens: bool
) -> str | None:
    try:
        render(text, messages, tools, variables, opens)
    except _core.CoreError as refusal:
        return from_core(refusal).code
    return None


def test_templates_refuse_with_their_own_words(tmp_path: Path) -> None:
    """At least one template of the corpus raises, so that the comparison above says something of errors."""
    template = templates_of("gemma3", tmp_path)["default"]
    text = _core.ModelText(TOKENIZER, chat_template=template.source)
    with pytest.raises(_core.CoreError) as caught:
        render(text, CONVERSATIONS["turns out of order"], [], {}, True)
    assert from_core(caught.value).code == "TEMPLATE_FAILED"
    assert "Conversation roles must alternate user/assistant" in from_core(caught.value).message
