"""Fused experts: the matrices of all experts in one 3-D parameter, quantised one by one and run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch

from swarm_protocol.checkpoints.safetensors_file import StoredTensor

Activation = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]  # (experts, first product) -> input of ``down``
# Of all experts: [experts, …, …], in memory or stored, or a tensor for each, [out, in].
Matrices = torch.Tensor | StoredTensor | Sequence[StoredTensor]


class BuildLinear(Protocol):
    """Builds a layer; see ``_Quantizer.linear``."""

    def __call__(
        self, take_weight: Callable[[], torch.Tensor], bias: torch.Tensor | None, stored: StoredTensor | None = None
    ) -> torch.nn.Module: ...


@dataclass(frozen=True)
class ExpertLayout:
    """How one class of fused experts keeps its matrices and is called."""

    up: str  # parameter of each expert's first matrix; its bias, if any, is named ``<up>_bias``
    transposed: bool  # [experts, in, out] rather than [experts, out, in]
    activation: Activation
    routed: bool = True  # called with (hidden, experts of each token, their weights), else with a copy per expert
    down: str = "down_proj"

    @staticmethod
    def of(module: torch.nn.Module) -> ExpertLayout | None:
        """The layout of ``module``, or None where it is not fused experts of a known kind.

        Classes under transformers' ``use_experts_implementation`` state their layout as attributes; others are in
        ``UNDECLARED``.
        """
        if type(module).__name__ in UNDECLARED:
            return UNDECLARED[type(module).__name__]
        if not (hasattr(module, "is_transposed") and hasattr(module, "has_gate")):
            return None
        experts: Any = module
        if experts.has_gate:
            return ExpertLayout("gate_up_proj", experts.is_transposed, type(experts)._apply_gate)
        return ExpertLayout("up_proj", experts.is_transposed, _activate)


def deciding_parts(block: torch.nn.Module) -> set[torch.nn.Module]:
    """Return what chooses: the children of modules that own experts, and an index of positions to attend to.

    They are tiny, and the error of a decision is not bounded by the error of the weight.
    """
    beside_experts = {child for part in block.modules() if hasattr(part, "experts") for child in part.children()}
    return beside_experts | {part for name, part in block.named_modules() if "indexer" in name.split(".")}


def _activate(experts: Any, up: torch.Tensor) -> torch.Tensor:
    return experts.act_fn(up)


def _activate_gate(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


UNDECLARED = {
    "Llama4TextExperts": ExpertLayout("gate_up_proj", transposed=True, activation=_activate_gate, routed=False),
}


class QuantizedExperts(torch.nn.Module):
    """Stands in for a fused experts module: two quantised linears per expert, each run on that expert's tokens only.

    An expert sees its tokens in one batch and a token's experts are added in ascending order, so a token's result
    depends on the other tokens no more than the linears do.
    """

    def __init__(self, experts: torch.nn.Module, layout: ExpertLayout, build: BuildLinear) -> None:
        """Takes the matrices out of ``experts`` as they are quantised; the rest of it stays in use (activation)."""
        super().__init__()
        self.layout = layout
        self.up = _take_linears(experts, layout.up, layout.transposed, build)
        self.down = _take_linears(experts, layout.down, layout.transposed, build)
        self.emptied: Any = experts

    def forward(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden: [tokens, hidden_size], top_k_index and top_k_weights: [tokens, k] -> [tokens, hidden_size].

        With a layout that is not routed, hidden: [experts * tokens, hidden_size], already weighted, zero in the rows
        of tokens that an expert does not get -> the same shape.
        """
        if not self.layout.routed:
            return self._forward_copies(hidden)
        assert top_k_index is not None and top_k_weights is not None
        total = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            weighted = self._forward_expert(expert, hidden[token]) * top_k_weights[token, slot, None]
            total.index_add_(0, token, weighted.to(total.dtype))
        return total

    def _forward_copies(self, hidden: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for expert, rows in enumerate(torch.arange(len(hidden), device=hidden.device).chunk(len(self.up))):
            rows = rows[hidden[rows].ne(0).any(-1)]  # without biases, zeros stay zeros
            if len(rows):
                total.index_add_(0, rows, self._forward_expert(expert, hidden[rows]))
        return total

    def _forward_expert(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        output = self.down[expert](self.layout.activation(self.emptied, self.up[expert](hidden)))
        if getattr(self.emptied, "has_post_expert_norm", False):
            output = self.emptied.post_expert_norm(output)
        return output


def _one_by_one(matrices: Matrices) -> Iterator[tuple[Callable[[], torch.Tensor], StoredTensor | None]]:
    """For each expert, what takes its matrix, in order, and where it is stored if that is a tensor of its own.

    An expert's matrix is not kept here while the next one is taken.
    """
    if isinstance(matrices, torch.Tensor):
        return ((matrix.detach, None) for matrix in matrices)
    if not isinstance(matrices, StoredTensor):
        return ((matrix.read, matrix) for matrix in matrices)
    each = chain.from_iterable(map(torch.unbind, matrices.tiles(1)))
    return ((partial(next, each), None) for _ in range(matrices.shape[0]))


def _out_in(take: Callable[[], torch.Tensor], transposed: bool) -> torch.Tensor:
    return take().T if transposed else take()


def _take_linears(experts: torch.nn.Module, name: str, transposed: bool, build: BuildLinear) -> torch.nn.ModuleList:
    """One linear per expert from attribute ``name``, which is then deleted with its bias."""
    matrices, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    linears = torch.nn.ModuleList(
        build(partial(_out_in, take, transposed), None if biases is None else biases[expert], stored)
        for expert, (take, stored) in enumerate(_one_by_one(matrices))
    )
    delattr(experts, name)
    if biases is not None:
        delattr(experts, f"{name}_bias")
    return linears
