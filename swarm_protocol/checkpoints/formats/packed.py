"""The seam between checkpoints and formats: a weight that several stored tensors hold, unpacked whenever it is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil, lcm
from typing import Any

import torch

from swarm_protocol.checkpoints.safetensors_file import FileTensor, StoredTensor, filled
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown

Parts = Mapping[str, FileTensor]  # by role
_TILE = 256  # rows that are read at a time


@dataclass(frozen=True, eq=False)
class PackedTensor(StoredTensor):
    """A weight in full precision that is computed from its parts at each ``read``.

    Attributes:
        dtype: what ``unpack`` returns: float32, or bfloat16 where that loses nothing.
        parts: what is stored, by role.
        unpack: a function of a module and its settings, which takes the parts as they were read, by role, and returns
            ``shape`` in ``dtype``, or as many rows of it as it was given. Raises CheckpointError.
        part_rows: how many rows of a part belong to a row of the weight, by role; other parts are read whole for
            each tile. Empty: the weight cannot be unpacked in tiles.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Parts
    unpack: partial[Any]
    part_rows: Mapping[str, Fraction] = field(default_factory=dict)

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
        step = lcm(min_rows, *(ratio.denominator for ratio in self.part_rows.values()))
        for start in range(0, self.shape[0], step):
            yield self.unpack(**{role: self._rows(role, start, start + step) for role in self.parts})

    def _rows(self, role: str, start: int, stop: int) -> torch.Tensor:
        part, ratio = self.parts[role], self.part_rows.get(role)
        return part.read() if ratio is None else part.rows(int(start * ratio), ceil(stop * ratio))

    def _unpacked(self) -> Any:
        return self.unpack(**{role: part.read() for role, part in self.parts.items()})


class JoinedTensor(StoredTensor):
    """A matrix of the model whose rows are those of several tensors of one dtype, one after the other.

    Attributes:
        parts: the tensors.
    """

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
    """One way in which a format stores a weight: the names of its parts, and how they fit together.

    Attributes:
        parts: how the names of the parts end after what they have in common, by role. The first end is one that no
            other tensor of the checkpoint has: where it is, the other parts must be.
        weight: how the name of the weight ends instead.
        pack: makes the tensor of that name from its parts. Raises CheckpointError if they do not fit together.
        optional: like ``parts``, of those that need not be there.
        unused: ends of names of tensors that say how activations were quantised, which is not done here.
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
    """The tensors of a checkpoint in full precision, by name; None for those that are stored as they are.

    Args:
        names: of the stored tensors.
        where: the checkpoint, for errors.

    Raises:
        CheckpointError: naming a tensor whose scale or another part is missing.
    """
    rest = dict.fromkeys(names)  # keeps the order
    packed: dict[str, PackedNames | None] = {}
    for form in forms:
        (mark, *_) = form.parts.values()
        for marked in [name for name in names if name.endswith(mark)]:
            if marked not in rest:
                continue  # it is a part of an earlier form's weight
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
    """Raises CheckpointError unless ``is_right``; ``expected`` says what the tensor should have been."""
    if not is_right:
        kind = str(stored.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{stored.path} holds {stored.name} as {kind} of shape {list(stored.shape)}: expected {expected}"
        )


def require_finite(scale: torch.Tensor, name: str) -> torch.Tensor:
    """The scale in fp32. Raises CheckpointError if it holds an infinity or what is no number."""
    scale = scale.float()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"the scales of tensor {name} are damaged: expected finite numbers")
    return scale


def setting(config: Mapping[str, Any], key: str, choices: Collection[Any], default: Any = None) -> Any:
    """``config[key]``, which must be one of ``choices``. Raises CheckpointError."""
    value = config.get(key, default)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        expected = ", ".join(map(repr, choices))
        raise CheckpointError(
            f"quantization_config has {key}={shown(value)}, which cannot be read: expected {expected}"
        )
    return value
