"""The export of trained weights as files that stock ``transformers`` and ``peft`` load."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as weight_init
from transformers.core_model_loading import revert_weight_conversion

from swarm_models.checkpoints.formats.shards import INDEX
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_models.checkpoints.peft_files import WEIGHTS_NAME
from swarm_training.stages.compress.layers import NONE
from swarm_training.stages.engine.boundaries import is_of_boundary, save_boundaries
from swarm_training.stages.engine.lora import name_in_peft_file, peft_config

_METADATA = {"format": "pt"}


def export(
    parts: Iterable[Mapping[str, Tensor]],
    config: PreTrainedConfig,
    directory: Path,
    layers: str = NONE,
) -> None:
    """Write a checkpoint from ``Stage.state()`` of all stages, first to last: a file for each, and an index.

    ``layers``: the layers at the boundaries. They are no part of the stock model, and go into a file of their own, in
    fp32. Without them, the checkpoint is not what was trained (``install_boundaries``).

    Parts are taken one at a time, so that no more than one must be in memory. The directory has no index before all
    is written.

    Raises:
        ValueError: a tensor is missing, unknown, or differs between two stages.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).unlink(missing_ok=True)  # transformers loads nothing from shards without an index
    with hf_loader():
        model = _on_meta(config)
    aliases: dict[str, str] = model.all_tied_weights_keys  # names that are not stored, each with that of its tensor
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    expected, tied = set(model.state_dict()) - ignored - aliases.keys(), set(aliases.values())
    shared: dict[str, Tensor] = {}
    stored: list[set[str]] = []  # names in each file
    seen: set[str] = set()  # names in all files so far: a tied tensor is stored once
    total_bytes = 0
    between: dict[str, Tensor] = {}
    for number, whole in enumerate(parts):
        # Copies, because a part's tensors may change when the next part is asked for.
        between |= {name: whole[name].cpu().clone() for name in whole if layers != NONE and is_of_boundary(name)}
        part = {name: each for name, each in whole.items() if name not in between}
        _check_part(number, part, expected, seen, shared)
        shared |= {name: part[name].clone() for name in tied & part.keys() - seen}
        fresh = {name: _as_stored(part[name]) for name in part if name not in seen}
        seen |= part.keys()
        with hf_loader():
            converted = revert_weight_conversion(model, fresh)
        save_file({name: each.contiguous() for name, each in converted.items()}, _part(directory, number), _METADATA)
        stored.append(set(converted))
        total_bytes += sum(each.numel() * each.element_size() for each in converted.values())
    if missing := sorted(expected - seen):
        raise ValueError(f"no stage has tensor {missing[0]}: expected the states of all stages")
    if between:
        save_boundaries(between, layers, directory)
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    _write_index(directory, stored, total_bytes)


def export_adapter(parts: Iterable[Mapping[str, Tensor]], rank: int, directory: Path, base_model: str) -> None:
    """Write a PEFT adapter of this rank from ``Stage.state()`` of all stages. ``base_model``: the model that it adapts.
    Raise ValueError if there are no matrices."""
    tensors: dict[str, Tensor] = {}
    for part in parts:  # copies, as in ``export``
        tensors |= {name_in_peft_file(name): each.to("cpu", copy=True).contiguous() for name, each in part.items()}
    if not tensors:
        raise ValueError("the stages have no adapter: expected their states")
    directory.mkdir(parents=True, exist_ok=True)
    # PEFT's default for the family is written out, so that readers need not know it.
    targets = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    adapter = replace(peft_config(rank, base_model), target_modules=targets, inference_mode=True)
    adapter.save_pretrained(str(directory))
    save_file(tensors, directory / WEIGHTS_NAME, _METADATA)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    with weight_init.no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.config.update({"dtype": "float32", "architectures": [type(model).__name__]})
    return model


def _as_stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _check_part(
    number: int,
    part: Mapping[str, Tensor],
    expected: Collection[str],
    seen: Collection[str],
    shared: Mapping[str, Tensor],
) -> None:
    """Raise ValueError if the model lacks a tensor of the part, or an earlier part had another one of that name."""
    for name, tensor in part.items():
        if name not in expected:
            raise ValueError(f"stage {number} has a tensor {name}: the model has none of that name")
        if name in seen and (name not in shared or not torch.equal(shared[name], tensor)):
            raise ValueError(f"tensor {name} differs between stages: expected states of the same step")


def _write_index(directory: Path, stored: Sequence[Collection[str]], total_bytes: int) -> None:
    """Give all files their names, and write the index. ``stored``: the names of the tensors in each file."""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(stored):
        file = f"model-{number + 1:05}-of-{len(stored):05}.safetensors"
        _part(directory, number).replace(directory / file)
        weight_map |= dict.fromkeys(sorted(names), file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}.safetensors"
