"""Spans: what they accept, what they say when they do not."""

import pytest

from swarm_protocol.span import Span


@pytest.mark.parametrize("text", ["10:20", " 10:20 "])
def test_parses(text: str) -> None:
    assert Span.parse(text) == Span(10, 20)


@pytest.mark.parametrize("text", ["", "10", "10-20", "10:", ":20", "a:b", "-1:3", "1:2:3", "1.5:3"])
def test_refuses_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="expected START:END, for example 10:20"):
        Span.parse(text)


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 3), (-1, 3)])
def test_is_never_empty_or_negative(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"blocks {start}:{end} are no range of blocks"):
        Span(start, end)


def test_within_names_the_model_size() -> None:
    assert Span(0, 32).within(32) == Span(0, 32)
    with pytest.raises(ValueError, match=r"blocks 10:40 are outside the model, which has 32 blocks \(0:32\)"):
        Span(10, 40).within(32)


def test_covers() -> None:
    assert Span(2, 5).covers(Span(2, 5))
    assert Span(2, 5).covers(Span(3, 4))
    assert not Span(2, 5).covers(Span(1, 4))
    assert not Span(2, 5).covers(Span(3, 6))
