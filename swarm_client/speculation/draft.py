"""What a draft is: it guesses the tokens that a model writes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Ranking(Protocol):
    """By what a draft's guesses are ordered, so that they are what the model is most likely to choose."""

    def scores(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """The higher, the sooner a token is guessed: [rows, vocabulary], like the logits of the draft.

        depth: how many guesses come before this one.
        """

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]: how likely the draft takes each token to be."""


@dataclass(frozen=True)
class Plan:
    """How much is to be guessed.

    Attributes:
        num_rows: lines of guesses that are verified together, at most.
        length: guesses in a line, at most.
        least: a line is not made longer by guesses that are all right with a lower probability than this.
    """

    num_rows: int
    length: int
    least: float = 0.0


@dataclass(frozen=True)
class Guesses:
    """Lines of guesses, the likeliest first.

    Attributes:
        token_ids: [rows, length] int64; either may be 0.
        confidences: [rows, length], the estimated probability that each is right if those before it are.
    """

    token_ids: torch.Tensor
    confidences: torch.Tensor

    @classmethod
    def none(cls) -> Guesses:
        return cls(torch.empty(0, 0, dtype=torch.long), torch.empty(0, 0))


class Draft(ABC):
    """Guesses for one model, in any number of generations at once.

    Attributes:
        name: as users know it.
        num_hidden: of how many of the last positions of a prompt it wants hidden states; 0: of none, token ids are all
            that it is given.
    """

    name: str
    num_hidden: int = 0

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
        """What comes after all that is confirmed. May be called again, which forgets what it has guessed before."""


class SteppedSession(DraftSession):
    """Of a draft that computes logits token by token, for several lines at once."""

    @abstractmethod
    def start(self, num_rows: int) -> torch.Tensor:
        """Forgets guesses. Logits of the token after all that is confirmed: [vocabulary]; so many lines begin here.

        The draft cannot go on (its context is full) if this has no elements.
        """

    @abstractmethod
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each line goes on with one token, [rows]. Logits of the one after it: [rows, vocabulary]."""

    def guess(self, plan: Plan, ranking: Ranking) -> Guesses:
        from swarm_client.speculation.lines import grow

        return grow(self, plan, ranking)
