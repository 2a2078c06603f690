"""PowerSGD: gradient matrices as products of two thin matrices (Vogels et al., 2019, Algorithms 1 and 2)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm_training.compression.compressor import Phases
from swarm_training.numerics.reproducible import orthonormal, outer_sum


class PowerSGD:
    """A compressor that replaces each matrix M [rows, columns] by P Qᵀ: P = mean(M Q), orthonormalised, Q = mean(Mᵀ P).

    A tensor of more dimensions is a matrix of its first dimension by the rest. Tensors for which rank × (rows +
    columns) is not below their size are averaged as they are. The difference between M and P Qᵀ with this peer's own Q
    is added to its next gradient.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int, run: str = "") -> None:
        """Start with random Q. ``shapes``: the tensors' shapes, in the gradient's order. ``run``: the name that seeds
        every Q. Raise ValueError if the rank is less than 1."""
        if rank < 1:
            raise ValueError(f"a rank of {rank} is too small: expected at least 1")
        self._sizes = [math.prod(shape) for shape in shapes]
        self._initial: dict[int, Tensor] = {}
        self._dims: dict[int, tuple[int, int]] = {}
        for index, (shape, size) in enumerate(zip(shapes, self._sizes, strict=True)):
            rows = shape[0] if shape else 1
            columns = size // rows if rows else 0
            if rank * (rows + columns) < size:
                self._dims[index] = rows, columns
                self._initial[index] = _uniform(columns, rank, f"{run}|{index}|{tuple(shape)}")
        self._q = dict(self._initial)
        self._errors: dict[int, Tensor] = {}  # this peer's own

    def phases(self, gradient: Tensor) -> Phases:
        """Yield every P with the uncompressed tensors, then every Q, if there is one; see ``Compressor.phases``."""
        parts = list(gradient.split(self._sizes))
        matrices = self._matrices(parts)
        first = [matrices[i] @ self._q[i] if i in matrices else part for i, part in enumerate(parts)]
        means = _like((yield _joined(first)), first)
        bases = {i: orthonormal(means[i]) for i in matrices}
        own = {i: matrix.T @ bases[i] for i, matrix in matrices.items()}
        seconds = (
            dict(zip(own, _like((yield _joined(list(own.values()))), list(own.values())), strict=True)) if own else {}
        )
        # All peers need the same bits here, hence no `@`. For the errors, which are this peer's own, it will do.
        for i, mean in seconds.items():
            means[i] = outer_sum(bases[i], mean)
        result = _joined(means)
        errors = {i: matrix - bases[i] @ own[i].T for i, matrix in matrices.items()}
        self._errors = {i: torch.where(error.isfinite(), error, 0.0) for i, error in errors.items()}
        if bool(result.isfinite().all()):
            # Columns that are 0 because the gradient had a lower rank would stay 0 for ever.
            self._q = {i: torch.where((q == 0).all(0), self._initial[i], q) for i, q in seconds.items()}
        return result

    def _matrices(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the matrices to compress, by their index, each with the error of the last gradient added."""
        matrices = {index: parts[index].view(dims) for index, dims in self._dims.items()}
        return {i: matrix + self._errors[i] if i in self._errors else matrix for i, matrix in matrices.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return every Q. The errors are this peer's own: a joining peer has none yet."""
        return {f"q.{index}": q.clone() for index, q in self._q.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load every Q, and forget the errors, which belong to the old state. Raise ValueError if the state has other
        shapes or another rank."""
        given = {name: tuple(q.shape) for name, q in state.items()}
        expected = {f"q.{index}": tuple(q.shape) for index, q in self._q.items()}
        if given != expected:
            raise ValueError(f"PowerSGD's state is of the shapes {given}: expected {expected}")
        self._q = {index: state[f"q.{index}"].float().clone() for index in self._q}
        self._errors = {}


def _uniform(rows: int, columns: int, name: str) -> Tensor:
    """Return [rows, columns] in [-1, 1), seeded by the name: uniform, unlike normal, numbers are equal everywhere."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of the flat vector, in the tensors' shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
