"""The layers at the boundaries of stages: in a stage's model, and in a stock model whose checkpoint has none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import Family
from swarm_training.stages.compress.layers import boundary
from swarm_training.stages.engine.settings import BoundarySettings, seed_of
from swarm_training.stages.engine.skeleton import Layout, base_of

FILE_NAME = "boundary_layers.safetensors"
_CHILD, _UP, _DOWN = "boundary", "up", "down"


def add_boundaries(model: PreTrainedModel, settings: BoundarySettings, layout: Layout) -> None:
    """Add ``up`` where hidden states arrive and ``down`` where they leave, as ``boundary.BLOCK.up`` and
    ``boundary.BLOCK.down`` of the model. BLOCK is the first block after the boundary. The seed and BLOCK decide the
    numbers that the layers begin with.

    Raises ValueError if the hidden size cannot be divided.
    """
    family, span = layout.family, layout.span
    found: dict[str, nn.Module] = {}
    if not layout.is_first:
        found[str(span.start)] = nn.ModuleDict({_UP: _made(settings, family, span.start)[1]})
    if not layout.is_last:
        found[str(span.end)] = nn.ModuleDict({_DOWN: _made(settings, family, span.end)[0]})
    model.add_module(_CHILD, nn.ModuleDict(found))


def up_of(model: nn.Module, block: int) -> nn.Module:
    """Return the module that hidden states go through before this block; the identity if there is none."""
    return _half(model, block, _UP)


def down_of(model: nn.Module, block: int) -> nn.Module:
    """Return the module that hidden states go through when they leave the stage that ends before this block; the
    identity if there is none."""
    return _half(model, block, _DOWN)


def is_of_boundary(name: str) -> bool:
    """Return whether a stage's tensor belongs to a boundary, and not to the stock model."""
    return name.startswith(f"{_CHILD}.")


def save_boundaries(tensors: Mapping[str, Tensor], layers: str, directory: Path) -> None:
    """Write the layers beside a checkpoint that was exported without them."""
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / FILE_NAME, {"layers": layers})


def install_boundaries(model: PreTrainedModel, directory: Path) -> None:
    """Make a stock model compute what the stages did, with the layers that are beside its checkpoint.

    Raises ValueError if there are none, or they belong to another model.
    """
    try:
        with safe_open(directory / FILE_NAME, framework="pt") as file:
            layers = (file.metadata() or {}).get("layers", "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory} has no layers of boundaries that can be read: {error}") from None
    family = describe(model.config)
    halves: dict[str, nn.Module] = {}
    for block in range(1, family.num_blocks):
        if any(name.startswith(f"{_CHILD}.{block}.") for name in tensors):
            down, up = boundary(layers, family.hidden_size)
            halves[str(block)] = nn.ModuleDict({_DOWN: down, _UP: up})
    try:
        nn.ModuleDict({_CHILD: nn.ModuleDict(halves)}).load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the layers in {directory} are of another model: {error}") from None
    blocks: Any = getattr(family.owner_of(base_of(model, family)), family.blocks)
    for number, half in halves.items():
        blocks[int(number) - 1].register_forward_hook(partial(_pass, half.to(model.device, model.dtype)))


def _pass(half: Any, _block: nn.Module, _inputs: object, output: Any) -> Any:
    """Return a block's output, with its hidden states as they arrive on the other side of the boundary."""
    if isinstance(output, tuple):
        return half[_UP](half[_DOWN](output[0])), *output[1:]
    return half[_UP](half[_DOWN](output))


def _made(settings: BoundarySettings, family: Family, block: int) -> tuple[nn.Module, nn.Module]:
    return boundary(settings.layers, family.hidden_size, seed_of(settings.seed, f"{_CHILD}.{block}"))


def _half(model: nn.Module, block: int, which: str) -> nn.Module:
    try:
        return model.get_submodule(f"{_CHILD}.{block}.{which}")
    except AttributeError:
        return nn.Identity()
