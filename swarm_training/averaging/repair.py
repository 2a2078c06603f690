"""The repair of chunks that some member lacks. Decides from data alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RepairPlan:
    """A plan for missing chunks."""

    # ``fetch``, ``redo``: by chunk, the member to get it from, and the member that adds it up again.
    fetch: Mapping[int, int] = field(default_factory=dict)
    redo: Mapping[int, int] = field(default_factory=dict)
    lost: bool = False  # whether some member lacks a chunk that no member can add up


def repair(
    num_chunks: int, held: Mapping[int, Collection[int]], reachable: Collection[int], shares: Sequence[float]
) -> RepairPlan:
    """Plan a repair. ``held``: the chunks that each living member has; ``reachable``: members that others can call.

    A chunk that reachable members have is fetched from one of them. All other chunks are added up again by reachable
    members with a share. Members take turns in both.
    """
    fetch: dict[int, int] = {}
    redo: dict[int, int] = {}
    lost = False
    owners = [member for member in sorted(held) if member in reachable and shares[member] > 0]
    for chunk in range(num_chunks):
        holders = [member for member in sorted(held) if chunk in held[member]]
        if len(holders) == len(held):  # nobody lacks the chunk
            continue
        callable_holders = [member for member in holders if member in reachable]
        if callable_holders:
            fetch[chunk] = callable_holders[len(fetch) % len(callable_holders)]
        elif owners:
            redo[chunk] = owners[len(redo) % len(owners)]
        else:
            lost = True
    return RepairPlan(fetch, redo, lost)
