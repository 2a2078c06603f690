"""Fused experts: the matrices of all experts in one 3-D parameter, quantised one by one and run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch

from swarm_models.checkpoints.safetensors_file import StoredTensor

Activation = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]  # (experts, first product) -> input of ``down``
# The matrices of all experts: one tensor, [experts, …, …], in memory or stored; or one tensor per expert, [out, in].
Matrices = torch.Tensor | StoredTensor | Sequence[StoredTensor]


class BuildLinear(Protocol):
    """A function that builds a quantised layer, as ``_Quantizer.linear`` does."""

    def __call__(
        self, take_weight: Callable[[], torch.Tensor], bias: torch.Tensor | None, stored: StoredTensor | None = None
    ) -> torch.nn.Module: ...


@dataclass(frozen=True)
class ExpertLayout:
    """The way in which one class of fused experts keeps its matrices and is called."""

    up: str  # parameter of each expert's first matrix; its bias, if any, is named ``<up>_bias``
    transposed: bool  # [experts, in, out] rather than [experts, out, in]
    activation: Activation
    routed: bool = True  # called with (hidden, experts of each token, their weights), else with a copy per expert
    down: str = "down_proj"

    @staticmethod
    def of(module: torch.nn.Module) -> ExpertLayout | None:
        """Return the layout of ``module``, or None if it is not a known kind of fused experts.

        Classes under transformers' ``use_experts_implementation`` state their layout as attributes; other classes are
        in ``UNDECLARED``.
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
    """Return the modules that make choices: modules beside experts, and indexers of the positions to attend to.

    These modules are tiny, and the error of a decision is not bounded by the error of the weight.
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
    """A replacement for fused experts: two quantised linears per expert, each run on that expert's tokens only.

    An expert gets its tokens in one batch, and a token's experts are added in ascending order. A token's result
    therefore depends on the other tokens no more than the results of the linears do.
    """

    def __init__(self, experts: torch.nn.Module, layout: ExpertLayout, build: BuildLinear) -> None:
        """Take the matrices out of ``experts`` as they are quantised; the rest of ``experts`` (activation) is used."""
        super().__init__()
        self.layout = layout
        self.up = _take_linears(experts, layout.up, layout.transposed, build)
        self.down = _take_linears(experts, layout.down, layout.transposed, build)
        self.emptied: Any = experts

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor | None = None, top_k_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [tokens, hidden_size]. hidden: [tokens, hidden_size], top_k_index and top_k_weights: [tokens, k].

        If the layout is not routed, hidden and the result are [experts * tokens, hidden_size]. Then hidden is already
        weighted, and zero in the rows of tokens that an expert does not get.
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
    """Return for each expert, in order, a function that takes its matrix, and the matrix's own stored tensor or None.

    No matrix is kept here while the next one is taken.
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
    """Return one linear per expert, made from attribute ``name``, which is then deleted with its bias."""
    matrices, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    linears = torch.nn.ModuleList(
        build(partial(_out_in, take, transposed), None if biases is None else biases[expert], stored)
        for expert, (take, stored) in enumerate(_one_by_one(matrices))
    )
    delattr(experts, name)
    if biases is not None:
        delattr(experts, f"{name}_bias")
    return linears
