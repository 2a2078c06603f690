"""fp8 is read as the format's own arithmetic says, and as transformers reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_server.blocks.block_loading import load_block
from tests.published import assert_read, fp8_blocks, fp8_config, fp8_rows, publish


@pytest.mark.parametrize("block", [(32, 32), (24, 40), (128, 128)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks(tmp_path: Path, block: tuple[int, int], scale_dtype: torch.dtype) -> None:
    expected = publish(tmp_path, fp8_config(block), lambda weight: fp8_blocks(weight, block, scale_dtype))
    assert_read(tmp_path, expected)


@pytest.mark.parametrize("shape", [(), (1,), ("rows",), ("rows", 1)])
@pytest.mark.parametrize("end", [".weight_scale", ".weight_scale_inv", ".qscale_weight"])
def test_a_scale_for_each_row_or_tensor(tmp_path: Path, shape: tuple, end: str) -> None:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return fp8_rows(weight, tuple(len(weight) if size == "rows" else size for size in shape), end)

    expected = publish(tmp_path, fp8_config(), pack, num_hidden_layers=1)
    assert_read(tmp_path, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_blocks_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    publish(tmp_path, fp8_config((16, 16)), lambda weight: fp8_blocks(weight, (16, 16)), name=name, num_hidden_layers=2)
    whole = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = dict(load_block(ModelCheckpoint.open(tmp_path), 1, torch.float32).named_parameters())
    theirs = dict(whole.model.layers[1].named_parameters())
    assert ours.keys() == theirs.keys()
    for key, parameter in theirs.items():
        assert torch.allclose(ours[key], parameter.float(), rtol=1e-6, atol=0), key
