"""The directory of a rounded checkpoint: a safetensors file for each block, written as soon as the block is rounded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swarm_models.checkpoints import safetensors_bytes
from swarm_models.checkpoints.checkpoint import GENERATION_CONFIG, ModelCheckpoint
from swarm_models.checkpoints.formats.compressed_tensors import mixed_config
from swarm_models.checkpoints.safetensors_file import StoredTensor

_WEIGHT = ".weight"
_HEAD = "lm_head"  # not stored if it is tied to the embeddings


class WrittenCheckpoint:
    """A checkpoint that is being written into a directory that exists."""

    def __init__(self, source: ModelCheckpoint, directory: Path) -> None:
        self._source, self._directory = source, directory
        self._files: list[dict[str, int]] = []  # the bytes of each tensor, by name
        self._eight_bits: list[str] = []
        self._four_bits: list[str] = []

    def add_stored(self, stored: Mapping[str, StoredTensor]) -> None:
        """Write tensors that are not rounded, each in a file of its own, so that only one is in memory."""
        for name, tensor in stored.items():
            self._write({name: _unrounded(tensor)})

    def add_block(self, stored: Mapping[str, StoredTensor], rounded: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write a block's tensors, those of ``rounded`` in place of the weights with these names."""
        tensors = {name: _unrounded(tensor) for name, tensor in stored.items() if name not in rounded}
        for name, parts in rounded.items():
            layer = name.removesuffix(_WEIGHT)
            tensors |= {layer + end: part for end, part in parts.items()}
            (self._eight_bits if _WEIGHT in parts else self._four_bits).append(layer)
        self._write(tensors)

    def finish(self) -> None:
        """Name the files by their number, and write the index and the configs."""
        weight_map: dict[str, str] = {}
        for number, sizes in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._part(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(sizes, file)
        total = sum(sum(sizes.values()) for sizes in self._files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self._write_json("model.safetensors.index.json", index)
        if (generation := self._source.generation_config) is not None:
            # Not by ``save_pretrained``, which refuses the inconsistent ones that are published.
            self._write_json(GENERATION_CONFIG, json.loads(generation.to_json_string()))
        config: dict[str, Any] = json.loads(self._source.whole_config.to_json_string(use_diff=False))
        config.pop("quantization_config", None)  # that of the source
        if self._four_bits or self._eight_bits:
            config["quantization_config"] = self._quantization_config()
        self._write_json("config.json", config)

    def _quantization_config(self) -> dict[str, Any]:
        weights = {name.removesuffix(_WEIGHT) for sizes in self._files for name in sizes if name.endswith(_WEIGHT)}
        left = (weights | {_HEAD}) - {*self._four_bits, *self._eight_bits}
        return mixed_config(self._four_bits, self._eight_bits, sorted(left))

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._part(len(self._files)).open("wb") as file:
            safetensors_bytes.write(file, tensors, {"format": "pt"})
        self._files.append({name: tensor.nbytes for name, tensor in tensors.items()})

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}"

    def _write_json(self, name: str, content: object) -> None:
        (self._directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _unrounded(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor in the dtype in which it is stored, or in bfloat16 if it is packed in fewer bytes than it has."""
    tensor = stored.read()
    is_packed = sum(piece.size_bytes for piece in stored.pieces) < stored.size_bytes
    return tensor.bfloat16() if is_packed else tensor
