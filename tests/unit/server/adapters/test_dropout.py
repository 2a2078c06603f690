"""What is dropped depends on seed, place and row only."""

from __future__ import annotations

import pytest
import torch

from swarm_server.adapters.dropout import Dropout

X = torch.randn(4, 50, 101)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_the_share_that_is_dropped(probability):
    factors = Dropout(1).factors(3, "self_attn.q_proj", probability, X)
    assert factors.shape == X.shape and factors.dtype == X.dtype
    assert abs((factors == 0).double().mean() - probability) < 0.01
    assert torch.allclose(factors[factors != 0], torch.tensor(1 / (1 - probability)))


def test_the_same_again_however_rows_are_cut():
    whole = Dropout(1).factors(3, "q", 0.5, X)
    assert torch.equal(Dropout(1).factors(3, "q", 0.5, X), whole)
    for row in range(4):
        assert torch.equal(Dropout(1, first_row=row).factors(3, "q", 0.5, X[row : row + 1]), whole[row : row + 1])


def test_others_are_dropped_elsewhere():
    kept = [
        dropout.factors(block, module, 0.5, X)[rows] != 0
        for dropout, block, module, rows in (
            (Dropout(1), 3, "q", 0),
            (Dropout(1), 3, "q", 1),
            (Dropout(2), 3, "q", 0),
            (Dropout(1), 4, "q", 0),
            (Dropout(1), 3, "k", 0),
        )
    ]
    for i, one in enumerate(kept):
        for other in kept[:i]:
            assert abs((one == other).double().mean() - 0.5) < 0.05


def test_the_numbers_are_those_of_every_server():
    """Servers of other versions and machines must drop the same: this may change with the wire version only."""
    kept = Dropout(1).factors(3, "self_attn.q_proj", 0.5, torch.zeros(1, 1, 16))[0, 0] != 0
    assert "".join(str(int(bit)) for bit in kept) == "0000101101101111"


@pytest.mark.parametrize(
    ("probability", "element", "is_kept"),
    [
        (0.3, 61391, False),  # its number is 19660; 0.3 is 19660.8 of 65536, and thus 19661
        (0.2, 35119, True),  # its number is 13107; 0.2 is 13107.2 of 65536, and thus 13107
    ],
)
def test_a_probability_is_rounded_to_the_nearest_level(probability, element, is_kept):
    """Servers that round differently drop different elements, if only a few."""
    factors = Dropout(1).factors(3, "q", probability, torch.zeros(1, 1, 61440))
    assert bool(factors[0, 0, element] != 0) == is_kept
