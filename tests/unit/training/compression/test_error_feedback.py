"""Nothing is lost for good, and a failed round leaves no trace."""

from __future__ import annotations

import math

import torch

from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback

INT8 = codec_of("int8")


def vectors(count: int, n: int = 100) -> torch.Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(0))


def test_sums_differ_by_the_last_error_only() -> None:
    feedback = ErrorFeedback(INT8)
    given = vectors(50)
    sent = []
    for vector in given:
        sent.append(INT8.decode(feedback.encode("span", vector), 100))
        feedback.commit()
    lost = (given.sum(0) - torch.stack(sent).sum(0)).abs().max()
    without = torch.stack([INT8.decode(INT8.encode(vector), 100) for vector in given]).sum(0)
    assert lost < 0.02 < (given.sum(0) - without).abs().max()


def test_what_int8_cannot_show_arrives_later() -> None:
    feedback = ErrorFeedback(INT8)
    vector = torch.tensor([1000.0, 1.0])  # a step is 1000/127
    received = torch.zeros(2)
    for _ in range(100):
        received += INT8.decode(feedback.encode(0, vector), 2)
        feedback.commit()
    assert INT8.decode(INT8.encode(vector), 2)[1] == 0
    torch.testing.assert_close(received / 100, vector, rtol=0, atol=0.08)


def test_a_round_that_fails_leaves_no_trace() -> None:
    a, b = ErrorFeedback(INT8), ErrorFeedback(INT8)
    first, second, third = vectors(3)
    for feedback in (a, b):
        feedback.encode(0, first)
        feedback.commit()
    b.encode(0, third)
    b.rollback()
    b.commit()
    assert a.encode(0, second) == b.encode(0, second)


def test_encoding_again_in_a_round_gives_the_same_bytes() -> None:
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    feedback.encode(0, first)
    feedback.commit()
    assert feedback.encode(0, second) == feedback.encode(0, second) != INT8.encode(second)


def test_keys_have_memories_of_their_own_and_other_lengths_none() -> None:
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    feedback.encode(0, first)
    feedback.commit()
    assert feedback.encode(1, second) == INT8.encode(second)
    assert feedback.encode(0, second[:50]) == INT8.encode(second[:50])


def test_what_is_not_finite_is_not_remembered() -> None:
    feedback = ErrorFeedback(codec_of("fp16"))
    first, second = vectors(2)
    first[3] = math.nan
    feedback.encode(0, first)
    feedback.commit()
    assert feedback.codec.decode(feedback.encode(0, second), 100).isfinite().all()


def test_what_was_lost_is_forgotten_with_the_state_that_it_belongs_to() -> None:
    encoder = ErrorFeedback(codec_of("int8"))
    encoder.encode("key", torch.tensor([1e12, 1.0]))
    encoder.commit()
    encoder.forget()
    assert bool((codec_of("int8").decode(encoder.encode("key", torch.zeros(2)), 2) == 0).all())
