"""What routers are told: models, pools, workers, recent deaths. Pure."""

from collections.abc import Collection, Iterable, Mapping

from google.protobuf import json_format

from kvist.agent.v1.agent_pb2 import WORKER_PHASE_DRAINING, WORKER_PHASE_READY, AttachedEngine
from kvist.controller.v1.controller_pb2 import AttachedEntry, ClusterState, DeadIncarnation, Model, Pool, WorkerEntry
from kvist.router.v1.router_pb2 import TRANSPORT_GRPC, Target
from kvist_controller.hand_over import group_of
from kvist_controller.pools import PoolSpec
from kvist_controller.records import NodeRecord, ServiceRecord, SlotRecord
from kvist_controller.resources import ModelServiceSpec, parse_model_service
from kvist_controller.revision import pool_revision
from kvist_controller.verdict import PoolContract


def pool_uid(service_uid: str, pool: str) -> str:
    """UID of a pool of a model service."""
    return f"{service_uid}-{pool}"


def stored_spec(service: ServiceRecord) -> ModelServiceSpec:
    """The checked specification of a stored resource."""
    return parse_model_service(service.spec, name=service.name)


def is_usable(slot: SlotRecord, dead_incarnations: Mapping[str, int]) -> bool:
    """Whether routers may know the slot's worker."""
    status, verdict = slot.status, slot.verdict
    if status is None or verdict is None or not verdict.is_accepted:
        return False
    incarnation = status.description.incarnation
    return (
        status.phase in {WORKER_PHASE_READY, WORKER_PHASE_DRAINING}
        and bool(status.address)
        and verdict.incarnation == incarnation
        and incarnation > dead_incarnations.get(slot.uid, 0)
    )


def build_cluster_state(
    *,
    cluster: str,
    hash_seed: int,
    services: Iterable[ServiceRecord],
    slots: Iterable[SlotRecord],
    nodes: Mapping[str, NodeRecord],
    attached: Iterable[tuple[str, AttachedEngine]] = (),
    contracts: Mapping[tuple[str, str], PoolContract],
    dead_incarnations: Mapping[str, int],
    silent_workers: Collection[str],
) -> ClusterState:
    """Builds a cluster state without a version. Equal inputs give equal messages, so that nothing is sent twice."""
    state = ClusterState(cluster=cluster, hash_seed=hash_seed)
    for service in sorted(services, key=lambda service: service.name):
        state.models.append(_model(service, contracts))
    for slot in sorted(slots, key=lambda slot: slot.uid):
        if slot.uid not in silent_workers and is_usable(slot, dead_incarnations):
            state.workers.append(_worker(slot, nodes.get(slot.node_uid)))
    for node_uid, engine in sorted(attached, key=lambda item: (item[1].worker_uid, item[0])):
        if node_uid in nodes:
            state.attached.append(
                AttachedEntry(engine=engine, node_uid=node_uid, agent_address=nodes[node_uid].address)
            )
    state.dead_incarnations.extend(
        DeadIncarnation(worker_uid=uid, incarnation=incarnation)
        for uid, incarnation in sorted(dead_incarnations.items())
    )
    return state


def _model(service: ServiceRecord, contracts: Mapping[tuple[str, str], PoolContract]) -> Model:
    spec = stored_spec(service)
    model = Model(
        name=spec.model,
        uid=service.uid,
        aliases=spec.aliases,
        pools=[_pool(service, spec, pool, contracts) for pool in spec.all_pools],
        hand_over=spec.hand_over,
        deleting=service.deleted_at_unix_nanos is not None,
        tool_parser=spec.tool_parser or "",
        reasoning_parser=spec.reasoning_parser or "",
    )
    if spec.routing is not None:
        json_format.ParseDict(spec.routing, model.routing)
    if isinstance(spec.admission, str):
        model.admission.string_value = spec.admission
    elif spec.admission is not None:
        json_format.ParseDict(spec.admission, model.admission.struct_value)
    model.created_at.FromNanoseconds(service.created_at_unix_nanos)
    return model


def _pool(
    service: ServiceRecord,
    spec: ModelServiceSpec,
    pool: PoolSpec,
    contracts: Mapping[tuple[str, str], PoolContract],
) -> Pool:
    uid, revision = pool_uid(service.uid, pool.name), pool_revision(spec, pool)
    contract = contracts.get((uid, revision), PoolContract())
    return Pool(
        uid=uid,
        role=pool.wire_role,
        revision=revision,
        tokenizer_digest=contract.tokenizer_digest or "",
        hash_unit_tokens=contract.hash_unit_tokens or 0,
        replicas=pool.replicas,
        name=pool.name,
    )


def _worker(slot: SlotRecord, node: NodeRecord | None) -> WorkerEntry:
    status = slot.status
    if status is None:
        raise ValueError("a slot that was never heard of is not usable")
    description = status.description
    return WorkerEntry(
        target=Target(
            worker_uid=slot.uid,
            rank=0,
            address=status.address,
            transport=TRANSPORT_GRPC,
            role=slot.spec.role,
            pool_uid=slot.spec.pool_uid,
            pool_revision=slot.spec.pool_revision,
            group=group_of(slot.service_uid, description),
        ),
        model=slot.spec.model,
        incarnation=description.incarnation,
        ranks=max(1, description.ranks),
        block_size_tokens=description.block_size_tokens,
        draining=slot.is_draining or status.phase == WORKER_PHASE_DRAINING or description.draining,
        node_uid=slot.node_uid,
        agent_address="" if node is None else node.address,
        namespace=description.namespace,
    )
