"""Models that are published quantised compute over two servers what the dequantised model computes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client import DistributedModel
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import SMALL_CHAT_MODEL, locate
from tests.published import (
    AWQ_CONFIG,
    MXFP4_CONFIG,
    Packer,
    awq,
    compressed_config,
    compressed_words,
    fp8_blocks,
    fp8_config,
    gptq,
    gptq_config,
    mxfp4_experts,
    publish,
)
from tests.small_chat_model import NEEDS_IT
from tests.swarm.harness import InProcessServers

PROJECTIONS, EXPERTS = ("_proj.weight",), (".gate_up_proj", ".down_proj")
FORMATS: dict[str, tuple[object, Packer, str, tuple[str, ...]]] = {
    "fp8": (fp8_config((24, 40)), lambda weight: fp8_blocks(weight, (24, 40)), "llama", PROJECTIONS),
    "fp8 experts": (fp8_config((16, 16)), lambda weight: fp8_blocks(weight, (16, 16)), "qwen3_moe", PROJECTIONS),
    "mxfp4": (MXFP4_CONFIG, mxfp4_experts, "gpt_oss", EXPERTS),
    "gptq": (gptq_config(desc_act=True), lambda weight: gptq(weight, order=True), "llama", PROJECTIONS),
    "awq": (AWQ_CONFIG, awq, "qwen3", PROJECTIONS),
    "compressed-tensors": (
        compressed_config("pack-quantized", 4, strategy="group"),
        lambda weight: compressed_words(weight, 16, 4),
        "llama",
        PROJECTIONS,
    ),
}


def assert_same_logits(model: Path, local: torch.nn.Module, token_ids: torch.Tensor) -> None:
    half = local.config.num_hidden_layers // 2
    with InProcessServers(model, memory_dht=True) as servers:
        servers.start(f"0:{half}", f"{half}:{local.config.num_hidden_layers}")
        with DistributedModel.from_pretrained(str(model), swarm=servers.swarm) as remote, torch.no_grad():
            ours = remote(token_ids, use_cache=False).logits
            theirs = local.eval()(token_ids, use_cache=False).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("format", FORMATS)
def test_logits_of_two_servers(tmp_path: Path, format: str) -> None:
    config, pack, name, ends = FORMATS[format]
    expected = publish(tmp_path, config, pack, name=name, ends=ends, num_hidden_layers=2)
    unpacked = {key: tensor.float() for key, tensor in expected.items()}
    model_config = ModelCheckpoint.open(tmp_path).config
    model_class = AutoModelForCausalLM._model_mapping[type(model_config)]
    local = model_class.from_pretrained(None, config=model_config, state_dict=unpacked, dtype=torch.float32)
    assert_same_logits(tmp_path, local, torch.arange(2 * 9).view(2, 9) + 3)


@NEEDS_IT
def test_a_real_gguf_file() -> None:
    model = Path(locate(SMALL_CHAT_MODEL))
    local = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    assert_same_logits(model, local, torch.tensor([[504, 3575, 282, 4649, 314]]))
