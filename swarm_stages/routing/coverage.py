"""What a step still lacks: at which stages the gradient of which micro-batch is in nobody's sums. Pure.

A stage's peers say which micro-batches they have in bitmaps. What a trainer has committed is not in them at once, so it
keeps *claims* of its own for a while: a micro-batch that is computed again although somebody has it costs that one all
of its sums, since none may count twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_training.core.moment import Moment


class PeerView(Protocol):
    """What is known of a living peer of a stage.

    ``bits``: of the micro-batches in its sums; number m is bit m % 8, from the lowest, of byte m // 8. ``holds``: the
    average of its moment is decided, and it waits for other stages.
    """

    @property
    def peer_id(self) -> str: ...
    @property
    def moment(self) -> Moment: ...
    @property
    def bits(self) -> bytes: ...
    @property
    def holds(self) -> bool: ...


Stages = Sequence[Sequence[PeerView]]  # the living peers of each


def members(bits: bytes) -> frozenset[int]:
    """The micro-batches of a bitmap."""
    return frozenset(8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)


def moment_of(stages: Stages) -> Moment | None:
    """At which the trainers are wanted: where the slowest stage is. None if a stage has no living peers."""
    if not stages or not all(stages):
        return None
    return min(max(peer.moment for peer in stage) for stage in stages)


def servers_of(stages: Stages, stage: int, moment: Moment) -> frozenset[str]:
    """Peers of a stage that have the weights of this moment."""
    return frozenset(peer.peer_id for peer in stages[stage] if peer.moment == moment)


@dataclass(frozen=True)
class _Claim:
    peer_id: str
    until_s: float


class Claims:
    """Commits of this trainer at one moment of the run that bitmaps do not show yet, also those whose answers were
    lost: whether they were carried out, a later bitmap says."""

    def __init__(self, settle_s: float) -> None:
        """``settle_s``: after which a bitmap would show it."""
        self._settle_s = settle_s
        self._claims: dict[tuple[int, int], _Claim] = {}

    def add(self, stage: int, number: int, peer_id: str, now: float) -> None:
        self._claims[stage, number] = _Claim(peer_id, now + self._settle_s)

    def drop(self, stage: int, number: int) -> None:
        """It was not carried out."""
        self._claims.pop((stage, number), None)

    def of(self, stage: int) -> frozenset[int]:
        return frozenset(number for at, number in self._claims if at == stage)

    def settle(self, stages: Stages, moment: Moment, now: float) -> None:
        """Drops those that a bitmap shows, whose time is over, or whose peer is gone, or past this moment."""
        for stage, peers in enumerate(stages):
            bits = {peer.peer_id: members(peer.bits) for peer in peers if peer.moment == moment}
            for at, number in [key for key in self._claims if key[0] == stage]:
                claim = self._claims[at, number]
                shown = bits.get(claim.peer_id)
                if shown is None or number in shown or claim.until_s <= now:
                    del self._claims[at, number]


def lacking(
    stages: Stages, moment: Moment, num_micro_batches: int, claimed: Mapping[int, Collection[int]]
) -> dict[int, frozenset[int]]:
    """By micro-batch, the stages that lack its gradient at this moment; those that nobody lacks are left out.

    A stage whose average is decided, or that has gone on, lacks nothing. ``claimed``: by stage, what counts as there.
    """
    everything = frozenset(range(num_micro_batches))
    found: dict[int, set[int]] = {}
    for stage, peers in enumerate(stages):
        if any(peer.moment > moment or (peer.moment == moment and peer.holds) for peer in peers):
            continue
        present = frozenset[int]().union(*(members(peer.bits) for peer in peers if peer.moment == moment))
        for number in everything - present - frozenset(claimed.get(stage, ())):
            found.setdefault(number, set()).add(stage)
    return {number: frozenset(found[number]) for number in sorted(found)}
