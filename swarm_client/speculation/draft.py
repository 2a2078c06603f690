"""The interface of drafts, which guess the tokens that a model writes next, in one line or in several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm_client.speculation.policy import DraftPlan

# The worth of a branch's m-th row (1.0, 0.2 / 2, 0.2 / 3, …), relative to the branch's probability. The first row adds
# a token and its likeliest continuation. Later rows add other continuations, which are worth little.
_FIRST_ROW, _LATER_ROW = 1.0, 0.2

Ranking = Callable[[torch.Tensor, int], torch.Tensor]
"""The order of guesses, which puts first what the model is most likely to choose.

It returns scores [rows, vocabulary] for the draft's logits and the number of guesses before this one: a token with a
higher score is guessed first. ``scores.softmax(-1)`` is about the probability that the guess is right.
"""


@dataclass(frozen=True)
class Guesses:
    """The lines of guesses for one pass; the first line is the likeliest.

    Attributes:
        token_ids: [rows, length] int64; empty if there are no guesses.
    """

    token_ids: torch.Tensor

    @classmethod
    def none(cls) -> Guesses:
        return cls(torch.empty(0, 0, dtype=torch.long))

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def length(self) -> int:
        return self.token_ids.shape[1]


class Draft(ABC):
    """A source of guesses for one model, for any number of generations at once.

    Attributes:
        name: the name that users know.
        num_hidden: how many of a prompt's last positions the draft wants hidden states of; 0 means that it only gets
            token ids.
        acceptance: the assumed share of right guesses, until it is measured.
        most_rows: the most lines that the draft can guess at once.
    """

    name: str
    num_hidden: int = 0
    acceptance: float = 0.5
    most_rows: int = 8

    @abstractmethod
    def begin(self) -> DraftSession:
        """Return a session for a new generation. Any thread may call this method."""


class DraftSession(ABC):
    """The draft's state in one generation. One thread at a time may use an instance."""

    @abstractmethod
    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Continue the text with these tokens: first the whole prompt, later the tokens that the model has chosen.

        Confirmed tokens are never taken back. Guesses since the last call are dropped.

        hidden: [tokens, hidden_size] float32 if the draft wants hidden states. Each token has the state from which the
            model predicted the token, as the head gets that state (after the last norm). Zeros mean that the state is
            unknown, such as at the first token of a text.
        """

    @abstractmethod
    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        """Return guesses that follow the confirmed text. A second call drops the guesses of the first."""


class SteppedSession(DraftSession):
    """A session of a draft that computes logits token by token, for several lines at once."""

    @abstractmethod
    def start(self, num_rows: int) -> torch.Tensor | None:
        """Begin ``num_rows`` lines; return the logits of the token after the confirmed text, [vocabulary] float32.

        Return None if the draft cannot go on because its context is full.
        """

    @abstractmethod
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Add one token to each line, [rows] int64; return the logits of the next, [rows, vocabulary] float32."""

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        logits = self.start(plan.num_rows) if plan.length > 0 else None
        if logits is None:
            return Guesses.none()
        branches, by_row = [_Branch((), 1.0, range(plan.num_rows))], logits[None].expand(plan.num_rows, -1)
        while True:
            grown = _grown(branches, by_row, ranking)
            if sum(branch.probability for branch in grown) < plan.least:  # another guess costs more than it brings
                break
            branches = grown
            if len(branches[0].token_ids) == plan.length:
                break
            by_row = self.step(torch.tensor([branch.token_ids[-1] for branch in branches for _ in branch.rows]))
        if not branches[0].token_ids:
            return Guesses.none()
        branches.sort(key=lambda branch: -branch.probability)
        return Guesses(torch.tensor([branch.token_ids for branch in branches]))


@dataclass(frozen=True)
class _Branch:
    """The guesses that some rows share, with the probability that all of these guesses are right."""

    token_ids: tuple[int, ...]
    probability: float
    rows: range

    def children(self, scores: torch.Tensor) -> list[_Branch]:
        """Return the branches of the likeliest next tokens, which share the rows; ``scores`` are [vocabulary]."""
        best = scores.softmax(-1).topk(min(len(self.rows), len(scores)))
        probabilities: list[float] = best.values.tolist()
        counts = [0] * len(probabilities)
        for _ in self.rows:  # each row goes to the token for which it is worth most
            worth = [
                p * (_LATER_ROW / (count + 1) if count else _FIRST_ROW)
                for p, count in zip(probabilities, counts, strict=True)
            ]
            counts[worth.index(max(worth))] += 1
        found, start = [], self.rows.start
        for token_id, p, count in zip(best.indices.tolist(), probabilities, counts, strict=True):
            if count:
                child = range(start, start + count)
                found.append(_Branch((*self.token_ids, token_id), self.probability * p, child))
                start += count
        return found


def _grown(branches: list[_Branch], by_row: torch.Tensor, ranking: Ranking) -> list[_Branch]:
    """Return the branches with one more token each; ``by_row`` are the logits of that token, [rows, vocabulary]."""
    scores = ranking(by_row[[branch.rows.start for branch in branches]], len(branches[0].token_ids))
    return [child for branch, row in zip(branches, scores, strict=True) for child in branch.children(row)]
