"""Whether a worker fits its pool revision.

A worker that does not fit is refused loudly: overlap that is silently zero is the commonest fault of such systems.
"""

from dataclasses import dataclass, replace

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.engine.v1.engine_pb2 import ROLE_AGGREGATE, ROLE_DECODE, ROLE_PREFILL, Role, WorkerDescription


@dataclass(frozen=True, slots=True)
class PoolContract:
    """What the workers of one pool revision share.

    Attributes:
        tokenizer_digest: Digest of the tokenizer; none until the resource or the first accepted worker fixed it.
        hash_unit_tokens: Tokens a hash unit; none until fixed.
        template_digest: Digest of the chat template of the first accepted worker; differences are warnings.
    """

    tokenizer_digest: str | None = None
    hash_unit_tokens: int | None = None
    template_digest: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the controller thinks of one start of a worker.

    Attributes:
        incarnation: Which start.
        refused_reason: Empty when it fits.
        warnings: What is odd and not fatal.
    """

    incarnation: int
    refused_reason: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """Whether routers may use it."""
        return not self.refused_reason


def judge(
    description: WorkerDescription, *, spec: WorkerSpec, hash_seed: int, contract: PoolContract
) -> tuple[Verdict, PoolContract]:
    """Compares what a worker says of itself with what its pool revision demands.

    Returns:
        The verdict, and the contract, which the first accepted worker completes.
    """
    reasons = list(_reasons(description, spec=spec, hash_seed=hash_seed, contract=contract))
    if reasons:
        return Verdict(description.incarnation, refused_reason="; ".join(reasons)), contract
    warnings = []
    if contract.template_digest is not None and description.template_digest != contract.template_digest:
        warnings.append(
            f"its chat template ({_short(description.template_digest)}) differs from the pool's "
            f"({_short(contract.template_digest)}); routers render with the pool's"
        )
    if not description.capabilities.kv_events:
        warnings.append("it sends no KV events, so its cache is invisible to routing")
    completed = replace(
        contract,
        tokenizer_digest=_first(contract.tokenizer_digest, description.tokenizer_digest),
        template_digest=_first(contract.template_digest, description.template_digest),
    )
    if completed.hash_unit_tokens is None and description.block_size_tokens:
        completed = replace(completed, hash_unit_tokens=description.block_size_tokens)
    return Verdict(description.incarnation, warnings=tuple(warnings)), completed


def _reasons(description: WorkerDescription, *, spec: WorkerSpec, hash_seed: int, contract: PoolContract) -> list[str]:
    reasons = []
    if description.worker_uid != spec.worker_uid:
        reasons.append(f"it calls itself {description.worker_uid!r}")
    if description.model != spec.model:
        reasons.append(f"it serves model {description.model!r}, the pool serves {spec.model!r}")
    if description.engine != spec.engine:
        reasons.append(f"it runs engine {description.engine!r}, the pool wants {spec.engine!r}")
    if description.pool_revision != spec.pool_revision:
        reasons.append(f"it was started for revision {description.pool_revision!r}, not {spec.pool_revision!r}")
    # A role that is not stated is that of an aggregate.
    wanted, stated = (role or ROLE_AGGREGATE for role in (spec.role, description.role))
    if stated != wanted:
        reasons.append(f"it was started as {Role.Name(stated)}, the pool is {Role.Name(wanted)}")
    if spec.role in {ROLE_PREFILL, ROLE_DECODE} and not description.capabilities.kv_transfer:
        reasons.append("it can hand no KV over, which its pool is for")
    if description.hash_seed != hash_seed:
        reasons.append("its block hashes have another seed than the cluster's")
    if description.incarnation == 0:
        reasons.append("it states no incarnation")
    if contract.tokenizer_digest is not None and description.tokenizer_digest != contract.tokenizer_digest:
        reasons.append(
            f"its tokenizer ({_short(description.tokenizer_digest)}) is not the pool's "
            f"({_short(contract.tokenizer_digest)})"
        )
    if description.capabilities.kv_events and description.block_size_tokens == 0:
        reasons.append("it sends KV events and states no block size")
    unit = contract.hash_unit_tokens
    if unit and description.block_size_tokens % unit:
        reasons.append(
            f"its block size of {description.block_size_tokens} tokens is no multiple of the pool's hash unit of "
            f"{unit} tokens"
        )
    return reasons


def _first(fixed: str | None, stated: str) -> str:
    return stated if fixed is None else fixed


def _short(digest: str) -> str:
    return digest[:12] or "none"
