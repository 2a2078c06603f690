"""Verification: the model chooses each token exactly as without a draft, and guesses are compared with its choice.

A token is sampled with the same random numbers as without a draft. A draft therefore never changes the text of a seed;
it only changes how many tokens one pass gives. Guesses are drawn with the same random numbers, which makes them right
more often. This is a coupling by Gumbel noise (Maddison et al., "A* Sampling", 2014): ``torch.multinomial`` takes the
token with the largest p / e, where the e are exponential.
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

# These processors use only a row's scores and their own settings, so they fit a draft's scores and many rows at once.
BY_ROW = (
    InfNanRemoveLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


# Greedy generation always takes the model's likeliest token, while a draft has learned how often each token occurs.
# This factor makes the shipped draft's probabilities match on average how often it is right: 0.53 against 0.54.
_GREEDY_SHARPNESS = 1.4


def rank_greedily(logits: torch.Tensor, _depth: int) -> torch.Tensor:
    """Rank guesses for generations that take the likeliest token; see ``Ranking``."""
    return logits * _GREEDY_SHARPNESS


class SampledRanking:
    """The ranking for generations that sample: guesses are the tokens that the draft would sample as the model."""

    def __init__(self, processors: LogitsProcessorList, generator: torch.Generator | None) -> None:
        """Look ahead in ``generator``, which samples, without using its numbers; None if this is not possible."""
        self._processors = LogitsProcessorList([own for own in processors if type(own) in BY_ROW])
        self._generator = generator
        self._noise: list[torch.Tensor] = []
        self._state: torch.Tensor | None = None  # of the generator, after the numbers in ``_noise``

    def __call__(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        ids = torch.empty(len(logits), 0, dtype=torch.long)  # these processors ignore it
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
        """Return the noise [1, size] that ``generator`` will draw for the token after those of ``_noise``."""
        assert self._state is not None
        kept = generator.get_state()  # the text's own tokens are drawn from here on
        generator.set_state(self._state)
        noise = torch.empty(1, size).exponential_(1, generator=generator)
        self._state = generator.get_state()
        generator.set_state(kept)
        return noise


@dataclass(frozen=True)
class Verified:
    """Verified guesses: ``token_ids`` are the chosen tokens, of which all but the last are right guesses of ``row``.

    There is always at least one chosen token.
    """

    token_ids: list[int]
    row: int

    @property
    def num_right(self) -> int:
        return len(self.token_ids) - 1


def verify(guesses: Guesses, logits: torch.Tensor, choose: Callable[[torch.Tensor], tuple[int, bool]]) -> Verified:
    """Return the longest run of right guesses, and the model's next token.

    Args:
        logits: [rows, length + 1, vocabulary] float32: after the last token of the text, and after each guess.
        choose: a function from the logits of one position, [vocabulary], to the next token, and whether it is the last.
            It is called once for each token that is returned, in the order of the text.
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
