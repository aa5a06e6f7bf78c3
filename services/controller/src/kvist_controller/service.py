"""The gRPC face of the controller."""
# ruff: noqa: ARG002, N802  Generated signatures.

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceServicer
from kvist.errors import InvalidRequestError, invalid, invalid_field
from kvist.telemetry import logger
from kvist_controller.control import Controller, not_leading
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

_log = logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class ControllerService(ControllerServiceServicer):
    """Serves resources, registration and cluster state of the controller that leads."""

    def __init__(self, leading: Callable[[], Controller | None], registry: RegistrySettings) -> None:
        self._leading = leading
        self._registry = registry

    # Resources.

    async def Apply(self, request: pb.ApplyRequest, context: _Context) -> pb.ApplyResponse:
        """Creates or changes a resource."""
        controller = self._controller()
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
        return pb.GetResponse(resource=to_resource(self._controller().service(request.name)))

    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListResponse:
        """Resources of a kind, by page; the token is the last name of the page before."""
        _check_kind(request.kind)
        if request.page_size > LARGEST_PAGE_SIZE:
            raise invalid_field("page_size", f"must be at most {LARGEST_PAGE_SIZE}")
        size = request.page_size or DEFAULT_PAGE_SIZE
        names = sorted(name for name in self._controller().services if name > request.page_token)
        services = [self._controller().services[name] for name in names[:size]]
        return pb.ListResponse(
            resources=[to_resource(service) for service in services],
            next_page_token=names[size - 1] if len(names) > size else "",
        )

    async def Delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteResponse:
        """Marks a resource for deletion."""
        _check_kind(request.kind)
        return pb.DeleteResponse(resource=to_resource(await self._controller().delete(request.name)))

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        """Resources at once, then what is different after each change. A slow reader sees the last of many changes."""
        _check_kind(request.kind)
        controller = self._controller()
        seen: dict[str, ServiceRecord] = {}
        is_synced = False
        while True:
            number = controller.resource_changes.number
            present = dict(controller.services)
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
            await controller.resource_changes.after(number)

    # Agents.

    async def Register(  # type: ignore[override]  # It writes to its context.
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: _Context
    ) -> None:
        """An agent's session."""
        controller = self._controller()
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid_field("hello", "must be the first message")
        node_uid = first.hello.inventory.node_uid
        if not node_uid:
            raise invalid_field("hello.inventory.node_uid", "is required")
        _log.info("agent_registered", node_uid=node_uid, workers=len(first.hello.workers))
        welcome = pb.RegisterWelcome(cluster=controller.cluster, hash_seed=controller.hash_seed)
        welcome.lease_duration.FromNanoseconds(int(self._registry.lease_seconds * 1e9))
        welcome.heartbeat_interval.FromNanoseconds(int(self._registry.heartbeat_interval_seconds * 1e9))
        await context.write(pb.RegisterResponse(welcome=welcome))
        controller.hello(first.hello)
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(_send_orders(controller, node_uid, context))
            async for request in request_iterator:
                if request.WhichOneof("message") == "heartbeat":
                    beat = request.heartbeat
                    load = beat.load if beat.HasField("load") else None
                    controller.heartbeat(node_uid, beat.workers, attached=beat.attached, load=load)
            sender.cancel()
        _log.info("agent_session_ended", node_uid=node_uid)

    async def ListNodes(self, request: pb.ListNodesRequest, context: _Context) -> pb.ListNodesResponse:
        """Nodes and workers as the registry knows them."""
        return pb.ListNodesResponse(nodes=self._controller().node_entries())

    # Routers and KV masters.

    async def WatchCluster(
        self, request: pb.WatchClusterRequest, context: _Context
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        """The cluster state, then each new one. A slow reader sees the last of many."""
        controller = self._controller()
        sent = request.known_version
        if sent == controller.cluster_state.version:
            # Without a state: it says that the stream is open and the known version is the present one.
            yield pb.WatchClusterResponse()
        while True:
            number = controller.state_changes.number
            state = controller.cluster_state
            if state.HasField("version") and state.version != sent:
                sent = state.version
                yield pb.WatchClusterResponse(state=state)
            await controller.state_changes.after(number)

    def _controller(self) -> Controller:
        controller = self._leading()
        if controller is None:
            raise not_leading()
        return controller


async def _send_orders(controller: Controller, node_uid: str, context: _Context) -> None:
    """Sends assignment and verdicts whenever they differ from what was sent."""
    sent_number = 0
    sent_verdicts: list[pb.WorkerVerdict] = []
    while True:
        number = controller.order_changes.number
        orders = controller.orders(node_uid)
        # Number 0: the node was not reconciled yet, and an empty assignment would end its workers.
        if orders.number > sent_number:
            sent_number = orders.number
            assignment = pb.Assignment(assignment_number=orders.number, fence=controller.fence, workers=orders.workers)
            await context.write(pb.RegisterResponse(assignment=assignment))
        verdicts = controller.verdicts(node_uid)
        if verdicts != sent_verdicts:
            sent_verdicts = verdicts
            await context.write(pb.RegisterResponse(verdicts=pb.WorkerVerdicts(verdicts=verdicts)))
        await controller.order_changes.after(number)


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
