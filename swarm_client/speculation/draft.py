"""What a draft is: it guesses the tokens that a model writes next, in one line or in several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# What another row is worth to a branch that has m - 1 of them, by the probability of the branch. The first brings its
# token and what follows it; later ones bring what follows if it is not the likeliest, which is not much.
_FIRST_ROW, _LATER_ROW = 1.0, 0.2


class Ranking(Protocol):
    """By what guesses are ordered, so that they are what the model is most likely to choose."""

    def scores(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """[rows, vocabulary], like the draft's logits: the higher, the sooner a token is guessed.

        ``scores.softmax(-1)`` is about the probability that the guess is right. ``depth``: how many guesses come before
        this one.
        """


@dataclass(frozen=True)
class Plan:
    """How much is to be guessed.

    Attributes:
        num_rows: lines of guesses that are verified together, at most.
        length: guesses in a line, at most.
        least: lines are not made longer if the probability that all guesses of one of them are right is lower.
    """

    num_rows: int
    length: int
    least: float = 0.0


@dataclass(frozen=True)
class Guesses:
    """Lines of guesses, of which the first is the likeliest.

    Attributes:
        token_ids: [rows, length] int64; there are none if it is empty.
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
    """Guesses for one model, in any number of generations at once.

    Attributes:
        name: as users know it.
        num_hidden: of how many of the last positions of a prompt it wants hidden states; 0: of none, token ids are all
            that it is given.
        acceptance: how often a guess is right, as long as that has not been measured.
        most_rows: lines that it can guess at once.
    """

    name: str
    num_hidden: int = 0
    acceptance: float = 0.5
    most_rows: int = 8

    @abstractmethod
    def begin(self) -> DraftSession:
        """For a new generation. From any thread."""


class DraftSession(ABC):
    """The guesses of one generation, used by one thread at a time."""

    @abstractmethod
    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        """The text goes on with these tokens, whatever was guessed: first the whole prompt, later what was written.

        What is confirmed is never taken back. What was guessed since the last call is forgotten.

        hidden: [tokens, hidden_size] float32 if the draft wants hidden states: before each token the one that the model
            has predicted it from, which is what its head gets (after the last norm). Zeros where it is not known, as at
            the first token of a text.
        """

    @abstractmethod
    def guess(self, plan: Plan, ranking: Ranking) -> Guesses:
        """What comes after all that is confirmed. May be called again, which forgets what was guessed before."""


class SteppedSession(DraftSession):
    """Of a draft that computes logits token by token, for several lines at once."""

    @abstractmethod
    def start(self, num_rows: int) -> torch.Tensor | None:
        """Logits of the token after all that is confirmed, [vocabulary] float32; so many lines begin here.

        None: the draft cannot go on, since its context is full.
        """

    @abstractmethod
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each line goes on with one token, [rows] int64. Logits of the one after it: [rows, vocabulary] float32."""

    def guess(self, plan: Plan, ranking: Ranking) -> Guesses:
        logits = self.start(plan.num_rows) if plan.length > 0 else None
        if logits is None:
            return Guesses.none()
        branches, by_row = [_Branch((), 1.0, range(plan.num_rows))], logits[None].expand(plan.num_rows, -1)
        while True:
            depth, firsts = len(branches[0].token_ids), [branch.rows.start for branch in branches]
            scores = ranking.scores(by_row[firsts], depth)
            grown = [child for branch, row in zip(branches, scores, strict=True) for child in branch.children(row)]
            if sum(branch.probability for branch in grown) < plan.least:
                break
            branches = grown
            if depth + 1 == plan.length:
                break
            by_row = self.step(torch.tensor([branch.token_ids[-1] for branch in branches for _ in branch.rows]))
        if not branches[0].token_ids:
            return Guesses.none()
        branches.sort(key=lambda branch: -branch.probability)
        return Guesses(torch.tensor([branch.token_ids for branch in branches]))


@dataclass(frozen=True)
class _Branch:
    """Guesses that some rows have in common, and the probability that all of them are right."""

    token_ids: tuple[int, ...]
    probability: float
    rows: range

    def children(self, scores: torch.Tensor) -> list[_Branch]:
        """The rows, shared out among the likeliest next tokens; scores: [vocabulary]."""
        best = scores.softmax(-1).topk(min(len(self.rows), len(scores)))
        probabilities: list[float] = best.values.tolist()
        counts = [0] * len(probabilities)
        for _ in self.rows:
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
