"""Forward passes with kept graphs, so that their backward need not compute them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class KeptPass:
    """A forward pass with its graph."""

    given: Tensor  # the inputs as the model got them, [rows, positions] or [rows, positions, width]
    output: Tensor  # the output with its graph, [rows, positions, width]
    size_bytes: int  # the bytes of both, and of all that the graph keeps except parameters


class GraphMemoryMeter:
    """A context that measures the tensors that a graph keeps. They are kept without their history: otherwise an
    operation that keeps its own output would keep itself alive. ``size_bytes``: the bytes of their storages, each
    counted once; those of ``free`` tensors do not count."""

    def __init__(self, free: Iterable[Tensor]) -> None:
        self.size_bytes = 0
        self._known = {each.untyped_storage().data_ptr() for each in free}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept)

    def __enter__(self) -> GraphMemoryMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.size_bytes += storage.nbytes()
        return tensor.detach()


class KeptPasses:
    """The kept passes for one state of the weights. If a pass has no room, its backward pass computes it again. If a
    trainer never asks for the backward pass, its pass takes room until the weights change. ``max_bytes``: the most
    bytes that the passes may take."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._passes: list[KeptPass] = []
        self._versions: tuple[int, ...] = ()

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._passes)

    @property
    def has_room(self) -> bool:
        """Return whether there is room for one more pass of the usual size."""
        usual = self._passes[-1].size_bytes if self._passes else 0
        return self.size_bytes + usual < self.max_bytes

    def of_weights(self, weights: Iterable[Tensor]) -> None:
        """Drop all passes if the weights have changed since they were computed."""
        # torch counts the changes of a tensor in place. Comparing the counts costs less than keeping copies.
        versions = tuple(each._version for each in weights)
        if versions != self._versions:
            self._passes.clear()
            self._versions = versions

    def keep(self, kept: KeptPass) -> None:
        if self.size_bytes + kept.size_bytes <= self.max_bytes:
            self._passes.append(kept)

    def take(self, given: Tensor) -> KeptPass | None:
        """Remove and return a pass with equal inputs, whichever trainer has sent them; None if there is none."""
        for at, kept in enumerate(self._passes):
            if torch.equal(kept.given, given):
                return self._passes.pop(at)
        return None
