"""Safetensors files in memory, beside those of the library."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from swarm_models.checkpoints.safetensors_bytes import from_bytes, to_bytes
from swarm_models.checkpoints.safetensors_file import DTYPES

TENSORS = {
    **{name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()},
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 6).T,
    "part": torch.randn(10)[1:4],
    "größer": torch.nn.Parameter(torch.randn(2)),
}
METADATA = {"optimizer": '{"lr": "0,1 €"}'}


@pytest.fixture(params=["in memory", "on disk"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on disk":
        monkeypatch.delattr(os, "memfd_create", raising=False)


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert (
            tensor.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(expected[name].detach().contiguous().view(-1).view(torch.uint8))
        ), name


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("metadata", [METADATA, {}])
def test_the_library_reads_what_is_written(metadata: dict[str, str]) -> None:
    data = to_bytes(TENSORS, metadata)
    assert_same(load(data), TENSORS)
    tensors, found = from_bytes(data)
    assert_same(tensors, TENSORS)
    assert found == metadata


@pytest.mark.usefixtures("where")
def test_what_the_library_writes_is_read_and_may_be_changed() -> None:
    data = save({name: tensor.detach().contiguous() for name, tensor in TENSORS.items()}, METADATA)
    tensors, metadata = from_bytes(data)
    assert_same(tensors, TENSORS)
    assert metadata == METADATA
    tensors["F32"].add_(1)
    assert_same(from_bytes(data)[0], TENSORS)


@pytest.mark.usefixtures("where")
def test_nothing_makes_a_file_too() -> None:
    assert load(to_bytes({})) == {} == from_bytes(to_bytes({}))[0]


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-5],
        lambda data: data + b"more",
        lambda data: b"\x80\x04pickle" + data,
        lambda data: (1 << 60).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b'"F32"', b'"F99"'),
        lambda data: data.replace(b'"F8_E4M3"', b'"F8_E8M0"'),
    ],
)
def test_what_is_no_such_file_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SafetensorError):
        from_bytes(spoil(to_bytes(TENSORS, METADATA)))


def test_what_the_format_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"'x' is of torch\.complex64"):
        to_bytes({"x": torch.zeros(2, dtype=torch.complex64)})
