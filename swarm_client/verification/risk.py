"""How much of a server's work is computed again: more while little is known of it, and never nothing. Pure.

Work is counted in steps: one step is what a server does for one new position of one row. Whoever checks a position has
it and all before it computed by a second server, as a prompt is: ``check_cost``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_protocol.dht.records import ServerRecord

SECOND_OPINIONS = 0.1  # of checks that pass: a third server is asked as well
DOUBT_CHECKS = 4  # and a doubt about a server is over
DOUBT_AGAIN_S = 3600.0  # until another doubt about it counts
_YOUNG = 8.0  # times the steady share, for a server of which nothing is known
_AGE_S = 15.0  # for one passed check to count: a hurry of texts does not make a server old
_DOUBTED = 8.0  # times the steady share
_BESIDE = 0.25  # of the share is spent at random, in texts that were checked already too
_MOST_SAVED = 64.0  # steps
_FOR_DOUBTS = 0.1  # of the share is kept for servers that other clients doubt, until there is enough for one doubt
_MOST_KEPT = 16.0  # steps
_DOUBT_STEPS = 64  # on average, from one check of such a server to the next: each shows all steps before it
_LEAST_PRICE = 0.002  # of a position in a prompt, beside a step: what the fastest GPUs come near


@dataclass(frozen=True)
class History:
    """What a client knows of one server.

    Attributes:
        passed: checks of this client that found its answers right; ``age_s``: since the first of them.
        is_doubted: this client has seen it differ from others, and fewer than ``DOUBT_CHECKS`` have been made since.
        is_coarse: it says that it rounds so coarsely that many comparisons find only gross lies.
    """

    passed: int = 0
    age_s: float = 0.0
    is_doubted: bool = False
    is_coarse: bool = False


def share_of(history: History, steady: float) -> float:
    """The share of a server's work that checks of it may cost; ``steady`` for one with a good record, never less."""
    good = min(history.passed, 1 + history.age_s / _AGE_S)
    young = _YOUNG * (2 if history.is_coarse else 1) / (1 + good)
    return steady * max(1.0, young, _DOUBTED if history.is_doubted else 0.0)


def price_of(servers: Sequence[ServerRecord]) -> float:
    """What a position costs that is computed among many, in steps, by the median of what servers say of themselves.

    1 where nothing is known: the most.
    """
    prices = [
        server.tokens_per_s / server.forward_tokens_per_s
        for server in servers
        if server.tokens_per_s and server.forward_tokens_per_s
    ]
    return min(1.0, max(_LEAST_PRICE, statistics.median(prices))) if prices else 1.0


def work_of(num_rows: int, num_tokens: int, price: float) -> float:
    """Steps that a client's step of new positions counts for."""
    return num_rows * max(1.0, num_tokens * price)


def check_cost(length: int, price: float) -> float:
    """Steps for a check of a row of so many positions, further opinions included: no pass is cheaper than one step."""
    return max(1.0, length * price) * (1 + SECOND_OPINIONS)


class Budget:
    """The work that a client may spend on checks, and what it spends it on.

    A text that was not checked yet has what is saved. A small part, and what cannot be saved, is spent at random
    moments of all texts, so that no server knows after which position nobody looks. Servers that other clients doubt
    have what is kept for them. On average no more is spent than the share of the work, whoever is doubted.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        """``chance``: a random number from 0 to 1."""
        self._chance = chance
        self._saved = 0.0
        self._kept = 0.0  # for servers that other clients doubt

    def draws(
        self,
        share: float,
        work: float,
        cost: float,
        is_owed: bool,
        is_possible: bool = True,
        is_heard: bool = False,
    ) -> bool:
        """Whether a check that costs so much is made after a step of so much work.

        ``is_owed``: the text was not checked yet, and its turn has come. ``is_possible``: it could be made now.
        ``is_heard``: other clients doubt one of the servers.
        """
        earned = share * work
        kept = min(_FOR_DOUBTS * earned, max(0.0, min(_MOST_KEPT, DOUBT_CHECKS * cost) - self._kept))
        self._kept += kept
        earned -= kept
        beside = _BESIDE * earned
        saved = min(self._saved + earned - beside, _MOST_SAVED)
        beside += self._saved + earned - beside - saved
        self._saved = saved
        if not is_possible:
            return False
        if self._chance() * cost < beside:
            return True
        if is_heard and self._chance() * cost * _DOUBT_STEPS < min(self._kept, cost):
            self._kept -= cost
            return True
        if is_owed and self._chance() * cost < self._saved:
            self._saved -= cost
            return True
        return False
