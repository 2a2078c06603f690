"""A checkpoint that is rounded to 4 bits by the inputs of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_cli.command_line import parse_args
from swarm_cli.quantize.command import quantize_command
from swarm_cli.quantize.quantize import round_blocks
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.hollow_model import load_whole_model
from swarm_models.kernels.int4_linear import PlainInt4Weight, quantize_groups
from swarm_models.quantization import linear_names
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_models.quantization.stored import stored_int4, stored_int8
from tests.zoo import VOCAB, save_checkpoint


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_servers_take_the_integers_and_the_model_changes_less(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "model", **({"num_hidden_layers": 2} if name == "llama" else {}))
    source = ModelCheckpoint.open(tmp_path / "model")
    random, said = torch.Generator().manual_seed(0), []
    known, new = (torch.randint(3, VOCAB, (8, 64), generator=random) for _ in range(2))
    round_blocks(source, known, tmp_path / "rounded", said.append)
    assert len(said) == source.family.num_blocks

    rounded = ModelCheckpoint.open(tmp_path / "rounded")
    assert set(rounded.tensor_names) == set(source.tensor_names)
    eight_bits = eight_bit_layers(source.family)
    for index, linears in enumerate(source.family.linears):
        stored = {rounded.family.name_in_block(full): it for full, it in rounded.block_tensors(index).items()}
        for layer, _ in linears:
            weight = stored[f"{layer}.weight"]
            assert (stored_int8(weight) is not None) == (name == "llama" and layer in eight_bits[index]), layer
            assert (stored_int4(weight) is not None) == (name == "llama" and layer not in eight_bits[index]), layer
    exact, found = (load_whole_model(checkpoint)(new).logits for checkpoint in (source, rounded))
    if name == "gpt2":  # whose matrices are stored the other way round
        assert torch.equal(found, exact)
    else:
        assert (found - exact).norm() < 0.9 * (nearest(source)(new).logits - exact).norm()


def nearest(source: ModelCheckpoint) -> torch.nn.Module:
    """The model with each weight that int4 holds in 4 bits rounded to the nearest."""
    model: Any = load_whole_model(source)
    for block, eight_bits in zip(model.model.layers, eight_bit_layers(source.family), strict=True):
        for layer in set(linear_names(block)) - eight_bits:
            linear = block.get_submodule(layer)
            linear.weight.data = PlainInt4Weight(*quantize_groups(linear.weight.data)).dequantize()
    return model


def test_the_config_names_the_layers_in_8_bits_and_those_left(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "model")
    round_blocks(ModelCheckpoint.open(tmp_path / "model"), torch.ones(1, 32).long(), tmp_path / "rounded", print)
    config = json.loads((tmp_path / "rounded" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.v_proj" in config["config_groups"]["group_0"]["targets"]
    assert "model.embed_tokens" in config["ignore"]
    assert not any("_proj" in name for name in config["ignore"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "."], "exists already: expected a new directory"),
        (["--output", "new", "--text", "missing"], "is not there: expected a file of text"),
        (["--output", "new", "--tokens", "5"], "expected at least 256"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_command(parse_args(["quantize", *flags]))
