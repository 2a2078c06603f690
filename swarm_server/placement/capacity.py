"""The throughput of a swarm, in tokens per second, as a pure function of its servers.

It is what passes through all blocks if clients spread it as well as possible. A server computes any part of its span,
so its time goes to those of its blocks that have the fewest other servers. Given the spans, this is a bipartite flow
from servers to blocks. Because spans are intervals, its minimum cut (Ford and Fulkerson, "Maximal flow through a
network", 1956) has a closed form:

    throughput = min over unions V of intervals, but not all blocks:  (speed of all - speed inside V) / (B - |V|)

where a server is inside V if its whole span is, and speeds are in blocks x tokens per second. The blocks outside V at
the minimum are the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span

EQUAL = 1e-6  # relative: numbers that differ less count as equal
_NUDGE = 1e-9
_NUMBERS_AT_ONCE = 1 << 21  # of layouts that are compared at the same time: 16 MiB


@dataclass(frozen=True)
class Balance:
    """The throughput of a swarm, and its bottleneck.

    Attributes:
        tokens_per_s: the throughput through all blocks; 0 if nobody holds some of them.
        bottleneck: [blocks], true for every block that limits the throughput.
    """

    tokens_per_s: float
    bottleneck: np.ndarray

    @property
    def num_missing(self) -> int:
        """Return the number of blocks that nobody holds."""
        return 0 if self.tokens_per_s else int(self.bottleneck.sum())

    def is_better_than(self, other: Balance) -> bool:
        """Return whether this swarm carries more, or as much with fewer blocks that limit it."""
        if self.tokens_per_s > other.tokens_per_s * (1 + EQUAL):
            return True
        same = self.tokens_per_s >= other.tokens_per_s * (1 - EQUAL)
        return same and self.bottleneck.sum() < other.bottleneck.sum()


@dataclass(frozen=True)
class SpanChange:
    """An amount of speed that moves from the span ``since`` to the span ``to``; None is a server that is new."""

    speed: float
    since: Span | None
    to: Span


@dataclass(frozen=True)
class Coverage:
    """The servers of a view as arrays, sorted by peer id; speeds in blocks x tokens per second."""

    num_blocks: int
    peer_ids: tuple[str, ...]
    starts: np.ndarray
    ends: np.ndarray
    speeds: np.ndarray
    movable: np.ndarray

    @classmethod
    def of(cls, view: SwarmView, num_blocks: int) -> Coverage:
        """Return present and joining servers; moving ones count at their destinations, unknown speeds as the median."""
        servers = sorted(filter(_is_counted, view.servers), key=lambda server: server.peer_id)
        known = [speed for server in servers if (speed := speed_of(server))]
        usual = median(known) if known else 1.0
        spans = [server.next_span or server.span for server in servers]
        return cls(
            num_blocks,
            tuple(server.peer_id for server in servers),
            np.array([min(span.start, num_blocks - 1) for span in spans], int),
            np.array([min(span.end, num_blocks) for span in spans], int),
            np.array([speed_of(server) or usual for server in servers], float),
            np.array([_is_movable(server) for server in servers], bool),
        )

    @property
    def usual_speed(self) -> float:
        return float(np.median(self.speeds)) if len(self.speeds) else 1.0

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.ends - self.starts
        return lengths

    def balance(self) -> Balance:
        (throughput,), (bottleneck,) = _throughputs(self._inside()[None], self.speeds.sum())
        return Balance(float(throughput), bottleneck)

    def balances_with(self, alternatives: Sequence[Sequence[SpanChange]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the swarm's throughput after each of several sets of changes; all sets add the same new speed.

        Returns: [alternatives] tokens per second, [alternatives, blocks] the bottlenecks.
        """
        inside = self._inside()
        new_speed = sum(change.speed for change in alternatives[0] if change.since is None)
        at_once = max(1, _NUMBERS_AT_ONCE // len(inside) ** 2)
        results = []
        for first in range(0, len(alternatives), at_once):
            part = alternatives[first : first + at_once]
            stack = np.repeat(inside[None], len(part), 0)
            for matrix, changes in zip(stack, part, strict=True):
                for change in changes:
                    if change.since is not None:
                        matrix[: change.since.start + 1, change.since.end :] -= change.speed
                    matrix[: change.to.start + 1, change.to.end :] += change.speed
            results.append(_throughputs(stack, self.speeds.sum() + new_speed))
        throughputs, bottlenecks = zip(*results, strict=True)
        return np.concatenate(throughputs), np.concatenate(bottlenecks)

    def upper_bound(self) -> float:
        """Return a bound for any spans of these lengths: a server of L blocks adds at most L times the throughput."""
        limit = self.speeds.sum() / self.num_blocks
        while (lower := np.minimum(self.speeds, limit * self.lengths).sum() / self.num_blocks) < limit * (1 - EQUAL):
            limit = lower
        return float(limit)

    def block_sums(self) -> list[float]:
        """Return for each block the tokens per second of the servers that hold it, each through its whole span."""
        change = np.zeros(self.num_blocks + 1)
        np.add.at(change, self.starts, self.speeds / self.lengths)
        np.add.at(change, self.ends, -self.speeds / self.lengths)
        sums: list[float] = change.cumsum()[:-1].round(9).tolist()
        return sums

    def _inside(self) -> np.ndarray:
        """Return [start, end]: the speed of all servers whose span lies inside start:end."""
        matrix = np.zeros((self.num_blocks + 1, self.num_blocks + 1))
        np.add.at(matrix, (self.starts, self.ends), self.speeds)
        return matrix[::-1].cumsum(0)[::-1].cumsum(1)

    def span(self, index: int) -> Span:
        return Span(int(self.starts[index]), int(self.ends[index]))

    def moved(self, moves: Iterable[tuple[int, Span]]) -> Coverage:
        """Return a copy with some servers, given by index, at other spans."""
        starts, ends = self.starts.copy(), self.ends.copy()
        for index, to in moves:
            starts[index], ends[index] = to.start, to.end
        return replace(self, starts=starts, ends=ends)


def speed_of(server: ServerRecord) -> float:
    """Return the server's speed in blocks x tokens per second, or 0 if it is unknown."""
    tokens_per_s = server.forward_tokens_per_s or server.tokens_per_s
    if server.network_tokens_per_s:
        tokens_per_s = min(tokens_per_s, server.network_tokens_per_s)
    return tokens_per_s * len(server.span)


def _is_movable(server: ServerRecord) -> bool:
    return server.state is ServerState.ONLINE and not server.pinned and server.next_span is None


def _is_counted(server: ServerRecord) -> bool:
    return server.state is not ServerState.DRAINING or server.next_span is not None


def _throughputs(inside: np.ndarray, speed: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the throughput of each layout, and its bottleneck: the widest one if there are several.

    inside: [layouts, start, end], see ``Coverage._inside``; speed: of all servers together. The minimum of a ratio is
    found by Dinkelbach's method ("On Nonlinear Fractional Programming", 1967), the best V for a ratio by dynamic
    programming.
    """
    num_layouts, size, _ = inside.shape
    throughputs = np.full(num_layouts, speed / (size - 1))
    bottlenecks = np.ones((num_layouts, size - 1), bool)
    active = np.arange(num_layouts)
    while len(active):
        # With a price a little above the throughput, V = all blocks is worse than the blocks outside the bottleneck.
        speed_inside, outside = _best_intervals(
            inside[active], throughputs[active] * (1 + _NUDGE) + _NUDGE * speed / size
        )
        num_outside = outside.sum(1)
        ratios = np.maximum(0, speed - speed_inside) / np.maximum(1, num_outside)
        ratios[ratios < 1e-9 * speed] = 0.0  # rounding must not hide that nobody holds some blocks
        proper = num_outside > 0
        bottlenecks[active[proper]] = outside[proper]
        lower = proper & (ratios < throughputs[active] * (1 - EQUAL / 10))
        throughputs[active[lower]] = ratios[lower]
        active = active[lower]
    return throughputs, bottlenecks


def _best_intervals(inside: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the speed inside the V with the greatest (speed inside - price x blocks), and the blocks outside V."""
    num_layouts, size, _ = inside.shape
    rows, ends = np.arange(num_layouts), np.arange(size)
    best = np.zeros((num_layouts, size))
    since = np.zeros((num_layouts, size), int)  # start of the interval that ends here; equal to the end if none does
    for end in range(1, size):
        values = best[:, :end] + inside[:, :end, end] - prices[:, None] * (end - ends[:end])
        start = values.argmax(1)
        value = values[rows, start]
        better = value > best[:, end - 1]
        best[:, end] = np.where(better, value, best[:, end - 1])
        since[:, end] = np.where(better, start, end)
    outside = np.ones((num_layouts, size - 1), bool)
    blocks, at = np.arange(size - 1), np.full(num_layouts, size - 1)
    while at.any():
        start = since[rows, at]
        outside &= (blocks < start[:, None]) | (blocks >= at[:, None])
        at = np.where(start == at, np.maximum(0, at - 1), start)
    return best[:, -1] + prices * (~outside).sum(1), outside
