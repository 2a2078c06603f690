"""Forward passes that keep what their backward passes need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput
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


def all_finite_together(inputs: Sequence[BlockInput]) -> bool:
    """Return whether one sum shows that all hidden states are finite.

    If it does not, they may still be finite: steps with additions or with other numbers of positions are not added up.
    One sum is much faster than many: during each, Python's other threads may take the interpreter.
    """
    shapes = {each.hidden.shape for each in inputs}
    if any(each.additions is not None for each in inputs) or len({shape[1:] for shape in shapes}) > 1:
        return False
    hidden = [each.hidden for each in inputs]
    return not hidden or all_finite(hidden[0] if len(hidden) == 1 else torch.cat(hidden))


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise RequestRejected if the tensor is not finite. ``what``: the tensor's name in the plural."""
    if not all_finite(tensor):
        raise RequestRejected(f"the {what} sent are not finite (they contain NaN or infinity)")
