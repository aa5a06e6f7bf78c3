"""`kvist chat`: talk to a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvist.cli.connection import (
    CALL_TIME_LIMIT_SECONDS,
    EXIT_NETWORK,
    EXIT_NOT_FOUND,
    RouterEndpoint,
    fail,
    router_stub,
)
from kvist.router.v1 import router_pb2
from kvist.router.v1.router_pb2_grpc import RouterServiceStub

ANSWER_TIME_LIMIT_SECONDS = 600.0
PROMPT = "> "


def chat(
    text: Annotated[str | None, typer.Argument(help="what to say; without it, a conversation line by line")] = None,
    *,
    model: Annotated[str, typer.Option(help="by default the first that is served")] = "",
    system: Annotated[str, typer.Option(help="a system message before everything")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    endpoint: RouterEndpoint = None,
) -> None:
    """Say something to a model and stream its answer."""
    with router_stub(endpoint) as router:
        request = router_pb2.GenerateRequest(model=model or first_model(router))
        request.stop.max_tokens = max_tokens
        request.sampling.temperature = temperature
        messages = request.prompt.chat.messages
        if system:
            messages.add(role="system", content=system)
        if text is not None:
            messages.add(role="user", content=text)
            answer(router, request)
            return
        while (line := read_line()) is not None:
            if not line.strip():
                continue
            messages.add(role="user", content=line)
            messages.add(role="assistant", content=answer(router, request))


def first_model(router: RouterServiceStub) -> str:
    """A model that is served; ends the command when there is none."""
    response = router.ListModels(router_pb2.ListModelsRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    for model in response.models:
        if model.ready_targets:
            return model.name
    raise fail("no model is served", "look at `kvist get modelservices`", EXIT_NOT_FOUND)


def read_line() -> str | None:
    """The next line of the conversation; none at its end."""
    if sys.stdin.isatty():
        typer.echo(PROMPT, nl=False, err=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def answer(router: RouterServiceStub, request: router_pb2.GenerateRequest) -> str:
    """Streams one answer to stdout, its figures to stderr, and returns it."""
    parts: list[str] = []
    finished: router_pb2.GenerateFinished | None = None
    request_id = ""
    for response in router.Generate(request, timeout=ANSWER_TIME_LIMIT_SECONDS):
        # The first response names the request.
        request_id = request_id or response.request_id
        parts.append(response.delta.text)
        typer.echo(response.delta.text, nl=False)
        if response.HasField("finished"):
            finished = response.finished
    typer.echo("")
    if finished is None:
        raise fail("the answer was cut", "", EXIT_NETWORK)
    usage = finished.usage
    typer.echo(
        f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {usage.completion_tokens} generated; "
        f"request {request_id}]",
        err=True,
    )
    return "".join(parts)
