"""The targets to which an adapter may be attached: linear layers of blocks, and hidden states that enter blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from swarm_models.quantization import TRANSPOSED
from swarm_models.quantization.split_linear import SplitLinear
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank

_EXPERTS = "experts"  # transformers' name for a list of experts, or for the module in which they are fused


def require_fit(adapter: Adapter, span: Span, hidden_size: int, block: Callable[[int], nn.Module]) -> None:
    """Check that an adapter can be attached to blocks of ``span``; ``block(index)`` gives such a block.

    Raises:
        RequestRejected: a part does not fit; the error says which part, and what was expected.
    """
    places: set[tuple[int, str]] = set()
    for part in adapter.low_rank:
        _require_block(part.block, span)
        _require_shapes(part, *linear_features(block(part.block), part.module, part.block))
        if (part.block, part.module) in places:
            raise RequestRejected(f"{_place(part.block, part.module)} has low-rank matrices twice: expected one pair")
        places.add((part.block, part.module))
    prompted: set[int] = set()
    for prompt in adapter.prompts:
        _require_block(prompt.block, span)
        positions, width = prompt.values.shape
        if width != hidden_size or not positions:
            raise RequestRejected(
                f"the prompt of block {prompt.block} has shape {[positions, width]}: "
                f"expected [positions, {hidden_size}]"
            )
        if prompt.block in prompted:
            raise RequestRejected(f"block {prompt.block} has two prompts: expected one")
        prompted.add(prompt.block)


def linear_features(block: nn.Module, path: str, index: int) -> tuple[int, int]:
    """Return in_features and out_features of the linear layer ``path`` of a block, quantised or not.

    Raises:
        RequestRejected: there is no such module, or the module computes something else.
    """
    place = _place(index, path)
    if _EXPERTS in path.split("."):
        raise RequestRejected(
            f"{place} is among experts, which see some of the positions only: expected a linear layer outside them"
        )
    try:
        module: Any = block.get_submodule(path)
    except AttributeError:
        raise RequestRejected(f"{place} does not exist: expected one of {_known(block)}") from None
    kind = type(module).__name__
    if not _is_linear(block, path):
        raise RequestRejected(f"{place} is a {kind}: expected a linear layer, one of {_known(block)}")
    return (module.nx, module.nf) if TRANSPOSED.get(kind) else (module.in_features, module.out_features)


def _require_block(block: int, span: Span) -> None:
    if block not in span:
        raise RequestRejected(f"the adapter is for block {block}, but this server holds blocks {span}")


def _require_shapes(part: LowRank, in_features: int, out_features: int) -> None:
    rank = part.a.shape[0]
    if not rank or part.a.shape[1] != in_features or part.b.shape[0] != out_features:
        raise RequestRejected(
            f"{_place(part.block, part.module)} has low-rank matrices of shapes {list(part.a.shape)} and "
            f"{list(part.b.shape)}: expected [rank, {in_features}] and [{out_features}, rank]"
        )


def _place(index: int, path: str) -> str:
    shown = path if len(path) <= 60 else path[:60] + "…"  # untrusted clients choose it
    return f"module {shown!a} of block {index}"


def _is_linear(block: nn.Module, path: str) -> bool:
    """Return whether this is a whole linear layer, which several devices may hold together."""
    # The parts of a split layer are in a list inside it, two levels below.
    module, above = block.get_submodule(path), block.get_submodule(".".join(path.split(".")[:-2]))
    if isinstance(above, SplitLinear):
        return False
    return (
        isinstance(module, SplitLinear) or getattr(module, "is_quantised", False) or type(module).__name__ in TRANSPOSED
    )


def _known(block: nn.Module) -> str:
    names = [name for name, _ in block.named_modules() if _is_linear(block, name) and _EXPERTS not in name.split(".")]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
