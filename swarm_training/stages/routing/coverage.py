"""The gradients that a step still lacks: which micro-batches are in no peer's sums at which stages. Pure.

A stage's peers report in bitmaps which micro-batches they have. A bitmap does not show a commit at once. Until it does,
a trainer keeps a *claim* of its own. A micro-batch that is computed again although a peer has it costs one of the two
peers all of its sums, since none may count twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm_training.core.moment import Moment
from swarm_training.stages.routing.run_stages import Stages


def members(bits: bytes) -> frozenset[int]:
    """Return the micro-batches of a bitmap."""
    return frozenset(8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)


@dataclass(frozen=True)
class _Claim:
    peer_id: str
    until_s: float


class Claims:
    """A trainer's commits at one moment of the run that bitmaps do not show yet. Commits with lost answers are
    included: a later bitmap shows whether they were carried out."""

    def __init__(self, settle_s: float) -> None:
        """Start without claims. ``settle_s``: the time after which a bitmap would show a commit."""
        self._settle_s = settle_s
        self._claims: dict[tuple[int, int], _Claim] = {}

    def add(self, stage: int, number: int, peer_id: str, now: float) -> None:
        self._claims[stage, number] = _Claim(peer_id, now + self._settle_s)

    def drop(self, stage: int, number: int) -> None:
        """Drop a commit that was not carried out."""
        self._claims.pop((stage, number), None)

    def of(self, stage: int) -> frozenset[int]:
        return frozenset(number for at, number in self._claims if at == stage)

    def settle(self, stages: Stages, moment: Moment, now: float) -> None:
        """Drop claims that a bitmap shows, that are too old, or that are of a peer that is gone or past this moment."""
        for stage, peers in enumerate(stages):
            bits = {peer.peer_id: members(peer.micro_batches) for peer in peers if peer.moment == moment}
            for at, number in [key for key in self._claims if key[0] == stage]:
                claim = self._claims[at, number]
                shown = bits.get(claim.peer_id)
                if shown is None or number in shown or claim.until_s <= now:
                    del self._claims[at, number]


def lacking(
    stages: Stages, moment: Moment, num_micro_batches: int, claimed: Mapping[int, Collection[int]]
) -> dict[int, frozenset[int]]:
    """Return, by micro-batch, the stages that lack its gradient at this moment; complete micro-batches are left out.

    A stage lacks nothing if a peer holds a decided average, or more peers have gone on than are at this moment.
    ``claimed``: the micro-batches that count as present although no bitmap shows them, by stage.
    """
    everything = frozenset(range(num_micro_batches))
    found: dict[int, set[int]] = {}
    for stage, peers in enumerate(stages):
        here = [peer for peer in peers if peer.moment == moment]
        if any(peer.holds for peer in here) or sum(peer.moment > moment for peer in peers) > len(here):
            continue
        present = frozenset[int]().union(*(members(peer.micro_batches) for peer in here))
        for number in everything - present - frozenset(claimed.get(stage, ())):
            found.setdefault(number, set()).add(stage)
    return {number: frozenset(found[number]) for number in sorted(found)}
