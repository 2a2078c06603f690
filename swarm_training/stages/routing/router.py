"""The choice of the peer of a stage that is asked next. It decides from data alone.

A trainer asks the peer with the least delay by announced speeds, if all trainers do the same (``Backlogs``). The
benchmark of routing compares this with other policies (``benchmarks/routing_policies.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from swarm_protocol.backoff import Backoff
from swarm_training.stages.routing.backlogs import Backlogs
from swarm_training.stages.routing.speed import SHARES, believed

_SMOOTHING = 0.2  # the weight of a new measurement in the moving average
_UNKNOWN_S = 0.01  # the runtime of a request while no peer has been measured, which is soon over
_KEPT_FIRST = 1.0  # micro-batches of extra delay for a kept graph: while no peer is idle, it saves work for all


@dataclass(frozen=True)
class RouterBackoff(Backoff):
    """The times for which a peer is not asked. ``busy_s``: the time after the peer had no room."""

    first_s: float = 0.5
    most_s: float = 30.0
    busy_s: float = 0.1


@dataclass
class _Peer:
    """A trainer's knowledge of a peer from its own requests. Times are those of one clock, in seconds."""

    runtime_s: dict[str, float] = field(default_factory=dict)  # moving average, by kind of request
    waiting: Counter[str] = field(default_factory=Counter)  # unanswered requests, by kind
    free_s: float = 0.0  # when the peer is expected to have answered them
    answered_s: float = 0.0
    failures: int = 0  # consecutive ones
    not_before_s: float = 0.0

    def asked(self, kind: str, free_s: float) -> None:
        self.free_s = free_s
        self.waiting[kind] += 1

    def answered(self, kind: str, asked_s: float, now: float) -> None:
        took_s = now - max(asked_s, self.answered_s)  # until its previous answer, the peer computed that one
        usual_s = self.runtime_s.get(kind, took_s)
        self.runtime_s[kind] = usual_s + _SMOOTHING * (took_s - usual_s)
        self.answered_s, self.failures = now, 0

    def busy(self, backoff: RouterBackoff, now: float) -> None:
        self.not_before_s = now + backoff.busy_s

    def failed(self, backoff: RouterBackoff, now: float) -> None:
        self.failures += 1
        self.not_before_s = now + backoff.after(self.failures)

    def ended(self, kind: str, now: float) -> None:
        """End a request. Estimate the remaining ones from now on, so that errors of earlier estimates do not add up."""
        self.waiting[kind] -= 1
        assert self.waiting[kind] >= 0
        left_s = (number * self.runtime_s.get(each, _UNKNOWN_S) for each, number in self.waiting.items())
        self.free_s = now + sum(left_s)


class Router:
    """A trainer's choice of peers. Requests are of kinds, such as forward; a peer answers one request at a time."""

    def __init__(self, draw: Callable[[], float], backoff: RouterBackoff | None = None) -> None:
        """Start without knowledge. ``draw``: returns a number, uniform in [0, 1), for random choices and ties."""
        self._draw = draw
        self._backoff = backoff or RouterBackoff()
        self._peers: dict[str, _Peer] = {}
        self._announced: Mapping[str, float] = {}
        self._num_trainers = 1
        self._backlogs = Backlogs(draw)

    def hear(self, announced: Mapping[str, float], num_trainers: int) -> None:
        """Take over the micro-batches per second that peers announce (0: unknown), and how many trainers there are."""
        self._announced, self._num_trainers = announced, num_trainers

    def choose(self, candidates: Collection[str], kind: str, now: float, kept_by: str | None = None) -> str | None:
        """Return the peer to ask; None if all are to be left alone for a while, see ``wait_s``. ``kept_by``: the peer
        that has computed the forward pass of this backward pass. It is asked unless its delay is longer than another
        peer's by a whole micro-batch."""
        willing = sorted(peer for peer in candidates if self._peer(peer).not_before_s <= now)
        return self.best(willing, candidates, kind, now, kept_by) if willing else None

    def best(self, willing: list[str], candidates: Collection[str], kind: str, now: float, kept_by: str | None) -> str:
        """Return the peer of ``willing`` with the least delay. The policies of a benchmark override this method."""
        speeds, share = believed(self._announced, candidates), SHARES.get(kind, 1.0)
        delays_s = {peer: self._delay_s(peer, speeds[peer], share, now) for peer in willing}
        if kept_by in delays_s:
            delays_s[kept_by] -= _KEPT_FIRST / speeds[kept_by]
        return min(delays_s, key=delays_s.__getitem__)

    def _delay_s(self, peer_id: str, speed: float, share: float, now: float) -> float:
        waiting = sum(SHARES.get(kind, 1.0) * number for kind, number in self._peer(peer_id).waiting.items())
        return self._backlogs.delay_s(peer_id, speed, share, waiting, self._num_trainers, now)

    def ready_s(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> float:
        """Return when this peer is expected to have answered one more request; ``runtime_s`` estimates its time."""
        return max(now, self._peer(peer_id).free_s) + self.runtime_s(peer_id, candidates, kind)

    def runtime_s(self, peer_id: str, candidates: Collection[str], kind: str) -> float:
        """Return the seconds of a request there, without waiting; the least of the candidates if it is not measured."""
        own = self._peer(peer_id).runtime_s.get(kind)
        if own is not None:
            return own
        known = [self._peer(peer).runtime_s.get(kind) for peer in candidates]
        return min((each for each in known if each is not None), default=_UNKNOWN_S)

    def is_known(self, candidates: Collection[str], kind: str) -> bool:
        """Return whether a candidate has answered a request of this kind."""
        return any(kind in self._peer(peer).runtime_s for peer in candidates)

    def wait_s(self, candidates: Collection[str], now: float) -> float:
        """Return the seconds until a candidate may be asked again."""
        return max(0.0, min((self._peer(peer).not_before_s for peer in candidates), default=now) - now)

    def asked(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> None:
        """Record that a request was sent; one of ``answered``, ``busy``, ``failed`` and ``withdrawn`` must follow."""
        self._peer(peer_id).asked(kind, self.ready_s(peer_id, candidates, kind, now))
        speed, share = believed(self._announced, candidates)[peer_id], SHARES.get(kind, 1.0)
        self._backlogs.asked(peer_id, speed, share, self._num_trainers, now)

    def answered(self, peer_id: str, kind: str, asked_s: float, now: float) -> None:
        self._peer(peer_id).answered(kind, asked_s, now)
        self._peer(peer_id).ended(kind, now)

    def busy(self, peer_id: str, kind: str, now: float) -> None:
        """Record that a peer had no room, since other trainers send it work as well."""
        self._peer(peer_id).busy(self._backoff, now)
        self._peer(peer_id).ended(kind, now)

    def failed(self, peer_id: str, kind: str, now: float) -> None:
        """Record that a peer did not answer, or answered wrongly."""
        self._peer(peer_id).failed(self._backoff, now)
        self._peer(peer_id).ended(kind, now)

    def withdrawn(self, peer_id: str, kind: str, now: float) -> None:
        """Record that an answer is no longer waited for, which says nothing about the peer."""
        self._peer(peer_id).ended(kind, now)

    def keep(self, peer_ids: Collection[str]) -> None:
        """Forget all other peers, unless they still have requests to answer."""
        gone = [peer for peer, known in self._peers.items() if peer not in peer_ids and not known.waiting.total()]
        for peer in gone:
            del self._peers[peer]
            self._backlogs.forget(peer)

    def _peer(self, peer_id: str) -> _Peer:
        return self._peers.setdefault(peer_id, _Peer())
