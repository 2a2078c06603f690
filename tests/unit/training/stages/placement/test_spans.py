from __future__ import annotations

import pytest

from swarm_protocol.span import Span
from swarm_training.stages.placement.spans import all_spans, split


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_stages_have_each_block_once_and_about_as_many(num_stages: int) -> None:
    spans = split(12, num_stages)
    assert [block for span in spans for block in span] == list(range(12))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert all_spans(12, num_stages) == all_spans(12, spans) == spans


@pytest.mark.parametrize("num_stages", [0, -1, 13])
def test_stages_without_blocks_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 12"):
        split(12, num_stages)


@pytest.mark.parametrize(
    "spans", [[], [Span(0, 5)], [Span(0, 5), Span(6, 12)], [Span(0, 7), Span(6, 12)], [Span(6, 12), Span(0, 6)]]
)
def test_spans_with_gaps_or_overlaps_are_refused(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="expected each of 0:12 once, in order"):
        all_spans(12, spans)
