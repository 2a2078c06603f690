"""Which answers of a client's servers are checked, and what is done about those that were wrong."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from swarm_client.core.background import now_s
from swarm_client.core.config import CHECK_SHARE
from swarm_client.core.events import Reporter, WrongAnswers
from swarm_client.routing.routing import Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.verification.accusations import Accusations
from swarm_client.verification.checks import Check, Sample
from swarm_client.verification.verdict import Verdict
from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import PeerError, SwarmError

_logger = logging.getLogger(__name__)
_ATTEMPTS = 3  # at one check, each with other servers
_MOST_WAITS = 2  # for the first check of a server, by two sessions or steps; after that it is checked like any other
_SUSPENDED_S = 600.0
_LOOK_AGAIN_S = 20.0  # for others that hold the same blocks


class Checker:
    """Of one client. Runs on the background loop.

    Attributes:
        num_checked: positions that others have computed again.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._chance = random.SystemRandom()
        self._known: set[str] = set()  # peer ids of servers whose first answers have been checked
        self._waits: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)  # session and step; lanes wait together
        self._alone: dict[frozenset[str], float] = {}  # chains that nobody can check, and when to look again
        self._said: set[Any] = set()
        self._tasks: set[asyncio.Task[Verdict]] = set()
        self._accusations = Accusations(swarm)
        config = swarm.config
        self.share = CHECK_SHARE if config.initial_peers or config.discover else 0.0
        if config.check_share is not None:
            self.share = config.check_share
        self._reads = False
        self.num_checked = 0

    def start(self) -> None:
        """Reads from now on of whom others accuse."""
        if not self._reads:
            self._reads = True
            self._swarm.spawn(self._accusations.keep_reading())

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def has_new(self, hops: Route) -> bool:
        """Whether the first answers of some of these servers are still to be checked, and can be."""
        peer_ids = frozenset(hop.server.peer_id for hop in hops)
        return not peer_ids <= self._known and self._alone.get(peer_ids, 0.0) <= now_s()

    def draws(self, num_positions: int, length: int) -> bool:
        """Whether a session that has come to ``length`` by ``num_positions`` new ones, of all rows, is checked now.

        Of all positions a share is computed again: a check takes ``length`` of them.
        """
        return not self.is_busy and self._chance.random() * length < self.share * num_positions

    def row(self, batch_size: int) -> int:
        return self._chance.randrange(batch_size)

    async def check(
        self, sample: Sample, reporter: Reporter, *, wait_s: float, then: Callable[[Verdict], None]
    ) -> Verdict | None:
        """None if it takes longer than ``wait_s``: it goes on, and ``then`` is called with what comes of it."""
        task = asyncio.ensure_future(self._check(sample, reporter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if wait_s:
            for hop in sample.hops:
                self._waits[hop.server.peer_id].add((id(reporter.stats), sample.inputs.hidden.shape[1]))
            await asyncio.wait([task], timeout=wait_s)
            if task.done():
                return task.result()
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else then(done.result()))
        return None

    async def _check(self, sample: Sample, reporter: Reporter) -> Verdict:
        verdict = Verdict()
        for _ in range(_ATTEMPTS):
            try:
                verdict = await Check(self._swarm, sample, self._swarm.routed, self._chance).run()
                break
            except PeerError as error:
                _logger.info("a check was not made: %s", error)
                if error.peer_id in {hop.server.peer_id for hop in sample.hops}:
                    break  # its session will notice
                self._swarm.failed(error)
            except SwarmError as error:
                _logger.info("a check was not made: %s", error)
                break
        has_verdict = bool(verdict.passed or verdict.distrusted or verdict.disagreements)
        reporter.stats.checks += has_verdict
        self.num_checked += sample.inputs.hidden.shape[1] * has_verdict
        self._learn(verdict, sample, reporter)
        return verdict

    def _learn(self, verdict: Verdict, sample: Sample, reporter: Reporter) -> None:
        peer_ids = frozenset(hop.server.peer_id for hop in sample.hops)
        self._known |= verdict.passed
        self._known |= {peer_id for peer_id in peer_ids if len(self._waits[peer_id]) >= _MOST_WAITS}
        for lie in verdict.lies:
            self._swarm.ban(lie.server)
            self._known.discard(lie.server)
            self._swarm.spawn(self._accusations.tell(lie.server, lie.span, sample.inputs.hidden.shape[-1]))
            reporter.report(WrongAnswers(lie.span, lie.server, lie.witnesses))
        for peer_id in verdict.suspects:
            self._swarm.ban(peer_id, _SUSPENDED_S)
            self._known.discard(peer_id)
        if verdict.suspects:
            names = ", ".join(map(short_id, sorted(verdict.suspects)))
            _logger.warning(
                "servers %s together answered a session otherwise than each does alone: all are left out for %g s",
                names,
                _SUSPENDED_S,
            )
        for disagreement in verdict.disagreements:
            names = ", ".join(map(short_id, disagreement.servers))
            self._say_once(
                disagreement,
                f"servers {names} differ over blocks {disagreement.span}, and no other decides who is right",
            )
        if not (verdict.passed or verdict.distrusted or verdict.disagreements):
            self._alone[peer_ids] = now_s() + _LOOK_AGAIN_S
        for span in verdict.unchecked:
            self._say_once(span, f"blocks {span} cannot be checked: no second server has them")

    def _say_once(self, what: Any, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning("%s", sentence)


_checkers: WeakKeyDictionary[Swarm, Checker] = WeakKeyDictionary()


def checker_of(swarm: Swarm) -> Checker:
    """The one that all sessions of a client share."""
    if swarm not in _checkers:
        _checkers[swarm] = Checker(swarm)
    return _checkers[swarm]
