"""An adapter that does not fit the hosted blocks is refused with a sentence that says what was expected."""

from __future__ import annotations

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank, Prompt
from swarm_server.adapters.targets import linear_features, require_fit
from swarm_server.blocks.blocks import BlockStack, load_blocks
from tests.adapted import SALT
from tests.zoo import FFN, HIDDEN, save_checkpoint

SPAN = Span(1, 4)


@pytest.fixture(scope="module", params=["none", "int8", "int4", "fp8", "nf4"])
def quant(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def stacks(quant, tmp_path_factory) -> dict[str, BlockStack]:
    def transform(block: torch.nn.Module, _index: int) -> None:
        quantize_(block, quant, torch.device("cpu"), torch.float32, emulated=True)

    loaded = {}
    for family in ("llama", "gpt2", "falcon-7b", "mixtral", "llama4_text"):
        directory = tmp_path_factory.mktemp(family)
        save_checkpoint(family, directory)
        loaded[family] = load_blocks(ModelCheckpoint.open(directory), SPAN, transform=transform)
    return loaded


def part(module: str, out_features: int = HIDDEN, in_features: int = HIDDEN, block: int = 2, rank: int = 2) -> LowRank:
    return LowRank(block, module, 1.0, torch.zeros(rank, in_features), torch.zeros(out_features, rank))


def check(stack: BlockStack, *parts: LowRank | Prompt) -> None:
    low_rank = tuple(part for part in parts if isinstance(part, LowRank))
    prompts = tuple(part for part in parts if isinstance(part, Prompt))
    require_fit(Adapter(SALT, low_rank, prompts), stack.span, HIDDEN, stack.original)


@pytest.mark.parametrize(
    ("family", "module", "features"),
    [
        ("llama", "self_attn.k_proj", (HIDDEN, HIDDEN // 2)),
        ("llama", "mlp.down_proj", (FFN, HIDDEN)),
        ("gpt2", "attn.c_attn", (HIDDEN, 3 * HIDDEN)),
        ("gpt2", "mlp.c_proj", (4 * HIDDEN, HIDDEN)),
        ("falcon-7b", "self_attention.query_key_value", (HIDDEN, HIDDEN + 2 * HIDDEN // 4)),
        ("mixtral", "self_attn.o_proj", (HIDDEN, HIDDEN)),
    ],
)
def test_linear_layers_of_any_kind(stacks, family, module, features):
    assert linear_features(stacks[family].original(2), module, 2) == features
    check(stacks[family], part(module, *reversed(features)), Prompt(1, torch.zeros(3, HIDDEN)))


BAD = {
    "block": ("llama", [part("self_attn.q_proj", block=4)], "is for block 4, but this server holds blocks 1:4"),
    "module": (
        "llama",
        [part("self_attn.query")],
        "'self_attn.query' of block 2 does not exist: expected one of self_",
    ),
    "no module": ("llama", [part("")], "'' of block 2 is a LlamaDecoderLayer: expected a linear layer"),
    "no linear": ("llama", [part("input_layernorm")], "is a LlamaRMSNorm: expected a linear layer, one of self_attn.q"),
    "long": ("llama", [part("a" * 1000)], "module 'aaa.*…|does not exist"),
    "router": ("mixtral", [part("mlp.gate", 4)], "is a MixtralTopKRouter: expected a linear layer"),
    "experts": ("mixtral", [part("mlp.experts")], "is among experts, .*: expected a linear layer outside"),
    "one expert": ("mixtral", [part("mlp.experts.up.0", 2 * FFN)], "is among experts"),
    "other router": ("llama4_text", [part("feed_forward.router", 2, block=1)], "is a Llama4Router: expected a linear"),
    "shape": (
        "llama",
        [part("self_attn.k_proj")],
        r"low-rank matrices of shapes \[2, 64\] and \[64, 2\]: expected \[rank, 64\] and \[32, rank\]",
    ),
    "transposed": ("gpt2", [part("attn.c_attn", HIDDEN, 3 * HIDDEN)], r"expected \[rank, 64\] and \[192, rank\]"),
    "no rank": ("llama", [part("self_attn.q_proj", rank=0)], r"shapes \[0, 64\] and \[64, 0\]: expected \[rank, 64\]"),
    "twice": ("llama", [part("self_attn.q_proj")] * 2, "has low-rank matrices twice"),
    "prompt width": (
        "llama",
        [Prompt(1, torch.zeros(3, 65))],
        r"block 1 has shape \[3, 65\]: expected \[positions, 64",
    ),
    "no prompt": ("llama", [Prompt(1, torch.zeros(0, HIDDEN))], r"block 1 has shape \[0, 64\]: expected"),
    "prompt block": ("llama", [Prompt(0, torch.zeros(3, HIDDEN))], "is for block 0, but this server holds blocks 1:4"),
    "two prompts": ("llama", [Prompt(1, torch.zeros(3, HIDDEN))] * 2, "block 1 has two prompts"),
}


@pytest.mark.parametrize("quant", ["none", "int8"], indirect=True)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(stacks, name):
    family, parts, sentence = BAD[name]
    with pytest.raises(RequestRejected, match=sentence) as caught:
        check(stacks[family], *parts)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
