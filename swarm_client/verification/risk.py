"""How much of a server's work is checked: more while little is known of the server, and never nothing. Pure.

Work is counted in steps: one step is a server's work for one new position of one row. Checking a position makes a
second server compute this and all earlier positions like a prompt: see ``check_cost``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_protocol.dht.records import ServerRecord

SECOND_OPINIONS = 0.1  # the share of passed checks in which a third server is asked as well
DOUBT_CHECKS = 4  # after this many checks, a doubt about a server is over
DOUBT_AGAIN_S = 3600.0  # until then, another doubt about the same server does not count
_YOUNG = 8.0  # factor on the steady share, for a server of which nothing is known
_AGE_S = 15.0  # server age for each passed check that counts: many texts in a short time do not make a server old
_DOUBTED = 8.0  # factor on the steady share
_BESIDE = 0.25  # part of the share that is spent at random, also on texts that were checked already
_MOST_SAVED = 64.0  # the limit of savings, in steps
_FOR_DOUBTS = 0.1  # part of the share kept for servers that other clients doubt, until there is enough for one doubt
_MOST_KEPT = 16.0  # the limit of what is kept, in steps
_DOUBT_STEPS = 64  # mean steps from one check of such a server to the next: each check covers all steps before it
_LEAST_PRICE = 0.002  # price of a prompt position in steps; the fastest GPUs come near it


@dataclass(frozen=True)
class CheckHistory:
    """A client's knowledge of one server.

    Attributes:
        passed: the server's passed checks by this client; ``age_s``: the time since the first check.
        is_doubted: this client has seen the server differ, and made fewer than ``DOUBT_CHECKS`` checks since.
        is_coarse: the server announces rounding so coarse that many comparisons find only gross lies.
    """

    passed: int = 0
    age_s: float = 0.0
    is_doubted: bool = False
    is_coarse: bool = False


def share_of(history: CheckHistory, steady: float) -> float:
    """Return the share of a server's work that checks of it may cost: ``steady`` for a good record, never less."""
    good = min(history.passed, 1 + history.age_s / _AGE_S)
    young = _YOUNG * (2 if history.is_coarse else 1) / (1 + good)
    return steady * max(1.0, young, _DOUBTED if history.is_doubted else 0.0)


def price_of(servers: Sequence[ServerRecord]) -> float:
    """Return the cost in steps of a position that is computed among many, the median of what servers announce.

    The result is 1, the maximum, if no server announces its speeds.
    """
    prices = [
        server.tokens_per_s / server.forward_tokens_per_s
        for server in servers
        if server.tokens_per_s and server.forward_tokens_per_s
    ]
    return min(1.0, max(_LEAST_PRICE, statistics.median(prices))) if prices else 1.0


def work_of(num_rows: int, num_tokens: int, price: float) -> float:
    """Return the work in steps of a client's step with ``num_tokens`` new positions in each row."""
    return num_rows * max(1.0, num_tokens * price)


def check_cost(length: int, price: float) -> float:
    """Return the cost in steps of checking a row of so many positions, further opinions included; at least one pass."""
    return max(1.0, length * price) * (1 + SECOND_OPINIONS)


class CheckBudget:
    """The budget that a client may spend on checks, and the rules of spending it.

    The savings are for texts that were not checked yet. A small part of what is earned, and all above the savings'
    limit, is spent at random moments of all texts. No position is therefore safe from checks. Servers that other
    clients doubt have a reserve. On average no more is spent than the share of the work, whichever server is doubted.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        """Keep ``chance``, which returns a random number from 0 to 1."""
        self._chance = chance
        self._saved = 0.0
        self._kept = 0.0  # the reserve for servers that other clients doubt

    def draws(
        self,
        share: float,
        work: float,
        cost: float,
        is_owed: bool,
        is_possible: bool = True,
        is_heard: bool = False,
    ) -> bool:
        """Return whether to make a check with this cost after a step with this much work.

        ``is_owed``: the text was not checked yet, and its turn has come. ``is_possible``: a check could be made now.
        ``is_heard``: other clients doubt one of the servers.
        """
        earned = share * work
        # First the reserve is filled, up to the cost of one doubt's checks.
        kept = min(_FOR_DOUBTS * earned, max(0.0, min(_MOST_KEPT, DOUBT_CHECKS * cost) - self._kept))
        self._kept += kept
        earned -= kept
        beside = _BESIDE * earned
        saved = min(self._saved + earned - beside, _MOST_SAVED)
        beside += self._saved + earned - beside - saved  # what the limit of the savings has cut off
        self._saved = saved
        if not is_possible:
            return False
        if self._chance() * cost < beside:  # on average, this spends ``beside``, so no account is kept
            return True
        if is_heard and self._chance() * cost * _DOUBT_STEPS < min(self._kept, cost):
            self._kept -= cost
            return True
        if is_owed and self._chance() * cost < self._saved:
            self._saved -= cost
            return True
        return False
