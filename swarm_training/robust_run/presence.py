"""A member's presence on the network: its service, its DHT node, its channels, and how it enters the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from typing import Any

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_training.core.record import JOINING, Progress
from swarm_training.core.robust_config import RobustConfig
from swarm_training.core.robust_network import RobustNetwork
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.membership import RunMembership, serve
from swarm_training.net.robust import GrpcRobustNetwork, RobustTrainingService
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust_run.directory import PeerDirectory
from swarm_training.robust_run.member import RobustMember
from swarm_training.robust_run.standings import Standings, vouched

_POLL_S = 0.1
_MAX_RESULT_BYTES = 1 << 32
MakeMember = Callable[[bytes, RobustNetwork], RobustMember]
Load = Callable[[RobustMember, Standings, bytes, bytes], Awaitable[None]]


class RobustPresence:
    """A peer's service, DHT node and channels in a robust run.

    Attributes:
        addresses: multiaddrs by which other peers join.
        member: None until the run has begun.
    """

    def __init__(
        self,
        config: RobustConfig,
        network: GrpcNetwork,
        directory: PeerDirectory,
        addresses: list[str],
        resources: AsyncExitStack,
    ) -> None:
        """Set up the presence. ``resources``: everything that ends when the peer leaves."""
        self.addresses = addresses
        self.directory = directory
        self.member: RobustMember | None = None
        self._config = config
        self._network = GrpcRobustNetwork(network, directory.record_of)
        self._resources = resources

    @classmethod
    async def enter(cls, run: str, model: bytes, member: RunMembership, config: RobustConfig) -> RobustPresence:
        """Start the service and join the DHT. ``model``: the digest of what must be equal. Raises as ``RobustRun``."""
        host = await member.find_host(config)
        async with AsyncExitStack() as resources:
            board, network = await member.connect(run, config, resources, host)
            answers = _Answers()
            service = RobustTrainingService(answers, member.access)
            address, fingerprint = await serve(service.add_to, config, host, resources)
            own = Progress(
                run, member.identity.peer_id, state=JOINING, model=model, address=address, tls_fingerprint=fingerprint
            )
            directory = PeerDirectory(own, member.identity, board)
            addresses = await board.addresses()
            resources.callback(asyncio.ensure_future(directory.run()).cancel)
            presence = cls(config, network, directory, addresses, resources.pop_all())
            answers.begin(presence)
            return presence

    async def take_part(self, founders: Sequence[str], make: MakeMember, load: Load) -> RobustMember:
        """Start the run with all founders once they have come, or join a run that has begun.

        Args:
            make: creates a member from the session and the network.
            load: fills a member from the standings of other peers, the bytes of their state, and their last aggregate.

        Raises:
            PeerUnavailable: not all founders have come in time, and none of them is in a run.
        """
        try:
            async with asyncio.timeout(self._config.join_timeout_s):
                while not (await self._has_begun(founders, make) or await self._has_joined(founders, make, load)):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            missing = set(founders) - self.directory.known()
            odd = len(missing & self.directory.others)
            train_others = f"; {odd} of them train another model, or by other rules" if odd else ""
            raise PeerUnavailable(
                f"{len(missing)} of {len(founders)} founders have not come in time{train_others}"
            ) from None
        assert self.member is not None
        self.directory.has_joined()
        return self.member

    async def _has_begun(self, founders: Sequence[str], make: MakeMember) -> bool:
        if self.directory.own_id not in founders or not self.directory.known() >= set(founders):
            return False
        session = self.directory.session(founders)
        if self.member is None or self.member.broadcasts.session != session:
            if self.member is not None:
                self.member.close()
            self.member = make(session, self._network)
            self.member.broadcasts.set_peers(founders)
            self.member.broadcasts.say(pb.Said(ready=pb.Ready()))
        if not self.member.ready() >= set(founders):
            return False
        self.member.begin(0, ())
        return True

    async def _has_joined(self, founders: Sequence[str], make: MakeMember, load: Load) -> bool:
        others = set(founders) & self.directory.known() - {self.directory.own_id}
        answers = await asyncio.gather(*(self._ask(name) for name in others))
        data = vouched([answer for answer in answers if answer is not None], founders)
        if data is None:
            return False
        standings = Standings.parse(data)
        if self.directory.own_id not in standings.joined:
            return False
        if self.member is not None:
            self.member.close()
        self.member = None
        state = await self._fetch(standings.state, others, standings.state_bytes)
        result = await self._fetch(standings.result, others, _MAX_RESULT_BYTES)
        if state is None or result is None:
            return False
        member = make(standings.session, self._network)
        await load(member, standings, state, result)
        member.broadcasts.set_peers({*standings.snapshot.standings, *standings.joined})
        self.member = member
        member.begin(standings.step, standings.joined)
        return True

    async def _ask(self, peer_id: str) -> bytes | None:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(self._config.phase_s):
                return await self._network.standings(peer_id)
        return None

    async def _fetch(self, digest: bytes, holders: Iterable[str], max_bytes: int) -> bytes | None:
        for holder in holders:
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(self._config.compute_s / 2):
                    data = await self._network.fetch(holder, digest, max_bytes)
                    if sha256(data).digest() == digest:
                        return data
        return None

    async def leave(self) -> None:
        if self.member is not None:
            self.member.close()
        await self._resources.aclose()


class _Answers:
    """The handlers of this peer's service, which work as soon as the peer takes part."""

    _presence: RobustPresence | None = None

    def begin(self, presence: RobustPresence) -> None:
        self._presence = presence

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None:
        await self._member().tell(peer_id, request)

    async def fetch(self, peer_id: str, digest: bytes) -> bytes:
        return await self._member().fetch(peer_id, digest)

    async def standings(self, peer_id: str) -> bytes:
        return await self._member().standings(peer_id)

    def _member(self) -> RobustMember:
        if self._presence is None or self._presence.member is None:
            raise PeerUnavailable("the run has not begun here")
        return self._presence.member


async def in_thread(function: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(function)
