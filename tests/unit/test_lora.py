"""Low-rank matrices inside hosted blocks compute what plain ``peft`` computes on the local model."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.block_input import BlockInput
from swarm_protocol.checkpoint import Checkpoint
from swarm_protocol.span import Span
from swarm_server.blocks import load_blocks
from swarm_server.engine import Engine
from tests.adapted import LocalModel
from tests.zoo import BLOCKS, HIDDEN, save_checkpoint

TOLERANCE = 1e-5  # relative
HOSTED = Span(0, BLOCKS)
TARGETS = {  # attention's, and others'; in GPT-2 they are transposed, in Falcon q, k and v are one, some blocks flatten
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "falcon-7b": ["query_key_value", "dense_h_to_4h"],
    "falcon-40b": ["query_key_value"],
    "mixtral": ["q_proj", "k_proj", "o_proj"],
    "opt": ["q_proj", "fc1", "fc2"],
    "gpt_neox": ["query_key_value"],
    "bloom": ["query_key_value"],
    "mpt": ["Wqkv"],
    "qwen2_moe": ["q_proj", "shared_expert.up_proj"],
    "gemma3_text": ["q_proj", "gate_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", TARGETS)
def test_outputs_and_gradients_are_those_of_peft(family, tmp_path):
    save_checkpoint(family, tmp_path)
    local = LocalModel.load(tmp_path, r=4, lora_alpha=6, target_modules=TARGETS[family])
    engine = Engine(load_blocks(Checkpoint.open(tmp_path), HOSTED))
    placed = engine.place(b"key", local.adapter(HOSTED))
    for span in (HOSTED, Span(1, 4)):  # a view has modules of its own where they know their index
        hidden, upstream, mask = random(3, 7, HIDDEN), random(3, 7, HIDDEN, seed=1), torch.ones(3, 7, dtype=torch.long)
        mask[0, :3] = 0
        attended = mask.bool()
        expected = local.run(span, hidden, mask)
        plain = engine.forward(span, BlockInput(hidden, mask))
        output = engine.forward(span, BlockInput(hidden, mask), placed)
        assert_same(output[attended], expected[attended])
        assert (output - plain)[attended].abs().max() > 0.01 * expected.abs().max()
        upstream[~attended] = 0
        grads = engine.backward(span, BlockInput(hidden, mask), upstream, placed, trains_adapter=True)
        expected_grads = local.gradients(span, hidden, upstream, mask)
        assert len(grads) == len(expected_grads) == 1 + 2 * len(local.layers(span))
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert grad.dtype == torch.float32 and not grad.is_inference()
            assert_same(grad, expected_grad)
        (alone,) = engine.backward(span, BlockInput(hidden, mask), upstream, placed)
        assert torch.equal(alone, grads[0])
        assert torch.equal(engine.forward(span, BlockInput(hidden, mask)), plain)
