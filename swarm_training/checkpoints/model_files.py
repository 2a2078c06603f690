"""The files of a checkpoint's model, which transformers and servers load, and the way back to the run's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from swarm_models.checkpoints.safetensors_file import StoredTensor, read_header
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import any_error_as, first_line
from swarm_protocol.untrusted.json_file import read_object, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHARD_SIZE = "5GB"
_DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.bfloat16, torch.float16)}
_Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ServableModel:
    """The model of a run in the form in which transformers writes it into a checkpoint."""

    model: PreTrainedModel  # the model whose class, config and generation config are written
    tokenizer: PreTrainedTokenizerBase | None = None  # the tokenizer whose files are written too; None: there is none
    # The moving average of the weights, under the names of ``model.state_dict()``; None: there is none.
    averaged: Mapping[str, torch.Tensor] | None = None


def is_servable(model: object) -> TypeGuard[PreTrainedModel]:
    """Return whether transformers can write all weights of this model. If it has adapters, only these are written."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return False
    return not getattr(model, "_hf_peft_config_loaded", False)


def place_of(tensor: torch.Tensor) -> _Place:
    """Return the place of a tensor in memory. Tied weights have the same place."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def write_model(directory: Path, servable: ServableModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a model with these tensors, which have the names of ``model.state_dict()``. Return JSON for ``read_model``.

    transformers writes the tensors of some families under other names, and some tensors in parts. Then only
    transformers itself can read them back, which needs a class of its own and one dtype.

    Raises:
        ValueError: transformers has written another form, and cannot read it back.
    """
    import transformers

    from swarm_models.checkpoints.hollow_model import hf_loader

    kind = type(servable.model)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    has_way_back = len(dtypes) == 1 and dtypes <= set(_DTYPES.values())
    has_way_back = has_way_back and getattr(transformers, kind.__name__, None) is kind
    with hf_loader():
        servable.model.save_pretrained(
            directory, state_dict=dict(tensors), max_shard_size=_SHARD_SIZE, save_original_format=has_way_back
        )
    if servable.tokenizer is not None:
        servable.tokenizer.save_pretrained(directory)
    stored = _stored(directory, [path.name for path in directory.iterdir()])
    if (aliases := _aliases(tensors, stored)) is not None:
        return {"aliases": aliases}
    if not has_way_back:
        raise ValueError(f"transformers writes {kind.__name__} in another form: expected a class that it has itself")
    return {"dtype": str(dtypes.pop()).removeprefix("torch.")}


def read_model(directory: Path, files: Collection[str], how: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that ``write_model`` has written. ``files``: the names of its files; ``how``: the
    JSON from ``write_model``. Raise CheckpointError if a file is missing or damaged, or ``how`` is wrong."""
    aliases = how.get("aliases") if isinstance(how, dict) else None
    if aliases is None:
        return _loaded(directory, how)
    tensors = {name: stored.read() for name, stored in _stored(directory, files).items()}
    if not isinstance(aliases, dict) or not all(isinstance(name, str) and name in tensors for name in aliases.values()):
        raise CheckpointError(f"{directory} lacks a tensor that {shown(aliases)} stands for")
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _stored(directory: Path, files: Collection[str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name in sorted(files):
        if name.endswith(".safetensors"):
            found |= read_header(directory / name)
    return found


def _aliases(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> dict[str, str] | None:
    """Return the tied tensors that are not stored under their own names, each with the name under which it is stored.
    Return None if the files have other tensors than the model."""
    for name, each in stored.items():
        if name not in tensors or (each.shape, each.dtype) != (tuple(tensors[name].shape), tensors[name].dtype):
            return None
    by_place = {place_of(tensors[name]): name for name in stored}
    missing = {name: by_place.get(place_of(tensor)) for name, tensor in tensors.items() if name not in stored}
    found = {alias: name for alias, name in missing.items() if name is not None}
    return found if len(found) == len(missing) else None


def _loaded(directory: Path, how: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that only transformers can put together from its files."""
    import transformers

    from swarm_models.checkpoints.hollow_model import hf_loader

    path = directory / "config.json"
    names = read_object(path).get("architectures")
    kind = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    dtype = _DTYPES.get(str(how.get("dtype"))) if isinstance(how, dict) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)) or dtype is None:
        raise CheckpointError(f"{path} has architectures={shown(names)}: expected a model of transformers")

    def refusal(error: Exception) -> CheckpointError:
        return CheckpointError(f"{directory} cannot be loaded by transformers: {first_line(error)}")

    with any_error_as(refusal), hf_loader():
        return dict(kind.from_pretrained(directory, dtype=dtype).state_dict())
