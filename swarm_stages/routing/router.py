"""Which peer of a stage is asked next. Decides from data alone.

By default, the peer is asked where the delay would be least by the speeds that peers announce, if all trainers do the
same (``Backlogs``). Other policies are there to be compared: SWARM's Algorithm 1 (``WeightedRoundRobin``), which does
not see that a peer has nothing to do; the peer that would be ready first by the times that this trainer has measured,
which as one of many takes the requests of others for slow peers; the shortest queue of its own requests; and chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from swarm_stages.routing.backlogs import Backlogs
from swarm_stages.routing.speed import SHARES, believed
from swarm_stages.routing.weighted import WeightedRoundRobin

POLICIES = ("shortest_delay", "weighted_round_robin", "ready_time", "queue_only", "random")
SHORTEST_DELAY, WEIGHTED, READY_TIME, QUEUE_ONLY, RANDOM = POLICIES
_SMOOTHING = 0.2  # of a new measurement in the moving average
_UNKNOWN_S = 0.01  # nothing is known of anybody: soon it is
_KEPT_FIRST = 1.0  # micro-batches: as long as nobody has nothing to do, it is less work for all


@dataclass(frozen=True)
class Backoff:
    """How long a peer is not asked.

    Attributes:
        first_s: after a failure; twice as long after each that follows, up to ``most_s``.
        busy_s: after it had no room.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    busy_s: float = 0.1

    def after(self, failures: int) -> float:
        return float(min(self.first_s * 2.0 ** min(failures - 1, 32), self.most_s))


@dataclass
class _Peer:
    """What this trainer knows of a peer from its own requests. Times are those of one clock, in seconds."""

    runtime_s: dict[str, float] = field(default_factory=dict)  # moving average, by kind of request
    waiting: Counter[str] = field(default_factory=Counter)  # requests that are not answered, by kind
    free_s: float = 0.0  # when it is expected to have answered them
    answered_s: float = 0.0
    failures: int = 0  # in a row
    not_before_s: float = 0.0


class Router:
    """Requests are of kinds that take different times, such as forward and backward; a peer answers one at a time."""

    def __init__(self, policy: str, draw: Callable[[], float], backoff: Backoff | None = None) -> None:
        """``draw``: uniform in [0, 1), for random choices and ties.

        Raises:
            ValueError: there is no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"routing is {policy!r}: expected one of {', '.join(POLICIES)}")
        self._policy = policy
        self._draw = draw
        self._backoff = backoff or Backoff()
        self._peers: dict[str, _Peer] = {}
        self._announced: Mapping[str, float] = {}
        self._num_trainers = 1
        self._weighted, self._backlogs = WeightedRoundRobin(draw), Backlogs(draw)

    def hear(self, announced: Mapping[str, float], num_trainers: int) -> None:
        """What peers say of how many micro-batches per second they can compute; 0: they do not know yet. And of how
        many trainers this is one."""
        self._announced, self._num_trainers = announced, num_trainers

    def choose(self, candidates: Collection[str], kind: str, now: float, kept_by: str | None = None) -> str | None:
        """None if all of them are to be left alone for a while, see ``wait_s``. ``kept_by``: who has computed a part of
        this already; by default, it is asked unless it has a micro-batch more to do than another."""
        willing = sorted(peer for peer in candidates if self._peer(peer).not_before_s <= now)
        if not willing:
            return None
        speeds, share = believed(self._announced, candidates), SHARES.get(kind, 1.0)
        if self._policy == SHORTEST_DELAY:
            delays_s = {peer: self._delay_s(peer, speeds[peer], share, now) for peer in willing}
            if kept_by in delays_s:
                delays_s[kept_by] -= _KEPT_FIRST / speeds[kept_by]
            return min(delays_s, key=delays_s.__getitem__)
        if self._policy == WEIGHTED:
            return self._weighted.choose(willing, speeds, share)
        if self._policy == RANDOM:
            return willing[int(self._draw() * len(willing))]
        if self._policy == QUEUE_ONLY:
            least = min(self._peer(peer).waiting.total() for peer in willing)
            shortest = [peer for peer in willing if self._peer(peer).waiting.total() == least]
            return shortest[int(self._draw() * len(shortest))]
        return min(willing, key=lambda peer: self.ready_s(peer, willing, kind, now))

    def _delay_s(self, peer_id: str, speed: float, share: float, now: float) -> float:
        waiting = sum(SHARES.get(kind, 1.0) * number for kind, number in self._peer(peer_id).waiting.items())
        return self._backlogs.delay_s(peer_id, speed, share, waiting, self._num_trainers, now)

    def ready_s(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> float:
        """When this peer is expected to have answered one more request. Of those never seen the best is hoped."""
        return max(now, self._peer(peer_id).free_s) + self.runtime_s(peer_id, candidates, kind)

    def runtime_s(self, peer_id: str, candidates: Collection[str], kind: str) -> float:
        """What a request takes there, without waiting; the least of others if it has not been measured."""
        own = self._peer(peer_id).runtime_s.get(kind)
        if own is not None:
            return own
        known = [self._peer(peer).runtime_s.get(kind) for peer in candidates]
        return min((each for each in known if each is not None), default=_UNKNOWN_S)

    def is_known(self, candidates: Collection[str], kind: str) -> bool:
        """Whether one of them has answered such a request."""
        return any(kind in self._peer(peer).runtime_s for peer in candidates)

    def wait_s(self, candidates: Collection[str], now: float) -> float:
        """Until one of them may be asked again."""
        return max(0.0, min((self._peer(peer).not_before_s for peer in candidates), default=now) - now)

    def num_waiting(self, peer_id: str) -> int:
        """Requests to it that are not answered."""
        return self._peer(peer_id).waiting.total()

    def asked(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> None:
        """A request was sent; one of ``answered``, ``busy``, ``failed`` and ``withdrawn`` must follow."""
        peer = self._peer(peer_id)
        peer.free_s = self.ready_s(peer_id, candidates, kind, now)
        peer.waiting[kind] += 1
        speed, share = believed(self._announced, candidates)[peer_id], SHARES.get(kind, 1.0)
        self._weighted.asked(peer_id, speed, share)
        self._backlogs.asked(peer_id, speed, share, self._num_trainers, now)

    def answered(self, peer_id: str, kind: str, asked_s: float, now: float) -> None:
        peer = self._peer(peer_id)
        took_s = now - max(asked_s, peer.answered_s)  # before that it was busy with the request before
        usual_s = peer.runtime_s.get(kind, took_s)
        peer.runtime_s[kind] = usual_s + _SMOOTHING * (took_s - usual_s)
        peer.answered_s, peer.failures = now, 0
        self._ended(peer, kind, now)

    def busy(self, peer_id: str, kind: str, now: float) -> None:
        """It had no room: others send it work as well."""
        peer = self._peer(peer_id)
        peer.not_before_s = now + self._backoff.busy_s
        self._ended(peer, kind, now)

    def failed(self, peer_id: str, kind: str, now: float) -> None:
        """It did not answer, or wrongly."""
        peer = self._peer(peer_id)
        peer.failures += 1
        peer.not_before_s = now + self._backoff.after(peer.failures)
        self._ended(peer, kind, now)

    def withdrawn(self, peer_id: str, kind: str, now: float) -> None:
        """The answer is no longer waited for, and says nothing of the peer."""
        self._ended(self._peer(peer_id), kind, now)

    def keep(self, peer_ids: Collection[str]) -> None:
        """Forgets all others, unless they still have requests to answer."""
        gone = [peer for peer, known in self._peers.items() if peer not in peer_ids and not known.waiting.total()]
        for peer in gone:
            del self._peers[peer]
            self._weighted.forget(peer)
            self._backlogs.forget(peer)

    def _peer(self, peer_id: str) -> _Peer:
        return self._peers.setdefault(peer_id, _Peer())

    def _ended(self, peer: _Peer, kind: str, now: float) -> None:
        """What is left is expected anew, from now on: errors of the past do not add up."""
        peer.waiting[kind] -= 1
        assert peer.waiting[kind] >= 0
        left_s = (number * peer.runtime_s.get(each, _UNKNOWN_S) for each, number in peer.waiting.items())
        peer.free_s = now + sum(left_s)
