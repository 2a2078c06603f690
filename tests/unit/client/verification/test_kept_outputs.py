"""Outputs that are kept until they may be checked are those of the rows and positions that a session still has."""

import pytest
import torch

from swarm_client.verification.session_checks import _changed


@pytest.mark.parametrize("num_cropped", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("reordered", [None, [1, 0], [0], [1, 1, 0]])
def test_they_follow_crops_and_reorders(num_cropped, reordered):
    first, second = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    outputs = _changed([first, second], num_cropped, reordered)
    left = 5 - num_cropped
    if left <= 0:
        assert outputs == []
        return
    (kept,) = outputs
    rows = range(2) if reordered is None else reordered
    for row, origin in enumerate(rows):
        positions = [*first[origin], *second[origin]][:left]
        assert torch.equal(kept[row], torch.stack(positions))


def test_nothing_kept_stays_nothing():
    assert _changed([], 2, [0, 0]) == []
