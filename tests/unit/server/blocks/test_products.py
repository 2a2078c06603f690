"""What is said to multiply is what does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import quantize_
from swarm_server.blocks.products import described, multiplied_by

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_int8_names_what_quantised_layers_use() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantize_(block, "int8", CPU, torch.float32)
    layer, library = block[0], kernel()
    assert isinstance(layer, QuantizedLinear)
    names = {"KernelWeight": library and library.name, "FbgemmWeight": "fbgemm", "PlainWeight": "torch"}
    assert multiplied_by("int8", CPU, torch.float32) == names[type(layer.quantized).__name__]
    if isinstance(layer.quantized, KernelWeight):
        assert library is not None and described("int8", CPU, torch.float32) == f"int8 ({library.name} kernel)"


def test_int4_names_the_kernel_wherever_it_is() -> None:
    library = kernel()
    expected = "int4 (torch; no compiled kernel)" if library is None else f"int4 ({library.name} kernel)"
    assert described("int4", CPU, torch.float32) == expected
    in_group = "int8 (torch; no compiled kernel)" if library is None else f"int8 ({library.name} kernel)"
    assert described("int8", CPU, torch.float32, is_in_group=True) == in_group


@pytest.mark.parametrize(
    ("method", "device", "dtype", "expected"),
    [
        ("nf4", CPU, torch.float32, "nf4 (bitsandbytes)"),
        ("bnb-int8", CPU, torch.float32, "bnb-int8 (bitsandbytes)"),
        ("bnb-int8", CUDA, torch.bfloat16, "bnb-int8 (bitsandbytes)"),
        ("fp8", CUDA, torch.bfloat16, "fp8 (torch)"),
        ("none", CUDA, torch.bfloat16, "none (torch)"),
        ("none", CPU, torch.bfloat16, "none (torch)"),
    ],
)
def test_others_name_their_library(method: str, device: torch.device, dtype: torch.dtype, expected: str) -> None:
    assert described(method, device, dtype) == expected


def test_without_the_kernel_it_says_so() -> None:
    code = "import torch; from swarm_server.blocks.products import *"
    code += "; print(described('int8', torch.device('cpu'), torch.float32))"
    environment = {**os.environ, "SWARM_KERNEL": "off"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() in ("int8 (fbgemm; no compiled kernel)", "int8 (torch; no compiled kernel)")
