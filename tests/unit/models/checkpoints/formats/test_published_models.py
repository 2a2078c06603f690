"""The ``quantization_config`` of large models, word for word, is read beside tiny weights that are stored as theirs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import UnsupportedModel
from swarm_server.blocks.block_loading import load_block
from tests.published import (
    Packed,
    Packer,
    compressed_words,
    edit_config,
    fp8_blocks,
    fp8_rows,
    gptq,
    mxfp4_experts,
    publish,
)
from tests.zoo import save_checkpoint

ATTENTION = tuple(f"self_attn.{kind}_proj.weight" for kind in "qkvo")
OF_EXPERTS = tuple(f"mlp.experts.{n}.{kind}_proj.weight" for n in range(4) for kind in ("gate", "up", "down"))
LATENT = ("_proj.weight", "_proj_with_mqa.weight")
SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64}

FP8_OF_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
FP8_OF_TENSORS = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "model_file_base_name": None,
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}


def compressed(format: str, weights: dict[str, Any], activations: dict[str, Any] | None, ignore: list[str]) -> object:
    common = {"actorder": None, "block_structure": None, "observer_kwargs": {}, "symmetric": True}
    group = {
        "input_activations": activations and {**common, **activations},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, "observer": "minmax", **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": format,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


FP8_OF_CHANNELS = partial(
    compressed,
    "float-quantized",
    {"group_size": None, "num_bits": 8, "strategy": "channel", "type": "float"},
    {"dynamic": True, "group_size": None, "num_bits": 8, "observer": None, "strategy": "token", "type": "float"},
)
INT4_OF_EXPERTS = compressed(
    "pack-quantized",
    {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"},
    None,
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
)


def of_blocks(weight: torch.Tensor) -> Packed:
    return fp8_blocks(weight, (128, 128))


def of_channels(weight: torch.Tensor) -> Packed:
    return fp8_rows(weight, (len(weight), 1))


def of_tensors(weight: torch.Tensor) -> Packed:
    parts, unpacked = fp8_rows(weight, (), ".weight_scale_inv")
    return {end.replace(".input_scale", ".activation_scale"): part for end, part in parts.items()}, unpacked


class PublishedModel(NamedTuple):
    quantization_config: object
    pack: Packer
    name: str  # in the zoo, of the same or a like architecture
    ends: tuple[str, ...]  # of what is packed
    sizes: Mapping[str, Any] = MappingProxyType({})


WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 320}  # blocks at the edges are smaller
MODELS = {
    "gpt-oss-120b": PublishedModel(MXFP4, mxfp4_experts, "gpt_oss", (".gate_up_proj", ".down_proj")),
    "DeepSeek-V3": PublishedModel(FP8_OF_BLOCKS, of_blocks, "deepseek_v3", LATENT, WIDE),
    "Kimi-K2-Instruct": PublishedModel(FP8_OF_BLOCKS, of_blocks, "deepseek_v3", LATENT),
    "Kimi-K2-Thinking": PublishedModel(
        INT4_OF_EXPERTS, partial(compressed_words, group=32, bits=4), "deepseek_v3", OF_EXPERTS
    ),
    "Qwen3-235B-A22B-FP8": PublishedModel(FP8_OF_BLOCKS, of_blocks, "qwen3_moe", ("_proj.weight",), SPARSE),
    "Qwen3-235B-A22B-GPTQ-Int4": PublishedModel(
        GPTQ,
        partial(gptq, group=128, symmetric=True),
        "qwen3_moe",
        ("_proj.weight",),
        {**SPARSE, "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16},
    ),
    "Llama-4-Maverick-FP8": PublishedModel(
        FP8_OF_CHANNELS([f"language_model.model.layers.0.{end.removesuffix('.weight')}" for end in ATTENTION]),
        of_channels,
        "llama4_text",
        ("_proj.weight",),
    ),
    "GLM-4.6-FP8": PublishedModel(FP8_OF_CHANNELS(["lm_head"]), of_channels, "qwen3_moe", ("_proj.weight",), SPARSE),
    "Mistral-Small-3.2-FP8": PublishedModel(FP8_OF_TENSORS, of_tensors, "llama", ("_proj.weight",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_quantiser(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    expected = publish(tmp_path, model.quantization_config, model.pack, name=model.name, ends=model.ends, **model.sizes)
    if name.startswith("Kimi"):  # as its code says, which is neither there nor asked for
        edit_config(tmp_path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    checkpoint = ModelCheckpoint.open(tmp_path)
    read = checkpoint.read(lambda name: True)
    assert read.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(read[key].float(), tensor.float()), key
    assert checkpoint.config.model_type == model.name
    load_block(checkpoint, checkpoint.family.num_blocks - 1, torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "computed"),
    [("scoring_func", "softmax", "sigmoid"), ("topk_method", "greedy", "noaux_tc"), ("moe_layer_freq", 2, 1)],
)
def test_kimi_k2_with_settings_that_deepseek_v3_does_not_compute(
    tmp_path: Path, key: str, value: object, computed: object
) -> None:
    save_checkpoint("deepseek_v3", tmp_path)
    for setting in ({}, {key: None}, {key: computed}):
        edit_config(tmp_path, model_type="kimi_k2", **setting)
        ModelCheckpoint.open(tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(UnsupportedModel, match=f"has {key} = {value!r}: expected {computed!r} in a model of type"):
        ModelCheckpoint.open(tmp_path)
