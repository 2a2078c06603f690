"""Instructions for any number of rows, from captures with two and three: all their numbers are linear in the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from swarm_models.kernels.int4_linear import KernelInt4Weight
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.program import MAX_DIMENSIONS, NOTHING, Instruction, Opcode, Operand, Program
from swarm_models.kernels.quantized_linear import QuantizedWeight
from swarm_server.graph.lowering import Lowered, StridedAddress
from swarm_server.graph.recording import Memory, NotCapturable
from swarm_server.group.split_weight import SplitWeight

_ALIGNMENT = 16  # floats: a cache line
_WHOLE = {Opcode.MATRIX_PRODUCT, Opcode.PRODUCT, Opcode.ATTEND}  # kinds whose sizes are no dimensions to be folded
_OF_VECTORS = {Opcode.MEAN, Opcode.LAYER_NORM}  # kinds that treat the innermost dimension as one vector


@dataclass(frozen=True)
class Captured:
    """The instructions of a stack of blocks for ``num_rows`` rows.

    Attributes:
        memories: the memories that depend on the inputs, by number.
        hidden, positions, output: the places of the step's inputs and output.
        windows: for each block that attends, how many of the last positions it looks at; None for all.
    """

    num_rows: int
    code: tuple[Lowered, ...]
    memories: Mapping[int, Memory]
    hidden: StridedAddress
    positions: StridedAddress
    output: StridedAddress
    windows: Mapping[int, int | None]


class Linear:
    """Two captures that differ in their number of rows alone, and predict the capture for any number of rows."""

    def __init__(self, less: Captured, more: Captured) -> None:
        """Compare the captures; raise NotCapturable if they differ in anything else."""
        self._less, self._more = less, more
        alike = len(less.code) == len(more.code) and less.windows == more.windows
        if not (alike and all(map(_same_kind, less.code, more.code))):
            raise NotCapturable("what is computed depends on the number of rows, or on how many positions there are")
        if not all(_same_place(a, b) for a, b in zip(_ends(less), _ends(more), strict=True)):
            raise NotCapturable("inputs or outputs depend on the number of rows")

    @property
    def windows(self) -> Mapping[int, int | None]:
        return self._less.windows

    def matches(self, other: Captured) -> bool:
        """Return whether another capture is equal to the prediction for its number of rows."""
        try:
            Linear(self._less, other)
        except NotCapturable:
            return False
        at = self._at(other.num_rows)
        for mine, less, code in zip(self._more.code, self._less.code, other.code, strict=True):
            predicted = _between(less, mine, at)
            if predicted.sizes != code.sizes:
                return False
            for a, b in zip(predicted.places, code.places, strict=True):
                if a is not None and b is not None and (a.offset, a.strides) != (b.offset, b.strides):
                    return False
        return True

    def assembled(self, num_rows: int, room: Callable[[int], torch.Tensor]) -> Assembled:
        """Return the program for ``num_rows`` rows. ``room(n)``: a 1-D tensor of n or more floats to compute in."""
        at = self._at(num_rows)
        between = [_between(less, more, at) for less, more in zip(self._less.code, self._more.code, strict=True)]
        code = _split_products_together(between)
        sizes = {
            number: at(memory.num_elements, self._more.memories[number].num_elements)
            for number, memory in self._less.memories.items()
        }
        hidden, positions, output = (
            _place_between(a, b, at) for a, b in zip(_ends(self._less), _ends(self._more), strict=True)
        )
        return Assembled(code, sizes, hidden, positions, output, room)

    def _at(self, num_rows: int) -> Callable[[int, int], int]:
        first, second = self._less.num_rows, self._more.num_rows

        def at(less: int, more: int) -> int:
            slope, rest = divmod(more - less, second - first)
            if rest:
                raise NotCapturable("a size is not linear in the number of rows")
            return less + (num_rows - first) * slope

        return at


class Assembled:
    """A program with the memory in which it computes, which other programs may share.

    Attributes:
        hidden: [rows, 1, hidden_size] float32, to be written before a run.
        positions: [rows, 1] int64, to be written before a run.
        output: [rows, 1, hidden_size] float32, to be read after a run.
    """

    def __init__(
        self,
        code: Sequence[Lowered],
        sizes: Mapping[int, int],
        hidden: StridedAddress,
        positions: StridedAddress,
        output: StridedAddress,
        room: Callable[[int], torch.Tensor],
    ) -> None:
        self._constants: list[object] = [code]  # kept alive: the program has only their addresses
        self._positions_number = positions.memory.number
        sizes = dict(sizes)
        num_rows = sizes.pop(self._positions_number)
        offsets, total = _arena(code, sizes, kept=(hidden.memory.number, output.memory.number))
        arena = room(total)
        self.positions = np.zeros((num_rows, 1), dtype=np.int64)
        width = sizes[hidden.memory.number] // num_rows
        self.hidden, self.output = (
            arena[offsets[place.memory.number] + place.offset :][: num_rows * width].view(num_rows, 1, width).numpy()
            for place in (hidden, output)
        )
        start = arena.data_ptr()  # of float32, as all memories are but the positions
        addresses = {number: start + 4 * offset for number, offset in offsets.items()}
        addresses[self._positions_number] = self.positions.ctypes.data
        group = next((lowered.weight.links.handle for lowered in code if isinstance(lowered.weight, SplitWeight)), 0)
        self.program = Program([self._instruction(lowered, addresses) for lowered in code], group)
        self._arena = arena

    def _instruction(self, lowered: Lowered, addresses: Mapping[int, int]) -> Instruction:
        places: list[StridedAddress | None] = [*lowered.places, *[None] * (4 - len(lowered.places))]
        sizes = lowered.sizes
        if lowered.kind not in _WHOLE:
            sizes, places = _folded(lowered.kind, sizes, places)
        operands = [self._operand(place, addresses) for place in places]
        if lowered.kind == Opcode.PRODUCT:
            operands[2:] = _weight_operands(lowered.weight)
        out, a, b, c = operands
        sizes = (*sizes, *[0] * (MAX_DIMENSIONS - len(sizes)))
        number = lowered.weight.number + 1 if isinstance(lowered.weight, SplitWeight) else lowered.number
        return Instruction(lowered.kind, sizes, (out, a, b, c), lowered.scalar, number, lowered.other)

    def _operand(self, place: StridedAddress | None, addresses: Mapping[int, int]) -> Operand:
        if place is None:
            return NOTHING
        constant = place.memory.constant
        if constant is None:
            address = addresses[place.memory.number]
        else:
            self._constants.append(constant)
            address = constant.untyped_storage().data_ptr()
        item_bytes = 8 if place.memory.number == self._positions_number else 4
        strides = (*place.strides, *[0] * (MAX_DIMENSIONS - len(place.strides)))
        return Operand(address + item_bytes * place.offset, strides)


def _split_products_together(code: list[Lowered]) -> list[Lowered]:
    """Return the code with each product of a split weight right behind an earlier one that has the same inputs.

    The members of a group then exchange inputs and outputs once for both. Only products that no instruction in between
    prevents are moved.
    """
    ordered: list[Lowered] = []
    for lowered in code:
        place = _earliest_place(lowered, ordered)
        ordered.insert(place, lowered)
    return ordered


def _earliest_place(product: Lowered, before: Sequence[Lowered]) -> int:
    if not isinstance(product.weight, SplitWeight):
        return len(before)
    out, x = product.places[:2]
    assert out is not None and x is not None
    for place in range(len(before), 0, -1):
        earlier = before[place - 1]
        y = earlier.places[1] if isinstance(earlier.weight, SplitWeight) else None
        if y is not None and (y.memory.number, y.offset) == (x.memory.number, x.offset):
            return place
        numbers = [where.memory.number for where in earlier.places if where is not None]
        # Not across an instruction that uses the output's memory, nor across the one that writes the input.
        if out.memory.number in numbers or x.memory.number == numbers[0]:
            break
    return len(before)


def _weight_operands(weight: QuantizedWeight | None) -> list[Operand]:
    """Return the operands for the packed weight and for its scales; int4 has no separate scales."""
    if isinstance(weight, SplitWeight):
        return _weight_operands(weight.own)
    if isinstance(weight, KernelWeight):
        return [Operand(weight.address.packed), Operand(weight.address.scale)]
    assert isinstance(weight, KernelInt4Weight)
    return [Operand(weight.address), NOTHING]


def _ends(captured: Captured) -> tuple[StridedAddress, StridedAddress, StridedAddress]:
    return captured.hidden, captured.positions, captured.output


def _same_kind(a: Lowered, b: Lowered) -> bool:
    if (a.kind, a.scalar, a.number, a.other, a.weight) != (b.kind, b.scalar, b.number, b.other, b.weight):
        return False
    return len(a.sizes) == len(b.sizes) and all(map(_same_place, a.places, b.places))


def _same_place(a: StridedAddress | None, b: StridedAddress | None) -> bool:
    """Return whether two places are alike, apart from their offsets and strides."""
    if a is None or b is None:
        return a is b
    if len(a.strides) != len(b.strides) or a.memory.number != b.memory.number:
        return False
    ours, theirs = a.memory.constant, b.memory.constant
    # A constant that the blocks compute is another tensor in each capture.
    if ours is None or theirs is None:
        return ours is theirs
    if ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr():
        return True
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and bool(torch.equal(ours, theirs))


def _between(less: Lowered, more: Lowered, at: Callable[[int, int], int]) -> Lowered:
    places = tuple(
        None if a is None or b is None else _place_between(a, b, at)
        for a, b in zip(less.places, more.places, strict=True)
    )
    return replace(less, sizes=tuple(map(at, less.sizes, more.sizes)), places=places)


def _place_between(less: StridedAddress, more: StridedAddress, at: Callable[[int, int], int]) -> StridedAddress:
    return StridedAddress(less.memory, at(less.offset, more.offset), tuple(map(at, less.strides, more.strides)))


def _folded(
    kind: Opcode, sizes: Sequence[int], places: Sequence[StridedAddress | None]
) -> tuple[tuple[int, ...], list[StridedAddress | None]]:
    """Drop dimensions of size one, join dimensions that are contiguous for all operands, and pad to four."""
    strides = [place.strides for place in places if place is not None]
    folded = _folded_dimensions(kind, sizes, strides)
    if len(folded) > MAX_DIMENSIONS:
        raise NotCapturable(f"an operation over {len(folded)} dimensions")
    folded = [(1, [0] * len(strides))] * (MAX_DIMENSIONS - len(folded)) + folded
    shorter = iter(zip(*[here for _, here in folded], strict=True))
    new_places = [
        None if place is None else StridedAddress(place.memory, place.offset, next(shorter)) for place in places
    ]
    return tuple(size for size, _ in folded), new_places


def _folded_dimensions(
    kind: Opcode, sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, list[int]]]:
    """Return the size of each dimension that is left, with the strides of all operands."""
    folded: list[tuple[int, list[int]]] = []
    for number, size in enumerate(sizes):
        here = [of_place[number] for of_place in strides]
        is_vector = kind in _OF_VECTORS and number == len(sizes) - 1
        if is_vector or not folded:
            folded.append((size, here))
            continue
        before, outer = folded[-1]
        if size == 1:
            continue
        if before == 1:
            folded[-1] = size, here
        elif all(large == size * small for large, small in zip(outer, here, strict=True)):
            folded[-1] = before * size, here
        else:
            folded.append((size, here))
    return folded


def _arena(code: Sequence[Lowered], sizes: Mapping[int, int], kept: tuple[int, int]) -> tuple[dict[int, int], int]:
    """Return where each memory begins, in floats, and the total; memory that is no longer needed is used again.

    kept: the memories of the input, which is written before the code runs, and of the output, which is read after it.
    """
    first, last = _uses(code, sizes, kept)
    room = {memory: -(-size // _ALIGNMENT) * _ALIGNMENT for memory, size in sizes.items()}
    ends: dict[int, list[int]] = {}
    for memory, end in last.items():
        ends.setdefault(end, []).append(memory)
    offsets: dict[int, int] = {}
    free: list[tuple[int, int]] = []  # offset and size of each piece
    total, before = 0, -1
    for memory, number in first.items():  # in the order of their first use
        freed = [other for end in range(before, number) for other in ends.get(end, [])]
        free = _joined([*free, *((offsets[other], room[other]) for other in freed)])
        before = number
        found = next((i for i, (_, size) in enumerate(free) if size >= room[memory]), None)
        if found is None:
            offsets[memory], total = total, total + room[memory]
        else:
            where, size = free.pop(found)
            offsets[memory] = where
            free.append((where + room[memory], size - room[memory]))
    return offsets, total


def _uses(
    code: Sequence[Lowered], sizes: Mapping[int, int], kept: tuple[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the numbers of the first and of the last instruction that use each memory, in order of first use."""
    first = {kept[0]: -1}
    last = {kept[0]: 0, kept[1]: len(code)}
    for number, lowered in enumerate(code):
        for place in lowered.places:
            if place is not None and place.memory.number in sizes:
                first.setdefault(place.memory.number, number)
                last[place.memory.number] = max(last.get(place.memory.number, 0), number)
    return first, last


def _joined(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the free pieces in order, with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for where, room in sorted(piece for piece in free if piece[1]):
        if joined and sum(joined[-1]) == where:
            joined[-1] = joined[-1][0], joined[-1][1] + room
        else:
            joined.append((where, room))
    return joined
