"""Waiting for room: when all servers are full, a session takes its place in their queues."""

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

_SOON_S = 0.2  # what takes no longer is no waiting
_LOOK_S = 1.0  # how often others than those in whose queue we are may be looked at
_RETRY_S = 0.2
_CLOCKS_S = 0.1  # by which a server's clock may be ahead of ours in a wait
_ADVICE = ". Nothing is lost: it can be tried again, with the same past_key_values if there are any"


class AdmissionWait:
    """What one session does while there is no room for it. It holds none meanwhile but where its turn has come.

    Servers are asked one after the other, in an order that is the same for all clients: nobody waits in a circle.

    Attributes:
        may_wait: False: what there is no room for is refused at once.
    """

    def __init__(self, swarm: Swarm, opener: Opener, reporter: Reporter) -> None:
        self._swarm = swarm
        self._opener = opener
        self._reporter = reporter
        self.may_wait = True
        self._deadline_s: float | None = None  # None: there is room, as far as is known
        self._said = False  # that it waits

    def over(self) -> None:
        """There was room, and the session has got on."""
        self._deadline_s, self._said = None, False

    async def begin(self, shortage: PeerBusy) -> None:
        """The session is about to give up what it has, in order to wait for room.

        Raises:
            PeerBusy: it has waited for ``wait_timeout_s`` already.
        """
        if self._deadline_s is not None:  # what room it had got was not enough
            await asyncio.sleep(_RETRY_S)
        self._check_time(shortage)

    async def hops(self, span: Span, opening: Opening, shortage: PeerBusy) -> list[HopSession]:
        """Hops over all of ``span`` once there is room.

        Args:
            shortage: why there is none.

        Raises:
            PeerBusy: no server can ever have so much room, or none has had it for ``wait_timeout_s``.
            NoRoute: nobody holds some block any more.
            PeerError: a server failed meanwhile. It may be tried again.
        """
        never: dict[str, PeerBusy] = {}
        while True:
            left_s = self._check_time(shortage)
            try:
                chain = await self._swarm.chain(span, opening.need_tokens, avoid=never, timeout_s=left_s)
            except NoRoute:
                if never:
                    raise next(iter(never.values())) from None
                raise
            asked_s, left_s = now_s(), self._check_time(shortage)
            try:
                return await self._in_queue(chain, span, opening, left_s, shortage)
            except PeerBusy as error:
                shortage = error
                if now_s() < asked_s + left_s - _CLOCKS_S:
                    never[error.peer_id] = error

    def _check_time(self, shortage: PeerBusy) -> float:
        """How many seconds are left."""
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
        """Waits in the queues of this chain's servers, unless there is room elsewhere before."""
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
        """Hops over servers that have room at once; none if there are none."""
        try:
            return await self._opener.open_span(span, opening, None, avoid=avoid, timeout_s=0.0)
        except (NoRoute, PeerBusy):
            return []
        except PeerError as error:
            self._swarm.failed(error)
            return []


def _abandon_result(opening: asyncio.Task[list[HopSession]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        abandon(opening.result())
