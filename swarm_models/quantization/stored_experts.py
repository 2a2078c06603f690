"""Places where fused experts are stored: one tensor for the matrices of all experts, or tensors for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from swarm_models.checkpoints.formats.packed import JoinedTensor
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.quantization.experts import ExpertLayout

_OF_ONE = re.compile(r"(?:^|\.)experts\.(\d+)\.(\w+)\.weight$")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")  # names in several families


def take_out_experts(block: torch.nn.Module, stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """Put tensors of the checkpoint in place of the block's fused matrices, and return these tensors.

    ``QuantizedExperts`` reads these tensors one expert at a time. Matrices that transformers builds from tensors in
    other ways stay parameters.
    """
    layouts = {name: ExpertLayout.of(part) for name, part in block.named_modules()}
    fused = {name: layout for name, layout in layouts.items() if layout is not None}
    taken: list[StoredTensor] = []
    for name, layout in fused.items():
        experts = block.get_submodule(name)
        first = (_GATE, _UP) if layout.up == "gate_up_proj" else (_UP,)
        for parameter, roles in ((layout.up, first), (layout.down, (_DOWN,))):
            shape = tuple(getattr(experts, parameter).shape)
            together = stored.get(f"{name}.{parameter}")
            if together is not None and together.shape == shape:
                taken.append(together)
                _replace(experts, parameter, together)
            elif together is None and len(fused) == 1 and not layout.transposed:
                taken += _replace_by_parts(experts, parameter, _parts_of_each(stored, roles, shape))
    return taken


def _replace(experts: torch.nn.Module, parameter: str, stored: StoredTensor | Sequence[StoredTensor]) -> None:
    delattr(experts, parameter)
    setattr(experts, parameter, stored)


def _replace_by_parts(
    experts: torch.nn.Module, parameter: str, parts: Sequence[Sequence[StoredTensor]]
) -> list[StoredTensor]:
    """Put the tensors of each expert in place of the fused matrix, if there are any; return these tensors."""
    if parts:
        _replace(experts, parameter, [JoinedTensor(each) if each[1:] else each[0] for each in parts])
    return [part for each in parts for part in each]


def _with_role(role: Sequence[str], stored: Mapping[str, StoredTensor]) -> Iterator[tuple[int, StoredTensor]]:
    """Yield the weights of single experts that have one of these names, each with its expert's number."""
    for name, tensor in stored.items():
        match = _OF_ONE.search(name)
        if match is not None and match[2] in role:
            yield int(match[1]), tensor


def _parts_of_each(
    stored: Mapping[str, StoredTensor], roles: Sequence[Sequence[str]], shape: tuple[int, ...]
) -> list[list[StoredTensor]]:
    """Return the tensors that form each expert's matrix, from top to bottom; empty unless all exist and fit."""
    parts: list[list[StoredTensor]] = [[] for _ in range(shape[0])]
    for role in roles:
        for expert, tensor in _with_role(role, stored):
            if expert < len(parts):
                parts[expert].append(tensor)
    rows, width = shape[1] // len(roles), shape[2]
    fit = all(len(each) == len(roles) and all(part.shape == (rows, width) for part in each) for each in parts)
    is_alike = len({part.dtype for each in parts for part in each}) == 1
    return parts if fit and is_alike else []
