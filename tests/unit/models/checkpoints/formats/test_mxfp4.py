"""mxfp4 is read as the format's own arithmetic says, and what is no number is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from tests.published import MXFP4_CONFIG, damage, mxfp4_experts, publish, read_shards, write_shards

BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{end}" for end in ("blocks", "scales"))


def gpt_oss(directory: Path) -> dict[str, torch.Tensor]:
    ends = (".gate_up_proj", ".down_proj")
    return publish(directory, MXFP4_CONFIG, mxfp4_experts, name="gpt_oss", ends=ends, num_hidden_layers=2)


def test_experts(tmp_path: Path) -> None:
    expected = gpt_oss(tmp_path)
    read = ModelCheckpoint.open(tmp_path).read(lambda name: True)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name].float(), tensor), name


def test_every_code_and_exponent_is_exact(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    stored = read_shards(tmp_path)
    codes = torch.arange(stored[BLOCKS].numel()).to(torch.uint8).reshape(stored[BLOCKS].shape)
    exponents = (torch.arange(stored[SCALES].numel()) % 250 + 3).to(torch.uint8).reshape(stored[SCALES].shape)
    write_shards(tmp_path, stored | {BLOCKS: codes, SCALES: exponents})
    read = ModelCheckpoint.open(tmp_path).read(lambda name: name.endswith("1.mlp.experts.down_proj"))
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    levels = torch.cat([levels, -levels])
    both = torch.stack([levels[(codes & 15).long()], levels[(codes >> 4).long()]], -1).flatten(3)
    expected = (both * 2.0 ** (exponents.double() - 127)[..., None]).flatten(2).transpose(1, 2)
    (tensor,) = read.values()
    assert torch.equal(tensor.double(), expected)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (SCALES, lambda scales: scales.fill_(255), "damaged: an exponent is 255, which is no number"),
        (SCALES, lambda scales: scales[:, :-1], r"expected uint8 of shape \[.*\], an exponent for each group"),
        (BLOCKS, lambda blocks: blocks[..., :8], r"expected uint8 of shape \[experts, rows, groups, 16\]"),
        (BLOCKS, torch.Tensor.int, r"as int32 of shape .*: expected uint8 of shape \[experts, rows, groups, 16\]"),
    ],
)
def test_damaged(tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], sentence: str) -> None:
    gpt_oss(tmp_path)
    damage(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=sentence):
        ModelCheckpoint.open(tmp_path).read(lambda name: True)
