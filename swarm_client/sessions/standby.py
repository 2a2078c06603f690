"""Standby replicas of a session's hops on other servers, for failover and for servers that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from swarm_client.core.background import now_s
from swarm_client.sessions.opening import Opener, Terms
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopEvent, HopSession
from swarm_protocol.errors import PeerError, SwarmError
from swarm_protocol.failures import undone_on_error

_logger = logging.getLogger(__name__)
_RETRY_S = 2.0  # the pause between two attempts to make a replica
_COPY_TIMEOUT_S = 600.0  # for copying all keys and values
_AGREE_TIMEOUT_S = 5.0  # for a replica to take the last steps of its hop
_AGREE_POLL_S = 0.005


class StandbyReplicas:
    """The standby replicas of one chain, at most one for each hop, opened and filled in the background."""

    def __init__(
        self,
        hops: Sequence[HopSession],
        swarm: Swarm,
        opener: Opener,
        terms: Terms,
        stand_by: bool,
        on_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """Set up the replicas without opening any.

        Args:
            hops: the chain's live list of hops; only the chain changes it.
            stand_by: every hop gets a replica; otherwise only hops whose servers leave get one.
            on_ready: called when a hop on a leaving server has a replica.
        """
        self._hops = hops
        self._swarm = swarm
        self._opener = opener
        self._terms = terms
        self._stand_by = stand_by
        self._on_ready = on_ready
        self._replicas: dict[int, HopSession] = {}  # keys: numbers of the replicated hops
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def arrange(self) -> None:
        """Start to replicate the hops that should have a replica and have none."""
        for hop in self._hops:
            wanted = self._stand_by or hop.leaving
            if wanted and hop.number not in self._replicas and hop.number not in self._tasks:
                task = asyncio.ensure_future(self._replicate(hop))
                self._tasks[hop.number] = task
                task.add_done_callback(lambda _, number=hop.number: self._tasks.pop(number, None))  # type: ignore[misc]

    def handle(self, event: HopEvent) -> None:
        """Drop the replica that sent the event: after any event of its own, a replica cannot be used."""
        for number, replica in list(self._replicas.items()):
            if replica.number == event.hop:
                del self._replicas[number]
                replica.abandon()

    def of(self, hop: HopSession) -> HopSession | None:
        return self._replicas.get(hop.number)

    def take(self, hop: HopSession) -> HopSession | None:
        """Remove and return the hop's replica, which will take the hop's place."""
        return self._replicas.pop(hop.number, None)

    def drop(self, hops: Iterable[HopSession]) -> None:
        """Forget the replicas of hops that are gone."""
        for hop in hops:
            task = self._tasks.get(hop.number)
            if task is not None:
                task.cancel()
            replica = self._replicas.pop(hop.number, None)
            if replica is not None:
                replica.abandon()

    def forget(self) -> list[HopSession]:
        """Cancel all replication, and return all replicas for the caller to close."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        replicas = list(self._replicas.values())
        self._replicas.clear()
        return replicas

    async def catch_up(self, hop: HopSession) -> int | None:
        """Wait until the hop's replica has all of the hop's positions, and point it at the next hop. No call may run.

        Returns:
            The number of positions; None if the replica was of no use and has been dropped.
        """
        replica, after = self._replicas[hop.number], self._after(hop)
        try:
            num_tokens = await _agree(hop, replica)
            if after is not None and replica.next_number != after.number:
                codec = self._swarm.links.codec(replica.hop.server, after.hop.server)
                await replica.reroute(after, [], codec)
        except SwarmError as error:
            _logger.info("blocks %s could not be moved: %s", hop.span, error)
            self.drop([hop])
            return None
        return num_tokens

    # ------------------------------------------------------------ making replicas

    async def _replicate(self, hop: HopSession) -> None:
        while not hop.gone:
            try:
                if await self._try_to_replicate(hop):
                    break
            except SwarmError as error:
                _logger.info("a replica of blocks %s could not be made: %s", hop.span, error)
                if isinstance(error, PeerError):
                    self._swarm.failed(error)
            await asyncio.sleep(_RETRY_S)
        if hop.leaving and not hop.gone:
            await self._on_ready()

    async def _try_to_replicate(self, hop: HopSession) -> bool:
        if hop not in self._hops:  # replaced during the pause: nothing is left to do
            return True
        after = self._after(hop)
        progress = await hop.progress()
        opening = self._terms.opening(progress.batch_size, progress.length, ages=hop.leaving)
        opening = replace(opening, spare_tokens=0)
        await self._swarm.view(self._swarm.config.view_max_age_s)
        avoid = {hop.hop.server.peer_id}
        server = self._swarm.replica(hop.span, opening.need_tokens, avoid, hop.hop.server)
        if server is None:
            return False
        replica = await self._opener.open_copy(hop, opening, after, server)
        with undone_on_error(replica.abandon):  # nobody else knows the replica
            await hop.copy(replica, _COPY_TIMEOUT_S)
        self._replicas[hop.number] = replica
        return True

    def _after(self, hop: HopSession) -> HopSession | None:
        """Return the hop that receives this hop's outputs; None if the client receives them."""
        index = self._hops.index(hop) + 1
        return self._hops[index] if index < len(self._hops) else None


async def _agree(hop: HopSession, replica: HopSession) -> int:
    """Wait until the replica has all of the hop's positions, and return their number.

    Raises:
        PeerError: the replica does not catch up in time.
    """
    expected = await hop.progress()
    deadline = now_s() + _AGREE_TIMEOUT_S
    while (found := await replica.progress()) != expected:
        if now_s() > deadline:
            raise PeerError(f"the replica is at step {found.number}, not {expected.number}", replica.hop.server.peer_id)
        await asyncio.sleep(_AGREE_POLL_S)
    return expected.length
