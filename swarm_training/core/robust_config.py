"""The settings of one peer of a robust run, and how long its phases may take."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_ELEMENT_BYTES = 4
_COMPUTING = frozenset({"commitment", "welcome", "accusations", "measurements"})
_OPENING = frozenset({"parts_opened", "evidence_opened", "aggregate_opened"})  # data must be there to be heard
_CARRYING = frozenset({"receipt", "reveal", "accusations"}) | _OPENING


@dataclass(frozen=True)
class RobustConfig:
    """How a peer takes part. All times, and ``bytes_per_s``, must be the same for all peers of a run.

    A phase ends as soon as all have spoken. Who has not spoken at its deadline is taken for silent, so deadlines should
    be generous: what is lost by them is time, once for each peer that dies. They do not depend on what a peer sees of
    others, since then honest peers would differ on who was silent; that data takes its time to travel is in them.

    Raises:
        ValueError: a setting is out of its range.
    """

    host: str | None = None  # to listen on; None: the address that leads to the initial peers, loopback without any
    port: int = 0
    dht_port: int = 0
    announce_host: str | None = None  # under which others reach this peer, where it is not ``host``
    join_timeout_s: float = 300.0  # to wait for the other founders, or to be let in
    compute_s: float = 120.0  # between two steps, or to recompute the gradients of others
    phase_s: float = 20.0  # for all other phases
    spread_s: float = 3.0  # in which what one honest peer has reaches all others, and by which they are apart at most
    bytes_per_s: float = 1e6  # the slowest line: gradients have so much more time to travel

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "compute_s", "phase_s", "spread_s", "bytes_per_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a number above 0")
        if self.phase_s < 3 * self.spread_s or self.compute_s < 3 * self.spread_s:
            raise ValueError(f"spread_s is {self.spread_s}: expected a third of phase_s and compute_s, or less")


@dataclass(frozen=True)
class Deadlines:
    """Seconds from the beginning of a phase; they depend on the config and the gradient's size alone.

    Attributes:
        late_s: when this peer no longer waits for data before it speaks.
        deadline_s, spread_s: see ``swarm_training.broadcast.agreement``.
    """

    late_s: float
    deadline_s: float
    spread_s: float

    @classmethod
    def of(cls, kind: str, config: RobustConfig, num_elements: int) -> Deadlines:
        travel_s = 2 * _ELEMENT_BYTES * num_elements / config.bytes_per_s  # a gradient to a peer, and one from it
        base_s = config.compute_s if kind in _COMPUTING else config.phase_s
        deadline_s = base_s + (travel_s if kind in _CARRYING else 0.0)
        return cls(deadline_s - base_s / 2, deadline_s, config.spread_s + (travel_s if kind in _OPENING else 0.0))
