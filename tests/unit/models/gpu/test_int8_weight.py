"""int8 on GPUs: its kernel in Triton's interpreter and compiled for GPUs; what does without, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from swarm_models.gpu.int8_weight import GpuInt8Weight, few_rows_kernel
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.quantized_linear import QuantizedLinear
from tests.marks import NEEDS_TRITON
from tests.unit.models.gpu.int8_checks import SHAPES, check

TYPES = (torch.float32, torch.float16, torch.bfloat16)


@NEEDS_TRITON
def test_the_kernel_gives_exact_products_rounded() -> None:
    """In a process of its own: Triton interprets everything or nothing."""
    command = [sys.executable, "-m", "tests.unit.models.gpu.int8_checks"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 4096), (16, 1024, 4096)])
def test_the_kernel_on_cuda(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    product = few_rows_kernel(torch.device("cuda", 0), dtype)
    assert product is not None
    check(product, *shape, dtype, "cuda")


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_compiles_for_gpus(capability: int, dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from swarm_models.gpu.triton_int8 import CHANNELS, WIDTH, _multiply

    if capability < 80 and dtype == "bf16":
        pytest.skip("that GPU has no bfloat16")
    kind = {"fp32": triton.language.float32, "fp16": triton.language.float16, "bf16": triton.language.bfloat16}[dtype]
    constants = {"SIDE": 16, "CHANNELS": CHANNELS, "WIDTH": WIDTH, "TYPE": kind}
    types = {"q": "*i8", "scale": "*fp32", "num_rows": "i32", "width": "i32", "num_channels": "i32"}
    signature = {name: types.get(name, f"*{dtype}") for name in _multiply.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    places = {(_multiply.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(_multiply, signature, places), target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]


def expanding(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return GpuInt8Weight(q, scale).matmul(x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_without_the_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(expanding, *shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_layer_is_that_of_its_weight_in_the_dtype_that_comes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, scale = quantize_rows(torch.randn(24, 40))
    plain = torch.nn.Linear(40, 24)
    plain.weight.data = q * scale[:, None]
    layer, plain = QuantizedLinear(GpuInt8Weight(q, scale), plain.bias), plain.to(dtype)
    assert torch.equal(layer.weight.to(dtype), plain.weight)
    x = torch.randn(2, 3, 40).to(dtype).requires_grad_()
    same = x.detach().clone().requires_grad_()
    output, expected = layer(x), plain(same)
    assert output.dtype == dtype and output.shape == expected.shape
    close = partial(torch.testing.assert_close, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-5)
    close(output, expected)
    output.sum().backward()
    expected.sum().backward()
    close(x.grad, same.grad)


def test_few_rows_go_to_the_kernel_and_more_do_not() -> None:
    q, scale = quantize_rows(torch.randn(4, 8))
    seen = []

    def kernel(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return expanding(x, q, scale)

    weight = GpuInt8Weight(q, scale, kernel, most=3)
    for num_rows in (0, 1, 3, 4):
        assert weight.matmul(torch.ones(num_rows, 8)).shape == (num_rows, 4)
    assert seen == [1, 3]


def test_without_a_gpu_there_is_no_kernel(caplog) -> None:
    few_rows_kernel.cache_clear()
    assert few_rows_kernel(torch.device("cuda", 7), torch.float32) is None
    assert "no int8 kernel on cuda:7" in caplog.text
    few_rows_kernel.cache_clear()
