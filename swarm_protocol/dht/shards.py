"""Under which DHT keys the servers of a model stand, so that any number of them can be read, or only those of a part.

All servers of a model stand under one key, the root, while there are few. Those for which it has no room go down a
tree: to the group of blocks where their span begins, then by the bits of a hash of their peer id. A server takes the
first shard of its ``path`` that has room. A reader who finds a shard half full reads its ``children`` too.

Why nobody is overlooked: a server goes past a shard only if that is full of records that will last for another 80 s,
and looks again every 60 s. So if a shard empties, even at once, those below it have come up before readers find it less
than half full.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from swarm_protocol.dht.records import LIFETIME_S, ROOT_SHARD
from swarm_protocol.span import Span

CAPACITY = 256  # records of 1.5 KB, at worst three times as many: far below the 4 MiB that hivemind can send
CLIMB_EVERY = 3  # publications, that is every 60 s
LONG = "long"  # the group of spans that reach over more than two groups
_LASTING_S = LIFETIME_S * 2 / 3  # of a record that was renewed at one of the last two times
_MIN_GROUP_BLOCKS = 8
_MAX_GROUPS = 8
_MAX_BITS = 12


def path(peer_id: str, span: Span, num_blocks: int) -> tuple[str, ...]:
    """The shards that may hold a server's record, the root first."""
    width = _group_width(num_blocks)
    first, last = span.start // width, (span.end - 1) // width
    group = str(first) if last - first <= 1 else LONG
    bits = f"{int.from_bytes(sha256(peer_id.encode()).digest()[:4], 'big'):032b}"
    return (ROOT_SHARD, group, *(f"{group}.{bits[:length]}" for length in range(1, _MAX_BITS + 1)))


def children(shard: str, num_blocks: int, part: Span | None = None) -> tuple[str, ...]:
    """The shards below this one in which servers may stand that hold some block of ``part`` (by default, any block)."""
    if shard != ROOT_SHARD:
        group, _, bits = shard.partition(".")
        return (f"{group}.{bits}0", f"{group}.{bits}1") if len(bits) < _MAX_BITS else ()
    width = _group_width(num_blocks)
    start, end = (part.start, part.end) if part is not None else (0, num_blocks)
    groups = range(max(0, start // width - 1), -(-end // width))
    return (*map(str, groups), *([LONG] if num_blocks > 2 * width else []))


def is_split(num_records: int, capacity: int = CAPACITY) -> bool:
    """Whether there may be servers below a shard that holds so many records, withdrawn and foreign ones included."""
    return 2 * num_records >= capacity


def has_room(lifetimes_left_s: Sequence[float], capacity: int = CAPACITY) -> bool:
    """Whether a shard takes one more server, beside records that expire after so many seconds."""
    lasting = sum(left_s > _LASTING_S for left_s in lifetimes_left_s)
    return lasting < capacity and len(lifetimes_left_s) < 3 * capacity


def _group_width(num_blocks: int) -> int:
    return max(_MIN_GROUP_BLOCKS, -(-num_blocks // _MAX_GROUPS))
