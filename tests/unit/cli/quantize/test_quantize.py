"""A checkpoint that is rounded to 4 bits by the inputs of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_cli.command_line import main
from swarm_cli.quantize.quantize import quantize_checkpoint, round_blocks
from swarm_cli.quantize.rounding import RoundedBlock
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.checkpoints.hollow_model import load_whole_model
from swarm_models.kernels.int4_linear import PlainInt4Weight, quantize_groups
from swarm_models.quantization import linear_names
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_models.quantization.stored import stored_int4, stored_int8
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_training.checkpoints.whole_directory import CannotWrite
from tests.published import compressed_config, int8_rows, publish
from tests.zoo import VOCAB, save_checkpoint


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_servers_take_the_integers_and_the_model_changes_less(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "model", **({"num_hidden_layers": 2} if name == "llama" else {}))
    source, directory = ModelCheckpoint.open(tmp_path / "model"), new_directory(tmp_path / "rounded")
    random, said = torch.Generator().manual_seed(0), []
    known, new = (torch.randint(3, VOCAB, (8, 64), generator=random) for _ in range(2))
    round_blocks(source, known, directory, said.append)
    assert len(said) == source.family.num_blocks

    rounded = ModelCheckpoint.open(directory)
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
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    else:
        with pytest.raises(UnsupportedModel, match=r"q_proj.weight is in 4 bits already"):
            round_blocks(rounded, known, new_directory(tmp_path / "again"), print)
        assert (found - exact).norm() < 0.9 * (nearest(source)(new).logits - exact).norm()


def new_directory(directory: Path) -> Path:
    directory.mkdir()
    return directory


def nearest(source: ModelCheckpoint) -> torch.nn.Module:
    """The model with each weight that int4 holds in 4 bits rounded to the nearest."""
    model: Any = load_whole_model(source)
    for block, eight_bits in zip(model.model.layers, eight_bit_layers(source.family), strict=True):
        for layer in set(linear_names(block)) - eight_bits:
            linear = block.get_submodule(layer)
            linear.weight.data = PlainInt4Weight(*quantize_groups(linear.weight.data)).dequantize()
    return model


def test_the_configs_name_the_layers_of_each_form_and_keep_what_generation_does(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=True)
    generation = {"temperature": 0.9, "top_p": 0.6}  # without do_sample, as some are published
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    source, directory = ModelCheckpoint.open(tmp_path / "model"), new_directory(tmp_path / "rounded")
    round_blocks(source, torch.arange(3, 35)[None], directory, print)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    eight, four = (config["config_groups"][f"group_{number}"]["targets"] for number in (0, 1))
    assert "model.layers.0.self_attn.v_proj" in eight
    layers = {f"model.layers.{index}.{name}" for index, of in enumerate(source.family.linears) for name, _ in of}
    assert {*eight, *four} == layers and len(eight) + len(four) == len(layers)
    assert "model.embed_tokens" in config["ignore"]
    assert "lm_head" in config["ignore"]  # though it is not stored, because it is tied
    assert not any("_proj" in name for name in config["ignore"])
    assert json.loads((directory / "generation_config.json").read_text()).items() >= generation.items()


def test_what_is_not_rounded_is_not_written_in_more_bytes_than_bfloat16_if_it_was_packed(tmp_path: Path) -> None:
    config = compressed_config("int-quantized", 8, strategy="channel")
    expected = publish(tmp_path, config, int8_rows, ends=("embed_tokens.weight",), num_hidden_layers=1)
    expected["model.embed_tokens.weight"] = expected["model.embed_tokens.weight"].bfloat16()
    round_blocks(ModelCheckpoint.open(tmp_path), torch.arange(3, 35)[None], new_directory(tmp_path / "rounded"), print)
    read = ModelCheckpoint.open(tmp_path / "rounded").read(lambda name: not name.endswith("_proj.weight"))
    torch.testing.assert_close(read, {name: expected[name] for name in read}, rtol=0, atol=0)


def test_a_block_whose_inputs_are_not_finite_is_named(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    source = ModelCheckpoint.open(tmp_path)
    block = RoundedBlock(load_blocks(source, Span(1, 2)), source.block_tensors(1), frozenset())
    with torch.no_grad(), pytest.raises(CheckpointError, match=r"layers.1.*_proj.weight cannot be rounded: expected"):
        block.round(torch.full((1, 8, source.config.hidden_size), torch.nan))


def test_what_cannot_be_read_or_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    file, output = tmp_path / "text", tmp_path / "output"
    file.write_bytes(b"\xff")
    for model, text, to, error, message in (
        (str(new_directory(tmp_path / "empty")), None, output, CheckpointError, "config.json"),
        (locate(DEFAULT_MODEL), file, output, ValueError, f"{file} is not in UTF-8: expected"),
        (locate(DEFAULT_MODEL), None, file / "output", CannotWrite, f"{file / 'output'}: File exists"),
    ):
        with pytest.raises(error, match=message):
            quantize_checkpoint(model, None, to, text, 256)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "empty"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --output"),
        (["--output", "."], "exists already: expected a new directory"),
        (["--output", "new", "--text", "missing"], "is not there: expected a file of text"),
        (["--output", "new", "--tokens", "5"], "expected at least 256"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", *flags])
    assert message in capsys.readouterr().err
