"""Forward passes with what their backward passes need."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm_protocol.errors import RequestRejected


@dataclass(eq=False)
class Recorded:
    """A forward pass that can be gone back through once.

    Attributes:
        output: on the CPU.
        inputs: the hidden states, then the adapter's tensors that gradients are wanted of.
        size_bytes: of activations, if they were counted.
    """

    output: torch.Tensor | None
    inputs: tuple[torch.Tensor, ...]
    size_bytes: int = 0

    def free(self) -> None:
        """Lets go of all tensors, whoever may still hold this object, such as the frames of an error."""
        self.output, self.inputs = None, ()

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of ``inputs`` given that of the output; those of the adapter on the CPU in fp32.

        Zeros for inputs without influence. On the compute thread only.

        Raises:
            RequestRejected: the gradient is not finite.
        """
        require_finite(grad, "gradients")
        assert self.output is not None, "the pass is freed"
        hidden_grad, *grads = torch.autograd.grad(
            self.output, self.inputs, grad.to(self.output.dtype), allow_unused=True, materialize_grads=True
        )
        return (hidden_grad, *(tensor_grad.to("cpu", torch.float32) for tensor_grad in grads))


class ActivationLimit:
    """Counts the memory of tensors that autograd saves meanwhile, and lets none be saved above a limit.

    Attributes:
        size_bytes: so far.
        exceeded: what was saved is useless: some of it is missing.
    """

    def __init__(self, max_bytes: int, permanent: Collection[int], counted: set[int]) -> None:
        """
        Args:
            permanent: addresses of memory that is there anyway.
            counted: of memory that is counted already; grows.
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
        # An output that was returned as it is would hold on to the graph that holds on to it.
        return None if self.exceeded else tensor.detach()


_active = threading.local()  # the limit that counts in this thread at present, or nothing
_NODE_BYTES = 1024  # about what autograd takes to save a tensor, besides its memory


def count_saved(tensor: torch.Tensor) -> None:
    """For layers that keep a tensor for their backward where autograd does not see it."""
    limit = getattr(_active, "limit", None)
    if limit is not None:
        limit.count(tensor)


def _unpack(packed: torch.Tensor | None) -> torch.Tensor:
    assert packed is not None, "the pass was not kept"
    return packed


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Raises RequestRejected if the tensor is not finite; ``what``: its name in the plural."""
    # A finite sum has finite terms, and is found in one pass; one that is not may have overflowed.
    if not math.isfinite(tensor.sum().item()) and not bool(torch.isfinite(tensor).all()):
        raise RequestRejected(f"the {what} sent are not finite (they contain NaN or infinity)")
