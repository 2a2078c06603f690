"""Quantises transformer blocks in place: int8, int4 or nf4, fused experts and transposed layers included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from swarm_protocol.checkpoints.family import WEIGHT_IS_READ
from swarm_protocol.gpu.int8_weight import GpuInt8Weight, few_rows_kernel
from swarm_protocol.kernels import int4_linear
from swarm_protocol.kernels.int4_linear import Int4Linear, Int4Weight, KernelInt4Weight, quantize_groups
from swarm_protocol.kernels.int8_linear import Int8Linear, Int8Weight, quantize_rows
from swarm_protocol.kernels.kernel_weight import KernelWeight
from swarm_protocol.kernels.quantized_linear import QuantizedLinear
from swarm_server.blocks.quantization import bnb
from swarm_server.blocks.quantization.experts import ExpertLayout, QuantizedExperts
from swarm_server.blocks.quantization.report import Left, Report
from swarm_server.blocks.quantization.stored import stored_int4, stored_int8
from swarm_server.core.config import METHODS

R = TypeVar("R")
Packed = KernelWeight | KernelInt4Weight  # weights that are made of some bytes alone

__all__ = ["METHODS", "Left", "Report", "packed_kind", "packed_weight", "quantize_", "require_device", "restored"]

# Classes of torch and transformers that multiply by their weight and do nothing else, and whether it is kept as
# [in, out]. A subclass that is not here computes something of its own, as Llama4Router does, and stays as it is.
TRANSPOSED = {"Linear": False, "FalconLinear": False, "Conv1D": True}


def quantize_(
    module: torch.nn.Module,
    method: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    int8_weight: type[Int8Weight] | None = None,
    int4_weight: type[Int4Weight] | None = None,
) -> Report:
    """Replaces every linear and fused expert weight of one block by its quantised version and moves it to ``device``.

    ``module`` is on the CPU or on ``device``; what was quantised before is passed over.

    Each original is freed once it is replaced, so the peak is what is
    quantised so far plus one weight: give it one block after the other. Quantised weights are frozen, gradients flow
    to the inputs. Routers, norms and biases stay as they are.

    ``method``: "int8" is ``Int8Linear`` on CPU and ``GpuInt8Weight`` on CUDA; "int4" is ``Int4Linear``, on CPU alone;
    "nf4" is 4-bit NormalFloat, expanded to ``compute_dtype`` for each product; "bnb-int8" is LLM.int8(), to compare
    with; "none" only moves.
    ``int8_weight`` and ``int4_weight`` are the implementations on CPU, the fastest that run here unless given.
    Raises ValueError: see ``require_device``.
    """
    require_device(method, device)
    quantizer = _Quantizer(method, device, compute_dtype, int8_weight, int4_weight)
    num_expert_weights = 0
    if method != "none":
        layouts = {name: ExpertLayout.of(part) for name, part in module.named_modules()}
        for name, layout in layouts.items():
            if layout is not None:
                experts = module.get_submodule(name)
                module.set_submodule(name, QuantizedExperts(experts, layout, quantizer.linear))
        num_expert_weights = len(quantizer.layers)
        for name in _linear_names(module):
            linear: Any = module.get_submodule(name)
            stored = getattr(linear, "stored", None)  # where it is from, if it is known
            module.set_submodule(name, quantizer.linear(partial(_take_weight, linear), linear.bias, stored))
    module.to(device)
    return Report(
        method,
        num_linears=len(quantizer.layers) - num_expert_weights,
        num_expert_weights=num_expert_weights,
        quantised_params=quantizer.num_params,
        quantised_bytes=quantizer.size_bytes,
        left=tuple(_left(module, quantizer.layers)),
    )


def require_device(method: str, device: torch.device) -> None:
    """Raises ValueError for an unknown method of quantisation, or one that ``device`` cannot run."""
    if method not in METHODS:
        raise ValueError(f"unknown quantisation {method!r}: choose one of {', '.join(METHODS)}")
    if method == "int4" and device.type == "cuda":
        raise ValueError("int4 runs on cpu, not on cuda: choose nf4")
    if method != "none" and device.type not in ("cpu", "cuda"):
        runs_on = "cpu" if method == "int4" else "cpu and cuda"
        raise ValueError(f"{method} runs on {runs_on}, not on {device.type}: choose none")


# ------------------------------------------------------------ weights that can be kept as bytes


def packed_kind(method: str, device: torch.device) -> type[Packed] | None:
    """How linear weights are packed by ``quantize_``; None if they cannot be made of bytes alone."""
    if device.type != "cpu":
        return None
    if method == "int4" and KernelInt4Weight.is_available():
        return KernelInt4Weight
    return KernelWeight if method == "int8" and KernelWeight.is_fastest() else None


def packed_weight(layer: torch.nn.Module) -> Packed | None:
    """The weight of a layer that ``quantize_`` has made, if it can be."""
    weight = layer.quantized if isinstance(layer, QuantizedLinear) else None
    return weight if isinstance(weight, Packed) else None


def restored(method: str, weight: Packed, bias: torch.Tensor | None) -> tuple[torch.nn.Module, Report]:
    """The layer that ``quantize_`` made with this weight, and what it then said. bias: [out]."""
    layer: Any = Int8Linear(weight, bias) if isinstance(weight, KernelWeight) else Int4Linear(weight, bias)
    layer.is_quantised = True
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
    """Builds the quantised layers of one block and counts them."""

    method: str
    device: torch.device
    compute_dtype: torch.dtype
    int8_weight: type[Int8Weight] | None
    int4_weight: type[Int4Weight] | None
    layers: set[torch.nn.Module] = field(default_factory=set)
    num_params: int = 0
    size_bytes: int = 0

    def linear(
        self, take_weight: Callable[[], torch.Tensor], bias: torch.Tensor | None, stored: object = None
    ) -> torch.nn.Module:
        """``take_weight()``: [out, in] of any strides, which is dropped as soon as it can be; bias: [out].

        ``stored`` is the weight in the checkpoint: if that is of the same integers, they are taken as they are.
        """
        if self.method == "int8" and self.device.type == "cpu":
            rounded = _kept(stored_int8(stored), take_weight) or quantize_rows(take_weight())
            return self._packed(Int8Linear.from_int8(*rounded, bias, self.int8_weight))
        if self.method == "int8":
            q, scale = _kept(stored_int8(stored), take_weight) or quantize_rows(take_weight().to(self.device))
            kernel = few_rows_kernel(self.device, self.compute_dtype)
            return self._packed(QuantizedLinear(GpuInt8Weight(q.to(self.device), scale.to(self.device), kernel), bias))
        if self.method == "int4":
            groups = _kept(stored_int4(stored), take_weight) or quantize_groups(take_weight())
            return self._packed(Int4Linear((self.int4_weight or int4_linear.fastest())(*groups), bias))
        weight = take_weight()
        if self.method == "nf4":
            layer, size_bytes = bnb.nf4_linear(weight, bias, self.device, self.compute_dtype)
        else:
            layer, size_bytes = bnb.int8_linear(weight, bias, self.device)
        return self._counted(layer, weight.numel(), size_bytes)

    def _packed(self, layer: QuantizedLinear) -> torch.nn.Module:
        return self._counted(layer, layer.quantized.shape.numel(), layer.quantized.size_bytes)

    def _counted(self, layer: Any, num_params: int, size_bytes: int) -> torch.nn.Module:
        layer.is_quantised = True
        self.layers.add(layer)
        self.num_params += num_params
        self.size_bytes += size_bytes
        return layer


def _kept(rounded: R | None, take_weight: Callable[[], torch.Tensor]) -> R | None:
    """The same; drops the weight in full precision if it is not needed."""
    if rounded is not None:
        take_weight()
    return rounded


def _take_weight(linear: Any) -> torch.Tensor:
    """The weight, [out, in], which the layer does not keep."""
    weight = linear.weight.detach()
    linear.weight = None
    return weight.T if TRANSPOSED[type(linear).__name__] else weight


def _linear_names(block: torch.nn.Module) -> list[str]:
    routers = _beside_experts(block)
    return [
        name
        for name, part in block.named_modules()
        if type(part).__name__ in TRANSPOSED and part not in routers and name.rpartition(".")[2] not in WEIGHT_IS_READ
    ]


def _beside_experts(block: torch.nn.Module) -> set[torch.nn.Module]:
    """Children of modules that own experts: where they are linear, they decide about experts.

    They are tiny, and the error of a decision is not bounded by the error of the weight.
    """
    return {child for part in block.modules() if hasattr(part, "experts") for child in part.children()}


def _left(block: torch.nn.Module, quantised: set[torch.nn.Module]) -> Iterator[Left]:
    beside_experts = _beside_experts(block)
    for name, part in block.named_modules():
        if getattr(part, "is_quantised", False) and part not in quantised:
            continue  # an earlier call has reported it
        params = dict(part.named_parameters(recurse=False))
        if part in quantised:
            params.pop("weight", None)
            kind = "bias"
        elif "norm" in type(part).__name__.lower():
            kind = "norm"
        elif any(param.ndim == 3 for param in params.values()):
            kind = "experts"
        elif any(param.ndim == 2 for param in params.values()):
            kind = "router" if part in beside_experts else "linear"
        else:
            kind = "other"
        if params:
            num_params = sum(param.numel() for param in params.values())
            yield Left(kind, name, num_params, sum(param.nbytes for param in params.values()))
