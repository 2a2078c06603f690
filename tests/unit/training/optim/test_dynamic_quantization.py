"""8-bit blocks beside those of bitsandbytes."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from swarm_training.optim.dynamic_quantization import code_values, dequantize, quantize

SIGNED = pytest.mark.parametrize("signed", [True, False])


def numbers(n: int, signed: bool, seed: int = 0) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return x if signed else x.square()


@SIGNED
def test_values_are_those_of_bitsandbytes(signed: bool) -> None:
    torch.testing.assert_close(code_values(signed), bnb.create_dynamic_map(signed=signed), rtol=1e-6, atol=1e-9)


@SIGNED
def test_codes_are_the_nearest_and_err_no_more_than_those_of_bitsandbytes(signed: bool) -> None:
    """Of which those computed on a CPU are not always the nearest."""
    x = numbers(25_600, signed)
    codes, maxima = quantize(x, signed)
    relative = (x.view(-1, 256) / maxima[:, None]).view(-1)
    nearest = (relative[:, None] - code_values(signed)).abs().argmin(1)
    if not signed:
        nearest = nearest.clamp(min=1)
    assert torch.equal(codes.long(), nearest)
    theirs, state = bnb.quantize_blockwise(x, code=code_values(signed), blocksize=256)
    torch.testing.assert_close(maxima, state.absmax)
    assert (codes.int() - theirs.int()).abs().float().mean() < 0.1
    error = (dequantize(codes, maxima, signed) - x).norm()
    assert error <= (bnb.dequantize_blockwise(theirs, state) - x).norm() * 1.001


@SIGNED
@pytest.mark.parametrize("shape", [(), (1,), (256,), (257,), (3, 5, 40), (0,)])
def test_shapes_survive_and_what_is_quantised_stays(signed: bool, shape: tuple[int, ...]) -> None:
    x = numbers(int(torch.Size(shape).numel()), signed).view(shape)
    codes, maxima = quantize(x, signed)
    assert codes.shape == shape and codes.dtype == torch.uint8 and len(maxima) == -(-x.numel() // 256)
    decoded = dequantize(codes, maxima, signed)
    again, same = quantize(decoded, signed)
    assert torch.equal(again, codes) and torch.equal(same, maxima)


def test_zeros_are_exact() -> None:
    x = torch.cat([numbers(256, True), torch.zeros(256)])
    assert not dequantize(*quantize(x, True), signed=True)[256:].any()


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    decoded = dequantize(*quantize(x, False), signed=False)
    assert (decoded[1:3] > 0).all() and decoded[3] == 0


@SIGNED
def test_what_is_not_finite_stays_in_its_block(signed: bool) -> None:
    x = numbers(512, signed)
    x[3] = torch.nan
    decoded = dequantize(*quantize(x, signed), signed=signed)
    assert not decoded[:256].isfinite().any() and decoded[256:].isfinite().all()
