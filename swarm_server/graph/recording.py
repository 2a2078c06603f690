"""A record of what the blocks' own code does with tensors in a step of one new position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from swarm_models.kernels.quantized_linear import QuantizedWeight


class NotCapturable(Exception):
    """The error that the blocks do something that cannot be an instruction; its message says what."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The storage of a tensor.

    Attributes:
        number: the order of appearance among memories that depend on the step's inputs; -1 for constants.
        constant: a tensor in this storage, if it is a constant.
        num_elements: how many elements of the tensor's dtype fit.
    """

    number: int
    num_elements: int
    constant: torch.Tensor | None = None


@dataclass(frozen=True)
class TensorView:
    """A tensor, described by where its elements are. Offset and strides are in elements."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """A call of an operator. ``arguments`` are those of the operator, with views in place of tensors.

    Attributes:
        name: the name of the operator, such as ``aten.mul.Tensor``; or ``product`` or ``attend``.
        output: the tensor that the call writes.
    """

    name: str
    output: TensorView
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: QuantizedWeight | None = None

    @property
    def inputs(self) -> list[TensorView]:
        return [leaf for leaf in tree_leaves((self.arguments, dict(self.options))) if isinstance(leaf, TensorView)]


class OperationRecorder(TorchDispatchMode):
    """A dispatch mode that records, while it is active, every operation whose result depends on marked tensors.

    A tensor that depends on no marked tensor is a constant. Views are not operations: tensors are known by their place.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler just to keep it out, a second of a server's start

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        # Weak keys: everything that is ever computed would be 9 MB, and most of it is never used again.
        self._memories: WeakKeyDictionary[torch.UntypedStorage, Memory] = WeakKeyDictionary()
        self._num_dynamic = 0

    def mark(self, tensor: torch.Tensor) -> TensorView:
        """Mark a tensor that differs from step to step, as does whatever is computed from it; return its view."""
        key = tensor.untyped_storage()
        if key not in self._memories:
            self._memories[key] = Memory(self._num_dynamic, _room(tensor))
            self._num_dynamic += 1
        return self.view(tensor)

    def view(self, tensor: torch.Tensor) -> TensorView:
        key = tensor.untyped_storage()
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(-1, _room(tensor), tensor)
        offset = int(tensor.storage_offset())
        return TensorView(memory, tensor.dtype, offset, tuple(tensor.shape), tuple(tensor.stride()))

    def add(self, name: str, output: torch.Tensor, *inputs: torch.Tensor, **more: Any) -> None:
        """Record an operation that torch does not see."""
        arguments = tuple(self.view(tensor) for tensor in inputs)
        weight = more.pop("weight", None)
        self.operations.append(Operation(name, self.mark(output), arguments, more, weight))

    def depends(self, tensor: torch.Tensor) -> bool:
        memory = self._memories.get(tensor.untyped_storage())
        return memory is not None and memory.constant is None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not any(map(self.depends, inputs)):
            return result
        if not outputs:
            raise NotCapturable(f"{func} looks at values")
        within = _shares_storage(outputs, inputs)
        if within and not func._schema.is_mutable:
            return result  # only a view of an input
        if within and not all(map(self.depends, outputs)):
            raise NotCapturable(f"{func} writes to a constant")
        output, described = self.mark(outputs[0]), self._described
        operation = Operation(str(func), output, tree_map(described, tuple(args)), tree_map(described, options))
        for other in outputs[1:]:
            self.mark(other)
        self.operations.append(operation)
        return result

    def _described(self, leaf: Any) -> Any:
        return self.view(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _shares_storage(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether all outputs are in the memory of inputs."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _room(tensor: torch.Tensor) -> int:
    """Return how many elements of the tensor's dtype its storage has room for."""
    return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def needed(operations: Sequence[Operation], output: TensorView) -> list[Operation]:
    """Return the operations on which the output depends, or what attention stores, in their order."""
    wanted = {output.memory}
    kept = []
    for operation in reversed(operations):
        if operation.output.memory in wanted or operation.name == "attend":
            kept.append(operation)
            wanted.update(view.memory for view in operation.inputs)
    return kept[::-1]
