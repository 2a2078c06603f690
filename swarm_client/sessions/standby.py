"""Standby replicas of a session's hops on other servers: some stand by, others take over from servers that leave."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swarm_client.core.background import now_s
from swarm_client.core.events import Move, Reporter
from swarm_client.sessions.opening import Opener
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopEvent, HopSession
from swarm_protocol.errors import PeerError, SwarmError

if TYPE_CHECKING:
    from swarm_client.sessions.chain import Chain

_logger = logging.getLogger(__name__)
_RETRY_S = 2.0
_COPY_TIMEOUT_S = 600.0
_AGREE_TIMEOUT_S = 5.0
_AGREE_POLL_S = 0.005


class StandbyReplicas:
    """At most one copy of each hop; opened and filled in the background."""

    def __init__(self, chain: Chain, swarm: Swarm, opener: Opener, stand_by: bool, reporter: Reporter) -> None:
        """``stand_by``: every hop is to have a copy, not only those whose servers leave."""
        self._chain = weakref.ref(chain)
        self._swarm = swarm
        self._opener = opener
        self._stand_by = stand_by
        self._reporter = reporter
        self._copies: dict[int, HopSession] = {}  # by the number of the hop they copy
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._switching: asyncio.Task[None] | None = None

    @property
    def num_ready(self) -> int:
        return len(self._copies)

    def arrange(self) -> None:
        """Starts to copy hops that should have a copy and have none."""
        chain = self._chain()
        for hop in chain.hops if chain is not None else ():
            wanted = self._stand_by or hop.leaving
            if wanted and hop.number not in self._copies and hop.number not in self._tasks:
                task = asyncio.ensure_future(self._copy(hop))
                self._tasks[hop.number] = task
                task.add_done_callback(partial(self._ended, hop.number))

    def _ended(self, number: int, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)

    def hop_leaves(self) -> None:
        """Called when the server of some hop has said that it wants to leave."""
        self.arrange()
        self._switching = asyncio.ensure_future(self._switch_soon())

    def handle(self, event: HopEvent) -> None:
        """Whatever a copy has to say, it is of no use any more."""
        for number, copy in list(self._copies.items()):
            if copy.number == event.hop:
                del self._copies[number]
                copy.abandon()

    def take(self, hop: HopSession) -> HopSession | None:
        """The hop's copy, to take its place."""
        return self._copies.pop(hop.number, None)

    def drop(self, hops: Iterable[HopSession]) -> None:
        """Forgets the copies of hops that are gone."""
        for hop in hops:
            task = self._tasks.get(hop.number)
            if task is not None:
                task.cancel()
            copy = self._copies.pop(hop.number, None)
            if copy is not None:
                copy.abandon()

    def forget(self) -> list[HopSession]:
        """All copies, to be closed."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    # ------------------------------------------------------------ making copies

    async def _copy(self, hop: HopSession) -> None:
        while not hop.gone:
            try:
                if await self._try_to_copy(hop):
                    break
            except SwarmError as error:
                _logger.info("a copy of blocks %s could not be made: %s", hop.span, error)
                if isinstance(error, PeerError):
                    self._swarm.failed(error)
            await asyncio.sleep(_RETRY_S)
        if hop.leaving and not hop.gone:
            await self._switch_soon()

    async def _try_to_copy(self, hop: HopSession) -> bool:
        chain = self._chain()
        if chain is None or hop not in chain.hops:
            return True
        index = chain.hops.index(hop)
        after = chain.hops[index + 1] if index + 1 < len(chain.hops) else None
        progress = await hop.progress()
        opening = chain.opening(progress.batch_size, progress.length, ages=hop.leaving)
        opening = replace(opening, spare_tokens=0)
        await self._swarm.view(self._swarm.config.view_max_age_s)
        avoid = {hop.hop.server.peer_id}
        server = self._swarm.replica(hop.span, opening.need_tokens, avoid, hop.hop.server)
        if server is None:
            return False
        del chain  # copying takes long
        copy = await self._opener.open_copy(hop, opening, after, server)
        try:
            await hop.copy(copy, _COPY_TIMEOUT_S)
        except BaseException:
            copy.abandon()
            raise
        self._copies[hop.number] = copy
        return True

    # ------------------------------------------------------------ taking over from a server that leaves

    async def _switch_soon(self) -> None:
        """Between two calls."""
        chain = self._chain()
        if chain is None:
            return
        async with chain.busy:
            await self.switch_ready()

    async def switch_ready(self) -> None:
        """Replaces hops whose servers leave by their copies. No call may be under way."""
        chain = self._chain()
        assert chain is not None  # whoever calls holds it
        for index, hop in enumerate(chain.hops):
            copy = self._copies.get(hop.number) if hop.leaving else None
            if copy is None:
                continue
            before = chain.hops[index - 1] if index else None
            after = chain.hops[index + 1] if index + 1 < len(chain.hops) else None
            start = now_s()
            try:
                num_tokens = await _agree(hop, copy)
                if after is not None and copy.next_number != after.number:
                    await copy.reroute(after, [])
            except SwarmError as error:
                _logger.info("blocks %s could not be moved: %s", hop.span, error)
                self.drop([hop])
                continue
            try:
                if before is not None:
                    await before.reroute(copy, [])
            except SwarmError:  # nobody knows where its outputs go
                await chain.forget()
                return
            del self._copies[hop.number]
            chain.hops[index] = copy
            await hop.close()
            seconds = now_s() - start
            servers = hop.hop.server.peer_id, copy.hop.server.peer_id
            self._reporter.report(Move(hop.span, *servers, num_tokens, seconds))


async def _agree(hop: HopSession, copy: HopSession) -> int:
    """Waits until the copy has all that the hop has; returns how many positions that are.

    Raises:
        PeerError: it does not come to that.
    """
    expected = await hop.progress()
    deadline = now_s() + _AGREE_TIMEOUT_S
    while (found := await copy.progress()) != expected:
        if now_s() > deadline:
            raise PeerError(f"the copy is at step {found.number}, not {expected.number}", copy.hop.server.peer_id)
        await asyncio.sleep(_AGREE_POLL_S)
    return expected.length
