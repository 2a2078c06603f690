"""GPTQ, AWQ and compressed-tensors are read as the quantiser's own arithmetic says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from tests.published import (
    AWQ_CONFIG,
    Packer,
    assert_read,
    awq,
    compressed_config,
    compressed_words,
    damage,
    fp8_blocks,
    fp8_rows,
    gptq,
    gptq_config,
    int8_rows,
    publish,
)

PACKED = compressed_config("pack-quantized", 4, strategy="group")
CASES: dict[str, tuple[object, Packer]] = {
    "gptq": (gptq_config(), gptq),
    "gptq-v1": (gptq_config(checkpoint_format="gptq"), gptq),
    "gptq-v2": (gptq_config(checkpoint_format="gptq_v2"), partial(gptq, version=2)),
    "gptq-act-order": (gptq_config(desc_act=True), partial(gptq, order=True)),
    "gptq-symmetric": (gptq_config(sym=True), partial(gptq, symmetric=True)),
    "gptq-8": (gptq_config(8), partial(gptq, bits=8)),
    "gptq-2": (gptq_config(2), partial(gptq, bits=2)),
    "awq": (AWQ_CONFIG, awq),
    "awq-symmetric": ({**AWQ_CONFIG, "zero_point": False}, partial(awq, zero_point=False)),
    "ct-int8": (compressed_config("int-quantized", 8), int8_rows),
    "ct-int8-groups": (compressed_config("int-quantized", 8), partial(int8_rows, group=16)),
    "ct-int8-zeros": (compressed_config("int-quantized", 8, symmetric=False), partial(int8_rows, symmetric=False)),
    "ct-fp8": (compressed_config("float-quantized", 8, "float"), lambda weight: fp8_rows(weight, (len(weight), 1))),
    "ct-fp8-tensor": (compressed_config("naive-quantized", 8, "float"), lambda weight: fp8_rows(weight, (1,))),
    "ct-fp8-blocks": (
        compressed_config("float-quantized", 8, "float", strategy="block", block_structure=[32, 24]),
        lambda weight: renamed(fp8_blocks(weight, (32, 24))),
    ),
    "ct-packed": (PACKED, partial(compressed_words, group=16, bits=4)),
    "ct-packed-8": (compressed_config("pack-quantized", 8), partial(compressed_words, group=32, bits=8)),
    "ct-packed-zeros": (PACKED, partial(compressed_words, group=16, bits=4, symmetric=False)),
    "ct-packed-order": (PACKED, partial(compressed_words, group=16, bits=4, order=True)),
}


def renamed(packed: tuple[dict[str, torch.Tensor], torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts, unpacked = packed
    return {end.removesuffix("_inv"): part for end, part in parts.items()}, unpacked


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_quantiser(tmp_path: Path, case: str) -> None:
    config, pack = CASES[case]
    expected = publish(tmp_path, config, pack, num_hidden_layers=1)
    assert_read(tmp_path, expected)


GPTQ, CT = "model.layers.0.self_attn.q_proj.{}", "model.layers.0.self_attn.q_proj.weight_{}"
Change = Callable[[torch.Tensor], torch.Tensor]
DAMAGES: dict[str, tuple[str, str, Change | None, str]] = {
    "no scales": ("gptq", GPTQ.format("scales"), None, "lacks tensor .*q_proj.scales, which belongs to .*qweight"),
    "no zeros": ("gptq", GPTQ.format("qzeros"), None, "lacks tensor .*q_proj.qzeros, which belongs to .*qweight"),
    "half": ("gptq", GPTQ.format("qweight"), lambda part: part.half(), "as float16 .*expected a matrix of int32"),
    "outputs": ("gptq", GPTQ.format("scales"), lambda part: part[:, 1:], r"expected floats of shape \[groups, 64\]"),
    "zeros": ("gptq", GPTQ.format("qzeros"), lambda part: part[1:], r"expected int32 of shape \[4, 8\]"),
    "order": ("gptq", GPTQ.format("g_idx"), lambda part: part[1:], "expected 64 integers"),
    "groups": ("gptq", GPTQ.format("g_idx"), lambda part: part + 3, "the groups of tensor .* are damaged: .* below 4"),
    "nan": ("gptq", GPTQ.format("scales"), lambda part: part * torch.nan, "the scales of tensor .* are damaged"),
    "awq groups": ("awq", GPTQ.format("scales"), lambda part: part[:3], "a number of groups that divides 64 inputs"),
    "shape": ("ct-packed", CT.format("shape"), lambda part: part * 2, "128 rows with words for 128 integers of 4 or 8"),
    "no shape": ("ct-packed", CT.format("shape"), None, "lacks tensor .*weight_shape, which belongs to .*_packed"),
    "negative": ("ct-packed", CT.format("shape"), lambda part: -part, "rows with words for -64 integers"),
    "ct scale": ("ct-packed", CT.format("scale"), lambda part: part[:, 1:], "number of groups that divides 64 inputs"),
    "ct rows": ("ct-packed", CT.format("scale"), lambda part: part[1:], "one scale, or 64 rows of one or more"),
    "ct empty": ("ct-packed", CT.format("scale"), lambda part: part[:, :0], "one scale, or 64 rows of one or more"),
    "ct zeros": (
        "ct-packed-zeros",
        CT.format("zero_point"),
        lambda part: part[1:],
        r"expected int32 of shape \[8, 4\]",
    ),
    "ct int8": ("ct-int8", CT.format("scale"), None, "q_proj.weight as int8, but its scale is missing"),
}


@pytest.mark.parametrize("case_of_damage", DAMAGES)
def test_damaged(tmp_path: Path, case_of_damage: str) -> None:
    case, name, change, sentence = DAMAGES[case_of_damage]
    config, pack = CASES[case]
    publish(tmp_path, config, pack, num_hidden_layers=1)
    damage(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        ModelCheckpoint.open(tmp_path).read(lambda name: True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (gptq_config(3), "as gptq: quantization_config has bits=3, which cannot be read: expected 2, 4, 8"),
        (gptq_config(checkpoint_format="marlin"), "has checkpoint_format='marlin', which cannot be read"),
        ({**AWQ_CONFIG, "bits": 8}, "has bits=8, which cannot be read: expected 4"),
        ({**AWQ_CONFIG, "version": "gemv"}, "has version='gemv', which cannot be read: expected 'gemm'"),
        (compressed_config("nvfp4-pack-quantized", 4), "has format='nvfp4-pack-quantized', which cannot be read"),
        ({**PACKED, "config_groups": [1]}, r"has config_groups=\[1\]: expected an object of objects"),
        ({**PACKED, "transform_config": {"a": 1}}, "has a transform_config, which cannot be read: expected none"),
        (
            compressed_config("float-quantized", 8, "float", strategy="block", block_structure=[0, 1]),
            r"has block_structure=\[\[0, 1\]\]: expected two sizes",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: object, sentence: str) -> None:
    publish(tmp_path, config, awq, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        ModelCheckpoint.open(tmp_path)
    assert "\n" not in str(caught.value)
