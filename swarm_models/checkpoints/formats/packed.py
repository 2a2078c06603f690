"""The interface between checkpoints and formats: a weight stored as several tensors, unpacked at each read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil, lcm
from typing import Any

import torch

from swarm_models.checkpoints.safetensors_file import FileTensor, StoredTensor, filled
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown

Parts = Mapping[str, FileTensor]  # by role
_TILE = 256  # how many rows are read at a time


@dataclass(frozen=True, eq=False)
class PackedTensor(StoredTensor):
    """A weight in full precision that is computed from its parts at each ``read``.

    Attributes:
        dtype: the dtype of what ``unpack`` returns: float32, or bfloat16 where that is exact.
        unpack: a module-level function with its settings. It takes the parts' data by role, and returns ``shape`` in
            ``dtype``, or the rows that the data covers. Raises CheckpointError.
        part_rows: rows of a part per row of the weight, by role; other parts are read whole for each tile. Empty: the
            weight cannot be unpacked in tiles.
        unit_rows: rows of the weight that ``unpack`` needs together, from a multiple of this number on.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Parts
    unpack: partial[Any]
    part_rows: Mapping[str, Fraction] = field(default_factory=dict)
    unit_rows: int = 1

    @property
    def has_tiles(self) -> bool:  # type: ignore[override]
        return bool(self.part_rows)

    @property
    def pieces(self) -> tuple[FileTensor, ...]:
        return tuple(self.parts.values())

    @property
    def recipe(self) -> str:
        function = self.unpack.func
        return f"{function.__module__}.{function.__qualname__}({sorted(self.unpack.keywords.items())})"

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = self._unpacked()
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, self.name
        return tensor

    def tiles(self, min_rows: int) -> Iterator[torch.Tensor]:
        if not self.part_rows:
            yield self.read()
            return
        step = lcm(min_rows, self.unit_rows, *(ratio.denominator for ratio in self.part_rows.values()))
        for start in range(0, self.shape[0], step):
            yield self.unpack(**{role: self._rows(role, start, start + step) for role in self.parts})

    def _rows(self, role: str, start: int, stop: int) -> torch.Tensor:
        part, ratio = self.parts[role], self.part_rows.get(role)
        return part.read() if ratio is None else part.rows(int(start * ratio), ceil(stop * ratio))

    def _unpacked(self) -> Any:
        return self.unpack(**{role: part.read() for role, part in self.parts.items()})


class JoinedTensor(StoredTensor):
    """A matrix of the model whose rows are the concatenated rows of several tensors of one dtype."""

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self.parts = parts
        self.name, self.dtype = parts[0].name, parts[0].dtype
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    @property
    def pieces(self) -> tuple[FileTensor, ...]:
        return tuple(piece for part in self.parts for piece in part.pieces)

    def read(self) -> torch.Tensor:
        return filled(self.shape, self.dtype, chain.from_iterable(part.tiles(_TILE) for part in self.parts))


@dataclass(frozen=True)
class PackedForm:
    """One way in which a format stores a weight: the names of its parts, and how to combine them.

    Attributes:
        parts: the suffix of each part's name after their common prefix, by role. No other tensor has the first suffix:
            wherever it occurs, all parts must exist.
        weight: the suffix of the weight's own name, in full precision, after the same prefix.
        pack: makes the tensor of the given name from its parts. Raises CheckpointError if they do not fit together.
        optional: like ``parts``, for parts that may be absent.
        unused: suffixes of tensors that describe the quantisation of activations, which is not done here.
    """

    parts: Mapping[str, str]
    weight: str
    pack: Callable[[str, Parts], StoredTensor]
    optional: Mapping[str, str] | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedNames:
    """The names of the parts of one weight, by role."""

    form: PackedForm
    parts: Mapping[str, str]


def find_packed(names: Collection[str], forms: Collection[PackedForm], where: str) -> dict[str, PackedNames | None]:
    """Return how each full-precision tensor of a checkpoint is stored, by name; None if it is stored unpacked.

    Raises:
        CheckpointError: a tensor has no scale, or lacks another part; the message names the tensor.
    """
    rest = dict.fromkeys(names)  # keeps the order
    packed: dict[str, PackedNames | None] = {}
    for form in forms:
        (mark, *_) = form.parts.values()
        for marked in [name for name in names if name.endswith(mark)]:
            if marked not in rest:
                continue  # already a part of an earlier form's weight
            base = marked[: -len(mark)]
            parts = {role: base + end for role, end in form.parts.items()}
            for name in parts.values():
                if name not in rest:
                    raise CheckpointError(f"{where} lacks tensor {name}, which belongs to {marked}")
            parts |= {role: base + end for role, end in (form.optional or {}).items() if base + end in rest}
            packed[base + form.weight] = PackedNames(form, parts)
            for name in [*parts.values(), *(base + end for end in form.unused)]:
                rest.pop(name, None)
    return packed | rest


# ---------------------------------------------------------------- checks


def require(is_right: bool, stored: FileTensor, expected: str) -> None:
    """Raise CheckpointError unless ``is_right``; ``expected`` describes the tensor that was expected."""
    if not is_right:
        kind = str(stored.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{stored.path} holds {stored.name} as {kind} of shape {list(stored.shape)}: expected {expected}"
        )


def require_groups(parts: Parts, scale: FileTensor, width: int, groups: int) -> None:
    """Raise CheckpointError unless ``g_idx`` has a group for each input, or else all groups are of equal size."""
    if "g_idx" in parts:
        order = parts["g_idx"]
        require(order.dtype in (torch.int32, torch.int64) and order.shape == (width,), order, f"{width} integers")
    else:
        require(width % groups == 0, scale, f"a number of groups that divides {width} inputs")


def require_finite(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Return the scale in fp32; raise CheckpointError if it contains NaN or infinity."""
    scale = scale.float()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"the scales of tensor {name} are damaged: expected finite numbers")
    return scale


def setting(config: Mapping[str, Any], key: str, choices: Collection[Any], default: Any = None) -> Any:
    """Return ``config[key]``, which must be one of ``choices``; raise CheckpointError otherwise."""
    value = config.get(key, default)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        expected = ", ".join(map(repr, choices))
        raise CheckpointError(
            f"quantization_config has {key}={shown(value)}, which cannot be read: expected {expected}"
        )
    return value
