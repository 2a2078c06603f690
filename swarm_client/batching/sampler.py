"""The choice of the next tokens of many generations in one pass, each with its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList

from swarm_client.batching.request import Token
from swarm_client.speculation.choosing import BY_ROW


@dataclass(eq=False)
class Choice:
    """The settings with which one generation chooses tokens.

    Attributes:
        token_ids: the tokens of the prompt and the generated tokens.
        generator: the random numbers; None takes the likeliest token.
        num_logprobs: see ``Request``.
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
        try:
            tokens = _choose_alike([choices[row] for row in rows], logits if len(rows) == len(logits) else logits[rows])
        except Exception as error:  # for instance of a grammar, which belongs to one generation
            chosen[rows[0]] = error
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


def _choose_alike(choices: Sequence[Choice], logits: torch.Tensor) -> list[Token]:
    first = choices[0]
    scores = logits
    if first.processors:
        ids_so_far: Any = torch.tensor([first.token_ids]) if first.key is None else None  # else processors ignore it
        copied: Any = logits.clone()  # processors may write into it
        scores = first.processors(ids_so_far, copied)
    if first.generator is None:
        ids = scores.argmax(-1).tolist()
    else:
        rows = zip(scores.softmax(-1).split(1), choices, strict=True)
        ids = [int(torch.multinomial(row, 1, generator=choice.generator)) for row, choice in rows]
    return [
        token_of(choice.num_logprobs, token_id, row) for choice, token_id, row in zip(choices, ids, logits, strict=True)
    ]


def token_of(num_logprobs: int | None, token_id: int, logits: torch.Tensor) -> Token:
    """Return the token with its logprobs if they are asked for; ``logits`` are [vocabulary]."""
    if num_logprobs is None:
        return Token(token_id)
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(num_logprobs, len(logprobs)))
    return Token(
        token_id, float(logprobs[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    )
