"""Calls to whichever member of an etcd cluster answers.

All calls and streams stay with one member until it fails, then move on to the next. A call is sent only over a
connection that stands, so that a member that is down costs nothing and leaves nothing unknown. A call that was sent and
not answered is unknown: it is sent again only when the caller says that doing it twice is doing it once. A frozen
member keeps its connections, so whoever moves on asks the next one for its health before it gets a write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvist import telemetry
from kvist.etcd.api.rpc_pb2 import AuthenticateRequest
from kvist.etcd.api.rpc_pb2_grpc import AuthStub
from kvist.etcd.failures import Verdict, is_own_cancellation, judge, to_store_error
from kvist.store.interface import AccessError, StoreError, UnknownOutcomeError
from kvist.tls_files import TlsFiles

# A member that does not answer within this has to let another one try.
LONGEST_ATTEMPT_SECONDS = 1.5
# What a process says that lives, whatever it thinks of the question.
_SILENCE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
# After a round over all members without an answer.
ROUND_PAUSE_SECONDS = 0.1
LARGEST_MESSAGE_BYTES = 64 * 1024 * 1024
# With it a member that is cut off from the leader ends streams instead of keeping them silent.
REQUIRE_LEADER = ("hasleader", "true")
_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
    # etcd hangs up on pings more often than every 5 s, and on those without a call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)

_log = telemetry.logger(__name__)
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """How to reach etcd.

    Attributes:
        endpoints: `host:port` of the members.
        tls: Files of the connection; plain text when absent.
        username: User; none for no authentication.
        password_file: File with the user's password, read at each authentication.
        time_limit_seconds: Most time of a call, over all members that are tried.
    """

    endpoints: tuple[str, ...]
    tls: TlsFiles | None = None
    username: str = ""
    password_file: Path | None = None
    time_limit_seconds: float = 5.0


class _NotConnectedError(Exception):
    """The member does not take connections now."""


class _Member:
    """One member and the channel to it, which is opened anew when its certificates change on disk."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self.address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._retired: grpc.aio.Channel | None = None
        self._stamps: tuple[int, ...] = ()

    async def channel(self) -> grpc.aio.Channel:
        """The channel, with today's certificates."""
        stamps = self._file_stamps()
        if self._channel is not None and stamps == self._stamps:
            return self._channel
        # Streams of the channel before go on until the next change.
        retired, self._retired = self._retired, self._channel
        if retired is not None:
            await retired.close()
        self._channel = self._open()
        self._stamps = stamps
        return self._channel

    def _file_stamps(self) -> tuple[int, ...]:
        tls = self._tls
        files = () if tls is None else (tls.ca_file, tls.certificate_file, tls.key_file)
        try:
            return tuple(file.stat().st_mtime_ns for file in files if file is not None)
        except OSError:
            # In the middle of being replaced: the channel that stands is as good as it was.
            return self._stamps

    def _open(self) -> grpc.aio.Channel:
        tls = self._tls
        if tls is None:
            return grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        try:
            authorities, key, chain = (
                None if file is None else file.read_bytes()
                for file in (tls.ca_file, tls.key_file, tls.certificate_file)
            )
        except OSError as failure:
            raise AccessError(f"a TLS file of the state store cannot be read: {failure}") from failure
        credentials = grpc.ssl_channel_credentials(
            root_certificates=authorities, private_key=key, certificate_chain=chain
        )
        return grpc.aio.secure_channel(self.address, credentials, options=_CHANNEL_OPTIONS)

    async def connected(self, *, time_limit_seconds: float) -> grpc.aio.Channel:
        """The channel once its connection stands.

        Raises:
            _NotConnectedError: It could not be made.
        """
        channel = await self.channel()
        try:
            async with asyncio.timeout(time_limit_seconds):
                while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise _NotConnectedError(f"{self.address} takes no connections")
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise _NotConnectedError(f"{self.address} does not answer") from None
        return channel

    async def check_that_it_lives(self, channel: grpc.aio.Channel, *, time_limit_seconds: float) -> None:
        """Asks it for its health; any answer will do.

        Raises:
            _NotConnectedError: It does not answer.
        """
        try:
            await HealthStub(channel).Check(HealthCheckRequest(), timeout=time_limit_seconds)
        except grpc.aio.AioRpcError as failure:
            if failure.code() in _SILENCE:
                raise _NotConnectedError(f"{self.address} is silent") from failure

    async def close(self) -> None:
        """Ends its connections and all their calls."""
        for channel in (self._channel, self._retired):
            if channel is not None:
                await channel.close()
        self._channel = self._retired = None


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection that stands.

    Attributes:
        channel: Its channel.
        metadata: What each call sends along.
        address: Of the member.
    """

    channel: grpc.aio.Channel
    metadata: Metadata
    address: str


class EtcdEndpoints:
    """The members of one etcd cluster; used as `async with`."""

    def __init__(self, options: EtcdOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not options.endpoints:
            raise ValueError("etcd needs at least one endpoint")
        self.options = options
        self._clock = clock
        self._members = [_Member(address, options.tls) for address in options.endpoints]
        self._current = 0
        # The present member has been moved on to, and not been heard of.
        self._is_untried = False
        self._is_closed = False
        self._token = ""
        self._authenticating = asyncio.Lock()
        self.attempt_seconds = min(LONGEST_ATTEMPT_SECONDS, options.time_limit_seconds / len(options.endpoints))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        for member in self._members:
            await member.close()

    # Connections.

    async def connect(self, *, time_limit_seconds: float | None = None) -> Connection:
        """A connection to a member that takes connections, authenticated.

        Raises:
            StoreError: No member does within the time limit.
        """
        limit_seconds = self.options.time_limit_seconds if time_limit_seconds is None else time_limit_seconds
        deadline = self._clock() + limit_seconds
        for attempt in range(1_000_000):
            if self._is_closed:
                raise StoreError("the store was closed")
            remaining = deadline - self._clock()
            member = self._members[self._current]
            attempt_seconds = max(0.0, min(self.attempt_seconds, remaining))
            try:
                channel = await member.connected(time_limit_seconds=attempt_seconds)
                if self._is_untried:
                    await member.check_that_it_lives(channel, time_limit_seconds=attempt_seconds)
                    self._is_untried = False
                return Connection(channel, await self._metadata(channel), member.address)
            except _NotConnectedError as failure:
                self.leave(member.address, str(failure))
                if remaining <= 0:
                    raise StoreError(f"no member of etcd can be reached: {failure}") from failure
            except grpc.aio.AioRpcError as failure:
                if judge(failure) is Verdict.FINAL:
                    raise to_store_error(failure) from failure
                self.leave(member.address, failure.code().name)
                if remaining <= 0:
                    raise StoreError("etcd does not authenticate anybody now") from failure
            if attempt % len(self._members) == len(self._members) - 1:
                await asyncio.sleep(ROUND_PAUSE_SECONDS)
        raise AssertionError("the deadline comes first")  # pragma: no cover

    def leave(self, address: str, reason: str) -> None:
        """Moves on to the next member, when the present one is the one that failed."""
        if self._members[self._current].address == address:
            self._current = (self._current + 1) % len(self._members)
            self._is_untried = True
            _log.debug("etcd_member_left", address=address, reason=reason)

    # Authentication.

    async def _metadata(self, channel: grpc.aio.Channel) -> Metadata:
        if not self.options.username:
            return (REQUIRE_LEADER,)
        if not self._token:
            async with self._authenticating:
                if not self._token:
                    self._token = await self._authenticate(channel)
        return (REQUIRE_LEADER, ("token", self._token))

    async def _authenticate(self, channel: grpc.aio.Channel) -> str:
        file = self.options.password_file
        try:
            password = "" if file is None else file.read_text().rstrip("\r\n")
        except OSError as failure:
            raise AccessError(f"the password file of the state store cannot be read: {failure}") from failure
        request = AuthenticateRequest(name=self.options.username, password=password)
        return (await AuthStub(channel).Authenticate(request, timeout=self.attempt_seconds)).token

    def forget_token(self, connection: Connection) -> None:
        """Authenticates again before the next call, unless somebody has done so already."""
        if ("token", self._token) in connection.metadata:
            self._token = ""

    # Calls.

    async def call(
        self, method: Callable[[grpc.aio.Channel], Callable[..., Any]], request: Any, *, is_repeatable: bool
    ) -> Any:
        """One call, by whichever member answers.

        Args:
            method: Gives the method of a stub of the channel.
            request: Its request.
            is_repeatable: Whether doing it twice is doing it once.

        Raises:
            UnknownOutcomeError: It was sent and not answered.
            StoreError: It was not done.
        """
        deadline = self._clock() + self.options.time_limit_seconds
        while True:
            remaining = deadline - self._clock()
            connection = await self.connect(time_limit_seconds=remaining)
            remaining = max(0.0, deadline - self._clock())
            try:
                return await method(connection.channel)(
                    request,
                    timeout=min(remaining, self.attempt_seconds) if is_repeatable else remaining,
                    metadata=connection.metadata,
                )
            except asyncio.CancelledError:
                if is_own_cancellation() or not self._is_closed:
                    raise
                raise UnknownOutcomeError("the store was closed during a call") from None
            except grpc.aio.AioRpcError as failure:
                match judge(failure):
                    case Verdict.AUTHENTICATE:
                        self.forget_token(connection)
                    case Verdict.FINAL:
                        raise to_store_error(failure) from failure
                    case verdict:
                        self.leave(connection.address, failure.code().name)
                        if verdict is Verdict.UNKNOWN and not is_repeatable:
                            raise UnknownOutcomeError(
                                f"etcd did not answer a write ({failure.code().name}): it may have been done"
                            ) from failure
                if self._clock() >= deadline:
                    raise StoreError(f"etcd does not answer ({failure.code().name})") from failure
                await asyncio.sleep(ROUND_PAUSE_SECONDS / len(self._members))
