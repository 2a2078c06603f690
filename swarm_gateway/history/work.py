"""Calculates the work of servers from the counters in their records. Decides from data alone.

Servers announce these counters themselves, so a server can exaggerate.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

from swarm_gateway.monitor.model_monitor import ModelStatus
from swarm_protocol.dht.records import MAX_FORWARD_BLOCKS_PER_S, MAX_WORK, WorkTotals

RATE_LIFETIME_S = 60.0  # a rate is over without a new record; records in the DHT are renewed every 20 s
Key = tuple[str, str]  # model and peer id


@dataclass(frozen=True)
class Rate:
    """A rate in positions through the whole model per second. Each server counts with the share of its blocks."""

    decoded: float = 0.0
    prompts: float = 0.0
    passes: float = 0.0

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.decoded + other.decoded, self.prompts + other.prompts, self.passes + other.passes)


@dataclass(frozen=True)
class Reading:
    """The counters of one process of a server; ``time`` is in seconds since 1970."""

    process: str
    work: WorkTotals
    time: float


@dataclass(frozen=True)
class Tally:
    """The work of one server on one model, over all its starts.

    Attributes:
        total: the work in positions × blocks, and the sum of the uptimes.
        rate: the rate between the last two readings.
        since: the time of the first reading, in seconds since 1970.
    """

    model: str
    peer_id: str
    num_blocks: int
    total: WorkTotals
    last: Reading
    since: float
    rate: Rate = Rate()

    @property
    def tokens(self) -> float:
        """Return the work as a number of positions through the whole model."""
        return self.total.tokens(self.num_blocks)

    def rate_at(self, time: float) -> Rate:
        return self.rate if time - self.last.time < RATE_LIFETIME_S else Rate()


def advance(tallies: dict[Key, Tally], models: Iterable[ModelStatus], time: float) -> None:
    """Add the new work in these records to the tallies."""
    for status in models:
        for record in (server.record for server in status.servers):
            if record.work.uptime_s > 0:
                key = status.model, record.peer_id
                reading = Reading(record.tls_fingerprint.hex(), record.work, time)
                tallies[key] = _advanced(tallies.get(key), key, status.num_blocks, reading)


def _advanced(old: Tally | None, key: Key, num_blocks: int, now: Reading) -> Tally:
    if old is None or old.num_blocks != num_blocks:
        return Tally(*key, num_blocks, now.work, now, now.time)
    last = old.last
    if now.process == last.process:
        if now.work.uptime_s <= last.work.uptime_s:  # the same record again, or an older one
            return old
        new = _combined(lambda a, b: max(a - b, 0), now.work, last.work)
    elif now.time - now.work.uptime_s >= last.time:  # the new process started after the last reading
        new = now.work
    else:
        return old  # a late record of an earlier process
    # Claims above what any machine can compute are cut off.
    per_s = [min(count / new.uptime_s, MAX_FORWARD_BLOCKS_PER_S) for count in (new.decoded, new.prompts, new.passes)]
    rate = Rate(*(each / num_blocks for each in per_s))
    return replace(old, total=_combined(operator.add, old.total, new), last=now, rate=rate)


def _combined(function: Callable[[float, float], float], a: WorkTotals, b: WorkTotals) -> WorkTotals:
    counts = (function(*pair) for pair in zip(astuple(a)[:-1], astuple(b)[:-1], strict=True))
    decoded, prompts, passes = (min(int(count), MAX_WORK) for count in counts)
    return WorkTotals(decoded, prompts, passes, function(a.uptime_s, b.uptime_s))
