"""Settings of a process: defaults, then a file, then the environment, then flags; each value knows its origin.

A process defines one subclass of `Settings` and calls `load`. All problems are reported at once, each with the path of
the setting and where the wrong value came from. Variables are named `KVIST__SECTION__KEY`; one that names no setting is
refused, as an unknown key of the file is.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

ENVIRONMENT_PREFIX = "KVIST__"
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


class Settings(BaseModel):
    """Base of all settings classes and of their sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class TelemetrySettings(Settings):
    """What a process tells about itself. Tracing follows the standard `OTEL_*` variables."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console when stderr is a terminal, else JSON."""
    admin_listen: str = "127.0.0.1:0"
    """`host:port` of /metrics, /livez and /readyz; port 0 takes a free one."""

    @field_validator("admin_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        split_address(value)
        return value


class DoorSettings(Settings):
    """TLS of a process's gRPC server, and who is let in. docs/guides/certificates.md shows them in use."""

    tls_certificate_file: Path | None = None
    """PEM chain of the server's certificate; the process shows it to the servers that it calls as well."""
    tls_key_file: Path | None = None
    """PEM key of the certificate."""
    tls_client_ca_file: Path | None = None
    """PEM of the authorities whose clients are let in; without it no client certificate is asked for."""
    tls_role_uri: str = ""
    """How certificates state roles, such as `spiffe://mesh.example/kvist/{role}`; any trust domain when empty."""
    open_services: tuple[Literal["health", "reflection"], ...] = ("health", "reflection")
    """Where client certificates are asked for: services that are open to every role; the others are for operators."""
    reflection: bool = True
    """Serve gRPC reflection."""
    insecure: bool = False
    """Allow plain text off loopback."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together")
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError("tls_client_ca_file needs tls_certificate_file")
        return self

    def check_listen(self, address: str) -> None:
        """Refuses plain text off loopback, unless it is wanted.

        Raises:
            ValueError: The address is not `host:port`, or is not loopback and has no TLS.
        """
        host, _ = split_address(address)
        if self.tls_certificate_file is None and not self.insecure and not is_loopback(host):
            raise ValueError(f"{address} is not loopback: give a TLS certificate, or say `insecure: true`")

    def core_door(self) -> dict[str, object]:
        """What a server in the core is told of its door; paths hold in any working folder."""
        files = {
            "tls_certificate_file": self.tls_certificate_file,
            "tls_key_file": self.tls_key_file,
            "tls_client_ca_file": self.tls_client_ca_file,
        }
        return {
            **{name: str(path.absolute()) for name, path in files.items() if path is not None},
            "tls_role_uri": self.tls_role_uri,
            "open_services": list(self.open_services),
            "reflection": self.reflection,
        }


class ListenSettings(DoorSettings):
    """Where a gRPC server listens. Off loopback it needs TLS or an explicit `insecure`."""

    listen: str = "127.0.0.1:0"
    """`host:port`; port 0 takes a free one."""
    max_message_bytes: int = Field(default=64 * 1024 * 1024, ge=64 * 1024)
    """Largest message taken or sent."""
    max_calls_at_once: int = Field(default=4_096, ge=16)
    """Calls of one method that run at once, three quarters of them from one host; streams count while they are open."""
    max_calls_per_second: float = Field(default=500.0, ge=0)
    """Calls of one method from one host in a second; 0 for no limit. Twice as many may come in a moment."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        self.check_listen(self.listen)
        return self


class BusSettings(Settings):
    """How to reach NATS."""

    urls: tuple[str, ...] = ()
    """Servers, such as `nats://127.0.0.1:4222`; none switches the bus off."""
    credentials_file: Path | None = None
    """NATS credentials (JWT and NKey)."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the servers' certificates."""


class EtcdSettings(Settings):
    """How to reach etcd 3.5.8 or newer."""

    endpoints: tuple[str, ...] = ()
    """`host:port` of the members; the first that answers is used."""
    namespace: Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9_.-]+)*$")] = ""
    """Before all keys, so that others may use the same etcd, such as `/team-a`."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the members' certificates; plain text without any of the three files."""
    tls_certificate_file: Path | None = None
    """PEM chain of this process's certificate, for etcd with client certificates."""
    tls_key_file: Path | None = None
    """PEM key of the certificate."""
    username: str = ""
    """User; none for an etcd without users."""
    password_file: Path | None = None
    """File with the user's password."""
    time_limit_seconds: float = Field(default=5.0, ge=0.5, le=60)
    """Most time of a call, over all members that are tried."""
    insecure: bool = False
    """Allow plain text to members off loopback."""

    @model_validator(mode="after")
    def _is_safe(self) -> EtcdSettings:
        for address in self.endpoints:
            host, _ = split_address(address)
            has_tls = self.tls_ca_file is not None or self.tls_certificate_file is not None
            if not has_tls and not self.insecure and not is_loopback(host):
                raise ValueError(f"{address} is not loopback: give tls_ca_file, or say `insecure: true`")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together")
        if (self.password_file is not None) != bool(self.username):
            raise ValueError("username and password_file go together")
        return self


class StoreSettings(Settings):
    """Which state store, and where."""

    kind: Literal["sqlite", "etcd"] = "sqlite"
    """`sqlite`: one machine, several processes; `etcd`: several machines."""
    path: Path = Path("kvist-state.sqlite")
    """File of the SQLite store."""
    etcd: EtcdSettings = EtcdSettings()
    """Where etcd is."""

    @model_validator(mode="after")
    def _is_complete(self) -> StoreSettings:
        if (self.kind == "etcd") != bool(self.etcd.endpoints):
            raise ValueError("kind `etcd` and etcd.endpoints go together")
        return self


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        ValueError: It is neither.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535 or not host:  # noqa: PLR2004  The last port.
        raise ValueError(f"{address!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address in brackets")
    return host, int(port)


def name_of_address(address: str, *, domain: str) -> str:
    """The name that DNS gives an IP address below a domain, as headless services of Kubernetes do: `10-0-0-7.DOMAIN`.

    Raises:
        ValueError: It is no IP address.
    """
    label = str(ipaddress.ip_address(address)).replace(".", "-").replace(":", "-")
    # Labels of DNS begin and end with a letter or a digit.
    label = f"0{label}" if label.startswith("-") else label
    label = f"{label}0" if label.endswith("-") else label
    return f"{label}.{domain}"


def join_address(host: str, port: int) -> str:
    """Writes `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_plain_text(address: str, *, insecure: bool) -> None:
    """Refuses plain text off loopback, for a listener that has no TLS of its own, unless it is wanted.

    Raises:
        ValueError: The address is not `host:port`, or is not loopback.
    """
    if not insecure and not is_loopback(split_address(address)[0]):
        raise ValueError(f"{address} is not loopback: say `insecure: true`, or put a TLS proxy before it")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host; a name other than localhost counts as not."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting.

    Attributes:
        path: Dotted path, such as `grpc.listen`.
        message: What is wrong.
        origin: Where the value came from.
    """

    path: str
    message: str
    origin: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} ({self.origin})"


class SettingsError(Exception):
    """All that is wrong with the settings."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


_S = TypeVar("_S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[_S]):
    """Settings and where each value came from.

    Attributes:
        settings: The checked settings.
        origins: Origin by dotted path; a path that is missing has its default.
    """

    settings: _S
    origins: Mapping[str, str]

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yields (path, value, origin) of every setting, secrets masked."""
        for path, value in _leaves(self.settings):
            yield path, str(value), self.origins.get(path, "default")


def load(
    model: type[_S],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded[_S]:
    """Reads and checks settings.

    Args:
        model: The settings class.
        file: YAML file with the same structure; none for no file.
        environment: Variables; the process's own when absent.
        flags: Values by dotted path, as a command line gave them. Texts are read like variables.

    Raises:
        SettingsError: With every problem, not the first alone.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        _merge(values, _read_file(file, problems), origin=f"file {file}", origins=origins)
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            _set(model, values, origins, problems, path=path, value=text, origin=f"environment {name}")
    for dotted, value in (flags or {}).items():
        _set(model, values, origins, problems, path=tuple(dotted.split(".")), value=value, origin=f"flag {dotted}")
    try:
        settings = model.model_validate(values)
    except ValidationError as failure:
        problems += [_problem(model, item, origins) for item in failure.errors(include_url=False)]
    if problems:
        raise SettingsError(tuple(problems))
    return Loaded(settings, origins)


def _read_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except OSError as failure:
        problems.append(Problem("(file)", f"cannot be read: {failure.strerror}", f"file {path}"))
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as failure:
        problems.append(Problem("(file)", f"is not YAML: {failure}", f"file {path}"))
        return {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(Problem("(file)", "must be a mapping", f"file {path}"))
        return {}
    return value


def _merge(
    target: dict[str, Any], source: Mapping[str, Any], *, origin: str, origins: dict[str, str], prefix: str = ""
) -> None:
    for key, value in source.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            _merge(target.setdefault(str(key), {}), value, origin=origin, origins=origins, prefix=f"{path}.")
        else:
            target[str(key)] = value
        origins[path] = origin


def _section(annotation: Any) -> type[BaseModel] | None:
    """The settings class that an annotation names, if it names one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _set(
    model: type[BaseModel],
    values: dict[str, Any],
    origins: dict[str, str],
    problems: list[Problem],
    *,
    path: tuple[str, ...],
    value: object,
    origin: str,
) -> None:
    current: type[BaseModel] | None = model
    annotation: Any = model
    for position, key in enumerate(path):
        if current is None:
            # Below a free-form mapping any key is right.
            break
        field = current.model_fields.get(key)
        if field is None:
            dotted = ".".join(path[: position + 1])
            problems.append(Problem(dotted, _unknown(key, current), origin))
            return
        annotation = field.annotation
        current = _section(annotation)
    target = values
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = target[key] = {}
        target = inner
    parsed = _parse(annotation, value)
    if isinstance(parsed, dict) and isinstance(target.get(path[-1]), dict):
        _merge(target[path[-1]], parsed, origin=origin, origins=origins, prefix=".".join(path) + ".")
    else:
        target[path[-1]] = parsed
    origins[".".join(path)] = origin


def _parse(annotation: Any, value: object) -> object:
    """Reads a text that stands for a list or a mapping as JSON, or as a list separated by commas."""
    if not isinstance(value, str):
        return value
    kinds = {getattr(candidate, "__origin__", candidate) for candidate in (annotation, *get_args(annotation))}
    if not kinds & {tuple, list, set, frozenset, dict} and _section(annotation) is None:
        return value
    if value[:1] in {"[", "{"}:
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    if dict in kinds or _section(annotation) is not None:
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _unknown(key: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(key, model.model_fields, n=1)
    return "unknown setting" + (f"; did you mean {close[0]!r}?" if close else "")


def _problem(model: type[BaseModel], item: Any, origins: Mapping[str, str]) -> Problem:
    location = [str(part) for part in item["loc"]]
    path = ".".join(location)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        owner: type[BaseModel] | None = model
        for key in location[:-1]:
            field = owner.model_fields.get(key) if owner else None
            owner = _section(field.annotation) if field else None
        message = _unknown(location[-1], owner) if owner else "unknown setting"
    for length in range(len(location), 0, -1):
        origin = origins.get(".".join(location[:length]))
        if origin:
            return Problem(path, message, origin)
    return Problem(path or "(settings)", message, "default")


def _leaves(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "(secret)" if isinstance(value, SecretStr) else value
