"""The gRPC face of the controller."""
# ruff: noqa: ARG002, N802  Generated signatures.

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvist import join_token
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceServicer
from kvist.errors import InvalidRequestError, NotFoundError, invalid, invalid_field, rpc_errors
from kvist.telemetry import logger
from kvist_controller.agent_session import AgentSession
from kvist_controller.control import not_leading
from kvist_controller.instance import PASSED_ON, Instance
from kvist_controller.plain import from_struct, to_struct
from kvist_controller.records import ServiceRecord
from kvist_controller.resources import (
    API_VERSION,
    INVALID_MANIFEST,
    KINDS,
    MODEL_SERVICE_KIND,
    check_identity,
    parse_model_service,
)
from kvist_controller.settings import RegistrySettings

DEFAULT_PAGE_SIZE = 100
LARGEST_PAGE_SIZE = 1_000
PASS_ON_TIME_LIMIT_SECONDS = 10.0

_log = logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class ControllerService(ControllerServiceServicer):
    """Serves reads, registration and cluster state in every controller, and passes on what only the leader does."""

    def __init__(self, instance: Instance, registry: RegistrySettings) -> None:
        self._instance = instance
        self._registry = registry

    def _require_knowledge(self) -> None:
        if self._instance.leading is None and not self._instance.follower.has_read:
            raise not_leading()

    # Resources.

    async def Apply(self, request: pb.ApplyRequest, context: _Context) -> pb.ApplyResponse:
        """Creates or changes a resource."""
        controller = self._instance.leading
        if controller is None:
            applied: pb.ApplyResponse = await self._ask_leader("Apply", request, context)
            return applied
        resource = request.resource
        name = resource.metadata.name
        violations = check_identity(api_version=resource.api_version, kind=resource.kind, name=name)
        spec = None
        try:
            spec = parse_model_service(from_struct(resource.spec), name=name)
        except InvalidRequestError as failure:
            violations += failure.fields
        if violations or spec is None:
            raise invalid(violations, code=INVALID_MANIFEST)
        service, is_created = await controller.apply(
            name,
            spec,
            labels=dict(resource.metadata.labels),
            annotations=dict(resource.metadata.annotations),
            resource_version=resource.metadata.resource_version,
            validate_only=request.validate_only,
        )
        result = {
            None: pb.APPLY_RESULT_UNCHANGED,
            True: pb.APPLY_RESULT_CREATED,
            False: pb.APPLY_RESULT_CONFIGURED,
        }[is_created]
        return pb.ApplyResponse(resource=to_resource(service), result=result)

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.GetResponse:
        """One resource."""
        _check_kind(request.kind)
        self._require_knowledge()
        service = self._instance.services.get(request.name)
        if service is None:
            raise NotFoundError(f"there is no {request.kind} {request.name!r}")
        return pb.GetResponse(resource=to_resource(service))

    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListResponse:
        """Resources of a kind, by page; the token is the last name of the page before."""
        _check_kind(request.kind)
        if request.page_size > LARGEST_PAGE_SIZE:
            raise invalid_field("page_size", f"must be at most {LARGEST_PAGE_SIZE}")
        size = request.page_size or DEFAULT_PAGE_SIZE
        self._require_knowledge()
        present = self._instance.services
        names = sorted(name for name in present if name > request.page_token)
        services = [present[name] for name in names[:size]]
        return pb.ListResponse(
            resources=[to_resource(service) for service in services],
            next_page_token=names[size - 1] if len(names) > size else "",
        )

    async def Delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteResponse:
        """Marks a resource for deletion."""
        _check_kind(request.kind)
        controller = self._instance.leading
        if controller is None:
            deleted: pb.DeleteResponse = await self._ask_leader("Delete", request, context)
            return deleted
        return pb.DeleteResponse(resource=to_resource(await controller.delete(request.name)))

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        """Resources at once, then what is different after each change. A slow reader sees the last of many changes."""
        _check_kind(request.kind)
        self._require_knowledge()
        seen: dict[str, ServiceRecord] = {}
        is_synced = False
        while True:
            # The leader's memory, or what the store says; another one after each change of the leader.
            source = self._instance.resources
            number = source.resource_changes.number
            present = dict(source.services)
            for name in sorted(seen.keys() - present.keys()):
                gone = to_resource(seen[name])
                yield pb.WatchResponse(type=pb.WATCH_EVENT_TYPE_DELETED, resource=gone)
            for name, service in sorted(present.items()):
                last = seen.get(name)
                if last is not None and last.uid != service.uid:
                    yield pb.WatchResponse(type=pb.WATCH_EVENT_TYPE_DELETED, resource=to_resource(last))
                if last != service:
                    yield pb.WatchResponse(type=pb.WATCH_EVENT_TYPE_APPLIED, resource=to_resource(service))
            seen = present
            if not is_synced:
                is_synced = True
                yield pb.WatchResponse(type=pb.WATCH_EVENT_TYPE_SYNCED)
            await source.resource_changes.after(number)

    # Agents.

    async def Register(  # type: ignore[override]  # It writes to its context.
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: _Context
    ) -> None:
        """An agent's session, whoever leads."""
        join_token.check(self._instance.join_token_file, context.invocation_metadata() or ())
        if self._instance.leading is None:
            _refuse_circles(context)
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid_field("hello", "must be the first message")
        node_uid = first.hello.inventory.node_uid
        if not node_uid:
            raise invalid_field("hello.inventory.node_uid", "is required")
        _log.info("agent_registered", node_uid=node_uid, workers=len(first.hello.workers))
        try:
            await AgentSession(self._instance, first.hello, context, self._registry).run(request_iterator)
        finally:
            _log.info("agent_session_ended", node_uid=node_uid)

    async def ListNodes(self, request: pb.ListNodesRequest, context: _Context) -> pb.ListNodesResponse:
        """Nodes and workers as the leader's registry knows them."""
        controller = self._instance.leading
        if controller is None:
            listed: pb.ListNodesResponse = await self._ask_leader("ListNodes", request, context)
            return listed
        return pb.ListNodesResponse(nodes=controller.node_entries())

    # Routers and KV masters.

    async def WatchCluster(
        self, request: pb.WatchClusterRequest, context: _Context
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        """The cluster state, then each new one, whoever leads. A slow reader sees the last of many."""
        if not self._instance.follower.has_read and self._instance.leading is None:
            raise not_leading()
        published = self._instance.published
        pulse_seconds = request.pulse_interval.ToNanoseconds() / 1e9 if request.HasField("pulse_interval") else None
        # Said with the first word: a subscriber whose connection is cut right after it knows what it misses.
        pulses = pulse_seconds is not None
        sent = request.known_version
        if sent == published.state.version:
            # Without a state: it says that the stream is open and the known version is the present one.
            yield pb.WatchClusterResponse(pulse=pulses)
        while True:
            number = published.changes.number
            state = published.state
            if state.HasField("version") and state.version != sent:
                sent = state.version
                yield pb.WatchClusterResponse(state=state, pulse=pulses)
            try:
                async with asyncio.timeout(None if pulse_seconds is None else max(0.05, pulse_seconds)):
                    await published.changes.after(number)
            except TimeoutError:
                yield pb.WatchClusterResponse(pulse=True)

    async def _ask_leader(self, method: str, request: Any, context: _Context) -> Any:
        """Passes a call on to the controller that leads."""
        _refuse_circles(context)
        remaining_seconds = context.time_remaining() or PASS_ON_TIME_LIMIT_SECONDS
        with rpc_errors():
            stub = await self._instance.leader_stub()
            return await getattr(stub, method)(
                request, timeout=min(remaining_seconds, PASS_ON_TIME_LIMIT_SECONDS), metadata=((PASSED_ON, "1"),)
            )


def _refuse_circles(context: _Context) -> None:
    """Refuses what was passed on by a controller that takes this one for the leader, which it is not yet or no more."""
    if any(key == PASSED_ON for key, _ in context.invocation_metadata() or ()):
        raise not_leading()


def to_resource(service: ServiceRecord) -> pb.Resource:
    """A stored resource as people see it."""
    resource = pb.Resource(
        api_version=API_VERSION,
        kind=MODEL_SERVICE_KIND,
        metadata=pb.Metadata(
            name=service.name,
            uid=service.uid,
            generation=service.generation,
            resource_version=str(service.resource_version),
            labels=dict(service.labels),
            annotations=dict(service.annotations),
        ),
        spec=to_struct(service.spec),
        status=to_struct(service.status),
    )
    resource.metadata.created_at.FromNanoseconds(service.created_at_unix_nanos)
    if service.deleted_at_unix_nanos is not None:
        resource.metadata.deleted_at.FromNanoseconds(service.deleted_at_unix_nanos)
    return resource


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise invalid_field("kind", f"unknown kind; known: {', '.join(KINDS)}")
