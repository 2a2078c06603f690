"""Who is wrong of those who have answered the same request."""

from __future__ import annotations

import pytest
import torch

from swarm_training.stages.audit import testimony  # whose class pytest would take for tests
from swarm_training.stages.audit.sketch import sketch
from swarm_training.stages.audit.testimony import Tolerance, agree, majority
from swarm_training.stages.rpc.answers import StageAnswer

FP32 = Tolerance.of("fp32", "fp32")
GRADIENT, INPUTS = torch.randn(1000), torch.randn(2, 3, 4)


def said(
    peer_id: str = "a", gradient: float = 1.0, inputs: float = 1.0, loss_sum: float = 7.0, num_tokens: int = 5
) -> testimony.Testimony:
    answer = StageAnswer(inputs * INPUTS, loss_sum, num_tokens)
    return testimony.Testimony(peer_id, answer, sketch([gradient * GRADIENT], bytes(16)))


@pytest.mark.parametrize(
    "other",
    [
        said(gradient=-1.0),
        said(gradient=1.1),
        said(gradient=0.0),
        said(inputs=-1.0),
        said(inputs=0.98),
        said(loss_sum=7.2),
        said(num_tokens=6),
        testimony.Testimony("b", said().answer),
        testimony.Testimony("b", StageAnswer(None, 7.0, 5), said().sketch),
    ],
)
def test_what_differs_is_another_answer(other: testimony.Testimony) -> None:
    assert not agree(said(), other, FP32) and not agree(other, said(), FP32)


@pytest.mark.parametrize("other", [said(), said(gradient=1.001, inputs=0.999, loss_sum=7.001)])
def test_what_processors_change_is_the_same_answer(other: testimony.Testimony) -> None:
    assert agree(said(), other, FP32)


def test_fewer_bits_may_differ_more() -> None:
    assert agree(said(), said(inputs=1.02), Tolerance.of("fp32", "int8"))
    assert not agree(said(), said(gradient=1.02), Tolerance.of("fp32", "int8"))
    assert agree(said(), said(gradient=1.05), Tolerance.of("bf16", "fp32"))


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.0, 1.0], "ab"),
        ([1.0, -1.0], ""),
        ([-1.0, 1.0, 1.0], "bc"),
        ([1.0, -1.0, 1.0], "ac"),
        ([1.0, -1.0, 2.0], ""),
        ([1.0, -1.0, 2.0, 1.0], ""),
        ([1.0, -1.0, 2.0, 1.0, 1.0], "ade"),
        ([1.0], ""),
    ],
)
def test_more_than_half_must_say_the_same(factors: list[float], expected: str) -> None:
    given = [said(name, factor) for name, factor in zip("abcde", factors, strict=False)]
    assert "".join(each.peer_id for each in majority(given, FP32)) == expected
