"""bfloat16 and 4-bit codecs: how far what comes back is from what went, and that a row's bytes are its own."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_protocol.codecs.int4 import pack_int4, unpack_int4
from swarm_protocol.codecs.sizes import CODECS, LADDER, encoded_bytes, num_outliers
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import Assembler, decode, encode

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LOSSY = [name for name in LADDER if name != "raw"]
BLOCK = 64
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 63, 64, 65, 130, 200]), max_size=3).map(tuple)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(tensor: torch.Tensor, name: str) -> torch.Tensor:
    header, parts = encode(tensor, CODECS[name])
    return Assembler(header, parts=parts).tensor()


def error(decoded: torch.Tensor, tensor: torch.Tensor) -> float:
    return float((decoded - tensor).norm() / tensor.norm())


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=50)
@given(shape=shapes, dtype=st.sampled_from(FLOATS), seed=st.integers(0, 1000), log_scale=st.floats(-4, 4))
def test_any_shape_comes_back_nearly_as_it_was(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, log_scale: float
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10**log_scale).to(dtype)
    decoded = there_and_back(tensor, name)
    assert (decoded.dtype, decoded.shape) == (dtype, tensor.shape)
    width = shape[-1] if shape else 1
    header, _ = encode(tensor, CODECS[name])
    assert header.size_bytes == encoded_bytes(name, math.prod(shape[:-1]) if width else 0, width, dtype.itemsize)
    if tensor.numel():
        step = {"bf16": 1 / 256, "int8": 1 / 254, "int4": 1 / 15 + 1 / 256}[name]  # half of one, of the largest element
        assert (decoded.double() - tensor.double()).abs().max() <= tensor.double().abs().max() * (
            step + torch.finfo(dtype).eps + 1e-3
        )


def test_four_bits_take_four_and_a_half_with_all_that_goes_with_them() -> None:
    for width in (128, 2048, 4096, 14336):
        assert encoded_bytes("int4", 7, width, 4) * 8 == 7 * width * 4.5


def test_the_ladder_goes_down() -> None:
    sizes = [encoded_bytes(name, 3, 2048, 4) for name in LADDER]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 4 * 3 * 2048


def test_layout_is_steps_then_outliers_then_levels() -> None:
    row = torch.zeros(130)
    row[0], row[1], row[33], row[64], row[129], row[70] = 7.5, -7.5, 0.5, 3.0, 1.0, -100.0  # 100: the outlier
    levels = torch.full((3, 64), 8)  # zero is half a step from the two nearest levels, and goes up
    levels[0, 0], levels[0, 1], levels[0, 33], levels[1, 0], levels[2, 1] = 15, 0, 8, 15, 15
    nibbles = levels[:, :32] | levels[:, 32:] << 4
    steps = torch.tensor([1.0, 3 / 7.5, 1 / 7.5]).bfloat16().view(torch.int16).tolist()
    value = torch.tensor(-100.0).bfloat16().view(torch.int16).item()
    expected = struct.pack("<3hHh96B", *steps, 70, value, *nibbles.reshape(-1).tolist())
    assert num_outliers(130) == 1
    assert pack_int4(row) == expected == encode(row, pb.INT4_BLOCKS)[0].data


@pytest.mark.parametrize(("name", "levels", "most"), [("int4", 7.5, 0.105), ("int8", 127, 0.01)])
def test_error_on_normal_data_is_that_of_the_formula(name: str, levels: float, most: float) -> None:
    """Uniform in steps of M / levels, where M is the largest of 64 absolute normal values: E[M²] = ∫ 2x P(M > x) dx."""
    dx = 1e-3
    tail = (1 - math.erf(x * dx / math.sqrt(2)) ** BLOCK for x in range(8000))
    mean_square = sum(2 * x * dx * p * dx for x, p in enumerate(tail))
    expected = math.sqrt(mean_square / 12) / levels
    tensor = random(4096, BLOCK)
    assert error(there_and_back(tensor, name), tensor) == pytest.approx(expected, rel=0.02)
    assert expected < most


def test_a_few_huge_channels_leave_the_others_as_they_are() -> None:
    """Not so for int8, whose blocks with such a channel lose the others."""
    tensor = random(64, 2048)
    huge = torch.tensor([3, 70, 71, 900, 1500, 2047])
    others = torch.ones(2048, dtype=torch.bool).index_fill(0, huge, False)
    tensor[:, huge] *= 100
    decoded = there_and_back(tensor, "int4")
    assert error(decoded[:, others], tensor[:, others]) < 0.1
    assert error(decoded[:, huge], tensor[:, huge]) < 0.03  # some of them are small in some rows
    by_eight_bits = there_and_back(tensor, "int8")
    assert error(by_eight_bits[:, others], tensor[:, others]) > 0.05


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_row_does_not_depend_on_others(name: str) -> None:
    rows = random(5, 3, 200)
    together = there_and_back(rows, name)
    assert torch.equal(together, there_and_back(rows, name))
    for batch in range(5):
        for position in range(3):
            assert torch.equal(there_and_back(rows[batch, position], name), together[batch, position])


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_not_hidden(name: str, value: float, width: int) -> None:
    tensor = random(3, width)
    for count in (1, 2, 3, 40):
        tensor[1, :count] = value
        decoded = there_and_back(tensor, name)
        assert not decoded[1].isfinite().all()
        assert decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    tensor = torch.full((2, 256), 65504.0, dtype=torch.float16)
    tensor[1] *= -1
    assert there_and_back(tensor, name).isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_and_the_smallest_numbers(name: str) -> None:
    tensor = torch.zeros(2, 256)
    tensor[1] = 1e-42
    assert there_and_back(tensor, name).abs().max() <= 1e-41


@given(st.integers(0, 2), st.sampled_from([1, 64, 129, 256]), st.randoms(use_true_random=False))
def test_any_bytes_can_be_decoded(num_rows: int, width: int, chance: object) -> None:
    size = encoded_bytes("int4", num_rows, width, 4)
    data = chance.randbytes(size)
    wire = pb.Tensor(dtype=pb.FLOAT32, shape=[num_rows, width], codec=pb.INT4_BLOCKS, size_bytes=size, data=data)
    assert decode(wire).shape == (num_rows, width)
    if num_rows:
        assert unpack_int4(bytearray(b"\xff" * size), (num_rows, width), torch.float32).shape == (num_rows, width)
