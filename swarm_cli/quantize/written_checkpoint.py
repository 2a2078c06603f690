"""The directory of a rounded checkpoint: a safetensors file for each block, written as soon as the block is rounded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swarm_models.checkpoints import safetensors_bytes
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.formats.compressed_tensors import mixed_config
from swarm_models.checkpoints.safetensors_file import StoredTensor

_WEIGHT = ".weight"


class WrittenCheckpoint:
    """A checkpoint that is being written. Without its config, which comes last, nobody takes it for whole."""

    def __init__(self, source: ModelCheckpoint, directory: Path) -> None:
        """Create the directory; raise OSError if it cannot be created or exists."""
        directory.mkdir(parents=True)
        self._source, self._directory = source, directory
        self._files: list[dict[str, int]] = []  # the bytes of each tensor, by name
        self._eight_bits: list[str] = []
        self._rounded: set[str] = set()

    def add_stored(self, stored: Mapping[str, StoredTensor]) -> None:
        """Write tensors as they are, in a file of their own."""
        self._write({name: tensor.read() for name, tensor in stored.items()})

    def add_block(self, stored: Mapping[str, StoredTensor], rounded: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write a block's tensors, those of ``rounded`` in place of the weights with these names."""
        tensors = {name: tensor.read() for name, tensor in stored.items() if name not in rounded}
        for name, parts in rounded.items():
            layer = name.removesuffix(_WEIGHT)
            tensors |= {layer + end: part for end, part in parts.items()}
            self._rounded.add(layer)
            if _WEIGHT in parts:
                self._eight_bits.append(layer)
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
        if self._source.generation_config is not None:
            self._source.generation_config.save_pretrained(self._directory)
        config: dict[str, Any] = json.loads(self._source.whole_config.to_json_string(use_diff=False))
        self._write_json("config.json", {**config, "quantization_config": self._quantization_config()})

    def _quantization_config(self) -> dict[str, Any]:
        left = sorted(
            {name.removesuffix(_WEIGHT) for sizes in self._files for name in sizes if name.endswith(_WEIGHT)}
            - self._rounded
        )
        return mixed_config(sorted(self._eight_bits), left)

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._part(len(self._files)).open("wb") as file:
            safetensors_bytes.write(file, tensors, {"format": "pt"})
        self._files.append({name: tensor.nbytes for name, tensor in tensors.items()})

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}"

    def _write_json(self, name: str, content: object) -> None:
        (self._directory / name).write_text(json.dumps(content, indent=2) + "\n")
