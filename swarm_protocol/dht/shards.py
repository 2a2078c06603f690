"""The DHT keys of a model's server records, so that readers can read any number of servers, or only those of a part.

All servers of a model are under one key, the root, while there are few. Servers that find no room there descend a tree:
to the group of blocks in which their span begins, then by the bits of a hash of their peer id. A server uses the
first shard of its ``path`` that has room. A reader that finds a shard half full reads its ``children`` too.

No server is overlooked: it descends past a shard only if that shard is full of records that last another 80 s, and
checks again every 60 s. If a shard empties, even at once, the servers below it have come up before readers find the
shard less than half full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from swarm_protocol.dht.records import LIFETIME_S, MAX_LIFETIME_S, ROOT_SHARD
from swarm_protocol.span import Span

CAPACITY = 256  # records of 1.5 KB, at worst three times as many: far below hivemind's limit of 4 MiB
CLIMB_EVERY = 3  # publications, which is every 60 s
LONG = "long"  # the group of spans that extend over more than two groups
_LASTING_S = LIFETIME_S * 2 / 3  # a record with more time left was renewed at one of the last two refreshes
_MIN_GROUP_BLOCKS = 8
_MAX_GROUPS = 8
_MAX_BITS = 12


@dataclass(frozen=True)
class DhtLimits:
    """The limits of a DHT, which are the same for all of its nodes.

    Attributes:
        capacity: the number of servers that fit under one key.
        climb_every: the number of publications after which a server looks for room nearer to the root.
        max_lifetime_s: records that expire later than in this many seconds are neither stored nor read.
    """

    capacity: int = CAPACITY
    climb_every: int = CLIMB_EVERY
    max_lifetime_s: float = MAX_LIFETIME_S


USUAL_LIMITS = DhtLimits()


def path(peer_id: str, span: Span, num_blocks: int) -> tuple[str, ...]:
    """Return the shards that may hold a server's record, root first."""
    width = _group_width(num_blocks)
    first, last = span.start // width, (span.end - 1) // width
    group = str(first) if last - first <= 1 else LONG
    bits = f"{int.from_bytes(sha256(peer_id.encode()).digest()[:4], 'big'):032b}"
    return (ROOT_SHARD, group, *(f"{group}.{bits[:length]}" for length in range(1, _MAX_BITS + 1)))


def children(shard: str, num_blocks: int, part: Span | None = None) -> tuple[str, ...]:
    """Return the shards below this one that may hold servers of blocks in ``part`` (by default, of any block)."""
    if shard != ROOT_SHARD:
        group, _, bits = shard.partition(".")
        return (f"{group}.{bits}0", f"{group}.{bits}1") if len(bits) < _MAX_BITS else ()
    width = _group_width(num_blocks)
    start, end = (part.start, part.end) if part is not None else (0, num_blocks)
    groups = range(max(0, start // width - 1), -(-end // width))
    return (*map(str, groups), *([LONG] if num_blocks > 2 * width else []))


def is_split(num_records: int, capacity: int = CAPACITY) -> bool:
    """Return whether servers may be below a shard with this many records, including withdrawn and foreign records."""
    return 2 * num_records >= capacity


def has_room(lifetimes_left_s: Sequence[float], capacity: int = CAPACITY) -> bool:
    """Return whether a shard accepts one more server, given the remaining lifetimes of its records in seconds."""
    # Records that were not renewed lately, as those of servers that have left, stay until they expire but do not count.
    lasting = sum(left_s > _LASTING_S for left_s in lifetimes_left_s)
    return lasting < capacity and len(lifetimes_left_s) < 3 * capacity


def _group_width(num_blocks: int) -> int:
    return max(_MIN_GROUP_BLOCKS, -(-num_blocks // _MAX_GROUPS))
