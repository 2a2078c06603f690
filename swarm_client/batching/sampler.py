"""The choice of the next tokens of many generations in one pass, each with its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from swarm_client.batching.request import Token
from swarm_client.speculation.choosing import BY_ROW
from swarm_protocol.failures import outcome_of

_MOST_KEPT = 1024  # tokens per row; to sort more of them without the others gains nothing


@dataclass(eq=False)
class Choice:
    """The settings with which one generation chooses tokens.

    Attributes:
        generator: the random numbers; None takes the likeliest token.
        key: equal if processors do the same to every row; None if they depend on earlier tokens.
    """

    token_ids: list[int]
    processors: LogitsProcessorList
    generator: torch.Generator | None
    num_logprobs: int | None
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        is_by_row = all(type(processor) in BY_ROW for processor in self.processors)
        described = ((type(processor), *sorted(vars(processor).items())) for processor in self.processors)
        self.key = (self.generator is None, *described) if is_by_row else None


def choose(choices: Sequence[Choice], logits: torch.Tensor) -> list[Token | Exception]:
    """Return each row's next token, or the error of its processor; ``logits`` are [rows, vocabulary] float32."""
    chosen: list[Token | Exception] = [ValueError("no scores")] * len(choices)
    for rows in _alike(choices):
        tokens = outcome_of(partial(_choose_alike, [choices[row] for row in rows], logits, rows))
        if isinstance(tokens, Exception):  # such as a grammar's: its processor has no key, so the row is alone
            chosen[rows[0]] = tokens
            continue
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def _alike(choices: Sequence[Choice]) -> list[list[int]]:
    """Return groups of rows whose processors do the same, so that one pass serves a group."""
    groups: dict[Hashable, list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault(("alone", row) if choice.key is None else choice.key, []).append(row)
    return list(groups.values())


def _choose_alike(choices: Sequence[Choice], logits: torch.Tensor, rows: list[int]) -> list[Token]:
    """Return the tokens of these rows of ``logits``, one for each choice."""
    logits = logits if len(rows) == len(logits) else logits[rows]
    ids = _ids(choices, logits)
    if all(choice.num_logprobs is None for choice in choices):
        return list(map(Token, ids))
    return [
        token_of(choice.num_logprobs, token_id, row) for choice, token_id, row in zip(choices, ids, logits, strict=True)
    ]


def _ids(choices: Sequence[Choice], logits: torch.Tensor) -> list[int]:
    sampled = _sampled_from_top(choices, logits)
    rest = [row for row, token_id in enumerate(sampled) if token_id is None]
    if len(rest) == len(choices):
        return _ids_alike(choices, logits)
    others = iter(_ids_alike([choices[row] for row in rest], logits[rest])) if rest else iter(())
    return [next(others) if token_id is None else token_id for token_id in sampled]


def _ids_alike(choices: Sequence[Choice], logits: torch.Tensor) -> list[int]:
    first = choices[0]
    scores = logits
    if first.processors:
        ids_so_far: Any = torch.tensor([first.token_ids]) if first.key is None else None  # else processors ignore it
        copied: Any = logits.clone()  # processors may write into it
        scores = first.processors(ids_so_far, copied)
    if first.generator is None:
        likeliest: list[int] = scores.numpy().argmax(-1).tolist()  # several times faster than torch's, and equal
        return likeliest
    rows = zip(scores.softmax(-1).split(1), choices, strict=True)
    return [int(torch.multinomial(row, 1, generator=choice.generator)) for row, choice in rows]


def _sampled_from_top(choices: Sequence[Choice], logits: torch.Tensor) -> Sequence[int | None]:
    """Return the tokens that ``_ids_alike`` returns, for rows of which top-k keeps few; None for the other rows.

    Later processors, such as top-p, then sort only the tokens that top-k keeps. ``torch.multinomial`` takes the token
    with the largest p / e, where the e are exponential; this function draws the same numbers.
    """
    first, vocabulary = choices[0], logits.shape[1]
    place = _place_of_top_k(first.processors)
    if first.key is None or first.generator is None or place is None:
        return [None] * len(choices)
    num_kept = int(first.processors[place].top_k)
    if num_kept > min(_MOST_KEPT, vocabulary - 1):
        return [None] * len(choices)
    unused: Any = None  # these processors ignore the token ids
    scores: Any = LogitsProcessorList(first.processors[:place])(unused, logits)
    top = scores.topk(num_kept + 1)
    is_clear = top.values[:, -2] > top.values[:, -1]  # top-k keeps all tokens that are as likely as the last one
    is_clear &= top.values[:, 0].isfinite()
    kept: Any = top.values[:, :-1].where(is_clear[:, None], 0.0)
    left = LogitsProcessorList(first.processors[place + 1 :])(unused, kept.clone())
    clear: list[bool] = (is_clear & ~_splits_ties(kept, left)).tolist()
    noise = torch.ones_like(logits)
    for row, choice, draws in zip(noise.split(1), choices, clear, strict=True):
        if draws:
            row.exponential_(1, generator=choice.generator)
    number = (left.softmax(-1) / noise.gather(1, top.indices[:, :-1])).argmax(-1, keepdim=True)
    ids: list[int] = top.indices.gather(1, number)[:, 0].tolist()
    return [token_id if drawn else None for token_id, drawn in zip(ids, clear, strict=True)]


def _splits_ties(kept: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Return for each row whether processors kept only some of several equally likely tokens, [rows] bool.

    Which of them are kept depends on their order in a whole row, which is not known here.

    kept: [rows, tokens], the scores in descending order; left: the same scores with some at -inf.
    """
    is_left = left != -torch.inf
    return ((kept[:, 1:] == kept[:, :-1]) & (is_left[:, 1:] != is_left[:, :-1])).any(-1)


def _place_of_top_k(processors: LogitsProcessorList) -> int | None:
    """Return the place of top-k, if only a temperature comes before it, which keeps the order of tokens."""
    for place, processor in enumerate(processors):
        if type(processor) is TopKLogitsWarper:
            return place if processor.filter_value == -float("inf") else None
        if type(processor) is not TemperatureLogitsWarper:
            return None
    return None


def token_of(num_logprobs: int | None, token_id: int, logits: torch.Tensor) -> Token:
    """Return the token with its logprobs if they are asked for; ``logits`` are [vocabulary]."""
    if num_logprobs is None:
        return Token(token_id)
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(num_logprobs, len(logprobs)))
    return Token(
        token_id, float(logprobs[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    )
