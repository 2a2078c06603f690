"""Loading of one block through transformers' own loader, so that the loader's renames, fusions and dtypes apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import WEIGHT_IS_READ
from swarm_models.checkpoints.hollow_model import LeftOut, load_hollow_model
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.quantization.experts import deciding_parts
from swarm_models.quantization.stored_experts import take_out_experts
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import any_error_as
from swarm_server.blocks.packed_layers import PackedLayers

NARROW = {torch.bfloat16, torch.float16}


def load_block(
    checkpoint: ModelCheckpoint,
    index: int,
    dtype: torch.dtype,
    replace: Callable[[nn.Linear], nn.Module] | None = None,
    layers: PackedLayers | None = None,
) -> nn.Module:
    """Return block ``index`` on the CPU, as transformers itself would load it within the whole model.

    ``replace`` gets linear layers one by one as they are read, and returns their replacements. The layers are therefore
    never all in memory. Layers whose weights transformers renames or fuses do not go to ``replace``, nor do layers that
    ``layers`` makes. If ``layers`` takes experts, the block's experts stay where they are stored.

    Raises:
        CheckpointError: a tensor is missing, damaged or of the wrong shape.
    """
    family = checkpoint.family
    tensors = checkpoint.block_tensors(index)
    stored = {family.name_in_block(name): tensor for name, tensor in tensors.items()}
    late: dict[str, nn.Linear] = {}

    def prepare(block: nn.Module) -> None:
        if replace is not None and not _keeps_own_dtypes(family.base_class, dtype):
            late.update(_take_out_linears(block, stored))
            experts = take_out_experts(block, stored) if layers is not None and layers.takes_experts else []
            for name, linear in late.items():
                experts += _tensors_of(name, linear, stored).values()
            _leave_out(tensors, experts)
        if dtype == torch.float32:
            _keep_as_stored(block, {name: tensor.dtype for name, tensor in stored.items()})

    everything = dict(tensors)
    with any_error_as(partial(_explained, checkpoint, everything)):
        hollow, info = load_hollow_model(
            family, checkpoint.config, hosted=(index,), tensors=tensors, dtype=dtype, prepare=prepare
        )
    checkpoint.require_fit(info)
    block = getattr(family.owner_of(hollow), family.blocks)[index]
    if dtype == torch.float32:
        _widen(block)
    if late:
        assert replace is not None  # nothing is late without it
        _put_back(late, block, stored, lambda linear, kinds: replace(_filled(linear, kinds, dtype)), layers)
    return block


def _leave_out(tensors: dict[str, StoredTensor], taken: Collection[StoredTensor]) -> None:
    names = {tensor.name for tensor in taken}
    for name in [name for name, tensor in tensors.items() if tensor.name in names]:
        del tensors[name]


def _put_back(
    late: dict[str, nn.Linear],
    block: nn.Module,
    stored: Mapping[str, StoredTensor],
    read: Callable[[nn.Linear, Mapping[str, StoredTensor]], nn.Module],
    layers: PackedLayers | None,
) -> None:
    """Give the block the linear layers that were taken out of it, one by one, as ``layers`` or ``read`` makes them."""
    for name in sorted(late, key=lambda name: _room(stored[f"{name}.weight"]), reverse=True):
        linear = late.pop(name)
        kinds = _tensors_of(name, linear, stored)
        layer = None if layers is None else layers.linear(kinds)
        block.set_submodule(name, read(linear, kinds) if layer is None else layer)


def _filled(linear: nn.Linear, kinds: Mapping[str, StoredTensor], dtype: torch.dtype) -> nn.Linear:
    """Read the layer's tensors into it, and return it."""
    for kind, tensor in kinds.items():
        setattr(linear, kind, nn.Parameter(tensor.read().to(dtype), requires_grad=False))
    return linear


def _room(stored: StoredTensor) -> tuple[bool, int]:
    """Return a sort key by the memory that reading takes: large tensors are read first, beside few packed ones."""
    return not stored.has_tiles, stored.size_bytes


def _keeps_own_dtypes(base_class: type, dtype: torch.dtype) -> bool:
    """Return whether transformers loads some weights in another dtype than ``dtype``."""
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return dtype != torch.float32 and any(getattr(base_class, name, None) for name in kept)


def _tensors_of(name: str, linear: nn.Linear, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensors of the layer's own parameters; old quantisers also store a bias of zeros."""
    kinds = [kind for kind, _ in linear.named_parameters()]
    return {kind: stored[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in stored}


def _take_out_linears(block: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, nn.Linear]:
    """Replace linear layers that are stored under their own names by placeholders; return the layers by name."""
    linears: dict[str, nn.Linear] = {}
    deciding = deciding_parts(block)  # layers that make choices are never quantised
    for name, part in list(block.named_modules()):
        if type(part) is nn.Linear and part not in deciding and name.rpartition(".")[2] not in WEIGHT_IS_READ:
            shapes = {kind: tuple(parameter.shape) for kind, parameter in part.named_parameters()}
            if shapes == {kind: tensor.shape for kind, tensor in _tensors_of(name, part, stored).items()}:
                linears[name] = part
                block.set_submodule(name, LeftOut())
    return linears


def _keep_as_stored(block: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
    """Make the loader leave narrow weights narrow; they are widened one at a time afterwards.

    The loader fuses a block's experts through copies of all experts, which would otherwise be wide copies.
    """
    parameters = dict(block.named_parameters())
    fused = {dtype for name, dtype in stored.items() if name not in parameters}
    for name, parameter in parameters.items():
        dtypes = {stored[name]} if name in stored else fused
        if len(dtypes) == 1 and dtypes <= NARROW and parameter.is_floating_point():
            parameter.data = parameter.data.to(next(iter(dtypes)))


def _widen(block: nn.Module) -> None:
    for parameter in block.parameters():
        if parameter.dtype in NARROW:
            parameter.data = parameter.data.float()


def _explained(checkpoint: ModelCheckpoint, tensors: Mapping[str, StoredTensor], error: Exception) -> Exception:
    """Return an error that names the tensors that transformers could not fuse, which it only logs, or ``error``."""
    problem = _odd_one_out(tensors) if isinstance(error, RuntimeError) else None
    return error if problem is None else CheckpointError(f"{checkpoint.location} {problem}")


def _odd_one_out(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return what is wrong with a block's numbered tensors (of experts), which must be alike and complete, or None."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(re.sub(r"\.\d+\.(?!.*\.\d+\.)", ".*.", name), {})[name] = tensor
    most = max(map(len, groups.values()))
    for pattern, group in groups.items():
        shapes = [tensor.shape for tensor in group.values()]
        usual = max(set(shapes), key=shapes.count)
        for name, tensor in group.items():
            if tensor.shape != usual:
                return f"holds tensor {name} with shape {list(tensor.shape)}, but others like it have {list(usual)}"
        expected = [pattern.replace("*", str(number)) for number in range(most)]
        if 1 < len(group) < most:
            return f"lacks tensor {next(name for name in expected if name not in group)}"
    return None
