"""Names of what multiplies with the weights of linear layers, for the ready line and the log."""

from __future__ import annotations

import torch

from swarm_models.gpu.int8_weight import few_rows_kernel
from swarm_models.kernels.int8_linear import FbgemmWeight, fastest
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel
from swarm_server.blocks import dense_linear

OURS = ("int8", "int4")  # methods for which there are kernels, on CPU
MISSING = "; no compiled kernel"


def multiplied_by(method: str, device: torch.device, dtype: torch.dtype, *, is_in_group: bool = False) -> str:
    """Return one word: ``avx512-vnni`` or another instruction set of the compiled kernel, or a library.

    Members of a group use the kernel even where a library is faster.
    """
    if method == "none":
        plain = device.type == "cpu" and dtype == torch.float32 and dense_linear.is_available()
        return "onednn" if plain else "torch"
    if method == "int8" and device.type == "cuda":
        return "torch" if few_rows_kernel(device, dtype) is None else "triton"
    if method == "fp8":
        return "torch"
    return _cpu_product(method, is_in_group) if method in OURS and device.type == "cpu" else "bitsandbytes"


def _cpu_product(method: str, is_in_group: bool) -> str:
    library, kind = kernel(), fastest()
    if library is not None and (method == "int4" or is_in_group or kind is KernelWeight):
        return library.name
    return "fbgemm" if method == "int8" and kind is FbgemmWeight else "torch"


def described(method: str, device: torch.device, dtype: torch.dtype, *, is_in_group: bool = False) -> str:
    """Return a description such as ``int8 (avx512-vnni kernel)`` or ``int8 (fbgemm; no compiled kernel)``."""
    by, library = multiplied_by(method, device, dtype, is_in_group=is_in_group), kernel()
    if method in OURS and device.type == "cpu":
        note = MISSING if library is None else " kernel" if by == library.name else "; faster here than the kernel"
        return f"{method} ({by}{note})"
    return f"{method} ({by})"
