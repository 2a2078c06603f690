"""The handlers of calls to a server's experts: they check requests, and submit them to the task pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from swarm_protocol.errors import PeerMoved, RequestRejected
from swarm_protocol.pb import swarm_pb2
from swarm_protocol.wire.codec import decode, encode
from swarm_protocol.wire.printable import printable
from swarm_training.experts.core.cells import Cell, expert_name
from swarm_training.experts.core.config import MAX_CALL_BYTES, ExpertServerConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.pb import experts_pb2 as pb
from swarm_training.experts.server.task_pool import Key, TaskPool

_SHOWN_DIMS = 8


class ExpertHost:
    """The experts of one server, and the handlers of calls to them. Used on one event loop only.

    Attributes:
        pool: the task pool that computes them; its ``run`` must be running.
    """

    def __init__(self, config: ExpertServerConfig) -> None:
        self.experts: dict[Cell, Expert] = {}
        self.pool = TaskPool(self._compute, config.window_s, config.max_batch_rows, config.max_queued_rows)
        self._name = config.name
        self._hidden = config.hidden

    async def forward(self, caller: str, request: pb.ForwardRequest) -> pb.ForwardReply:
        """Compute outputs. Raise RequestRejected, PeerMoved or PeerBusy."""
        cell = self._cell(request.name, request.cell)
        inputs = self._rows(request.inputs, "inputs")
        return pb.ForwardReply(outputs=encode(await self.pool.submit(caller, ("forward", cell), inputs))[0])

    async def backward(self, caller: str, request: pb.BackwardRequest) -> pb.BackwardReply:
        """Compute gradients, and train the expert. Raise RequestRejected, PeerMoved or PeerBusy."""
        cell = self._cell(request.name, request.cell)
        inputs, grads = self._rows(request.inputs, "inputs"), self._rows(request.grad_outputs, "gradients")
        if len(inputs) != len(grads):
            raise RequestRejected(f"{len(inputs)} rows of inputs and {len(grads)} of gradients: expected as many")
        return pb.BackwardReply(
            grad_inputs=encode(await self.pool.submit(caller, ("backward", cell), inputs, grads))[0]
        )

    def add(self, experts: Mapping[Cell, Expert]) -> None:
        self.experts |= experts

    def remove(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            self.experts.pop(cell, None)

    def move(self, cell: Cell, to: Cell) -> None:
        self.experts[to] = self.experts.pop(cell)

    def _compute(self, key: Key, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute a batch; the pool calls this in its thread."""
        kind, cell = key
        expert = self.experts.get(cell)
        if expert is None:
            raise PeerMoved(f"the expert {expert_name(self._name, cell)} has just moved to another cell")
        return expert.forward(*tensors) if kind == "forward" else expert.backward(*tensors)

    def _cell(self, name: str, coordinates: Sequence[int]) -> Cell:
        cell = tuple(coordinates[:_SHOWN_DIMS])  # a caller may send any number of them
        if name != self._name or len(coordinates) > _SHOWN_DIMS or cell not in self.experts:
            asked = expert_name(printable(name, 80), cell)
            raise PeerMoved(f"there is no expert {asked} here: expected one of those that this server announces")
        return cell

    def _rows(self, wire: swarm_pb2.Tensor, what: str) -> torch.Tensor:
        """Return the checked tensor, [rows, hidden] fp32."""
        tensor = decode(wire, MAX_CALL_BYTES)
        if tensor.dtype != torch.float32 or tensor.ndim != 2 or tensor.shape[1] != self._hidden or not len(tensor):
            raise RequestRejected(
                f"{what} are {list(tensor.shape)} of {tensor.dtype}: expected [rows, {self._hidden}] of torch.float32, "
                "with at least one row"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise RequestRejected(f"{what} are not finite (they contain NaN or infinity)")
        return tensor
