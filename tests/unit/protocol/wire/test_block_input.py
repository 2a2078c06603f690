"""Rows of a step's input that are equal come once, and only those."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.wire.block_input import IN_WINDOWS, BlockInput

TOKENS = 3
BESIDE = {
    "attention_mask": torch.ones(2, TOKENS, dtype=torch.long),
    "position_ids": torch.arange(TOKENS).repeat(2, 1),
    "additions": torch.ones(2, TOKENS, 2, 4),
    "joined": torch.full((2, TOKENS), IN_WINDOWS, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", BESIDE)
def test_rows_that_differ_in_one_thing_alone_stay_apart(name: str) -> None:
    different = BESIDE[name].clone()
    different[0, 1] = 0
    different[1, 1] = 2
    inputs = BlockInput(torch.ones(2, TOKENS, 4), **{**BESIDE, name: different})
    assert inputs.without_repeats() == (inputs, [])


@pytest.mark.parametrize("place", [0, 3])
def test_hidden_states_tell_rows_apart(place: int) -> None:
    hidden = torch.ones(2, TOKENS, 4)
    hidden[1, 1, place] = 2
    inputs = BlockInput(hidden, **BESIDE)
    assert inputs.without_repeats() == (inputs, [])


def test_equal_rows_become_one() -> None:
    found, repeats = BlockInput(torch.ones(2, TOKENS, 4), **BESIDE).without_repeats()
    assert repeats == [0, 0]
    assert torch.equal(found.hidden, torch.ones(1, TOKENS, 4))
    for name, tensor in BESIDE.items():
        assert torch.equal(getattr(found, name), tensor[:1])


def test_positions_of_all_rows_stay() -> None:
    hidden = torch.tensor([1.0, 2.0, 1.0]).expand(TOKENS, 4, 3).permute(2, 0, 1)
    positions = torch.arange(TOKENS)[None]
    found, repeats = BlockInput(hidden, position_ids=positions).without_repeats()
    assert repeats == [0, 1, 0]
    assert torch.equal(found.hidden, hidden[:2])
    assert found.position_ids is positions


def test_what_is_not_padding_in_every_row() -> None:
    hidden, ids = torch.arange(24.0).view(2, 6, 2), torch.arange(6)[None]
    mask = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]])
    inputs = BlockInput(hidden, mask, ids)
    assert inputs.unpadded == slice(1, 4)
    part = inputs.at(inputs.unpadded)
    assert torch.equal(part.hidden, hidden[:, 1:4]) and torch.equal(part.attention_mask, mask[:, 1:4])
    assert part.position_ids.tolist() == [[1, 2, 3]]
    for unmasked in (None, torch.zeros_like(mask)):
        assert BlockInput(hidden, unmasked, ids).unpadded == slice(0, 6)
