"""bitsandbytes' checkpoints are read as the package itself reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from tests.published import (
    assert_read,
    bitsandbytes_4bit,
    bitsandbytes_config,
    bitsandbytes_int8,
    damage,
    publish,
)

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(("kind", "nested", "block"), [("nf4", True, 64), ("nf4", False, 32), ("fp4", True, 64)])
def test_4_bits(tmp_path: Path, kind: str, nested: bool, block: int) -> None:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return bitsandbytes_4bit(weight, kind, nested, block)

    expected = publish(tmp_path, bitsandbytes_config(4), pack, num_hidden_layers=1, intermediate_size=128)
    read = ModelCheckpoint.open(tmp_path).read(lambda name: True)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(read[name], tensor, rtol=1e-6, atol=1e-8), name


def test_blocks_that_do_not_end_with_a_row(tmp_path: Path) -> None:
    """The package's own reader of 0.50 takes the wrong scales for them on a CPU."""
    originals: list[torch.Tensor] = []

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        originals.append(weight)
        return bitsandbytes_4bit(weight, "nf4", nested=False, blocksize=128)

    expected = publish(tmp_path, bitsandbytes_config(4), pack, num_hidden_layers=1)
    read = ModelCheckpoint.open(tmp_path).read(lambda name: name in expected and name.endswith("_proj.weight"))
    assert len(read) == len(originals) == 7
    for name, original in zip((name for name in expected if name in read), originals, strict=True):
        assert (read[name] - original).norm() < 0.12 * original.norm(), name


def test_int8(tmp_path: Path) -> None:
    expected = publish(tmp_path, bitsandbytes_config(8), bitsandbytes_int8, num_hidden_layers=1)
    assert_read(tmp_path, expected)


def with_state(**changes: object) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(part: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(part.tolist())) | changes).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (f"{WEIGHT}.absmax", lambda part: part[1:], r"expected 64 of uint8"),
        (f"{WEIGHT}.nested_absmax", lambda part: torch.cat([part, part]), "expected 1 floats"),
        (f"{WEIGHT}.nested_quant_map", lambda part: part[1:], "expected nested_quant_map of 256 floats"),
        (f"{WEIGHT}.quant_map", lambda part: part[1:], "expected 16 floats"),
        (f"{WEIGHT}.quant_map", None, "lacks tensor .*quant_map, which belongs to .*nf4"),
        (
            STATE,
            with_state(shape=[64, 65]),
            r"holds .*q_proj.weight as uint8 of shape .*: expected uint8, half of 4160",
        ),
        (STATE, with_state(shape=[[64]]), r"has shape=\[\[64\]\]: expected two sizes"),
        (STATE, with_state(blocksize=1), "has blocksize=1, which cannot be read"),
        (STATE, with_state(blocksize=64.0), "has blocksize=64.0, which cannot be read"),
        (STATE, with_state(nested_offset=10**400), "has nested_offset=1000.*: expected a finite number"),
        (STATE, with_state(nested_offset="x"), "has nested_offset='x': expected a finite number"),
        (STATE, lambda part: part[2:], "is no valid JSON"),
        (STATE, None, "q_proj.weight as uint8, but its scale is missing"),
    ],
)
def test_damaged(tmp_path: Path, name: str, change: Callable | None, sentence: str) -> None:
    publish(
        tmp_path,
        bitsandbytes_config(4),
        lambda weight: bitsandbytes_4bit(weight, "nf4", nested=True),
        num_hidden_layers=1,
    )
    damage(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        ModelCheckpoint.open(tmp_path).read(lambda name: True)
    assert "\n" not in str(caught.value)
