"""Resources as people write them: checked, defaulted, and refused with the path of each wrong field."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from kvist import _core
from kvist.engine.v1.engine_pb2 import HandOver
from kvist.errors import FieldViolation, from_core, invalid
from kvist_controller.pools import MAX_POOLS, MAX_REPLICAS, KvTransferSpec, PoolSpec, problems
from kvist_controller.section import DurationSeconds, Section, seconds_to_text

API_VERSION = "kvist.dev/v1alpha1"
MODEL_SERVICE_KIND = "ModelService"
KINDS = (MODEL_SERVICE_KIND,)
INVALID_MANIFEST = "INVALID_MANIFEST"
NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

# Below this likeness a suggestion confuses more than it helps.
_SUGGESTION_CUTOFF = 0.6


# What clients say; no white space and no control characters, since it travels in headers, logs and metrics.
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$")]


# Families of `crates/text/src/parse/family.rs`.
ToolParser = Literal[
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "gpt_oss",
    "kimi_k2",
    "granite",
    "qwen3_coder",
    "glm",
    "pythonic",
]
ReasoningParser = Literal["none", "qwen3", "deepseek_r1", "mistral", "gpt_oss", "kimi", "seed_oss"]


class EngineSpec(Section):
    """Which engine computes, and its arguments."""

    name: Literal["attached", "llamacpp", "sim", "vllm"]
    # Checked by the engine adapter at its start: the controller knows no engine's arguments.
    arguments: dict[str, Any] = Field(default_factory=dict)


class ModelServiceSpec(Section):
    """What a model service shall be."""

    model: ModelName
    engine: EngineSpec
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    aliases: tuple[ModelName, ...] = ()
    role: Literal["aggregate"] = "aggregate"
    pools: Annotated[tuple[PoolSpec, ...], Field(max_length=MAX_POOLS)] = ()
    """None: one pool of the role above with the replicas above."""
    kv_transfer: KvTransferSpec | None = None
    drain_timeout: DurationSeconds = 30.0
    startup_timeout: Annotated[DurationSeconds, Field(gt=0)] = 600.0
    tokenizer_digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    hash_unit_tokens: Annotated[int, Field(ge=1, le=65_536)] | None = None
    # Routers read both; the core says here already what they would refuse.
    routing: dict[str, Any] | None = None
    admission: str | dict[str, Any] | None = None
    tool_parser: ToolParser | None = None
    """How the model writes tool calls; by its chat template when absent."""
    reasoning_parser: ReasoningParser | None = None
    """How the model marks its thoughts; by its chat template when absent."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [self.model, *self.aliases]
        if len(set(names)) != len(names):
            raise ValueError("a name is given more than once")
        return self

    @model_validator(mode="after")
    def _replicas_are_said_once(self) -> Self:
        if self.pools and self.replicas != 1:
            raise ValueError("replicas are those of each pool where there are pools")
        return self

    @property
    def all_pools(self) -> tuple[PoolSpec, ...]:
        """The pools, the one that nobody wrote included."""
        return self.pools or (PoolSpec(name=self.role, role=self.role, replicas=self.replicas),)

    @property
    def total_replicas(self) -> int:
        """Replicas of all pools."""
        return sum(pool.replicas for pool in self.all_pools)

    def arguments_of(self, pool: PoolSpec) -> Mapping[str, Any]:
        """What the engines of a pool are started with."""
        return self.engine.arguments if pool.engine_args is None else pool.engine_args

    @property
    def hand_over(self) -> HandOver | None:
        """How KV is handed over; none where it is not."""
        return None if self.kv_transfer is None else self.kv_transfer.to_wire()

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names that clients may say."""
        return (self.model, *self.aliases)

    def to_plain(self) -> dict[str, Any]:
        """The specification with all defaults, as it is stored and shown."""
        plain = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        plain["drainTimeout"] = seconds_to_text(self.drain_timeout)
        plain["startupTimeout"] = seconds_to_text(self.startup_timeout)
        if not self.pools:
            del plain["pools"]
        if self.kv_transfer is not None:
            plain["kvTransfer"]["lease"] = seconds_to_text(self.kv_transfer.lease)
        return plain


def check_identity(*, api_version: str, kind: str, name: str) -> list[FieldViolation]:
    """Checks what every resource has."""
    violations = []
    if api_version != API_VERSION:
        violations.append(FieldViolation("apiVersion", f"must be {API_VERSION}"))
    if kind not in KINDS:
        violations.append(FieldViolation("kind", f"unknown kind{_suggestion(kind, KINDS)}; known: {', '.join(KINDS)}"))
    if NAME_PATTERN.fullmatch(name) is None:
        violations.append(
            FieldViolation(
                "metadata.name",
                "must be 1 to 63 lower-case letters, digits or '-', and begin and end with a letter or digit",
            )
        )
    return violations


def parse_model_service(spec: Mapping[str, Any], *, name: str) -> ModelServiceSpec:
    """Checks the specification of a `ModelService`.

    Args:
        spec: As written.
        name: Name of the resource; the served name unless `spec.model` says another.

    Raises:
        InvalidRequestError: INVALID_MANIFEST, with every wrong field.
    """
    defaulted = {"model": name, **spec} if isinstance(spec, Mapping) else spec
    violations = [*_policy_violations(defaulted)] if isinstance(defaulted, Mapping) else []
    try:
        checked = ModelServiceSpec.model_validate(defaulted)
    except ValidationError as error:
        violations += [_violation(dict(one), ModelServiceSpec) for one in error.errors()]
        raise invalid(violations, code=INVALID_MANIFEST) from None
    violations += [
        FieldViolation(f"spec.{field}", why)
        for field, why in problems(
            checked.pools, checked.kv_transfer, engine=checked.engine.name, arguments=checked.engine.arguments
        )
    ]
    if violations:
        raise invalid(violations, code=INVALID_MANIFEST)
    return checked


def _policy_violations(spec: Mapping[str, Any]) -> Iterator[FieldViolation]:
    """What the data plane would refuse."""
    for field, check in (("routing", _core.check_routing), ("admission", _core.check_admission)):
        value = spec.get(field)
        if not isinstance(value, str | dict) or (field == "routing" and isinstance(value, str)):
            # Absent, or of a type that the specification refuses by itself.
            continue
        try:
            check(json.dumps(value))
        except _core.CoreError as error:
            for violation in from_core(error).fields:
                yield FieldViolation(f"spec.{violation.field}", violation.description)
        except TypeError as error:
            yield FieldViolation(f"spec.{field}", str(error))


def _violation(error: dict[str, Any], model: type[BaseModel]) -> FieldViolation:
    path = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            known = _known_fields(model, error["loc"][:-1])
            unknown = str(error["loc"][-1])
            return FieldViolation(path, f"unknown field{_suggestion(unknown, known)}; known: {', '.join(known)}")
        case "missing":
            return FieldViolation(path, "is required")
        case "literal_error":
            expected = str(error["ctx"]["expected"])
            choices = tuple(re.findall(r"'([^']*)'", expected))
            return FieldViolation(
                path, f"must be one of {', '.join(choices)}{_suggestion(str(error['input']), choices)}"
            )
        case "value_error":
            return FieldViolation(path, str(error["ctx"]["error"]))
        case _:
            return FieldViolation(path, error["msg"][:1].lower() + error["msg"][1:])


def _path(location: tuple[int | str, ...]) -> str:
    path = "spec"
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def _known_fields(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The fields that the section at a location has."""
    section: Any = model
    for part in location:
        fields = {field.alias or name: field.annotation for name, field in section.model_fields.items()}
        section = fields.get(str(part))
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ()
    return tuple(sorted(field.alias or name for name, field in section.model_fields.items()))


def _suggestion(word: str, choices: tuple[str, ...]) -> str:
    by_folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower().replace("_", ""), by_folded, n=1, cutoff=_SUGGESTION_CUTOFF)
    return f", did you mean {by_folded[close[0]]!r}?" if close else ""
