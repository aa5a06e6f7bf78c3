"""One controller among several: whether it leads, and how it reaches the one that does."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.grpc import TlsFiles, open_channel
from kvist_controller.control import Controller, not_leading
from kvist_controller.follower import Follower
from kvist_controller.published import PublishedState
from kvist_controller.records import LeaderRecord, ServiceRecord

# Marks a call that another controller has passed on, so that none goes in a circle.
PASSED_ON = "kvist-passed-on"

if TYPE_CHECKING:
    from kvist.controller.v1.controller_pb2_grpc import ControllerServiceAsyncStub


class Instance:
    """What this process knows of the cluster and of its own part in it.

    Attributes:
        identity: How this process calls itself in an election.
        follower: What it reads from the store.
        published: The cluster state it gives away.
        leading: What it does while it leads; none while it stands by.
        join_token_file: Holds what agents must show to register, here and at the leader; none lets all in.
    """

    def __init__(
        self,
        identity: LeaderRecord,
        follower: Follower,
        published: PublishedState,
        *,
        peer_tls: TlsFiles | None = None,
        join_token_file: Path | None = None,
    ) -> None:
        self.identity = identity
        self.follower = follower
        self.published = published
        self.leading: Controller | None = None
        self.join_token_file = join_token_file
        self._peer_tls = peer_tls
        self._peer: tuple[str, grpc.aio.Channel] | None = None

    def set_leading(self, controller: Controller | None) -> None:
        """States that this process leads, or does no more."""
        before, self.leading = self.leading, controller
        if before is not None:
            # Whoever waits for it looks around for another one.
            before.resource_changes.announce()
            before.order_changes.announce()
        self.follower.resource_changes.announce()
        self.follower.leader_changes.announce()

    @property
    def resources(self) -> Controller | Follower:
        """Where resources are read: the leader has them before the store does."""
        return self.leading or self.follower

    @property
    def services(self) -> Mapping[str, ServiceRecord]:
        """Resources by name."""
        return self.resources.services

    def remote_leader(self) -> LeaderRecord | None:
        """The leader when it is another process."""
        leader = self.follower.leader
        return None if leader is None or leader == self.identity else leader

    async def leader_stub(self) -> "ControllerServiceAsyncStub":
        """The leader's service, when it is another process.

        Raises:
            KvistError: NOT_READY, when nobody leads, or this process is about to.
        """
        leader = self.remote_leader()
        if leader is None or not leader.address:
            raise not_leading()
        if self._peer is None or self._peer[0] != leader.address:
            await self.close()
            self._peer = (leader.address, open_channel(leader.address, tls=self._peer_tls, retries=False))
        return ControllerServiceStub(self._peer[1])

    async def close(self) -> None:
        """Ends the connection to the leader."""
        peer, self._peer = self._peer, None
        if peer is not None:
            # Calls on their way have a moment to end with an answer.
            await asyncio.shield(peer[1].close(grace=0.5))
