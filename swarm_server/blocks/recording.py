"""Forward passes that keep what their backward passes need."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.codec import all_finite


@dataclass(eq=False)
class Recorded:
    """A forward pass for which one backward pass can be computed.

    Attributes:
        output: the output, on the CPU; None once the pass is freed.
        inputs: the hidden states, then the adapter's tensors for which gradients are wanted.
        size_bytes: the bytes of the activations, if they were counted.
    """

    output: torch.Tensor | None
    inputs: tuple[torch.Tensor, ...]
    size_bytes: int = 0

    def free(self) -> None:
        """Release all tensors, even if something still holds this object, such as the frames of an error."""
        self.output, self.inputs = None, ()

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of ``inputs``, given the gradient of ``output``. Only call this on the compute thread.

        Inputs without influence get zeros. The gradients of the adapter's tensors are on the CPU in fp32.

        Raises:
            RequestRejected: the given gradient is not finite.
        """
        require_finite(grad, "gradients")
        assert self.output is not None, "the pass is freed"
        hidden_grad, *grads = torch.autograd.grad(
            self.output, self.inputs, grad.to(self.output.dtype), allow_unused=True, materialize_grads=True
        )
        return (hidden_grad, *(tensor_grad.to("cpu", torch.float32) for tensor_grad in grads))


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
        self._hooks.__enter__()
        _active.limit = self
        return self

    def __exit__(self, *exception: object) -> None:
        _active.limit = None
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


_active = threading.local()  # ``limit``: the one that counts in this thread at present, or None
_NODE_BYTES = 1024  # about what autograd takes to save a tensor, besides the tensor's memory


def count_saved(tensor: torch.Tensor) -> None:
    """Count a tensor that a layer keeps for its backward pass where autograd does not see it."""
    limit = getattr(_active, "limit", None)
    if limit is not None:
        limit.count(tensor)


def _unpack(packed: torch.Tensor | None) -> torch.Tensor:
    assert packed is not None, "the pass was not kept"
    return packed


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise RequestRejected if the tensor is not finite. ``what``: the tensor's name in the plural."""
    if not all_finite(tensor):
        raise RequestRejected(f"the {what} sent are not finite (they contain NaN or infinity)")
