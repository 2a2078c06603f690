"""Verification: the model chooses each token exactly as without a draft, and guesses are compared with its choice.

A token is sampled with the random numbers that it would be sampled with anyway. A draft does not change the text, not
even for a seed: it changes how many tokens one pass gives. Guesses are drawn with the same random numbers, a coupling
by Gumbel noise (Maddison et al., "A* Sampling", 2014): ``torch.multinomial`` takes the token with the largest p / e,
where the e are exponential.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    InfNanRemoveLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm_client.speculation.draft import Guesses

# What these do to a row follows from its scores and their own numbers: a draft's are treated alike, and rows together.
BY_ROW = (
    InfNanRemoveLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


# A model's likeliest token is what greedy generation takes, each time, and not as often as a draft has learned that it
# comes. With this factor the probabilities of the shipped draft say on average how often it is right: 0.53 beside 0.54.
_GREEDY_SHARPNESS = 1.4


class GreedyRanking:
    """For generations that take the likeliest token."""

    def scores(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        return logits * _GREEDY_SHARPNESS


class SampledRanking:
    """For generations that sample: guesses are what would be sampled if the draft were the model."""

    def __init__(self, processors: LogitsProcessorList, generator: torch.Generator | None) -> None:
        """``generator`` is the one that samples, which this looks into but does not use; None: that cannot be."""
        self._processors = LogitsProcessorList([own for own in processors if type(own) in BY_ROW])
        self._generator = generator
        self._noise: list[torch.Tensor] = []
        self._state: torch.Tensor | None = None  # of a generator that goes through the same numbers

    def scores(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        ids = torch.empty(len(logits), 0, dtype=torch.long)  # which these processors do not look at
        warped = self._processors(ids, logits.clone())  # type: ignore[arg-type]
        scores = warped.log_softmax(-1)
        if self._generator is None:
            return scores
        if depth == 0:
            self._noise.clear()
            self._state = self._generator.get_state()
        while len(self._noise) <= depth:
            self._noise.append(self._next(self._generator, logits.shape[1]))
        return scores - self._noise[depth].log()

    def _next(self, generator: torch.Generator, size: int) -> torch.Tensor:
        """What it will draw for the token after those of ``_noise``."""
        assert self._state is not None
        kept = generator.get_state()
        generator.set_state(self._state)
        noise = torch.empty(1, size).exponential_(1, generator=generator)
        self._state = generator.get_state()
        generator.set_state(kept)
        return noise


@dataclass(frozen=True)
class Verified:
    """Attributes:
    token_ids: chosen, one or more: those of the row that were right, and one more.
    row: whose guesses they are.
    """

    token_ids: list[int]
    row: int

    @property
    def num_right(self) -> int:
        return len(self.token_ids) - 1


def verify(guesses: Guesses, logits: torch.Tensor, choose: Callable[[torch.Tensor], tuple[int, bool]]) -> Verified:
    """Which guesses are right.

    Args:
        logits: [rows, length + 1, vocabulary] float32: after the last token of the text, and after each guess.
        choose: takes the logits of one position, [vocabulary], to the token that follows, and whether that is the last.
            Called once for each token that is returned, in the order of the text.
    """
    rows, chosen = list(range(len(logits))), []
    for depth in range(logits.shape[1]):
        token_id, is_last = choose(logits[rows[0], depth])
        chosen.append(token_id)
        if is_last or depth == guesses.length:
            break
        right = [row for row in rows if int(guesses.token_ids[row, depth]) == token_id]
        if not right:
            break
        rows = right
    return Verified(chosen, rows[0])
