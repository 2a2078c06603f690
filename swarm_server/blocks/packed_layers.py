"""Linear layers that are packed tile by tile as they are read, or read packed if an earlier start kept them on disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from swarm_protocol.checkpoints.safetensors_file import StoredTensor
from swarm_server.blocks.quantization import packed_kind, packed_weight, quantized_linear, restored
from swarm_server.blocks.quantization.report import Report
from swarm_server.blocks.weight_cache import WeightCache, content_key

IN_TILES = ("int8", "int4")  # whose rows are rounded by themselves


class PackedLayers:
    """Of blocks that are loaded with one quantisation.

    Attributes:
        report: of the layers that were made.
        takes_experts: whether ``quantize_`` makes layers of the experts, too.
    """

    def __init__(self, cache: WeightCache, method: str, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the weights before they are quantised."""
        self.report = Report(method)
        self.takes_experts = method != "none"
        self._cache = cache
        self._method, self._device, self._dtype = method, device, dtype
        self._kind = packed_kind(method, device)

    def linear(self, tensors: Mapping[str, StoredTensor]) -> nn.Module | None:
        """The layer of this weight and bias; None if the weight cannot be quantised by rows."""
        if self._method not in IN_TILES:
            return None
        stored = tensors["weight"]
        bias = tensors["bias"].read().to(self._dtype) if "bias" in tensors else None
        key = self._key(stored)
        weight = None if self._kind is None else self._cache.read(key, self._kind, stored.shape)
        if weight is not None:
            layer, report = restored(self._method, weight, bias)
        else:
            layer, report = quantized_linear(self._method, self._device, self._dtype, stored, bias)
            weight = packed_weight(layer)
            if weight is not None and key == self._key(stored):  # it has not been changed while it was read
                self._cache.write(key, weight)
        self.report += report
        return layer

    def _key(self, stored: StoredTensor) -> str:
        packing = "" if self._kind is None else self._kind.FORMAT
        return content_key(stored, f"{packing} from {self._dtype}")
