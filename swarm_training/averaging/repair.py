"""What is done about chunks that some member has not got. Decides from data alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Repair:
    """Attributes:
    fetch, redo: from which member to get a chunk, and who adds one up again, by chunk.
    lost: somebody lacks a chunk, and nobody can add it up.
    """

    fetch: Mapping[int, int] = field(default_factory=dict)
    redo: Mapping[int, int] = field(default_factory=dict)
    lost: bool = False


def repair(
    num_chunks: int, held: Mapping[int, Collection[int]], reachable: Collection[int], shares: Sequence[float]
) -> Repair:
    """``held``: the chunks that each living member has; ``reachable``: members that others can call.

    A chunk that a reachable member has is fetched from one of those, in turns. Any other is added up again, by the
    owners in turns: those with a share.
    """
    fetch: dict[int, int] = {}
    redo: dict[int, int] = {}
    lost = False
    owners = [member for member in sorted(held) if member in reachable and shares[member] > 0]
    for chunk in range(num_chunks):
        holders = [member for member in sorted(held) if chunk in held[member]]
        if len(holders) == len(held):
            continue
        callable_holders = [member for member in holders if member in reachable]
        if callable_holders:
            fetch[chunk] = callable_holders[len(fetch) % len(callable_holders)]
        elif owners:
            redo[chunk] = owners[len(redo) % len(owners)]
        else:
            lost = True
    return Repair(fetch, redo, lost)
