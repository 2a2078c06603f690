"""Tensors as they travel: exact where that is promised, within the bounds of their form elsewhere."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.codec import Assembler
from swarm_training.stages.rpc.forms import FORMS, check_form, check_header, decoded, encode_as


def there(form: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """After its travel, and how many bytes that took."""
    wire, parts = encode_as(FORMS[form], tensor)
    check_header(FORMS[form], wire)
    return decoded(FORMS[form], Assembler(wire, parts=parts)), wire.size_bytes


def test_fp64_has_every_bit_of_what_was_computed_in_any_precision() -> None:
    values = torch.randn(3, 500, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 0, :3] = torch.tensor([5e-324, -0.0, 1.7e308], dtype=torch.float64)
    found, size = there("fp64", values.transpose(0, 1))
    assert torch.equal(found.view(torch.int64), values.transpose(0, 1).contiguous().view(torch.int64))
    assert size == values.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(there("fp64", values.to(dtype))[0].to(dtype), values.to(dtype))


@pytest.mark.parametrize(
    ("form", "most", "bytes_each"), [("fp32", 0.0, 4.0), ("bf16", 2**-8, 2.0), ("int8", 0.01, 1.1)]
)
def test_other_forms_are_as_near_as_they_say(form: str, most: float, bytes_each: float) -> None:
    values = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(1))
    found, size = there(form, values)
    assert found.shape == values.shape and size <= bytes_each * values.numel()
    assert float((found.float() - values).norm()) <= most * float(values.norm())


def test_forms_that_there_are_not_are_refused() -> None:
    with pytest.raises(RequestRejected, match="wire form 7 is unknown"):
        check_form(7)  # type: ignore[arg-type]
