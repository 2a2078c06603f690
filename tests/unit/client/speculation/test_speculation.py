"""How often a generation guesses, by what its draft takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from swarm_client.speculation import speculation
from swarm_client.speculation.choosing import Verified, rank_greedily
from swarm_client.speculation.draft import Draft, DraftSession, Guesses, Ranking
from swarm_client.speculation.policy import DraftPlan
from swarm_client.speculation.speculation import Guessing, Speculation

PROMPT_S, GUESS_S, PASS_S = 2.0, 0.004, 0.15


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Reading(Draft):
    """Reads what was confirmed when it guesses: what is long takes long."""

    name = "reading"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def begin(self) -> DraftSession:
        return ReadingSession(self.clock)


class ReadingSession(DraftSession):
    def __init__(self, clock: Clock) -> None:
        self._clock, self._num_unread = clock, 0

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._num_unread += len(token_ids)

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        self._clock.now_s += GUESS_S * plan.length + (PROMPT_S if self._num_unread > 100 else 0.0)
        self._num_unread = 0
        return Guesses(torch.ones(plan.num_rows, plan.length, dtype=torch.long))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speculation, "time", clock)
    return clock


def lengths(guessing: Guessing, clock: Clock, num_passes: int) -> list[int]:
    """Guesses of so many passes, two of three of which are right."""
    found = []
    for _ in range(num_passes):
        guesses = guessing.next(15, most_rows=1)
        found.append(guesses.length)
        clock.now_s += PASS_S
        guessing.verified(Verified([1] * (1 + 2 * guesses.length // 3), 0), None)
    return found


def test_to_read_the_prompt_is_not_what_a_guess_takes(clock: Clock) -> None:
    guessing = Speculation(Reading(clock)).begin([1] * 1000, rank_greedily)
    assert guessing is not None
    guessing.begin(1, None)
    assert all(lengths(guessing, clock, 20)[2:])  # plain passes come first


def test_nor_is_what_was_written_meanwhile(clock: Clock) -> None:
    guessing = Speculation(Reading(clock)).begin([1] * 10, rank_greedily)
    assert guessing is not None
    guessing.begin(1, None)
    lengths(guessing, clock, 3)
    for _ in range(200):
        guessing.written([1], None)
    assert all(lengths(guessing, clock, 20))
