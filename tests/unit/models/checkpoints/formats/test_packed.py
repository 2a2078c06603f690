"""What all formats share: names, files, what is refused, and that a packed checkpoint is used like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.weight_cache import content_key
from tests.published import damage, edit_config, fp8_blocks, fp8_config, publish, read_shards, write_shards

BLOCK = (32, 32)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    publish(tmp_path / "fp8", fp8_config(BLOCK), lambda weight: fp8_blocks(weight, BLOCK), num_hidden_layers=2)
    return tmp_path / "fp8"


def test_blocks_and_client_share_out_the_weights(fp8: Path) -> None:
    checkpoint = ModelCheckpoint.open(fp8)
    parts = [checkpoint.client_tensors(), *(checkpoint.block_tensors(index) for index in range(2))]
    assert sorted(name for part in parts for name in part) == sorted(checkpoint.tensor_names)
    assert not any("scale" in name for name in checkpoint.tensor_names)
    assert not hasattr(checkpoint.config, "quantization_config")


def test_only_the_wanted_tensors_are_read(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = torch.empty
    checkpoint = ModelCheckpoint.open(fp8)
    tensors = checkpoint.block_tensors(1)
    for piece in {piece for tensor in tensors.values() for piece in tensor.pieces}:
        assert ".layers.1." in piece.name
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: read.append(str(args)) or original(*args, **kwargs))
    tensors[Q_PROJ].read()
    assert len(read) == 2  # the weight, and its scales


def test_the_fingerprint_depends_on_weights_and_scales(fp8: Path) -> None:
    before = ModelCheckpoint.open(fp8).revision
    assert ModelCheckpoint.open(fp8).revision == before
    for name in (Q_PROJ, f"{Q_PROJ}_scale_inv"):
        stored = read_shards(fp8)
        stored[name] = (stored[name].float() * 2).to(stored[name].dtype)
        write_shards(fp8, stored)
        assert ModelCheckpoint.open(fp8).revision != before, name
        before = ModelCheckpoint.open(fp8).revision


@pytest.mark.parametrize("changed", [Q_PROJ, f"{Q_PROJ}_scale_inv"])
def test_a_packed_weight_of_an_earlier_start_is_not_that_of_changed_parts(fp8: Path, changed: str) -> None:
    def key() -> str:
        return content_key(ModelCheckpoint.open(fp8).block_tensors(1)[Q_PROJ], "int8")

    before = key()
    assert key() == before
    (piece,) = [piece for piece in ModelCheckpoint.open(fp8).block_tensors(1)[Q_PROJ].pieces if piece.name == changed]
    with piece.path.open("r+b") as file:
        file.seek(piece.offset)
        file.write(b"\x21")
    assert key() != before


def test_a_packed_weight_of_an_earlier_start_is_not_that_of_another_recipe(fp8: Path) -> None:
    before = content_key(ModelCheckpoint.open(fp8).block_tensors(1)[Q_PROJ], "int8")
    edit_config(fp8, quantization_config=fp8_config((33, 33)))  # which has as many scales
    assert content_key(ModelCheckpoint.open(fp8).block_tensors(1)[Q_PROJ], "int8") != before


@pytest.mark.parametrize(
    ("quantization_config", "sentence"),
    [
        ([4], r"is stored quantised as None, which is not known: expected one of .*fp8, .*mxfp4"),
        ({}, "is stored quantised as None, which is not known: expected one of"),
        ({"quant_method": "quip#"}, "is stored quantised as 'quip#', which is not known: expected one of"),
        ({"quant_method": ["fp8"]}, r"is stored quantised as \['fp8'\], which is not known"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "as fp8: quantization_config has weight_block_size=128"),
        ({"quant_method": "fp8", "weight_block_size": [0, 8]}, r"has weight_block_size=\[0, 8\]: expected two sizes"),
    ],
)
def test_configs_that_are_refused(fp8: Path, quantization_config: object, sentence: str) -> None:
    edit_config(fp8, quantization_config=quantization_config)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        ModelCheckpoint.open(fp8)
    assert "\n" not in str(caught.value)


SCALE = f"{Q_PROJ}_scale_inv"


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (SCALE, None, "holds model.layers.1.self_attn.q_proj.weight as float8_e4m3fn, but its scale is missing"),
        (Q_PROJ, None, "lacks tensor model.layers.1.self_attn.q_proj.weight, which belongs to .*weight_scale_inv"),
        (
            SCALE,
            lambda scale: scale[:1],
            r"shape \[1, 2\]: expected \[2, 2\], a scale for each block of 32x",
        ),
        (SCALE, lambda scale: scale.int(), r"as int32 of shape \[2, 2\]: expected floats"),
        (SCALE, lambda scale: scale / 0, "scales of tensor .*q_proj.weight are damaged: expected finite"),
        (Q_PROJ, torch.Tensor.float, r"as float32 of shape \[64, 64\]: expected a matrix of float8"),
        (
            Q_PROJ,
            lambda weight: weight[:40],
            r"tensor .*q_proj.weight has shape \[40, 64\], expected \[64,",
        ),
    ],
)
def test_damaged_checkpoints(
    fp8: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, sentence: str
) -> None:
    damage(fp8, name, change)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_blocks(ModelCheckpoint.open(fp8), Span(1, 2))
    assert "\n" not in str(caught.value)
