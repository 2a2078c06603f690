"""Instructions for torch's operators: each operator is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm_models.kernels.program import Opcode
from swarm_models.kernels.quantized_linear import QuantizedWeight
from swarm_server.graph.recording import Memory, NotCapturable, Operation, TensorView


@dataclass(frozen=True)
class StridedAddress:
    """A place of elements in a memory. Offset and strides are in elements, one stride per size of the instruction."""

    memory: Memory
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """An instruction before the addresses of memories are known.

    Attributes:
        places: the places of out, a, b and c, as far as the instruction has them.
    """

    kind: Opcode
    sizes: tuple[int, ...]
    places: tuple[StridedAddress | None, ...]
    scalar: float = 0.0
    number: int = 0
    other: int = 0
    weight: QuantizedWeight | None = None


def lowered(operation: Operation) -> list[Lowered]:
    """Return the instructions for an operation; raise NotCapturable if there are none."""
    lower = _TABLE.get(operation.name)
    if lower is None:
        raise NotCapturable(f"there is no instruction for {operation.name}")
    return lower(operation)


def _spread(view: TensorView, sizes: Sequence[int]) -> StridedAddress:
    """Return the place of a view that is broadcast to ``sizes`` as torch does."""
    missing = len(sizes) - len(view.sizes)
    strides = [0] * missing
    for have, want, stride in zip(view.sizes, sizes[missing:], view.strides, strict=True):
        strides.append(0 if have == 1 and want != 1 else stride)
    return StridedAddress(view.memory, view.offset, tuple(strides))


def _floats(*views: TensorView) -> None:
    for view in views:
        if view.dtype != torch.float32:
            raise NotCapturable(f"a tensor is {view.dtype}")


def _operand(value: Any, sizes: Sequence[int]) -> StridedAddress:
    """Return the place of a tensor, or of a number as a constant."""
    if isinstance(value, TensorView):
        if value.sizes == () and value.memory.constant is not None:
            # ``constant`` is the first tensor that was seen in this memory, perhaps another element of it.
            value = value.memory.constant.as_strided((), (), value.offset).item()
        else:
            _floats(value)
            return _spread(value, sizes)
    number = torch.tensor([float(value)], dtype=torch.float32)
    return StridedAddress(Memory(-1, 1, number), 0, (0,) * len(sizes))


def _unary(kind: Opcode) -> Callable[[Operation], list[Lowered]]:
    def lower(operation: Operation) -> list[Lowered]:
        return _elementwise(kind, operation.output, operation.arguments[0])

    return lower


def _elementwise(kind: Opcode, out: TensorView, a: TensorView) -> list[Lowered]:
    _floats(out)
    if kind != Opcode.FROM_INT64:
        _floats(a)
    return [Lowered(kind, out.sizes, (_spread(out, out.sizes), _spread(a, out.sizes)))]


def _binary(kind: Opcode) -> Callable[[Operation], list[Lowered]]:
    def lower(operation: Operation) -> list[Lowered]:
        out, (a, b, *others) = operation.output, operation.arguments
        if others or any(value != 1 for value in operation.options.values()):
            raise NotCapturable(f"{operation.name} has options")
        _floats(out)
        places = _spread(out, out.sizes), _operand(a, out.sizes), _operand(b, out.sizes)
        return [Lowered(kind, out.sizes, places)]

    return lower


def _to_copy(operation: Operation) -> list[Lowered]:
    a = operation.arguments[0]
    return _elementwise(Opcode.FROM_INT64 if a.dtype == torch.int64 else Opcode.COPY, operation.output, a)


def _gelu(operation: Operation) -> list[Lowered]:
    return _unary(Opcode.GELU_TANH if operation.options.get("approximate") == "tanh" else Opcode.GELU)(operation)


def _pow(operation: Operation) -> list[Lowered]:
    kinds = {2: Opcode.SQUARE, 3: Opcode.CUBE, -0.5: Opcode.RSQRT}
    exponent = operation.arguments[1]
    if exponent not in kinds:
        raise NotCapturable(f"a power of {exponent}")
    return _unary(kinds[exponent])(operation)


def _mean(operation: Operation) -> list[Lowered]:
    a, dims, *keeps = operation.arguments
    out = operation.output
    _floats(a, out)
    if [dim % len(a.sizes) for dim in dims] != [len(a.sizes) - 1] or operation.options:
        raise NotCapturable("a mean over other than the last dimension")
    strides = out.strides[:-1] if keeps and keeps[0] else out.strides
    places = StridedAddress(out.memory, out.offset, (*strides, 0)), _spread(a, a.sizes)
    return [Lowered(Opcode.MEAN, a.sizes, places)]


def _layer_norm(operation: Operation) -> list[Lowered]:
    a, shape, weight, bias, epsilon = operation.arguments
    out = operation.output
    if len(shape) != 1 or a.strides[-1] != 1 or out.strides[-1] != 1:
        raise NotCapturable("a layer norm over other than the last dimension")
    given = [view for view in (weight, bias) if view is not None]
    _floats(a, out, *given)
    if any(view.memory.constant is None or view.strides != (1,) for view in given):
        raise NotCapturable("a layer norm whose weights are computed")
    flat = [
        None if view is None else StridedAddress(view.memory, view.offset, (0,) * len(a.sizes))
        for view in (weight, bias)
    ]
    places = _spread(out, out.sizes), _spread(a, out.sizes), *flat
    return [Lowered(Opcode.LAYER_NORM, a.sizes, places, scalar=epsilon)]


def _cat(operation: Operation) -> list[Lowered]:
    views, *rest = operation.arguments
    out, dim = operation.output, rest[0] if rest else 0
    dim %= len(out.sizes)
    _floats(out, *views)
    copies, start = [], 0
    for view in views:
        if 0 in view.sizes:
            continue
        place = StridedAddress(out.memory, out.offset + start * out.strides[dim], out.strides)
        copies.append(Lowered(Opcode.COPY, view.sizes, (place, _spread(view, view.sizes))))
        start += view.sizes[dim]
    return copies


def _stack(operation: Operation) -> list[Lowered]:
    """Lower to copies like those of ``_cat``, of views that are one wide in the new dimension."""
    views, *rest = operation.arguments
    dim = (rest[0] if rest else 0) % len(operation.output.sizes)
    wide = [
        replace(
            view,
            sizes=(*view.sizes[:dim], 1, *view.sizes[dim:]),
            strides=(*view.strides[:dim], 0, *view.strides[dim:]),
        )
        for view in views
    ]
    return _cat(replace(operation, arguments=(wide, dim)))


def _product(operation: Operation) -> list[Lowered]:
    (x,), out, weight = operation.arguments, operation.output, operation.weight
    assert weight is not None
    _floats(x, out)
    places = StridedAddress(out.memory, out.offset, ()), StridedAddress(x.memory, x.offset, ())
    return [Lowered(Opcode.PRODUCT, (x.sizes[0], *reversed(weight.shape)), places, weight=weight)]


def _matrix_product(operation: Operation) -> list[Lowered]:
    x, matrix = operation.arguments
    views = operation.output, x, matrix
    _floats(*views)
    if any(view.strides[1] != 1 for view in views):
        raise NotCapturable("a product of matrices whose columns are not neighbours")
    places = tuple(StridedAddress(view.memory, view.offset, view.strides) for view in views)
    return [Lowered(Opcode.MATRIX_PRODUCT, (*x.sizes, matrix.sizes[1]), places)]


def _attend(operation: Operation) -> list[Lowered]:
    query, keys, values = operation.arguments
    out, options = operation.output, operation.options
    _floats(query, keys, values, out)
    places = (
        StridedAddress(out.memory, out.offset, ()),
        *(StridedAddress(v.memory, v.offset, v.strides[:2]) for v in operation.arguments),
    )
    sizes = query.sizes[0], query.sizes[1], keys.sizes[1], query.sizes[3]
    return [
        Lowered(Opcode.ATTEND, sizes, places, scalar=options["scaling"], number=options["block"], other=values.sizes[3])
    ]


_TABLE: dict[str, Callable[[Operation], list[Lowered]]] = {
    "product": _product,
    "attend": _attend,
    "aten.mm.default": _matrix_product,
    "aten._to_copy.default": _to_copy,
    "aten.clone.default": _unary(Opcode.COPY),
    "aten.copy_.default": lambda operation: _elementwise(Opcode.COPY, *operation.arguments[:2]),
    "aten.gelu.default": _gelu,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.mean.dim": _mean,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    **{
        f"aten.{name}{suffix}.default": _unary(kind)
        for name, kind in (
            ("neg", Opcode.NEG),
            ("rsqrt", Opcode.RSQRT),
            ("silu", Opcode.SILU),
            ("sigmoid", Opcode.SIGMOID),
            ("tanh", Opcode.TANH),
            ("relu", Opcode.RELU),
            ("cos", Opcode.COS),
            ("sin", Opcode.SIN),
        )
        for suffix in ("", "_")
    },
    **{
        f"aten.{name}{suffix}.{overload}": _binary(kind)
        for name, kind in (("add", Opcode.ADD), ("sub", Opcode.SUB), ("mul", Opcode.MUL), ("div", Opcode.DIV))
        for suffix in ("", "_")
        for overload in ("Tensor", "Scalar")
    },
}
