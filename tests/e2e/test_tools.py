"""Tool calls and constrained answers of a real model, by the clients that people have.

The model is small and does not call tools of its own accord; what it is made to call by a schema is what can be shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster

# Twenty requests at once on two slots of a small machine, and the start of the cluster.
pytestmark = pytest.mark.timeout(400)

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "How is the weather in Paris tomorrow?"}]
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "London"]},
        "day": {"$ref": "#/$defs/Day"},
        "celsius": {"type": "boolean"},
    },
    "required": ["city", "day", "celsius"],
    "additionalProperties": False,
    "$defs": {"Day": {"type": "string", "enum": ["today", "tomorrow"]}},
}
SUM_SCHEMA = {
    "type": "object",
    "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 9}, "right": {"enum": [1, 2, 3]}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER_SCHEMA, "add": SUM_SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
OF_MESSAGES = [{"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
OF_RESPONSES = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "add"}}
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}
CONCURRENT = 20


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--workers=1")


def ask(cluster: EmbeddedCluster, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "temperature": 0, **more}
    return cluster.client().chat.completions.create(**asked)


def check(name: str, arguments: str) -> None:
    """Arguments keep to the schema of their tool."""
    value = json.loads(arguments)
    if name == "get_weather":
        assert value.keys() == {"city", "day", "celsius"}
        assert value["city"] in {"Paris", "London"}
        assert value["day"] in {"today", "tomorrow"}
        assert isinstance(value["celsius"], bool)
    else:
        assert name == "add"
        assert value.keys() == {"left", "right"}
        assert 0 <= value["left"] <= 9
        assert value["right"] in {1, 2, 3}


def check_whole(choice: Any) -> None:
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    check(call.function.name, call.function.arguments)


def test_a_call_that_is_required_keeps_to_its_schema_whole_and_streamed(cluster: EmbeddedCluster) -> None:
    whole = ask(cluster, **ONE_CALL).choices[0]
    check_whole(whole)
    name, arguments, ids, reason = "", "", set(), None
    for chunk in ask(cluster, **ONE_CALL, stream=True):
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            ids.update({call.id} - {None})
        assert not choice.delta.content
        reason = choice.finish_reason or reason
    # The same at temperature 0, whichever way it comes.
    said = whole.message.tool_calls[0].function
    assert (said.name, said.arguments, 1, "tool_calls") == (name, arguments, len(ids), reason)


def test_a_named_tool_is_called(cluster: EmbeddedCluster) -> None:
    choice = ask(cluster, tool_choice=NAMED).choices[0]
    check_whole(choice)
    assert choice.message.tool_calls[0].function.name == "add"
    # Cut by the budget it stays as it is: nobody closes its braces.
    cut = ask(cluster, tool_choice=NAMED, max_tokens=4).choices[0]
    assert cut.finish_reason == "length"
    for call in cut.message.tool_calls or []:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)


def test_the_anthropic_client_gets_blocks(cluster: EmbeddedCluster) -> None:
    client = cluster.anthropic_client()
    asked = {"model": MODEL, "max_tokens": 200, "messages": QUESTION, "tools": OF_MESSAGES}
    any_tool = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked, **any_tool)
    with client.messages.stream(**asked, **any_tool) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
        check(block.name, json.dumps(block.input))
    assert whole.content[0].input == streamed.content[0].input
    # What a tool said goes back in the API's own form, and the model goes on.
    turns = [
        *QUESTION,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "Rain."}]},
    ]
    after = client.messages.create(**{**asked, "messages": turns}, tool_choice={"type": "tool", "name": "get_weather"})
    check("get_weather", json.dumps(after.content[0].input))


def test_the_responses_api_gets_items(cluster: EmbeddedCluster) -> None:
    responses = cluster.client().responses
    asked = {"model": MODEL, "input": "How is the weather?", "max_output_tokens": 200, "store": False}
    asked |= {"tools": OF_RESPONSES, "temperature": 0, **ONE_CALL}
    whole = responses.create(**asked)
    with responses.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        (item,) = response.output
        assert (response.status, item.type, item.status) == ("completed", "function_call", "completed")
        check(item.name, item.arguments)
    assert whole.output[0].arguments == streamed.output[0].arguments
    assert "response.function_call_arguments.delta" in events
    assert events[-1] == "response.completed"
    replayed = [
        {"role": "user", "content": "How is the weather?"},
        whole.output[0].model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "Rain."},
    ]
    named = {"tool_choice": {"type": "function", "name": "add"}}
    check("add", responses.create(**{**asked, "input": replayed, **named}).output[0].arguments)


def test_twenty_mixed_constraints_at_once_are_all_kept(cluster: EmbeddedCluster) -> None:
    def required() -> None:
        check_whole(ask(cluster, **ONE_CALL, temperature=1, seed=7).choices[0])

    def named() -> None:
        check_whole(ask(cluster, tool_choice=NAMED, temperature=1).choices[0])

    def schema() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "day", "schema": SUM_SCHEMA, "strict": True}}
        answer = ask(cluster, tools=openai.omit, response_format=form, temperature=1).choices[0]
        assert answer.finish_reason == "stop"
        check("add", answer.message.content)

    def free() -> None:
        answer = ask(cluster, tool_choice="none", max_tokens=8).choices[0]
        assert answer.message.tool_calls is None

    kinds = [required, named, schema, free]
    order = [kinds[number % len(kinds)] for number in range(CONCURRENT)]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for outcome in [pool.submit(one) for one in order + order[::-1]]:
            outcome.result(timeout=300)


def test_white_space_does_not_use_up_the_budget(cluster: EmbeddedCluster) -> None:
    # A model that likes nothing better than blanks.
    biases: dict[str, int] = {}
    with cluster.router() as router:
        for blank in (" ", "\n", "\n\n", "\t"):
            asked = router_pb2.TokenizeRequest(model=MODEL, prompt=router_pb2.Prompt(text=blank))
            biases |= {str(token): 100 for token in router.Tokenize(asked, timeout=10).token_ids}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA, "strict": True}}
    answer = ask(cluster, tools=openai.omit, response_format=form, logit_bias=biases, max_tokens=40).choices[0]
    assert answer.finish_reason == "stop", answer
    check("add", answer.message.content)
    check_whole(ask(cluster, tool_choice=NAMED, logit_bias=biases, max_tokens=60).choices[0])


def test_a_model_whose_template_knows_no_tools_says_so(cluster: EmbeddedCluster) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(cluster)
    assert refused.value.param == "tools.strict"
    lax = [{"type": "function", "function": {"name": "add", "parameters": SUM_SCHEMA}}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(cluster, tools=lax)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    assert "does not show tools" in refused.value.message
    client = cluster.anthropic_client()
    with pytest.raises(anthropic.BadRequestError) as refused_message:
        client.messages.create(model=MODEL, max_tokens=20, messages=QUESTION, tools=OF_MESSAGES)
    assert "does not show tools" in refused_message.value.message
