"""A progress bar for reading the client's own part of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swarm_models.checkpoints.safetensors_file import FileTensor, StoredTensor
from swarm_protocol.process.logs import progress_bar

_DELAY_S = 0.5  # a shorter read needs no bar


@contextmanager
def reading_shown(tensors: Mapping[str, StoredTensor]) -> Iterator[dict[str, StoredTensor]]:
    """Yield the same tensors, and show on stderr how much of them has been read."""
    total = sum(tensor.size_bytes for tensor in tensors.values())
    with progress_bar(total, "loading embeddings and head", unit="B", unit_scale=True, delay=_DELAY_S) as bar:
        yield {name: _Counted(tensor, bar) for name, tensor in tensors.items()}


class _Counted(StoredTensor):
    def __init__(self, tensor: StoredTensor, bar: Any) -> None:
        self.name, self.dtype, self.shape = tensor.name, tensor.dtype, tensor.shape
        self._tensor, self._bar = tensor, bar

    @property
    def pieces(self) -> tuple[FileTensor, ...]:
        return self._tensor.pieces

    def read(self) -> torch.Tensor:
        tensor = self._tensor.read()
        self._bar.update(self.size_bytes)
        return tensor
