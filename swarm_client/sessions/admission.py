"""Waiting for admission: when all servers are full, a session takes its place in their queues."""

from __future__ import annotations

import asyncio

from swarm_client.core.background import now_s
from swarm_client.core.events import Reporter, Waiting
from swarm_client.routing.routing import Route
from swarm_client.sessions.opening import Opener, Opening, abandon
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopSession
from swarm_protocol.errors import NoRoute, PeerBusy, PeerError
from swarm_protocol.span import Span

_SOON_S = 0.2  # a shorter wait is not reported
_LOOK_S = 1.0  # the pause between two looks for room on other chains than the queued one
_RETRY_S = 0.2  # the pause before the session asks again for room that was not enough
_CLOCKS_S = 0.1  # a refusal this much before the end of a wait is taken for its end, because clocks differ
_ADVICE = ". Nothing is lost: it can be tried again, with the same past_key_values if there are any"


class AdmissionWait:
    """One session's wait for KV room. Until it ends, the session has room only on servers where its turn has come.

    Servers are asked one after the other, in an order that is the same for all clients, so no circular wait can arise.

    Attributes:
        may_wait: the session may wait for room; if False, a shortage is raised at once.
    """

    def __init__(self, swarm: Swarm, opener: Opener, reporter: Reporter) -> None:
        self._swarm = swarm
        self._opener = opener
        self._reporter = reporter
        self.may_wait = True
        self._deadline_s: float | None = None  # None: as far as is known, there is room
        self._said = False  # the wait was reported to the user

    def begin_call(self, may_wait: bool) -> None:
        """End an earlier call's wait, and let the new call wait for room or not."""
        self.over()
        self.may_wait = may_wait

    def over(self) -> None:
        """End the wait: there was room, and the session has made progress."""
        self._deadline_s, self._said = None, False

    async def begin(self, shortage: PeerBusy) -> None:
        """Check that there is time left to wait, before the session gives up its hops in order to wait for more room.

        Raises:
            PeerBusy: the session has waited for ``wait_timeout_s`` already.
        """
        if self._deadline_s is not None:  # the room that the wait brought was not enough
            await asyncio.sleep(_RETRY_S)
        self._check_time(shortage)

    async def hops(self, span: Span, opening: Opening, shortage: PeerBusy) -> list[HopSession]:
        """Wait for room for all of ``span``, then return the opened hops.

        Raises:
            PeerBusy: no server can ever have so much room, or none has had it for ``wait_timeout_s``.
            NoRoute: some block is not served any more.
            PeerError: a server failed during the wait. The call may be repeated.
        """
        never: dict[str, PeerBusy] = {}  # keys: peer ids of servers that can never have so much room
        while True:
            left_s = self._check_time(shortage)
            try:
                chain = await self._swarm.chain(
                    span, opening.need_tokens, avoid=never, timeout_s=left_s, prompt_pages=opening.prompt_pages
                )
            except NoRoute:
                if never:
                    raise next(iter(never.values())) from None
                raise
            asked_s, left_s = now_s(), self._check_time(shortage)
            try:
                return await self._in_queue(chain, span, opening, left_s, shortage)
            except PeerBusy as error:
                shortage = error
                # A server that could ever have the room would have waited until the end.
                if now_s() < asked_s + left_s - _CLOCKS_S:
                    never[error.peer_id] = error

    def _check_time(self, shortage: PeerBusy) -> float:
        """Return how many seconds are left; raise ``shortage``, or a PeerBusy that extends it, if there are none."""
        if not self.may_wait:
            raise shortage
        timeout_s = self._swarm.config.wait_timeout_s
        if self._deadline_s is None:
            self._deadline_s = now_s() + timeout_s
        left_s = self._deadline_s - now_s()
        if left_s <= 0:
            message = f"{shortage}; waited {timeout_s:g} s for room{_ADVICE}"
            raise PeerBusy(message, shortage.peer_id, shortage.span)
        return left_s

    async def _in_queue(
        self, chain: Route, span: Span, opening: Opening, wait_s: float, shortage: PeerBusy
    ) -> list[HopSession]:
        """Wait in the queues of this chain's servers, unless another chain has room sooner. Return the hops."""
        asked: list[str] = []
        queued = asyncio.ensure_future(self._opener.open_in_turn(chain, opening, wait_s, asked))
        used = False
        try:
            while True:
                await asyncio.wait([queued], timeout=_LOOK_S if self._said else _SOON_S)
                if queued.done():
                    used = True
                    return queued.result()
                if not self._said:
                    self._said = True
                    self._reporter.report(Waiting(str(shortage), wait_s))
                if elsewhere := await self._look(span, opening, asked[-1:]):
                    return elsewhere
        finally:
            if not used:
                queued.cancel()
                queued.add_done_callback(_abandon_result)

    async def _look(self, span: Span, opening: Opening, avoid: list[str]) -> list[HopSession]:
        """Return hops over servers that have room at once; empty if there are none."""
        try:
            return await self._opener.open_span(span, opening, None, avoid=avoid, timeout_s=0.0)
        except (NoRoute, PeerBusy):
            return []
        except PeerError as error:
            self._swarm.failed(error)
            return []


def _abandon_result(opening: asyncio.Task[list[HopSession]]) -> None:
    """End hops that were opened although the wait for them had been given up."""
    if not opening.cancelled() and opening.exception() is None:
        abandon(opening.result())
