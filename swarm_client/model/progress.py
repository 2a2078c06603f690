"""A bar while the client's own part of a model is read."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from swarm_protocol.checkpoints.safetensors_file import StoredTensor
from swarm_protocol.process.logs import shows_progress

_DELAY_S = 0.5  # what is read sooner needs no bar


@contextmanager
def reading_shown(tensors: Mapping[str, StoredTensor]) -> Iterator[dict[str, StoredTensor]]:
    """The same tensors; how much of them has been read is shown to who looks at stderr."""
    with tqdm(
        total=sum(tensor.size_bytes for tensor in tensors.values()),
        desc="loading embeddings and head",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        delay=_DELAY_S,
        disable=not shows_progress(),
    ) as bar:
        yield {name: _counted(tensor, bar) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _Counted(StoredTensor):
    bar: Any

    def read(self) -> torch.Tensor:
        tensor = super().read()
        self.bar.update(self.size_bytes)
        return tensor


def _counted(tensor: StoredTensor, bar: Any) -> StoredTensor:
    return _Counted(**{field.name: getattr(tensor, field.name) for field in dataclasses.fields(tensor)}, bar=bar)
