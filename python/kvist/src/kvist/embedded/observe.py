"""What an embedded cluster says of itself, asked of the controller and the router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvist.agent.v1.agent_pb2 import WorkerStatus
from kvist.controller.v1.controller_pb2 import ListNodesRequest, ListRequest, NodeEntry, Resource
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT
from kvist.grpc import open_channel
from kvist.router.v1.router_pb2 import (
    ListModelsRequest,
    ListSourcesRequest,
    ListTargetsRequest,
    ModelSummary,
    SourceStatus,
    TargetStatus,
)
from kvist.router.v1.router_pb2_grpc import RouterServiceStub

ASK_TIME_LIMIT_SECONDS = 2.0
# Looking every half second is no work that anybody wants to see in a trace: the parent says that it is not sampled.
NOT_TRACED = (("traceparent", f"00-{'1' * 32}-{'1' * 16}-00"),)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a cluster. What could not be asked is empty, and its process is named as silent.

    Attributes:
        services: Model services.
        nodes: Nodes with their workers.
        models: What the router serves, and whether it knows their caches.
        targets: What the router may choose.
        sources: What the router's index knows.
        silent: Processes that did not answer.
    """

    services: tuple[Resource, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()
    models: tuple[ModelSummary, ...] = ()
    targets: tuple[TargetStatus, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def workers(self) -> list[WorkerStatus]:
        """All worker slots of all nodes."""
        return [worker for node in self.nodes for worker in node.workers]

    def usable_targets(self, model: str) -> list[TargetStatus]:
        """Targets of a model that the router would choose from."""
        return [target for target in self.targets if target.model == model and not target.excluded_reason]

    def exact_sources(self) -> set[str]:
        """UIDs of workers whose cache the router knows exactly."""
        return {source.source.worker_uid for source in self.sources if source.state == SOURCE_STATE_EXACT}


class Observer:
    """Looks at a cluster again and again over the same channels."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        controller = await self._stack.enter_async_context(open_channel(self._addresses["controller"], retries=False))
        router = await self._stack.enter_async_context(open_channel(self._addresses["router"], retries=False))
        self._controller = ControllerServiceStub(controller)
        self._router = RouterServiceStub(router)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def look(self) -> Observation:
        """Asks both processes at once; none is waited for longer than the time limit."""
        limit = ASK_TIME_LIMIT_SECONDS
        services, nodes, models, targets, sources = await asyncio.gather(
            _answer(self._controller.List(ListRequest(kind="ModelService"), timeout=limit, metadata=NOT_TRACED)),
            _answer(self._controller.ListNodes(ListNodesRequest(), timeout=limit, metadata=NOT_TRACED)),
            _answer(self._router.ListModels(ListModelsRequest(), timeout=limit, metadata=NOT_TRACED)),
            _answer(self._router.ListTargets(ListTargetsRequest(), timeout=limit, metadata=NOT_TRACED)),
            _answer(self._router.ListSources(ListSourcesRequest(), timeout=limit, metadata=NOT_TRACED)),
        )
        silent = []
        if services is None or nodes is None:
            silent.append("controller")
        if models is None or targets is None or sources is None:
            silent.append("router")
        return Observation(
            services=tuple(services.resources) if services else (),
            nodes=tuple(nodes.nodes) if nodes else (),
            models=tuple(models.models) if models else (),
            targets=tuple(targets.targets) if targets else (),
            sources=tuple(sources.sources) if sources else (),
            silent=tuple(silent),
        )


async def _answer(call: Awaitable[_T]) -> _T | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
