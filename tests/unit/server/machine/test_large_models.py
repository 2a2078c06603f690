"""What the documentation says that a block of a large model takes is what servers count on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_server.machine.memory import hosted_bytes

PAGE = Path(__file__).parents[4] / "docs/how-to/models.md"
QUANTS = ("int8", "int4", "none")
LATENT = dict(q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)

# The published sizes.
DEEPSEEK = dict(
    LATENT,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    num_key_value_heads=128,
    n_routed_experts=256,
    n_shared_experts=1,
)
LLAMA4 = dict(
    hidden_size=5120,
    intermediate_size=8192,
    intermediate_size_mlp=16384,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
)
# One for each kind of blocks: the page's other rows are made by the same formula.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-120b": (
        "gpt_oss",
        dict(
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=128,
        ),
    ),
    "DeepSeek-V3.2": ("deepseek_v32", dict(DEEPSEEK, index_n_heads=64, index_head_dim=128)),
    "Llama-4-Maverick": ("llama4_text", dict(LLAMA4, num_local_experts=128, interleave_moe_layer_step=2)),
    "GLM-4.6": (
        "glm4_moe",
        dict(
            hidden_size=5120,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=92,
            first_k_dense_replace=3,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            n_routed_experts=160,
            n_shared_experts=1,
            attention_bias=True,
            use_qk_norm=True,
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_block(name: str) -> None:
    model_type, sizes = MODELS[name]
    family = describe(AutoConfig.for_model(model_type, **sizes))
    parameters = family.block_parameters.__getitem__
    checkpoint = cast(ModelCheckpoint, SimpleNamespace(family=family, block_parameters=parameters))
    taken = [f"{max(hosted_bytes(checkpoint, quant)) / 1e9:.1f} GB" for quant in QUANTS]
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert [cell.strip() for cell in row.strip("|").split("|")][-3:] == taken
