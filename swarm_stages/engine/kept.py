"""Forward passes whose graphs are kept, so that their backward need not compute them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class KeptPass:
    """
    Attributes:
        given: the inputs as the model got them; what its gradient is asked of.
        output: with its graph.
        size_bytes: of both, and of all that the graph keeps but parameters.
    """

    given: Tensor
    output: Tensor
    size_bytes: int


class Measured:
    """A context in which the tensors that a graph keeps are counted. They are kept without their history: an operation
    that keeps its own output would otherwise keep itself alive.

    Attributes:
        size_bytes: of storages, each once; those of ``free`` tensors do not count.
    """

    def __init__(self, free: list[Tensor]) -> None:
        self.size_bytes = 0
        self._known = {each.untyped_storage().data_ptr() for each in free}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept)

    def __enter__(self) -> Measured:
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
    """Of one state of the weights. What has no room is computed again by its backward; trainers that never come back
    for theirs cost room until the weights change.

    Attributes:
        max_bytes: that they may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._passes: list[KeptPass] = []
        self._versions: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._passes)

    @property
    def has_room(self) -> bool:
        """For one more of the usual size."""
        usual = self._passes[-1].size_bytes if self._passes else 0
        return self.size_bytes + usual < self.max_bytes

    def of_weights(self, weights: list[Tensor]) -> None:
        """Drops those of other weights than these are now."""
        versions = tuple(each._version for each in weights)
        if versions != self._versions:
            self._passes.clear()
            self._versions = versions

    def keep(self, kept: KeptPass) -> None:
        if self.size_bytes + kept.size_bytes <= self.max_bytes:
            self._passes.append(kept)

    def take(self, given: Tensor) -> KeptPass | None:
        """That of equal inputs, whoever has asked for it; it can be used once."""
        for at, kept in enumerate(self._passes):
            if torch.equal(kept.given, given):
                return self._passes.pop(at)
        return None
