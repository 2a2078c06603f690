"""Weights that are stored as the integers or FP8 codes that a server computes with: they are not rounded again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swarm_models.checkpoints.formats.groups import Integers, IntegerTensor
from swarm_models.checkpoints.formats.packed import JoinedTensor, PackedTensor, require_finite
from swarm_models.kernels.int4_linear import GROUP, LEVELS, groups_of
from swarm_models.kernels.int8_linear import TOP
from swarm_models.kernels.quantized_linear import joined

Rounded = tuple[torch.Tensor, torch.Tensor]


def stored_int8(stored: object) -> Rounded | None:
    """Return a weight stored in int8 with one scale per row, in the form of ``quantize_rows``; else None."""
    if isinstance(stored, JoinedTensor):
        return _joined(stored, stored_int8)
    if not isinstance(stored, IntegerTensor):
        return None
    integers = stored.read_integers()
    q, zero = integers.q, integers.zero
    if integers.scale.shape[1] != 1 or not isinstance(zero, int):
        return None
    if q.dtype == torch.uint8 and zero == TOP + 1:
        q, zero = (q.to(torch.int16) - zero).to(torch.int8), 0
    if q.dtype != torch.int8 or zero != 0 or int(q.min()) < -TOP:  # see ``TOP``
        return None
    return q, integers.scale.expand(len(q), 1)[:, 0].contiguous()


def stored_int4(stored: object) -> Rounded | None:
    """Return a 4-bit weight whose groups our groups divide, in the form of ``quantize_groups``; else None.

    Five bits of each scale are kept: a weight changes by 1/32 at most, and its integer and zero point do not change.
    """
    if isinstance(stored, JoinedTensor):
        return _joined(stored, stored_int4)
    if not isinstance(stored, IntegerTensor):
        return None
    integers = stored.read_integers()
    q, width, num_scales = integers.q, integers.q.shape[1], integers.scale.shape[1]
    per_scale = -(-width // GROUP) if num_scales == 1 else width // num_scales // GROUP
    if integers.group_of is not None or (num_scales > 1 and width % (num_scales * GROUP)):
        return None
    zero = _zeros(integers)
    if q.dtype != torch.uint8 or zero is None or int(q.max()) > LEVELS or not bool((integers.scale > 0).all()):
        return None
    shape = (len(q), num_scales)
    return q, groups_of(integers.scale.expand(shape), zero.expand(shape)).repeat_interleave(per_scale, 1)


def stored_fp8(stored: object) -> Rounded | None:
    """Return a weight stored in e4m3 with one scale, or one per row, in the form of ``quantize_fp8``; else None."""
    if isinstance(stored, JoinedTensor):
        return _joined(stored, stored_fp8)
    if not isinstance(stored, PackedTensor) or stored.parts.keys() != {"weight", "scale"}:
        return None
    (weight, scale), rows = (stored.parts["weight"], stored.parts["scale"]), stored.shape[0]
    is_by_row = scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
    if weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 2 or not is_by_row:
        return None
    per_row = require_finite(scale.read(), stored.name).reshape(-1).expand(rows)
    return weight.read().view(torch.uint8), per_row.contiguous()


def _joined(stored: JoinedTensor, taken_of: Callable[[object], Rounded | None]) -> Rounded | None:
    """Return the parts' integers and scales, joined; None if one part cannot be used as it is."""
    parts = [taken for part in stored.parts if (taken := taken_of(part)) is not None]
    return joined(parts) if len(parts) == len(stored.parts) else None


def _zeros(integers: Integers) -> torch.Tensor | None:
    """Return the zero points, [out, groups] or [1, 1] int32, all from 0 to 15; None if any is outside this range."""
    zero = torch.as_tensor(integers.zero).reshape(-1, 1) if isinstance(integers.zero, int) else integers.zero
    is_level = (zero >= 0) & (zero <= LEVELS)
    return zero.int() if bool(is_level.all()) else None
