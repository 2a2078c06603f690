"""The counters that a server keeps about its own work. They are plain numbers: counting is nearly free, and needs no
package."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm_protocol.dht.records import WorkTotals

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Distribution:
    """A histogram. Only one thread adds to it; any thread may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create a histogram; ``bounds`` are the buckets' largest values, rising; one more bucket takes larger ones."""
        self.total = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """Add a value that was seen ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each bucket's bound and the number of values up to it; the last bound is +Inf, as in Prometheus."""
        count = 0
        for bound, more in zip((*self._bounds, "+Inf"), list(self._counts), strict=True):
            count += more
            yield str(bound), count


@dataclass
class Counters:
    """The counters of one server process since its start, for all its blocks. One thread changes each number.

    Attributes:
        positions: rows × positions by use: computed in ``prefill`` (steps of several positions) or ``decode`` (of one),
            ``reused`` from the prefix cache, ``copied`` from a server, ``forward`` and ``backward`` without a session.
        block_positions: computed rows × positions × blocks, as ``prefill``, ``decode`` or ``forward``.
        blocks_run: the number of runs of a block, for any number of positions.
        batches: the number of batches that the compute thread has finished.
        wait_s: the time from submission to the compute thread, by kind: ``decode``, ``prefill``, ``training`` or
            ``background``, which is steps of sessions for whose answers nobody waits.
        compute_s: the busy time of the compute thread, by the same kinds.
        refusals: the number of refused calls and steps, by the gRPC status of the answer.
        sent_bytes: the bytes sent: ``reply`` to callers, ``push`` of hidden states to next hops, ``copy`` of sessions.
        sessions: the number of opened sessions: ``new``, or a ``replacement`` for another one after its first step.
        parked: the number of times that idle sessions left the KV cache (``parked``) and came back (``resumed``).
    """

    positions: Counter[str] = field(default_factory=Counter)
    block_positions: Counter[str] = field(default_factory=Counter)
    blocks_run: int = 0
    batches: int = 0
    batch_rows: Distribution = field(default_factory=lambda: Distribution(_ROWS))
    wait_s: dict[str, Distribution] = field(
        default_factory=lambda: {
            kind: Distribution(_WAIT_S) for kind in ("decode", "prefill", "training", "background")
        }
    )
    compute_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    daemon_restarts: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def receive(self, size_bytes: int) -> None:
        """Count a message from a caller."""
        self.received_bytes += size_bytes

    def move(self) -> None:
        """Count a move to other blocks."""
        self.moves += 1

    def restart_daemon(self) -> None:
        """Count a restart of the libp2p daemon."""
        self.daemon_restarts += 1

    def run_block(self) -> None:
        """Count a run of a block."""
        self.blocks_run += 1

    def finish(self, kind: str, seconds: float) -> None:
        """Count a batch of the compute thread."""
        self.batches += 1
        self.compute_s[kind] += seconds

    def work(self) -> WorkTotals:
        """Return the work done, for the server's record."""
        done = self.block_positions
        return WorkTotals(done["decode"], done["prefill"], done["forward"], time.monotonic() - self.started_s)
