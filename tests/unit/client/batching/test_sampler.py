"""The choice of tokens of many rows in one pass, beside what ``generate`` does with one row."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm_client.batching.request import Token
from swarm_client.batching.sampler import Choice, _sampled_from_top, choose

ROWS, VOCAB = 6, 500


def stock(processors: LogitsProcessorList, logits: torch.Tensor, seed: int) -> int:
    """The next token as ``generate`` samples it; logits: [vocabulary]."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    chances = processors(ids, logits[None].clone()).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)))


def chosen(processors: LogitsProcessorList, logits: torch.Tensor, seed: int) -> list[int]:
    choices = [Choice([0], processors, torch.Generator().manual_seed(seed + row), None) for row in range(len(logits))]
    tokens = choose(choices, logits)
    assert all(isinstance(token, Token) for token in tokens)
    return [token.id for token in tokens]


@pytest.mark.parametrize(
    "processors",
    [
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        [TopKLogitsWarper(1)],
        [TopKLogitsWarper(50), MinPLogitsWarper(0.05)],
        [TopKLogitsWarper(VOCAB)],
        [TopPLogitsWarper(0.5), TopKLogitsWarper(20)],
        [],
    ],
    ids=lambda processors: "-".join(type(each).__name__ for each in processors),
)
@pytest.mark.parametrize("levels", [None, 4])
def test_rows_sample_what_each_would_sample_alone(processors: list[LogitsProcessor], levels: int | None) -> None:
    """With few levels, many tokens are equally likely, and top-k keeps all that are as likely as its last one."""
    listed = LogitsProcessorList(processors)
    for seed in range(0, 120, ROWS):
        logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        logits = logits if levels is None else (logits / levels).round()
        expected = [stock(listed, row, seed + number) for number, row in enumerate(logits)]
        assert chosen(listed, logits, seed) == expected


def test_only_rows_in_which_an_edge_lies_between_equally_likely_tokens_need_the_whole_row() -> None:
    listed = LogitsProcessorList([TopKLogitsWarper(20), TopPLogitsWarper(0.5)])
    random = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randperm(VOCAB, generator=random) for _ in range(3)])
    logits = -0.1 * places
    logits[0][places[0] == 20] = logits[0][places[0] == 19]  # the edge of top-k
    logits[1][places[1] <= 10] = 0.0  # that of top-p
    logits[2] = -0.1 * (places[2] - (places[2] % 2) * (places[2] < 4))  # none, though there are two pairs
    expected = [stock(listed, row, number) for number, row in enumerate(logits)]
    choices = [Choice([0], listed, torch.Generator().manual_seed(row), None) for row in range(3)]
    assert _sampled_from_top(choices, logits) == [None, None, expected[2]]
    assert chosen(listed, logits, 0) == expected


def test_without_random_numbers_the_first_of_the_likeliest_tokens_is_taken() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    tokens = choose([Choice([0], LogitsProcessorList(), None, number) for number in (None, 1)], logits)
    assert [token.id for token in tokens] == [1, 0]
    assert tokens[0].logprob is None and tokens[1].top == ((0, pytest.approx(float(logits[1].log_softmax(0)[0]))),)
