"""Sketches tell gradients apart as their distance does, and nobody who lacks the seed can do without."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_training.stages.audit import sketch as module
from swarm_training.stages.audit.sketch import BUCKETS, SEED_BYTES, relative_difference, relative_distance, sketch

SEED = bytes(range(SEED_BYTES))


def gradients(scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator) for shape in ((300, 7), (), (BUCKETS,), (1001,))]


def test_the_numbers_are_those_of_the_definition() -> None:
    (gradient,) = [torch.randn(3 * BUCKETS + 5, dtype=torch.float64)]
    signs = [1.0 - 2.0 * (word >> bit & 1) for word in _words(13) for byte in range(8) for bit in _bits(byte)]
    expected = [0.0] * BUCKETS
    for at, value in enumerate(gradient.tolist()):
        expected[at % BUCKETS] += signs[at] * value
    assert sketch([gradient], SEED) == pytest.approx(expected, rel=1e-12)


def _words(count: int) -> list[int]:
    import numpy as np

    return [int(word) for word in np.random.Philox(key=int.from_bytes(SEED, "little")).random_raw(count)]


def _bits(byte: int) -> list[int]:
    return [8 * byte + bit for bit in range(7, -1, -1)]  # of each byte, the highest first


@pytest.mark.parametrize("chunk", [BUCKETS, 4 * BUCKETS])
def test_large_gradients_are_taken_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    found = sketch(gradients(), SEED)
    monkeypatch.undo()
    assert found == pytest.approx(sketch(gradients(), SEED), rel=1e-9)


@pytest.mark.parametrize(("change", "expected"), [(1e-5, 1e-5), (0.5, 0.5), (2.0, 1.0)])
def test_the_distance_is_that_of_the_gradients(change: float, expected: float) -> None:
    noise = [change * torch.randn(each.shape) * each.norm() / max(1, each.numel()) ** 0.5 for each in gradients()]
    other = [each + more for each, more in zip(gradients(), noise, strict=True)]
    found = relative_difference(sketch(gradients(), SEED), sketch(other, SEED))
    flat = [torch.cat([each.reshape(-1) for each in these]) for these in (gradients(), other)]
    assert found == pytest.approx(relative_distance(*flat), rel=0.5)
    assert found == pytest.approx(expected, rel=0.6)


def test_nothing_is_as_nothing() -> None:
    zeros = [torch.zeros(5)]
    assert relative_difference(sketch(zeros, SEED), sketch(zeros, SEED)) == 0
    assert relative_distance(zeros[0], zeros[0]) == 0
    assert relative_difference(sketch(zeros, SEED), ()) == math.inf
    assert relative_distance(zeros[0], torch.zeros(6)) == math.inf
