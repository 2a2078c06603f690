"""The state of an optimizer or scheduler as flat named tensors and JSON, from which it is restored bit for bit.

``torch.save`` would be simpler, but its files can run code when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swarm_protocol.errors import CheckpointError

# JSON's own values and lists stand for themselves. Everything else is an object with one of these as its only key.
_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"


@dataclass(frozen=True)
class FlatState:
    """A state in two parts, tensors and JSON."""

    tensors: Mapping[str, torch.Tensor]  # the tensors by their paths in the state, such as ``state/0/exp_avg``
    structure: Any  # JSON, in which ``{"tensor": path}`` stands for a tensor


def flatten(state: Any) -> FlatState:
    """Flatten nested dicts (keys: str or int), lists, tuples, tensors, numbers, strings, bools and None. Raise
    ValueError, which names the path, if the state contains something else."""
    tensors: dict[str, torch.Tensor] = {}
    return FlatState(tensors, _flat(state, "", tensors))


def unflatten(flat: FlatState) -> Any:
    """Return the state that was given to ``flatten``. Raise CheckpointError if ``flat`` does not come from there."""
    return _nested(flat.structure, flat.tensors)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state with its dtypes. ``load_state_dict`` of torch alone would change all tensors except ``step`` to the
    parameter's dtype. Raise ValueError if the state is of other parameters, or of another kind of optimizer."""
    needed = [set(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    if any(not keys <= set(group) for keys, group in zip(needed, optimizer.param_groups, strict=True)):
        raise ValueError("the state is that of another kind of optimizer")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        if index in state["state"]:
            optimizer.state[parameter] = _with_dtypes_of(state["state"][index], optimizer.state[parameter])


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Return the saved values with their own dtypes, on the devices of the loaded values."""
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict):
        return {key: _with_dtypes_of(value, loaded[key]) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_with_dtypes_of(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


def _flat(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, dict):
        if not all(type(key) in (str, int) for key in value):
            raise ValueError(f"the state has a key at {path!r} that is no string or whole number")
        # Pairs, because keys of JSON objects are always strings, and those of optimizers are often numbers.
        return {_DICT: [[key, _flat(each, f"{path}/{key}".lstrip("/"), tensors)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        items = [_flat(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"the state has a {type(value).__name__} at {path!r}: expected tensors, numbers, text, lists, tuples or dicts"
    )


def _nested(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(structure, list):
        return [_nested(each, tensors) for each in structure]
    if not isinstance(structure, dict):
        return structure
    match structure:
        case {"tensor": str() as path} if len(structure) == 1 and path in tensors:
            return tensors[path]
        case {"tuple": list() as items} if len(structure) == 1:
            return tuple(_nested(each, tensors) for each in items)
        case {"dict": list() as items} if len(structure) == 1 and all(_is_item(item) for item in items):
            return {key: _nested(each, tensors) for key, each in items}
    raise CheckpointError(f"the state of the optimizer is damaged: {str(structure)[:60]!r} is no value of it")


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)
