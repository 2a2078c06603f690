"""The settings of one peer of a robust run, and the deadlines of its phases."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_ELEMENT_BYTES = 4
_COMPUTING = frozenset({"commitment", "welcome", "accusations", "measurements"})
_OPENING = frozenset({"parts_opened", "evidence_opened", "aggregate_opened"})  # count only with their data
_CARRYING = frozenset({"receipt", "reveal", "accusations"}) | _OPENING


@dataclass(frozen=True)
class RobustConfig:
    """The settings of one peer. All times, and ``bytes_per_s``, must be the same for all peers of a run.

    A phase ends as soon as all peers have spoken. A peer that has not spoken at the deadline counts as silent, so
    deadlines should be generous: they only cost time, once for each peer that dies. Deadlines include the travel time
    of data. They do not depend on a peer's observations, or honest peers would disagree on which peers were silent.

    Raises:
        ValueError: a setting is out of its range.
    """

    host: str | None = None  # to listen on; None: the address on the route to the initial peers, or loopback
    port: int = 0
    dht_port: int = 0
    announce_host: str | None = None  # by which others reach this peer, if it is not ``host``
    join_timeout_s: float = 300.0  # to wait for the other founders, or for admission
    compute_s: float = 120.0  # between two steps, or to recompute other peers' gradients
    phase_s: float = 20.0  # for all other phases
    spread_s: float = 3.0  # for data to spread from an honest peer to all others; also their largest lag in time
    bytes_per_s: float = 1e6  # of the slowest link; it sets the extra time for gradients

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "compute_s", "phase_s", "spread_s", "bytes_per_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a number above 0")
        if self.phase_s < 3 * self.spread_s or self.compute_s < 3 * self.spread_s:
            raise ValueError(f"spread_s is {self.spread_s}: expected a third of phase_s and compute_s, or less")


@dataclass(frozen=True)
class Deadlines:
    """A phase's deadlines, in seconds from its beginning; they depend on the config and the gradient's size alone.

    Attributes:
        late_s: the time after which this peer speaks without waiting for data.
        deadline_s, spread_s: see ``swarm_training.broadcast.agreement``.
    """

    late_s: float
    deadline_s: float
    spread_s: float

    @classmethod
    def of(cls, kind: str, config: RobustConfig, num_elements: int) -> Deadlines:
        travel_s = 2 * _ELEMENT_BYTES * num_elements / config.bytes_per_s  # one gradient to a peer, and one back
        base_s = config.compute_s if kind in _COMPUTING else config.phase_s
        deadline_s = base_s + (travel_s if kind in _CARRYING else 0.0)
        return cls(deadline_s - base_s / 2, deadline_s, config.spread_s + (travel_s if kind in _OPENING else 0.0))
