"""A draft of a chosen acceptance, and what text takes with it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import torch
from common import generate
from transformers import PreTrainedModel

from swarm_client.speculation.draft import Draft, DraftSession, Guesses, Ranking
from swarm_client.speculation.policy import DraftPlan
from swarm_client.speculation.speculation import Speculation


class KnowingDraft(Draft):
    """Knows what will be written, and guesses each token right with a given chance: in one line."""

    most_rows = 1

    def __init__(self, texts: Sequence[Sequence[int]], chance: float) -> None:
        self.name, self.texts, self.chance, self.acceptance = f"knowing-{chance}", texts, chance, chance
        self._seeds = itertools.count()  # its luck is another in each generation

    def begin(self) -> _KnowingSession:
        return _KnowingSession(self, next(self._seeds))


class _KnowingSession(DraftSession):
    def __init__(self, draft: KnowingDraft, seed: int) -> None:
        self._draft, self._random, self._ids = draft, random.Random(seed), []

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._ids += token_ids

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        length = len(self._ids)
        coming = next((text[length:] for text in self._draft.texts if text[:length] == self._ids), [])[: plan.length]
        if not coming:
            return Guesses.none()
        return Guesses(torch.tensor([[t if self._random.random() < self._draft.chance else t + 1 for t in coming]]))


def written(
    model: PreTrainedModel, speculation: Speculation, prompt: torch.Tensor, new: int
) -> tuple[list[int], float]:
    """The text, its prompt first, and the seconds from its first new token to its last."""
    model.speculation = speculation  # type: ignore[assignment]
    times: list[float] = []

    class Times:
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = generate(model, prompt, new, streamer=Times())
    return ids[0].tolist(), times[-1] - times[1]
