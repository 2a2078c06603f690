"""Linear layers whose output rows are on several devices of one machine, which multiply at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch

from swarm_models.kernels.kernel_weight import STRIP
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import TRANSPOSED, GpuInt8Weight, linear_names


class SplitLinear(torch.nn.Module):
    """A frozen linear layer of which each device holds some of the output rows.

    Inputs and outputs are on the first device. Each number of a product is computed whole by one device. No call waits
    for a GPU, so all GPUs multiply at the same time. Torch itself makes a copy between two GPUs wait for the work of
    both. Gradients with respect to the input are the sum of what the parts give.

    Attributes:
        parts: the layers of the rows, in their order; each is on the device of the same number.
    """

    def __init__(self, layer: Any, devices: Sequence[torch.device], dtype: torch.dtype) -> None:
        """Take the layer apart. ``layer`` is on the first device, has rows for all, and computes in ``dtype``."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.devices = tuple(devices)
        rows = split_rows(layer.out_features, len(devices))
        self.parts = torch.nn.ModuleList(
            _part(layer, slice(*bounds), device, dtype)
            for bounds, device in zip(itertools.pairwise(rows), devices, strict=True)
        )

    @property
    def weight(self) -> torch.Tensor:
        """Return the weight, [out, in], put together at each access: for model code that reads it."""
        parts: Iterable[Any] = self.parts
        return torch.cat([part.weight.to(self.devices[0]) for part in parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.parts
        # The other devices get their work first, because they can begin before the first one has its own.
        theirs = [part(x.to(device)) for part, device in zip(others, self.devices[1:], strict=True)]
        return torch.cat([first(x), *(y.to(x.device) for y in theirs)], -1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Leave the parts where they are when the block around them is moved to the first device."""
        return self


def split_rows(num_rows: int, members: int) -> list[int]:
    """Return the first row of each member, and the number of rows: whole strips, as many for each as possible."""
    strips = -(-num_rows // STRIP)
    return [min(num_rows, strips * member // members * STRIP) for member in range(members + 1)]


def split_linears_(module: torch.nn.Module, devices: Sequence[torch.device], dtype: torch.dtype) -> None:
    """Replace linear layers that are on the first device by layers over all ``devices``, which may be repeated.

    Layers with fewer than ``STRIP`` rows for each device stay, as do layers in formats that cannot be split by rows.
    """
    _split_children(module, {module.get_submodule(name) for name in linear_names(module)}, devices, dtype)


def _split_children(
    module: torch.nn.Module, plain: set[torch.nn.Module], devices: Sequence[torch.device], dtype: torch.dtype
) -> None:
    child: Any
    for name, child in module.named_children():
        if isinstance(child, SplitLinear):
            continue
        if _has_rows(child, plain) and child.out_features >= STRIP * len(devices):
            module.set_submodule(name, SplitLinear(child, devices, dtype))
        else:
            _split_children(child, plain, devices, dtype)


def _has_rows(layer: Any, plain: set[torch.nn.Module]) -> bool:
    if isinstance(layer, QuantizedLinear):
        return isinstance(layer.quantized, GpuInt8Weight)
    return layer in plain and not TRANSPOSED[type(layer).__name__]


def _part(layer: Any, rows: slice, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a layer of some rows, copied to a device."""
    if isinstance(layer, QuantizedLinear):
        weight: Any = layer.quantized  # see ``_has_rows``
        bias = None if layer.bias is None else layer.bias[rows]
        return QuantizedLinear(weight.part(rows, device, dtype), bias).to(device)
    part = type(layer)(layer.in_features, rows.stop - rows.start, layer.bias is not None, device="meta")
    parameters = {name: whole[rows].to(device, copy=True) for name, whole in layer.named_parameters()}
    part.load_state_dict(parameters, assign=True)
    return part.requires_grad_(False)
