"""Linear layers whose packed weights are on disk since an earlier start: they are read as they are computed with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from swarm_protocol.checkpoints.safetensors_file import StoredTensor
from swarm_server.blocks.quantization import packed_kind, packed_weight, restored
from swarm_server.blocks.quantization.report import Report
from swarm_server.blocks.weight_cache import WeightCache, content_key


class PackedLayers:
    """Of blocks that are loaded with one quantisation.

    Attributes:
        report: of the layers that were restored.
    """

    def __init__(self, cache: WeightCache, method: str, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the weights before they are quantised."""
        self.report = Report(method)
        self._cache = cache
        self._method = method
        self._kind = packed_kind(method, device)
        self._dtype = dtype
        self._missed: dict[StoredTensor, str] = {}  # keys from before the tensors were read

    def restore(self, tensors: Mapping[str, StoredTensor]) -> nn.Module | None:
        """The layer of this weight and bias; None if its weight has to be read and packed."""
        if self._kind is None:
            return None
        stored = tensors["weight"]
        key = self._key(stored)
        weight = self._cache.read(key, self._kind, stored.shape)
        if weight is None:
            self._missed[stored] = key
            return None
        bias = tensors["bias"].read().to(self._dtype) if "bias" in tensors else None
        layer, report = restored(self._method, weight, bias)
        self.report += report
        return layer

    def keep(self, layer: nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
        """Writes its weight, unless the tensor it is from has been changed while it was read."""
        stored = tensors["weight"]
        weight = packed_weight(layer)
        key = self._missed.pop(stored, None)
        if weight is not None and key is not None and key == self._key(stored):
            self._cache.write(key, weight)

    def _key(self, stored: StoredTensor) -> str:
        assert self._kind is not None
        return content_key(stored, f"{self._kind.FORMAT} from {self._dtype}")
