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


def test_str_round_trips() -> None:
    assert str(Span(10, 20)) == "10:20"
    assert Span.parse(str(Span(0, 1))) == Span(0, 1)


def test_within_names_the_model_size() -> None:
    assert Span(0, 32).within(32) == Span(0, 32)
    with pytest.raises(ValueError, match=r"blocks 10:40 are outside the model, which has 32 blocks \(0:32\)"):
        Span(10, 40).within(32)


def test_is_a_collection_of_blocks() -> None:
    span = Span(2, 5)
    assert list(span) == [2, 3, 4]
    assert len(span) == 3
    assert 2 in span and 4 in span
    assert 1 not in span and 5 not in span


def test_covers() -> None:
    assert Span(2, 5).covers(Span(2, 5))
    assert Span(2, 5).covers(Span(3, 4))
    assert not Span(2, 5).covers(Span(1, 4))
    assert not Span(2, 5).covers(Span(3, 6))


def test_orders_by_start_then_end() -> None:
    assert sorted([Span(2, 5), Span(0, 9), Span(2, 3)]) == [Span(0, 9), Span(2, 3), Span(2, 5)]
