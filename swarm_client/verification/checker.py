"""Decides which answers of a client's servers are checked, and leaves out servers that answered wrongly."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from swarm_client.core.background import now_s
from swarm_client.core.config import CHECK_SHARE
from swarm_client.core.events import Reporter, WrongAnswers
from swarm_client.routing.routing import Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.verification.accusations import AccusationClient
from swarm_client.verification.checks import SampleCheck, SampledAnswer
from swarm_client.verification.references import kind_of
from swarm_client.verification.risk import (
    DOUBT_AGAIN_S,
    DOUBT_CHECKS,
    CheckBudget,
    CheckHistory,
    check_cost,
    price_of,
    share_of,
    work_of,
)
from swarm_client.verification.verdict import CheckVerdict
from swarm_protocol.dht.records import ServerRecord, short_id
from swarm_protocol.errors import PeerError, SwarmError

_logger = logging.getLogger(__name__)
_ATTEMPTS = 3  # the limit of tries for one check, each with other servers
_MOST_WAITS = 2  # after so many sessions or steps that waited for its first check, a server is checked like any other
_SUSPENDED_S = 600.0
_LOOK_AGAIN_S = 20.0  # the wait before searching again for other servers of the same blocks
_ACTIVE_S = 2.0  # a session shares steps with others until this long after its last step
_MAX_HISTORIES = 4096  # the limit of remembered servers


@dataclass
class _Doubt:
    """A doubt about one server. ``num_left``: the number of checks until the doubt is over."""

    num_left: int = 0
    since_s: float = -inf

    def begin(self, now_s: float) -> bool:
        """Begin a doubt unless the last one is recent, because doubters may lie; return whether it begins."""
        if now_s - self.since_s < DOUBT_AGAIN_S:
            return False
        self.num_left, self.since_s = DOUBT_CHECKS, now_s
        return True

    def count_check(self) -> None:
        self.num_left = max(0, self.num_left - 1)


@dataclass
class _Past:
    """The results of one server's checks. ``own``: the doubt of this client; ``heard``: the doubt of other clients."""

    first_s: float
    passed: int = 0
    own: _Doubt = field(default_factory=_Doubt)
    heard: _Doubt = field(default_factory=_Doubt)

    def count_check(self, *, has_passed: bool) -> None:
        self.passed += has_passed
        self.own.count_check()
        self.heard.count_check()


class Checker:
    """The checker of one client. All methods run on the background loop.

    Attributes:
        share: the share of a good server's work that checks of it may cost.
        price: the cost of computing a position again, in steps; see ``price_of``.
    """

    def __init__(self, swarm: Swarm, chance: random.Random | None = None) -> None:
        """Set up the checker. ``chance``: a source of random numbers, unpredictable by default."""
        self._swarm = swarm
        self._chance = chance or random.SystemRandom()
        self._known: set[str] = set()  # peer ids of servers whose first answers have been checked
        self._waits: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)  # waiting sessions and steps
        self._alone: dict[frozenset[str], float] = {}  # uncheckable chains, and when to search again
        self._said: set[Any] = set()
        self._tasks: set[asyncio.Task[CheckVerdict]] = set()
        self._accusations = AccusationClient(swarm, self.hear_doubt)
        config = swarm.config
        self.share = CHECK_SHARE if config.initial_peers or config.discover else 0.0
        if config.check_share is not None:
            self.share = config.check_share
        self._reads = False
        self.num_checked = 0
        self.price = 1.0
        self._budget = CheckBudget(self._chance.random)
        self._pasts: dict[str, _Past] = {}  # keys: peer ids
        self._stepped_s: dict[object, float] = {}  # the time of each session's last step, oldest first

    def start(self) -> None:
        """Start to read the accusations of other clients, unless that has been done."""
        if not self._reads:
            self._reads = True
            self._swarm.spawn(self._accusations.keep_reading())

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def has_new(self, hops: Route) -> bool:
        """Return whether some of these servers have first answers that are unchecked and can be checked."""
        peer_ids = frozenset(hop.server.peer_id for hop in hops)
        return not peer_ids <= self._known and self._alone.get(peer_ids, 0.0) <= now_s()

    def draws(
        self, session: object, hops: Route, num_rows: int, num_tokens: int, length: int, *, is_owed: bool
    ) -> bool:
        """Return whether to check a session now, which ``num_tokens`` new positions in each row bring to ``length``.

        ``is_owed``: some row of the session is still unchecked, and its turn has come. See ``CheckBudget``.
        """
        # Servers compute the steps of many sessions together. A step is then cheaper, and a prompt position costs more
        # of such steps.
        price = min(1.0, self.price * self._num_active(session))
        share = max(share_of(self._history(hop.server), self.share) for hop in hops)
        peer_ids = frozenset(hop.server.peer_id for hop in hops)
        is_alone = self._alone.get(peer_ids, 0.0) > now_s()
        return self._budget.draws(
            share,
            work_of(num_rows, num_tokens, price),
            check_cost(length, price),
            is_owed,
            is_possible=not (self.is_busy or is_alone),
            is_heard=any(self._pasts[peer_id].heard.num_left for peer_id in peer_ids & self._pasts.keys()),
        )

    def choose(self, rows: Sequence[int]) -> int:
        return self._chance.choice(rows)

    def _num_active(self, session: object) -> int:
        """Return the number of sessions with a recent step, this one included."""
        self._stepped_s.pop(session, None)  # so that the session is the newest key again
        self._stepped_s[session] = now = now_s()
        for other in [other for other, stepped_s in self._stepped_s.items() if stepped_s < now - _ACTIVE_S]:
            del self._stepped_s[other]
        return len(self._stepped_s)

    def _history(self, server: ServerRecord) -> CheckHistory:
        past = self._pasts.get(server.peer_id)
        if past is None:
            return CheckHistory(is_coarse=kind_of(server).is_coarse)
        age_s = now_s() - past.first_s
        return CheckHistory(past.passed, age_s, past.own.num_left > 0, kind_of(server).is_coarse)

    async def check(
        self, sample: SampledAnswer, reporter: Reporter, *, wait_s: float, then: Callable[[CheckVerdict], None]
    ) -> CheckVerdict | None:
        """Check the sample. Return None after ``wait_s``: the check then continues, and ``then`` gets its verdict."""
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

    async def _check(self, sample: SampledAnswer, reporter: Reporter) -> CheckVerdict:
        verdict = CheckVerdict()
        for _ in range(_ATTEMPTS):
            try:
                self.price = price_of(await self._swarm.usable_servers())
                verdict = await SampleCheck(self._swarm, sample, self._swarm.traits.routed, self._chance).run()
                break
            except PeerError as error:
                _logger.info("a check was not made: %s", error)
                if error.peer_id in {hop.server.peer_id for hop in sample.hops}:
                    break  # the session will notice
                self._swarm.failed(error)
            except SwarmError as error:
                _logger.info("a check was not made: %s", error)
                break
        if verdict.has_found:
            reporter.stats.count_check()
        self.num_checked += sample.inputs.hidden.shape[1] * verdict.has_found
        self._learn(verdict, sample, reporter)
        return verdict

    def _learn(self, verdict: CheckVerdict, sample: SampledAnswer, reporter: Reporter) -> None:
        peer_ids = frozenset(hop.server.peer_id for hop in sample.hops)
        self._known |= verdict.passed
        differing = {peer_id for each in verdict.disagreements for peer_id in each.servers}
        # Servers that differ count as checked too, so that a doubt ends after some checks whatever they bring.
        for peer_id in verdict.passed | (differing & peer_ids):
            self._past(peer_id).count_check(has_passed=peer_id in verdict.passed)
        for peer_id in differing:
            self.doubt(peer_id)
        # Without this, sessions would wait again and again for a server whose checks never come to an end.
        self._known |= {peer_id for peer_id in peer_ids if len(self._waits[peer_id]) >= _MOST_WAITS}
        self._ban(verdict, sample, reporter)
        for disagreement in verdict.disagreements:
            names = ", ".join(map(short_id, disagreement.servers))
            self._say_once(
                disagreement,
                f"servers {names} differ over blocks {disagreement.span}, and no further server decides which is right",
            )
        if not verdict.has_found:
            self._alone[peer_ids] = now_s() + _LOOK_AGAIN_S

    def _ban(self, verdict: CheckVerdict, sample: SampledAnswer, reporter: Reporter) -> None:
        """Leave out servers that have lied, and for a while all suspects, because at least one of them has lied."""
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
                "servers %s answered differently in one session than each does alone: all are left out for %g s",
                names,
                _SUSPENDED_S,
            )
        for span in verdict.unchecked:
            self._say_once(span, f"blocks {span} cannot be checked: no second server has them")

    def doubt(self, peer_id: str) -> None:
        """Check the server more for a while, and inform others, unless this client has doubted the server recently."""
        if self._past(peer_id).own.begin(now_s()):
            self._swarm.spawn(self._accusations.doubt(peer_id))

    def hear_doubt(self, peer_id: str) -> None:
        """Check a server sooner for a while, because other clients doubt it. ``share`` limits the cost of slander.

        A server without a history is checked more anyway, and gets no history here: otherwise strangers could crowd out
        the histories of other servers.
        """
        if peer_id in self._pasts:
            self._pasts[peer_id].heard.begin(now_s())

    def _past(self, peer_id: str) -> _Past:
        if peer_id not in self._pasts and len(self._pasts) >= _MAX_HISTORIES:
            del self._pasts[next(iter(self._pasts))]  # the server that was first checked longest ago
        return self._pasts.setdefault(peer_id, _Past(now_s()))

    def _say_once(self, what: Any, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning("%s", sentence)


_checkers: WeakKeyDictionary[Swarm, Checker] = WeakKeyDictionary()


def checker_of(swarm: Swarm) -> Checker:
    """Return the checker that all sessions of a client share."""
    if swarm not in _checkers:
        _checkers[swarm] = Checker(swarm)
    return _checkers[swarm]
