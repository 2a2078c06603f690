"""What the GPU's int8 kernel must give. As a script: for every shape, on the CPU, for Triton's interpreter."""

from __future__ import annotations

import itertools

import torch

from swarm_models.gpu.int8_weight import Product
from swarm_models.kernels.int8_linear import quantize_rows

SHAPES = ((1, 64, 128), (3, 70, 300), (17, 5, 40), (64, 33, 129))  # rows, out, in
# Of the largest. Sums of thousands of numbers in fp32 are off by a few 1e-6; in TF32 they would be by 3e-4.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def check(product: Product, num_rows: int, width_out: int, width_in: int, dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(num_rows, width_in).to(dtype), torch.randn(width_out, width_in)
    q, scale = quantize_rows(weight)
    expected = x.double() @ (q.double() * scale.double()[:, None]).T
    output = product(x.to(device), q.to(device), scale.to(device))
    assert output.shape == expected.shape and output.dtype == dtype
    assert (output.cpu() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    if num_rows > 1:  # a row that is not finite spoils no other
        x[0, 0] = float("nan")
        spoiled = product(x.to(device), q.to(device), scale.to(device))
        assert bool(spoiled[0].isnan().all()) and torch.equal(spoiled[1:], output[1:])


if __name__ == "__main__":
    from swarm_models.gpu.triton_int8 import few_rows_product

    for shape, kind in itertools.product(SHAPES, (torch.float32, torch.float16)):
        torch.manual_seed(0)
        check(few_rows_product, *shape, kind, "cpu")
