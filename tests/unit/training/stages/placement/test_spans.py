from __future__ import annotations

import pytest

from swarm_training.stages.placement.spans import split


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_stages_have_each_block_once_and_about_as_many(num_stages: int) -> None:
    spans = split(12, num_stages)
    assert [block for span in spans for block in span] == list(range(12))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize("num_stages", [0, -1, 13])
def test_stages_without_blocks_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 12"):
        split(12, num_stages)
