"""Linear layers that are packed tile by tile as they are read, or read packed from the disk cache of earlier starts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.kernels.int8_linear import Int8Weight
from swarm_models.quantization import Packed, packed_kind, packed_weight, quantized_linear, restored
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_models.quantization.report import Report
from swarm_models.quantization.stored import stored_int4
from swarm_models.quants import BY_ROWS
from swarm_server.blocks.weight_cache import WeightCache, content_key


class PackedLayers:
    """A source of layers for blocks that are loaded with one quantisation.

    Attributes:
        takes_experts: whether ``quantize_`` makes layers of the experts, too, as ``take_out_experts`` leaves them.
    """

    def __init__(
        self,
        cache: WeightCache,
        method: str,
        device: torch.device,
        dtype: torch.dtype,
        family: Family | None = None,
        int8_weight: type[Int8Weight] | None = None,
    ) -> None:
        """Make layers for one device.

        Args:
            dtype: the dtype of the weights before they are quantised.
            family: the model's family, which says which layers int4 holds in 8 bits; None if all layers use ``method``.
            int8_weight: the implementation of int8 on the CPU, as for ``quantize_``.
        """
        self.report = Report(method)
        self.takes_experts = method != "none"
        self._cache = cache
        self._method, self._device, self._dtype = method, device, dtype
        self._family, self._int8_weight = family, int8_weight
        self._eight_bits = eight_bit_layers(family) if family is not None and method == "int4" else ()

    def eight_bits(self, index: int) -> frozenset[str]:
        """Return the names of the layers in block ``index`` that ``quantize_`` holds in 8 bits."""
        return self._eight_bits[index] if self._eight_bits else frozenset()

    def linear(self, tensors: Mapping[str, StoredTensor]) -> nn.Module | None:
        """Return the layer of this weight and bias; None if the weight cannot be quantised by rows."""
        if self._method not in BY_ROWS:
            return None
        stored = tensors["weight"]
        bias = tensors["bias"].read().to(self._dtype) if "bias" in tensors else None
        eight_bits = self._is_eight_bits(stored)
        kind = packed_kind(self._method, self._device, eight_bits, self._int8_weight)
        key = self._key(stored, kind)
        weight = None if kind is None else self._cache.read(key, kind, stored.shape)
        if weight is not None:
            layer, report = restored(self._method, weight, bias)
        else:
            how = self._method, self._device, self._dtype
            layer, report = quantized_linear(*how, stored, bias, eight_bits, self._int8_weight)
            weight = packed_weight(layer)
            if weight is not None and key == self._key(stored, kind):  # unchanged while it was read
                self._cache.write(key, weight)
        self.report += report
        return layer

    def _is_eight_bits(self, stored: StoredTensor) -> bool:
        """Return whether int4 holds this weight in 8 bits. Weights that are stored as usable 4-bit integers stay so."""
        if self._family is None:
            return False
        index = self._family.block_index(stored.name)
        name = self._family.name_in_block(stored.name).removesuffix(".weight")
        return index is not None and name in self.eight_bits(index) and stored_int4(stored) is None

    def _key(self, stored: StoredTensor, kind: type[Packed] | None) -> str:
        packing = "" if kind is None else kind.FORMAT
        return content_key(stored, f"{packing} from {self._dtype}")
