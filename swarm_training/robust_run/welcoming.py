"""The newcomers of the next step: peers that most full members propose, by statements on which all agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from swarm_training.broadcast.agreement import Agreement
from swarm_training.pb import training_robust_pb2 as pb

_MOST = 8  # newcomers at a time


class Welcoming:
    """The vote on newcomers in one step.

    Attributes:
        is_over: an event that is set once all agree on what was proposed.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.is_over = asyncio.Event()

    def look(self, now: float) -> None:
        if self.agreement.outcome(now) is not None:
            self.is_over.set()

    def joining(self, now: float) -> tuple[str, ...]:
        heard = self.agreement.outcome(now) or {}
        counts = Counter(name for each in heard.values() for name in set(each.said.welcome.peers))
        wanted = (name for name, votes in counts.items() if 2 * votes > len(self.agreement.expected))
        return tuple(sorted(wanted))[:_MOST]


def proposal(step: int, candidates: Callable[[], Collection[str]], known: Collection[str]) -> pb.Said:
    """Return this peer's proposal. ``known``: peers that take part already, or never again."""
    return pb.Said(step=step, welcome=pb.Welcome(peers=sorted(set(candidates()).difference(known))[:_MOST]))
