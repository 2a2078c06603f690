"""Forward and backward passes through hosted blocks without a session, for training."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from swarm_models.activation_limit import ActivationLimit
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.dropout import Dropout
from swarm_server.adapters.lora import AdapterRows, Patches, PlacedAdapter
from swarm_server.blocks.recording import Recorded, require_finite
from swarm_server.blocks.split_stack import Stack
from swarm_server.core.counters import Counters


class StatelessPasses:
    """The passes without a session, for the compute thread only. Outputs are on the CPU in the dtype of the inputs.

    Attributes:
        counters: counts of the positions that go forward.
    """

    def __init__(self, stack: Stack, patches: Patches) -> None:
        self._stack = stack
        self._patches = patches
        self._weight_addresses = stack.weight_addresses()
        self.counters = Counters()

    def report_to(self, counters: Counters) -> None:
        self.counters = counters

    def forward(
        self, blocks: Span, inputs: BlockInput, adapter: PlacedAdapter | None = None, dropout: Dropout | None = None
    ) -> torch.Tensor:
        """Return the hidden states after ``blocks``, [batch, tokens, hidden_size]; keep nothing."""
        require_finite(inputs.hidden, "hidden states")
        with torch.inference_mode():
            return self._run_plain(blocks, inputs, adapter, dropout)

    def record(
        self,
        blocks: Span,
        inputs: BlockInput,
        adapter: PlacedAdapter | None = None,
        dropout: Dropout | None = None,
        *,
        trains_adapter: bool = False,
        max_bytes: int | None = None,
        counted: set[int] | None = None,
    ) -> tuple[torch.Tensor, Recorded | None]:
        """Return what ``forward`` returns, and the recorded pass for the backward to ``inputs.hidden``.

        Args:
            trains_adapter: whether the backward also goes to the adapter's tensors over ``blocks``, in the order of
                ``Adapter.tensors``.
            max_bytes: the most bytes of activations; the second result is None if there would be more.
            counted: addresses of memory that is counted already, such as memory of earlier rows; the set grows.
        """
        require_finite(inputs.hidden, "hidden states")
        hidden, permanent = inputs.hidden.requires_grad_(True), self._weight_addresses
        tensors: tuple[torch.Tensor, ...] = ()
        if adapter is not None and trains_adapter:
            adapter = adapter.trainable(blocks)
            tensors = adapter.adapter.tensors
        elif adapter is not None:
            permanent = permanent | {tensor.untyped_storage().data_ptr() for tensor in adapter.adapter.tensors}
        limit = (
            None if max_bytes is None else ActivationLimit(max_bytes, permanent, set() if counted is None else counted)
        )
        with torch.enable_grad(), limit or nullcontext():
            output = self._run_plain(blocks, inputs, adapter, dropout)
        if limit is None:
            return output.detach(), Recorded(output, (hidden, *tensors))
        limit.count(output)
        fits = not limit.exceeded
        return output.detach(), Recorded(output, (hidden, *tensors), limit.size_bytes) if fits else None

    def backward(
        self,
        blocks: Span,
        inputs: BlockInput,
        grad: torch.Tensor,
        adapter: PlacedAdapter | None = None,
        dropout: Dropout | None = None,
        *,
        trains_adapter: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Recompute the forward; return gradients of ``inputs.hidden``, and of adapter tensors as in ``record``."""
        _, recorded = self.record(blocks, inputs, adapter, dropout, trains_adapter=trains_adapter)
        assert recorded is not None  # there is no limit
        return recorded.backward(grad)

    def _run_plain(
        self, blocks: Span, inputs: BlockInput, adapter: PlacedAdapter | None, dropout: Dropout | None
    ) -> torch.Tensor:
        hidden, (num_rows, num_tokens, _) = inputs.hidden, inputs.hidden.shape
        shares = [] if adapter is None else [AdapterRows(slice(0, num_rows), adapter, dropout=dropout)]
        with self._patches.applied(shares, num_rows, num_tokens):
            for view in self._stack.views(blocks):
                device = view.device
                hidden = view(
                    hidden.to(device, view.dtype),
                    None if inputs.attention_mask is None else inputs.attention_mask.to(device),
                    None if inputs.position_ids is None else inputs.position_ids.to(device),
                    packed=inputs.packed,
                    joined=inputs.joined,
                )
        self.counters.block_positions["forward"] += num_rows * num_tokens * len(blocks)
        return hidden.to("cpu", inputs.hidden.dtype)
