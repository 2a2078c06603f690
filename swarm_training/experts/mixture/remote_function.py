"""Experts as a node of autograd: forward and backward call the same experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swarm_protocol.errors import TrainingDiverged
from swarm_protocol.process import network_loop
from swarm_training.experts.mixture.dispatch import Dispatcher, ExpertOutputs


def expert_outputs(rows: torch.Tensor, answers: ExpertOutputs, dispatcher: Dispatcher) -> torch.Tensor:
    """Return the outputs in ``answers``, [rows, k, hidden], as a function of ``rows``, [rows, hidden], on their device.

    The backward pass lets the experts compute the gradient of the rows, and train themselves. An expert that fails in
    it contributes no gradient.
    """
    # Experts train even if the rows need no gradient, but autograd has a node here only if some input needs one.
    needed = torch.zeros((), requires_grad=torch.is_grad_enabled())
    outputs: torch.Tensor = _AskExperts.apply(rows, needed, answers, dispatcher)  # type: ignore[no-untyped-call]
    return outputs


class _AskExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, needed: torch.Tensor, answers: ExpertOutputs, dispatcher: Dispatcher
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.calls, ctx.dispatcher = answers.calls, dispatcher  # torch has no other place for what is no tensor
        return answers.outputs.to(rows.device, rows.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        grads = on_wire(grad_outputs, "gradients of the outputs of experts")
        grad = network_loop.run(ctx.dispatcher.backward(on_wire(rows, "rows"), grads, ctx.calls))
        return grad.to(rows.device, rows.dtype), None, None, None


def on_wire(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensor on the CPU, in fp32. Raise TrainingDiverged if it is not finite."""
    tensor = tensor.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(tensor).all()):
        raise TrainingDiverged(f"{what} are not finite (they contain NaN or infinity): what is trained has diverged")
    return tensor
