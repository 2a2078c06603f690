"""Sampling with guesses has the model's distribution; the same test finds the ways in which it would not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from swarm_client.speculation.choosing import SampledRanking, verify
from swarm_client.speculation.draft import SteppedSession
from swarm_client.speculation.policy import DraftPlan
from tests.marks import SLOW

VOCAB, DEPTH, COUNT = 8, 3, 3000
TEMPERATURE, TOP_P = 0.8, 0.8
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)])
LIMIT = 1e-4  # of the probability that a right way looks as wrong as this; wrong ways are far below


class Toy:
    """Logits that depend on the last token alone."""

    def __init__(self, seed: int, near: Toy | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator) * 1.2
        if near is not None:
            self.table = near.table + 0.7 * self.table
        self._cut = WARPERS(None, self.table.clone()).softmax(-1)
        self._uncut = (self.table / TEMPERATURE).softmax(-1)

    def logits(self, token: int) -> torch.Tensor:
        return self.table[token]

    def probs(self, token: int, cut: bool = True) -> torch.Tensor:
        return (self._cut if cut else self._uncut)[token]


MODEL = Toy(0)
DRAFT = Toy(1, MODEL)


class ToySession(SteppedSession):
    def __init__(self, last: int) -> None:
        self.last = last

    def confirm(self, token_ids, hidden) -> None:
        self.last = token_ids[-1]

    def start(self, num_rows: int) -> torch.Tensor:
        return DRAFT.logits(self.last)

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        return DRAFT.table[token_ids]


def with_guesses(generator: torch.Generator, rows: int = 1) -> tuple[list[int], int]:
    """DEPTH tokens after token 0, and how many guesses of the first pass were right."""
    text, right = [0], None
    session = ToySession(0)

    def choose(logits: torch.Tensor) -> tuple[int, bool]:
        token = int(torch.multinomial(WARPERS(None, logits[None].clone()).softmax(-1), 1, generator=generator))
        text.append(token)
        return token, len(text) > DEPTH

    while len(text) <= DEPTH:
        guesses = session.guess(DraftPlan(rows, DEPTH - 1), SampledRanking(WARPERS, generator))
        lines = [[text[-1], *line] for line in guesses.token_ids.tolist()]
        found = verify(guesses, MODEL.table[torch.tensor(lines)], choose)
        session.confirm(found.token_ids, None)
        right = found.num_right if right is None else right
    return text[1:], right or 0


def plain(generator: torch.Generator) -> tuple[list[int], int]:
    text = [0]
    while len(text) <= DEPTH:
        text.append(int(torch.multinomial(MODEL.probs(text[-1]), 1, generator=generator)))
    return text[1:], 0


def accepting(generator: torch.Generator, *, ratio_is_cut: bool = True, corrects: bool = True) -> tuple[list[int], int]:
    """Leviathan et al., 2023, algorithm 1, or what it is taken for: each is written out for this test."""

    def draw(probs: torch.Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=generator))

    text = [0]
    while len(text) <= DEPTH:
        p, q = MODEL.probs(text[-1]), DRAFT.probs(text[-1])
        guess = draw(q)
        over, under = MODEL.probs(text[-1], ratio_is_cut), DRAFT.probs(text[-1], ratio_is_cut)
        if float(torch.rand((), generator=generator)) < over[guess] / under[guess]:
            text.append(guess)
            continue
        rest = (p - q).clamp(min=0) if corrects else p
        text.append(draw(rest if float(rest.sum()) > 0 else p))
    return text[1:], 0


def chance_of(way: Callable[[torch.Generator], tuple[list[int], int]]) -> float:
    """The probability of a chi-squared statistic as large, if pairs of tokens come as the model samples them."""
    expected = {}
    for first in range(VOCAB):
        for second in range(VOCAB):
            p = float(MODEL.probs(0)[first] * MODEL.probs(first)[second])
            if p > 0:
                expected[first, second] = COUNT * p
    generator = torch.Generator().manual_seed(7)
    seen = Counter(tuple(way(generator)[0][:2]) for _ in range(COUNT))
    if any(pair not in expected for pair in seen):
        return 0.0
    statistic = sum((seen[pair] - count) ** 2 / count for pair, count in expected.items())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(plain, id="plain"),
        pytest.param(with_guesses, id="ours", marks=SLOW),
        pytest.param(lambda generator: with_guesses(generator, 4), id="tree", marks=SLOW),
        pytest.param(accepting, id="exact", marks=SLOW),
    ],
)
def test_right_ways_have_the_distribution(way):
    assert chance_of(way) > LIMIT


@SLOW
@pytest.mark.parametrize(
    "mistake", [{"ratio_is_cut": False}, {"corrects": False}], ids=["ratio-without-top-p", "corrected-from-p"]
)
def test_wrong_ways_are_found(mistake):
    assert chance_of(lambda generator: accepting(generator, **mistake)) < LIMIT


@pytest.mark.parametrize("rows", [1, 4])
def test_text_of_a_seed_does_not_depend_on_the_draft(rows):
    """With the same draws the tokens are those of plain sampling, so that they have its distribution too."""
    for seed in range(200):
        expected, _ = plain(torch.Generator().manual_seed(seed))
        assert with_guesses(torch.Generator().manual_seed(seed), rows)[0] == expected


def test_guesses_with_the_noise_to_come_are_right_more_often():
    """At least (1 - d) / (1 + d) of the first ones, where d is the total variation distance."""
    generator = torch.Generator().manual_seed(1)
    share = sum(with_guesses(generator)[1] >= 1 for _ in range(200)) / 200
    p, q = MODEL.probs(0), DRAFT.probs(0)
    distance = float((p - q).abs().sum()) / 2
    likeliest = float(p[int(q.argmax())])
    assert share > (1 - distance) / (1 + distance) - 0.05
    assert share > likeliest
    more = sum(with_guesses(generator, 4)[1] >= 1 for _ in range(200)) / 200
    assert more > share
