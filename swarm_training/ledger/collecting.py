"""The collector, which asks other peers from time to time for the rounds that a ledger lacks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swarm_protocol.errors import SwarmError
from swarm_protocol.wire.printable import printable
from swarm_training.core.callbacks import InThread
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.ledger.contributions import RoundContributions, verify_round
from swarm_training.ledger.ledger import Ledger
from swarm_training.pb import training_pb2 as pb

_MAX_KNOWN_BYTES = 1 << 19
_ASK_S = 30.0  # between two calls, each to one other peer; a newcomer calls at once
_WAIT_S = 2.0  # before the next look, while there is no peer to ask
_MAX_ASK_S = 600.0  # the longest pause, while nobody answers or has anything new, and no step lacks its round
_MOST_STEPS = 4096  # the most steps since the last call that are searched for a missing round
_TIMEOUT_S = 10.0
_SIGNATURES_PER_S = 200.0  # checked in rounds of other peers: about 2 % of a core
_logger = logging.getLogger(__name__)
Ask = Callable[[pb.RoundsRequest], Awaitable[pb.RoundsReply]]
Take = Callable[[bytes], Awaitable[bool]]


@dataclass(eq=False, repr=False)
class Collector:
    """The collector of the rounds that one peer's ledger lacks."""

    _ledger: Ledger
    _network: Network
    _peers: Callable[[], Sequence[Progress]]  # returns the other peers
    _newest: Callable[[], Moment | None]  # the last moment whose rounds are taken; None: unknown yet
    _keep: Callable[[bytes, RoundContributions], Awaitable[bool]]  # takes a valid round; returns whether it was new
    _in_thread: InThread
    _rng: random.Random
    _liars: set[str] = field(default_factory=set)  # ids of peers that have given a wrong round

    async def run(self) -> None:
        """Ask one peer at a time, and less often while nobody answers or has anything new. A peer that has missed the
        round of a step, for instance because it has loaded a state, asks soon again."""
        pause_s = _ASK_S
        while True:
            peers = [peer for peer in self._peers() if peer.is_reachable and peer.peer_id not in self._liars]
            newest = self._newest()
            if not peers or newest is None:
                await asyncio.sleep(_WAIT_S)
                continue
            has_news = await self._ask(self._rng.choice(peers), newest)
            pause_s = _ASK_S if has_news else min(2 * pause_s, _MAX_ASK_S)
            if await self._misses_round(newest, min(pause_s * self._rng.uniform(0.5, 1.5), _MAX_ASK_S)):
                pause_s = _ASK_S

    async def _misses_round(self, asked: Moment, pause_s: float) -> bool:
        """Look every ``_ASK_S`` whether a step since ``asked`` has no round. Return True once there is such a step, or
        False at the end of the pause."""
        while pause_s > 0:
            await asyncio.sleep(min(pause_s, _ASK_S))
            pause_s -= _ASK_S
            newest = self._newest()
            if newest is not None and newest != asked:
                first = asked.step if asked.rollbacks == newest.rollbacks else newest.step - 1
                steps = range(max(first, newest.step - _MOST_STEPS, 0), newest.step)
                if not all(self._ledger.knows(Moment(newest.rollbacks, step)) for step in steps):
                    return True
        return False

    async def _ask(self, peer: Progress, newest: Moment) -> bool:
        """Fetch what the ledger lacks from this peer. Return whether the peer had anything new."""
        try:
            return await pull(self._ledger, lambda request: self._network.rounds(peer, request), self._take, newest)
        except (SwarmError, TimeoutError) as error:
            _logger.debug("%s gives no rounds: %s", peer.peer_id, error)
        except ValueError as error:
            self._liars.add(peer.peer_id)
            _logger.warning("%s has given a wrong round: %s", peer.peer_id, printable(str(error)))
        return False

    async def _take(self, data: bytes) -> bool:
        """Verify and keep a round, no faster than ``_SIGNATURES_PER_S`` allows. Return whether the round was new."""
        round_ = await self._in_thread(lambda: verify_round(data, self._ledger.organiser))
        await asyncio.sleep((1 + len(round_.credited)) / _SIGNATURES_PER_S)
        return await self._keep(data, round_)


async def pull(ledger: Ledger, ask: Ask, take: Take, newest: Moment | None = None) -> bool:
    """Fetch the rounds that the ledger lacks, up to ``newest``, page by page. Return whether there were any. Raise
    ValueError if a round is not valid; SwarmError or TimeoutError if the peer does not answer."""
    is_new = has_more = True
    has_news = False
    while is_new and has_more:  # a page without anything new ends it: the peer may repeat itself for ever
        since, known = ledger.seen(_MAX_KNOWN_BYTES)
        request = pb.RoundsRequest(since_rollbacks=since.rollbacks, since_step=since.step, known=known)
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await ask(request)
        is_new, has_more = False, reply.has_more
        for data in reply.rounds:
            await asyncio.sleep(0)
            if ledger.wants(data, newest):
                is_new = await take(data) or is_new
        has_news = has_news or is_new
    return has_news
