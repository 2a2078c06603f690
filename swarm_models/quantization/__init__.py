"""Quantisation of transformer blocks in place: int8, int4, fp8 or nf4, fused experts and transposed layers included."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.family import WEIGHT_IS_READ
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.gpu.devices import ACCELERATORS
from swarm_models.gpu.fp8_weight import Fp8Weight, has_fp8_products, quantize_fp8
from swarm_models.gpu.int8_weight import GpuInt8Weight, few_rows_kernel
from swarm_models.kernels import int4_linear, int8_linear
from swarm_models.kernels.int4_linear import Int4Weight, KernelInt4Weight, quantize_groups
from swarm_models.kernels.int8_linear import Int8Weight, quantize_rows
from swarm_models.kernels.kernel_weight import STRIP, KernelWeight
from swarm_models.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, joined
from swarm_models.quantization import bnb
from swarm_models.quantization.experts import ExpertLayout, QuantizedExperts, deciding_parts
from swarm_models.quantization.report import Left, Report
from swarm_models.quantization.stored import stored_fp8, stored_int4, stored_int8
from swarm_models.quants import BY_ROWS, METHODS

Packed = KernelWeight | KernelInt4Weight  # weights that are made of bytes alone
_TakeWeight = Callable[[], torch.Tensor]

__all__ = [
    "METHODS",
    "TRANSPOSED",
    "GpuInt8Weight",
    "Left",
    "Packed",
    "Report",
    "devices_of",
    "linear_names",
    "packed_kind",
    "packed_weight",
    "quantize_",
    "quantized_linear",
    "require_device",
    "restored",
]

# Classes of torch and transformers that only multiply by their weight, and whether the weight is kept as [in, out].
# A subclass that is not here computes something else, as Llama4Router does, and stays unchanged.
TRANSPOSED = {"Linear": False, "FalconLinear": False, "Conv1D": True}


def quantize_(
    module: torch.nn.Module,
    method: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    int8_weight: type[Int8Weight] | None = None,
    int4_weight: type[Int4Weight] | None = None,
    eight_bits: Container[str] = (),
    emulated: bool = False,
) -> Report:
    """Replace every linear and fused expert weight of one block by a quantised one, and move the block to ``device``.

    ``module`` is on the CPU or on ``device``; layers that were quantised before are skipped.

    Each original weight is freed once it is replaced. Peak memory is therefore the quantised weights so far plus one
    weight, if blocks are given one after the other. Quantised weights are frozen; gradients flow to the inputs.
    Routers, norms and biases stay unchanged. Experts may be stored tensors (see ``take_out_experts``), which are read
    one at a time.

    ``method``: "int8" is ``Int8Weight`` on CPU and ``GpuInt8Weight`` on CUDA; "int4" is ``Int4Weight``, on CPU alone;
    "fp8" is ``Fp8Weight``, on GPUs that multiply FP8; "nf4" is 4-bit NormalFloat, expanded to ``compute_dtype`` for
    each product; "bnb-int8" is LLM.int8(), for comparison; "none" only moves.
    ``eight_bits`` names the layers of ``module`` that int4 holds in 8 bits.
    ``emulated``: fp8 may run on any device, where torch computes what such a GPU would, slowly.
    ``int8_weight`` and ``int4_weight`` are the implementations on CPU; the default is the fastest that runs here.
    Raises ValueError: see ``require_device``.
    """
    if not (emulated and method == "fp8"):
        require_device(method, device)
    quantizer = _Quantizer(method, device, compute_dtype, int8_weight, int4_weight)
    num_expert_weights = 0
    if method != "none":
        layouts = {name: ExpertLayout.of(part) for name, part in module.named_modules()}  # before any is replaced
        for name, layout in layouts.items():
            if layout is not None:
                experts = module.get_submodule(name)
                module.set_submodule(name, QuantizedExperts(experts, layout, quantizer.linear))
        num_expert_weights = len(quantizer.layers)
        for name in linear_names(module):
            linear: Any = module.get_submodule(name)
            layer = quantizer.linear(partial(_take_weight, linear), linear.bias, eight_bits=name in eight_bits)
            module.set_submodule(name, layer)
    module.to(device)
    return quantizer.report(module, num_expert_weights)


def require_device(method: str, device: torch.device) -> None:
    """Raise ValueError for an unknown method of quantisation, or one that ``device`` cannot run."""
    if method not in METHODS:
        raise ValueError(f"unknown quantisation {method!r}: choose one of {', '.join(METHODS)}")
    if method == "fp8" and not has_fp8_products(device):
        others = ", ".join(other for other in METHODS if device.type in devices_of(other) and other != "fp8")
        raise ValueError(
            f"{device} has no FP8 products, which NVIDIA's GPUs have from compute capability 8.9 on: expected {others}"
        )
    if method != "none" and device.type not in (kinds := devices_of(method)):
        other = "nf4" if device.type == "cuda" else "none, or the device cpu"
        raise ValueError(f"{method} runs on {' and '.join(kinds)}, not on {device.type}: choose {other}")


def devices_of(method: str) -> tuple[str, ...]:
    """Return the kinds of devices that run this method of quantisation."""
    if method == "none":
        return ("cpu", *ACCELERATORS)
    return {"int4": ("cpu",), "fp8": ("cuda",)}.get(method, ("cpu", "cuda"))


# ------------------------------------------------------------ weights that can be kept as bytes


def packed_kind(
    method: str, device: torch.device, eight_bits: bool = False, int8_weight: type[Int8Weight] | None = None
) -> type[Packed] | None:
    """Return how ``quantize_`` packs linear weights; None if the weights cannot be made of bytes alone.

    ``eight_bits``: whether the weights are of layers that int4 holds in 8 bits. ``int8_weight``: as for ``quantize_``.
    """
    if device.type != "cpu":
        return None
    if method == "int4" and KernelInt4Weight.is_available():
        return KernelWeight if eight_bits else KernelInt4Weight
    is_kernels = KernelWeight.is_fastest() if int8_weight is None else int8_weight is KernelWeight
    return KernelWeight if method == "int8" and is_kernels else None


def packed_weight(layer: torch.nn.Module) -> Packed | None:
    """Return the weight of a layer that ``quantize_`` has made; None if it is not made of bytes alone."""
    weight = layer.quantized if isinstance(layer, QuantizedLinear) else None
    return weight if isinstance(weight, Packed) else None


def quantized_linear(
    method: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    stored: StoredTensor,
    bias: torch.Tensor | None,
    eight_bits: bool = False,
    int8_weight: type[Int8Weight] | None = None,
) -> tuple[torch.nn.Module, Report]:
    """Return the layer that ``quantize_`` makes of a linear one, and its report. bias: [out].

    The weight is read in tiles if its format allows it.
    """
    quantizer = _Quantizer(method, device, compute_dtype, int8_weight)
    layer = quantizer.linear(stored.read, bias, stored, eight_bits=eight_bits).to(device)
    return layer, quantizer.report(layer)


def restored(method: str, weight: Packed, bias: torch.Tensor | None) -> tuple[torch.nn.Module, Report]:
    """Return the layer that ``quantize_`` made with this weight, and the report that it gave. bias: [out]."""
    layer = QuantizedLinear(weight, bias)
    report = Report(
        method,
        num_linears=1,
        quantised_params=weight.shape.numel(),
        quantised_bytes=weight.size_bytes,
        left=tuple(_left(layer, {layer})),
    )
    return layer, report


@dataclass
class _Quantizer:
    """A builder that makes the quantised layers of one block and counts them."""

    method: str
    device: torch.device
    compute_dtype: torch.dtype
    int8_weight: type[Int8Weight] | None = None
    int4_weight: type[Int4Weight] | None = None
    layers: set[torch.nn.Module] = field(default_factory=set)
    num_params: int = 0
    size_bytes: int = 0

    def linear(
        self,
        take_weight: _TakeWeight,
        bias: torch.Tensor | None,
        stored: StoredTensor | None = None,
        eight_bits: bool = False,
    ) -> torch.nn.Module:
        """Return a quantised layer. ``take_weight()``: [out, in] of any strides, soon dropped; bias: [out].

        ``stored`` is the weight in the checkpoint, if known. It is read in tiles if possible. If the checkpoint stores
        the integers or FP8 codes that ``method`` needs, these are taken unchanged. ``eight_bits`` turns int4 into int8,
        computed by the kernel if there is one, so that decode steps can be programs.
        """
        if self.method in BY_ROWS:
            on_gpu = self.device.type != "cpu" or self.method == "fp8"
            quantized = self._on_gpu(take_weight, stored) if on_gpu else self._on_cpu(take_weight, stored, eight_bits)
            return self._counted(QuantizedLinear(quantized, bias), quantized.shape.numel(), quantized.size_bytes)
        weight = take_weight().to(self.compute_dtype)
        if self.method == "nf4":
            layer, size_bytes = bnb.nf4_linear(weight, bias, self.device, self.compute_dtype)
        else:
            layer, size_bytes = bnb.int8_linear(weight, bias, self.device)
        return self._counted(layer, weight.numel(), size_bytes)

    def _on_cpu(self, take_weight: _TakeWeight, stored: StoredTensor | None, eight_bits: bool) -> QuantizedWeight:
        kind: type[Int8Weight | Int4Weight]
        if self.method == "int8" or eight_bits:
            kernel_first = self.method == "int4" and KernelWeight.is_available()
            kind = self.int8_weight or (KernelWeight if kernel_first else int8_linear.fastest())
            rounded, quantize = stored_int8(stored), quantize_rows
        else:
            kind = self.int4_weight or int4_linear.fastest()
            rounded, quantize = stored_int4(stored), quantize_groups
        if rounded is not None:
            return kind(*rounded)
        shape, tiles = self._tiles(take_weight, stored)
        return kind.from_tiles(shape, map(quantize, tiles))

    def _on_gpu(self, take_weight: _TakeWeight, stored: StoredTensor | None) -> QuantizedWeight:
        is_fp8 = self.method == "fp8"
        rounded, quantize = (stored_fp8(stored), quantize_fp8) if is_fp8 else (stored_int8(stored), quantize_rows)
        if rounded is None:
            _, tiles = self._tiles(take_weight, stored)
            rounded = joined(quantize(tile.to(self.device)) for tile in tiles)
        q, scale = (part.to(self.device) for part in rounded)
        if is_fp8:
            return Fp8Weight(q, scale)
        return GpuInt8Weight(q, scale, few_rows_kernel(self.device, self.compute_dtype))

    def _tiles(
        self, take_weight: _TakeWeight, stored: StoredTensor | None
    ) -> tuple[torch.Size, Iterable[torch.Tensor]]:
        """Return the weight's shape, and its rows in tiles of whole strips."""
        if stored is not None and stored.has_tiles:
            return torch.Size(stored.shape), (tile.to(self.compute_dtype) for tile in stored.tiles(STRIP))
        weight = take_weight()
        return weight.shape, (tile.to(self.compute_dtype) for tile in weight.split(STRIP))

    def report(self, module: torch.nn.Module, num_expert_weights: int = 0) -> Report:
        """Return the report of what was done to the layers of ``module``."""
        return Report(
            self.method,
            num_linears=len(self.layers) - num_expert_weights,
            num_expert_weights=num_expert_weights,
            quantised_params=self.num_params,
            quantised_bytes=self.size_bytes,
            left=tuple(_left(module, self.layers)),
        )

    def _counted(self, layer: torch.nn.Module, num_params: int, size_bytes: int) -> torch.nn.Module:
        self.layers.add(layer)
        self.num_params += num_params
        self.size_bytes += size_bytes
        return layer


def _take_weight(linear: Any) -> torch.Tensor:
    """Return the weight, [out, in], and remove it from the layer."""
    weight = linear.weight.detach()
    linear.register_parameter("weight", None)
    return weight.T if TRANSPOSED[type(linear).__name__] else weight


def linear_names(block: torch.nn.Module) -> list[str]:
    """Return the names of the layers that may be quantised: they only multiply by their weight, and decide nothing."""
    deciding = deciding_parts(block)
    return [
        name
        for name, part in block.named_modules()
        if type(part).__name__ in TRANSPOSED and part not in deciding and name.rpartition(".")[2] not in WEIGHT_IS_READ
    ]


def _left(block: torch.nn.Module, quantised: set[torch.nn.Module]) -> Iterator[Left]:
    deciding = deciding_parts(block)
    for name, part in block.named_modules():
        if getattr(part, "is_quantised", False) and part not in quantised:
            continue  # an earlier call has reported it
        named = dict(part.named_parameters(recurse=False))
        if part in quantised:
            named.pop("weight", None)
        if named:
            params = list(named.values())
            kind = "bias" if part in quantised else _kind_of(name, part, params, part in deciding)
            yield Left(kind, name, sum(param.numel() for param in params), sum(param.nbytes for param in params))


def _kind_of(name: str, part: torch.nn.Module, params: Iterable[torch.Tensor], is_deciding: bool) -> str:
    """Return what a layer is that is left unquantised, in the words of ``Left``."""
    if "norm" in type(part).__name__.lower():
        return "norm"
    dims = {param.ndim for param in params}
    if 3 in dims:
        return "experts"
    if 2 not in dims:
        return "other"
    if not is_deciding:
        return "linear"
    return "index" if ".indexer." in name else "router"
