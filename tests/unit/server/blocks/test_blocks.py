"""Every supported family, split over servers, computes exactly what the whole model computes on one machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from tests.families import FEW
from tests.marks import LONG, SLOW, always
from tests.splitting import (
    BATCH,
    TOKENS,
    Swarm,
    difference_of_forward,
    difference_of_generation,
    load_whole,
    padding,
    run,
    run_split,
    tolerance_of_generation,
)
from tests.zoo import ALIKE, BLOCKS, HIDDEN, SUPPORTED, save_checkpoint

CHAINS = {
    "two": ("0:2", "2:6"),
    "in-the-middle": ("0:3", "3:4", "4:6"),
    "single-blocks": tuple(f"{i}:{i + 1}" for i in range(BLOCKS)),
}
SPLIT = [name for name in SUPPORTED if name != "minimax"]  # whose own class of cache is not that of stacks
UNLIKE = [name for name in SPLIT if name not in ALIKE]


@pytest.fixture(scope="module")
def swarm_of(tmp_path_factory) -> Callable[[str], Swarm]:
    """Each family's swarm is made once, whatever the order of the tests."""

    @cache
    def swarm_of(family: str) -> Swarm:
        directory = tmp_path_factory.mktemp(family)
        save_checkpoint(family, directory)
        return Swarm.load(directory)

    return swarm_of


@pytest.fixture(params=always(*FEW, among=SPLIT))
def swarm(request, swarm_of: Callable[[str], Swarm]) -> Swarm:
    return swarm_of(request.param)


# Blocks alone try all that a longer chain does; in the middle are the same blocks on either server.
@pytest.mark.parametrize(
    ("swarm", "chain"),
    [
        *(pytest.param(name, "two", marks=LONG if name in ALIKE else () if name in FEW else SLOW) for name in SPLIT),
        *(pytest.param(name, "in-the-middle", marks=SLOW) for name in ("llama", "gemma3_text", "qwen3_next")),
        *(pytest.param(name, "single-blocks", marks=SLOW) for name in UNLIKE),
    ],
    indirect=["swarm"],
)
def test_split_equals_whole(swarm: Swarm, chain: str) -> None:
    stacks = swarm.chain(*CHAINS[chain])
    tolerance = tolerance_of_generation(swarm.name)
    assert difference_of_forward(swarm, stacks) == 0.0
    assert difference_of_generation(swarm, stacks, padded=False) <= tolerance
    assert difference_of_generation(swarm, stacks, padded=True) <= tolerance


@pytest.mark.parametrize("swarm", always(*FEW, among=UNLIKE), indirect=True)
def test_wrong_chain_is_noticed(swarm: Swarm) -> None:
    assert difference_of_forward(swarm, swarm.chain("2:6", "0:2")) > 1e-3
    assert difference_of_forward(swarm, swarm.chain("0:2", "3:6")) > 1e-3


# Those of every family through real servers are in tests/swarm/test_families_remote.py.
@pytest.mark.parametrize("swarm", always(*FEW, among=UNLIKE), indirect=True)
def test_gradients_equal_those_of_the_whole(swarm: Swarm) -> None:
    mask, positions = padding(True)
    chain = swarm.chain("0:2", "2:6")
    embedded = torch.randn(BATCH, TOKENS, swarm.whole.get_input_embeddings().embedding_dim)

    def gradient(split: bool) -> torch.Tensor:
        leaf = embedded.clone().requires_grad_(True)
        inputs = dict(inputs_embeds=leaf, attention_mask=mask)
        if split:
            output = run_split(swarm, chain, [None, None], positions, **inputs)
        else:
            output = run(swarm.whole, positions, **inputs)
        return torch.autograd.grad((output * mask.unsqueeze(-1)).square().sum(), leaf)[0]

    expected = gradient(split=False)
    torch.testing.assert_close(gradient(split=True), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_weights_have_the_dtypes_of_the_whole(swarm: Swarm) -> None:
    whole = load_whole(swarm.directory, torch.bfloat16)
    stack = load_blocks(ModelCheckpoint.open(swarm.directory), Span(2, 3), dtype=torch.bfloat16)
    family = stack.family
    assert_same_weights(stack.blocks[0], getattr(family.owner_of(whole), family.blocks)[2])


def assert_same_weights(block: nn.Module, expected: nn.Module) -> None:
    for tensors in ("named_parameters", "named_buffers"):
        found = dict(getattr(block, tensors)())
        assert [name for name, _ in getattr(expected, tensors)()] == list(found)
        for name, tensor in getattr(expected, tensors)():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "bloom"])
def test_half_precision_checkpoint_computes_in_fp32(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, dtype=torch.bfloat16)
    whole = load_whole(tmp_path)
    stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(1, 4))
    for index, block in zip(stack.span, stack.blocks, strict=True):
        assert {parameter.dtype for parameter in block.parameters()} == {torch.float32}
        assert_same_weights(block, getattr(stack.family.owner_of(whole), stack.family.blocks)[index])


def test_positions_that_jump_do_not_separate_sequences(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(0, 2))
    hidden, positions = torch.randn(1, 4, HIDDEN), torch.tensor([[0, 1, 7, 8]])
    mask = torch.ones(1, 4, dtype=torch.long)
    with torch.inference_mode():
        assert torch.equal(stack(hidden, None, positions), stack(hidden, mask, positions))
        assert not torch.equal(stack(hidden, None, positions)[:, 3], stack(hidden[:, 2:], None, positions[:, 2:])[:, 1])


def test_stack_describes_itself(tmp_path: Path) -> None:
    save_checkpoint("opt-projected", tmp_path)
    loaded = []
    stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(1, 5), progress=loaded.append)
    view = stack.view(Span(2, 4))
    assert loaded == [1, 2, 3, 4]
    assert (view.span, view.num_blocks, view.config.num_hidden_layers) == (Span(2, 4), 2, 2)
    assert (view.hidden_size, view.dtype, view.device) == (HIDDEN, torch.float32, torch.device("cpu"))
    assert stack.view(Span(2, 4)) is view and stack.view(stack.span) is stack
    assert all(p is q for p, q in zip(view.blocks.parameters(), stack.blocks[1:3].parameters(), strict=True))
    with pytest.raises(ValueError, match=r"blocks 0:2 are not all among the hosted blocks 1:5"):
        stack.view(Span(0, 2))
    with pytest.raises(ValueError, match="outside the model, which has 6 blocks"):
        load_blocks(ModelCheckpoint.open(tmp_path), Span(4, 8))


def test_blocks_are_frozen_and_ready_for_autograd(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with torch.inference_mode():
        stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(0, 2))
    assert not any(parameter.requires_grad or parameter.is_inference() for parameter in stack.blocks.parameters())
    assert not any(block.training for block in stack.blocks)
    hidden = torch.randn(1, 4, HIDDEN, requires_grad=True)
    stack(hidden).sum().backward()
    assert hidden.grad.abs().min() > 0


def test_transform_is_called_with_the_whole_models_index(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    changed = []

    def transform(part: nn.Module, index: int) -> None:
        if hasattr(part, "self_attn"):
            changed.append((index, part.self_attn.layer_idx))
            part.mlp = nn.Identity()
        else:
            assert isinstance(part.linear, nn.Linear)

    stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(3, 5), transform=transform)
    assert changed == [(3, 3), (4, 4)]
    assert all(isinstance(block.mlp, nn.Identity) for block in stack.blocks)
    assert [block.self_attn.layer_idx for block in stack.view(Span(4, 5)).blocks] == [0]


@pytest.mark.parametrize("name", ["gpt_bigcode", "nanochat", "falcon_h1"])
def test_weight_initialisation_does_not_meet_what_is_left_out(name: str, tmp_path: Path) -> None:
    """These families initialise weights of layers, or buffers of blocks, from outside: here some are not there."""
    save_checkpoint(name, tmp_path)
    stack = load_blocks(ModelCheckpoint.open(tmp_path), Span(1, 3), transform=lambda _part, _index: None)
    whole = load_whole(tmp_path)
    for index, block in zip(stack.span, stack.blocks, strict=True):
        assert_same_weights(stack.original(index), getattr(stack.family.owner_of(whole), stack.family.blocks)[index])
        assert not any(parameter.requires_grad for parameter in block.parameters())
