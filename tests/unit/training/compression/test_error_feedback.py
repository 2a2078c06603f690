"""Nothing is lost for good, and a failed round leaves no trace."""

from __future__ import annotations

import math

import torch

from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ChunkPlace, ErrorFeedback

INT8 = codec_of("int8")
WHOLE = ChunkPlace("part", 0, 100)


def vectors(count: int, n: int = 100) -> torch.Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(0))


def test_sums_differ_by_the_last_error_only() -> None:
    feedback = ErrorFeedback(INT8)
    given = vectors(50)
    sent = []
    for vector in given:
        sent.append(INT8.decode(feedback.encode(WHOLE, vector), 100))
        feedback.commit({WHOLE})
    lost = (given.sum(0) - torch.stack(sent).sum(0)).abs().max()
    without = torch.stack([INT8.decode(INT8.encode(vector), 100) for vector in given]).sum(0)
    assert lost < 0.02 < (given.sum(0) - without).abs().max()


def test_a_round_that_fails_leaves_no_trace() -> None:
    a, b = ErrorFeedback(INT8), ErrorFeedback(INT8)
    first, second, third = vectors(3)
    for feedback in (a, b):
        feedback.encode(WHOLE, first)
        feedback.commit({WHOLE})
    b.encode(WHOLE, third)
    b.rollback()
    b.commit({WHOLE})
    assert a.encode(WHOLE, second) == b.encode(WHOLE, second)


def test_a_chunk_that_is_added_whole_after_all_has_lost_nothing() -> None:
    """Its owner is gone, and the peer itself adds it up in the second attempt."""
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    feedback.encode(WHOLE, first)
    assert torch.equal(feedback.whole(WHOLE, first), first)
    feedback.commit({WHOLE})
    assert feedback.encode(WHOLE, second) == INT8.encode(second)


def test_a_chunk_that_was_not_counted_leaves_no_trace() -> None:
    a, b = ErrorFeedback(INT8), ErrorFeedback(INT8)
    first, second, third = vectors(3)
    early, late = ChunkPlace("part", 0, 100), ChunkPlace("part", 64, 100)
    for feedback in (a, b):
        feedback.encode(early, first[:64])
        feedback.encode(late, first[64:])
        feedback.commit({early, late})
    for feedback in (a, b):
        feedback.encode(early, second[:64])
    b.encode(late, second[64:])
    a.commit({early})
    b.commit({early})
    assert a.encode(late, third[64:]) == b.encode(late, third[64:]) != INT8.encode(third[64:])
    assert a.encode(early, third[:64]) == b.encode(early, third[:64])


def test_encoding_again_in_a_round_gives_the_same_bytes() -> None:
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    feedback.encode(WHOLE, first)
    feedback.commit({WHOLE})
    assert feedback.encode(WHOLE, second) == feedback.encode(WHOLE, second) != INT8.encode(second)


def test_errors_stay_with_their_elements_however_a_round_cuts_the_vector() -> None:
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    lost = first - INT8.decode(feedback.encode(WHOLE, first), 100)
    feedback.commit({WHOLE})
    middle = ChunkPlace("part", 30, 100)
    assert feedback.encode(middle, second[30:70]) == INT8.encode(second[30:70] + lost[30:70])
    assert torch.equal(feedback.whole(middle, second[30:70]), second[30:70] + lost[30:70])
    feedback.commit({middle})
    assert torch.equal(feedback.whole(WHOLE, second)[30:70], second[30:70])
    assert torch.equal(feedback.whole(WHOLE, second)[:30], second[:30] + lost[:30])


def test_vectors_have_memories_of_their_own_and_other_lengths_none() -> None:
    feedback = ErrorFeedback(INT8)
    first, second = vectors(2)
    feedback.encode(WHOLE, first)
    feedback.commit({WHOLE})
    assert feedback.encode(WHOLE._replace(what="mean"), second) == INT8.encode(second)
    assert feedback.encode(WHOLE._replace(length=50), second[:50]) == INT8.encode(second[:50])
    assert feedback.whole(WHOLE._replace(what="mean"), second) is second


def test_what_is_not_finite_is_not_remembered() -> None:
    feedback = ErrorFeedback(codec_of("fp16"))
    first, second = vectors(2)
    first[3] = math.nan
    feedback.encode(WHOLE, first)
    feedback.commit({WHOLE})
    assert feedback.codec.decode(feedback.encode(WHOLE, second), 100).isfinite().all()


def test_what_was_lost_is_forgotten_with_the_state_that_it_belongs_to() -> None:
    encoder, place = ErrorFeedback(codec_of("int8")), ChunkPlace("part", 0, 2)
    encoder.encode(place, torch.tensor([1e12, 1.0]))
    encoder.commit({place})
    encoder.forget()
    assert bool((codec_of("int8").decode(encoder.encode(place, torch.zeros(2)), 2) == 0).all())
