"""Computes: sessions, their caches, and forward and backward passes through hosted blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import Cache

from swarm_protocol.block_input import BlockInput
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_server.blocks import BlockStack


@dataclass
class Session:
    """One generation's state on this server."""

    blocks: Span
    batch_size: int
    cache: Cache = field(repr=False)
    length: int = 0  # positions in the cache


class Engine:
    """Runs on the compute thread only. Hidden states come and go on the CPU, in the dtype they came in."""

    def __init__(self, stack: BlockStack) -> None:
        self._stack = stack

    def open(self, blocks: Span, batch_size: int) -> Session:
        return Session(blocks, batch_size, self._stack.view(blocks).new_cache())

    def step(self, session: Session, inputs: BlockInput) -> torch.Tensor:
        """Appends positions to the session; returns [batch, tokens, hidden_size]."""
        _require_finite(inputs.hidden, "hidden states")
        with torch.inference_mode():
            output = self._run(session.blocks, inputs, session.cache)
        session.length += inputs.hidden.shape[1]
        return output

    def reorder(self, session: Session, indices: torch.Tensor) -> None:
        """New row i of the cache is old row ``indices[i]``; the batch may grow or shrink."""
        with torch.inference_mode():
            session.cache.batch_select_indices(indices.to(self._stack.device))
        session.batch_size = len(indices)

    def crop(self, session: Session, length: int) -> None:
        """Keeps the first ``length`` positions."""
        with torch.inference_mode():
            session.cache.crop(length - session.length)
        session.length = length

    def record_past(self, session: Session) -> None:
        """Lets sliding-window blocks keep what a later crop may need."""
        session.cache.activate_past_recording()

    def forward(self, blocks: Span, inputs: BlockInput) -> torch.Tensor:
        """Hidden states after ``blocks``, [batch, tokens, hidden_size]; nothing is kept."""
        _require_finite(inputs.hidden, "hidden states")
        with torch.inference_mode():
            return self._run(blocks, inputs, None)

    def backward(self, blocks: Span, inputs: BlockInput, grad: torch.Tensor) -> torch.Tensor:
        """Gradient with respect to ``inputs.hidden``, given that of the output; recomputes the forward."""
        _require_finite(inputs.hidden, "hidden states")
        _require_finite(grad, "gradients")
        hidden = inputs.hidden.requires_grad_(True)
        with torch.enable_grad():
            output = self._run(blocks, inputs, None)
            (result,) = torch.autograd.grad(output, hidden, grad.to(output.dtype))
        return result

    def _run(self, blocks: Span, inputs: BlockInput, cache: Cache | None) -> torch.Tensor:
        device = self._stack.device
        output = self._stack.view(blocks)(
            inputs.hidden.to(device, self._stack.dtype),
            None if inputs.attention_mask is None else inputs.attention_mask.to(device),
            None if inputs.position_ids is None else inputs.position_ids.to(device),
            cache,
        )
        return output.to("cpu", inputs.hidden.dtype)


def _require_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise RequestRejected(f"the {what} sent are not finite (they contain NaN or infinity)")
