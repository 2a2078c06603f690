"""What a server counts about itself while it works. Plain numbers: to count costs next to nothing, and asks for no
package."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm_protocol.dht.records import Work

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Distribution:
    """A histogram. One thread adds to it, and any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the largest value of each bucket, rising; a further bucket takes what is larger."""
        self.total = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Of each bucket its bound, and how many values are not larger; as Prometheus has it, which ends with +Inf."""
        count = 0
        for bound, more in zip((*self._bounds, "+Inf"), list(self._counts), strict=True):
            count += more
            yield str(bound), count


@dataclass
class Counters:
    """Of one server process, from its start, whatever blocks it hosts. Each number is changed by one thread.

    Attributes:
        positions: rows × positions by what was done with them: computed in ``prefill`` (steps of several positions) or
            ``decode`` (of one), ``reused`` from the prefix cache, ``copied`` from another server, and ``forward`` and
            ``backward`` without a session.
        block_positions: what is computed, in rows × positions × blocks, as ``prefill``, ``decode`` or ``forward``.
        blocks_run: how often a block was run, for whatever and however many positions.
        batches: that the compute thread has ended.
        batch_rows: rows of a batch of steps.
        wait_s: from submission to the compute thread, by kind of work: ``decode``, ``prefill`` or ``training``.
        compute_s: of the compute thread, by the same kinds.
        calls: by method of the gRPC service.
        refusals: of calls and of single steps, by the gRPC status that they were answered with.
        received_bytes: messages of callers.
        sent_bytes: ``reply``: messages to callers; ``push``: hidden states to next hops; ``copy``: of sessions.
        sessions: that were opened: ``new``, or as ``replacement`` of another after its first step.
        moves: to other blocks.
        daemon_restarts: of the libp2p daemon.
    """

    positions: Counter[str] = field(default_factory=Counter)
    block_positions: Counter[str] = field(default_factory=Counter)
    blocks_run: int = 0
    batches: int = 0
    batch_rows: Distribution = field(default_factory=lambda: Distribution(_ROWS))
    wait_s: dict[str, Distribution] = field(
        default_factory=lambda: {kind: Distribution(_WAIT_S) for kind in ("decode", "prefill", "training")}
    )
    compute_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    daemon_restarts: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def work(self) -> Work:
        """As the server's record says it."""
        done = self.block_positions
        return Work(done["decode"], done["prefill"], done["forward"], time.monotonic() - self.started_s)
