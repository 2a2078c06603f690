"""A limit for the memory of the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar

import torch
from torch.autograd.graph import saved_tensors_hooks


class ActivationLimit:
    """A context that counts the memory of tensors that autograd saves, and lets none be saved above a limit.

    Attributes:
        size_bytes: the bytes counted so far.
        exceeded: whether some tensors were not saved, which makes the saved ones useless.
    """

    def __init__(self, max_bytes: int, permanent: Collection[int], counted: set[int]) -> None:
        """Set the limit.

        Args:
            permanent: addresses of memory that exists anyway, such as weights.
            counted: addresses of memory that is counted already; the set grows.
        """
        self._max_bytes = max_bytes
        self._permanent = permanent
        self._counted = counted
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self.size_bytes = 0
        self.exceeded = False

    def __enter__(self) -> ActivationLimit:
        assert _active.get() is None, "only one limit counts at a time"
        self._hooks.__enter__()
        _active.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.set(None)
        self._hooks.__exit__(*exception)

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.size_bytes += _NODE_BYTES
        if storage.data_ptr() not in self._permanent and storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.size_bytes += storage.nbytes()
        self.exceeded |= self.size_bytes > self._max_bytes

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self.count(tensor)
        # Detached, because a saved output would keep alive the graph that keeps the output alive.
        return None if self.exceeded else tensor.detach()


_active: ContextVar[ActivationLimit | None] = ContextVar("limit", default=None)  # each thread has its own
_NODE_BYTES = 1024  # about what autograd takes to save a tensor, besides the tensor's memory


def count_saved(tensor: torch.Tensor) -> None:
    """Count a tensor that a layer keeps for its backward pass where autograd does not see it."""
    limit = _active.get()
    if limit is not None:
        limit.count(tensor)


def _unpack(packed: torch.Tensor | None) -> torch.Tensor:
    assert packed is not None, "the pass was not kept"
    return packed
