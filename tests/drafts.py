"""Drafts for tests: they know what the model will write, and are wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from swarm_client.speculation.draft import Draft, DraftSession, Guesses, Ranking
from swarm_client.speculation.policy import MOST_POSITIONS, DraftPlan, Policy
from swarm_client.speculation.speculation import Guessing, Speculation


class KnowingDraft(Draft):
    """Knows the texts that will be written, and guesses each token right with a given chance.

    In several rows, one that is drawn for each pass has the best line.
    """

    name = "knowing"

    def __init__(
        self, texts: Sequence[Sequence[int]], chance: float, *, wrong: int = 3, seed: int = 0, num_hidden: int = 0
    ) -> None:
        self.texts, self.chance, self.wrong, self.seed = [list(text) for text in texts], chance, wrong, seed
        self.num_hidden, self.acceptance = num_hidden, chance
        self.sessions: list[KnowingSession] = []

    def begin(self) -> KnowingSession:
        self.sessions.append(KnowingSession(self))
        return self.sessions[-1]


class KnowingSession(DraftSession):
    def __init__(self, draft: KnowingDraft) -> None:
        self._draft, self._random = draft, random.Random(draft.seed)
        self.ids: list[int] = []
        self.hidden: list[torch.Tensor | None] = []
        self.plans: list[DraftPlan] = []

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.ids.extend(token_ids)
        self.hidden.append(hidden)
        assert hidden is None or len(hidden) == len(token_ids)

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        self.plans.append(plan)
        text = next((text for text in self._draft.texts if text[: len(self.ids)] == self.ids), None)
        if text is None:
            return Guesses.none()
        coming = (text[len(self.ids) :] + [self._draft.wrong] * plan.length)[: plan.length]
        lines = [self._line(coming, at) for at in range(plan.num_rows)]
        self._random.shuffle(lines)
        return Guesses(torch.tensor(lines))

    def _line(self, coming: list[int], row: int) -> list[int]:
        line: list[int] = []
        for token in coming:
            is_right = row == 0 and self._random.random() < self._draft.chance
            line.append(token if is_right else (token + 1 + row) % 50)
        return line


class Always(Speculation):
    """Verifies so many guesses in every pass, whether it pays or not."""

    def __init__(self, draft: Draft, rows: int, length: int) -> None:
        super().__init__(draft)
        self._size_of_tests = DraftPlan(rows, length)

    def begin(self, prompt: list[int], ranking: Ranking) -> Guessing | None:
        if self.draft is None or self.off:
            return None
        return Guessing(self, self.draft, prompt, ranking, _FixedPolicy(self.draft.acceptance, self._size_of_tests))


class _FixedPolicy(Policy):
    def __init__(self, acceptance: float, size: DraftPlan) -> None:
        super().__init__(acceptance)
        self._size = size

    def choose(self, most_guesses: int, most_rows: int = MOST_POSITIONS) -> DraftPlan:
        return DraftPlan(min(self._size.num_rows, most_rows), max(0, min(self._size.length, most_guesses)))
