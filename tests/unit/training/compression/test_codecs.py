"""Vectors as bytes: sizes, errors, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_training.compression.codecs import CODEC_NAMES, codec_of


def random(n: int, seed: int = 0, name: str = "fp32") -> torch.Tensor:
    """In the type of the codec of that name."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(codec_of(name).dtype)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    ("name", "bytes_of"),
    [
        ("fp64", lambda n: 8 * n),
        ("fp32", lambda n: 4 * n),
        ("fp16", lambda n: 2 * n),
        ("int8", lambda n: -(-n // 64) * 68),
        ("int4", lambda n: -(-n // 64) * 36),
        ("2bit", lambda n: -(-n // 64) * 20),
    ],
)
def test_sizes(name: str, bytes_of: object, n: int) -> None:
    codec = codec_of(name)
    data = codec.encode(random(n, name=name))
    assert len(data) == codec.size_bytes(n) == bytes_of(n)  # type: ignore[operator]
    decoded = codec.decode(memoryview(data), n)
    assert decoded.shape == (n,) and decoded.dtype == (torch.float64 if name == "fp64" else torch.float32)


def test_fp32_loses_nothing_and_fp16_rounds() -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert torch.equal(codec_of("fp64").decode(codec_of("fp64").encode(third), 1), third)
    x = random(1000) * torch.logspace(-6, 3, 1000)
    assert torch.equal(codec_of("fp32").decode(codec_of("fp32").encode(x), 1000), x)
    assert torch.equal(codec_of("fp16").decode(codec_of("fp16").encode(x), 1000), x.half().float())


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_integers_err_by_half_a_step_of_their_block(name: str, most: int) -> None:
    x = random(1000) * torch.logspace(-6, 6, 1000)
    codec = codec_of(name)
    errors = (codec.decode(codec.encode(x), 1000) - x).abs()
    for start in range(0, 1000, 64):
        block = slice(start, start + 64)
        assert errors[block].max() <= x[block].abs().max() / (2 * most) * 1.01


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_spoils_at_most_its_block(name: str, value: float) -> None:
    x = random(256, name=name)
    x[70] = value
    codec = codec_of(name)
    decoded = codec.decode(codec.encode(x), 256)
    assert not decoded[70].isfinite()
    assert decoded[:64].isfinite().all() and decoded[128:].isfinite().all()
    if name not in ("int8", "int4", "2bit"):
        assert decoded[70].item() == value or math.isnan(value)
        assert decoded.isfinite().sum() == 255


def test_values_beyond_fp16_become_its_largest() -> None:
    codec = codec_of("fp16")
    assert codec.decode(codec.encode(torch.tensor([1e6, -1e30])), 2).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("n", [64, 130, 7])
def test_two_bits_are_a_sign_and_the_mean_of_the_larger_or_of_the_smaller_ones(n: int) -> None:
    x, codec = random(n) * torch.logspace(-3, 3, n), codec_of("2bit")
    expected = []
    for start in range(0, n, 64):
        block = x[start : start + 64].tolist()
        mean = sum(map(abs, block)) / len(block)
        halves = [[abs(v) for v in block if (abs(v) > mean) == is_large] for is_large in (False, True)]
        levels = [sum(half) / len(half) for half in halves]
        expected += [math.copysign(levels[abs(v) > mean], v) for v in block]
    torch.testing.assert_close(codec.decode(codec.encode(x), n), torch.tensor(expected), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    codec = codec_of(name)
    assert not codec.decode(codec.encode(torch.zeros(100, dtype=codec.dtype)), 100).any()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    codec = codec_of(name)
    once = codec.decode(codec.encode(random(500, name=name)), 500)
    torch.testing.assert_close(codec.decode(codec.encode(once), 500), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_data_of_a_wrong_size_is_refused(name: str) -> None:
    codec = codec_of(name)
    data = codec.encode(random(100, name=name))
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match=f"100 elements in {name} take {len(data)} bytes, not {len(wrong)}"):
            codec.decode(wrong, 100)


def test_other_tensors_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="codec 'int2' is unknown: expected one of fp32, fp16, int8, int4, 2bit, fp64"):
        codec_of("int2")
    with pytest.raises(ValueError, match="expected a flat float32 vector"):
        codec_of("fp32").encode(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="expected a flat float32 vector"):
        codec_of("fp32").encode(torch.zeros(2, dtype=torch.float64))
