"""Programs: lists of instructions that the C++ kernel runs in one call."""

from __future__ import annotations

import ctypes
import enum
import functools
import struct
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from swarm_models.kernels.attention import attention_kernel
from swarm_models.kernels.library import kernel, with_functions

MAX_DIMENSIONS = 4
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "swarm_run_program": (c_long, [c_void_p, c_long, c_void_p, c_int, c_int, c_int, c_void_p]),
    "swarm_num_opcodes": (c_long, []),
}


class Opcode(enum.IntEnum):
    """The kinds of instructions, in the order of ``Opcode`` in program.cpp, which describes them."""

    COPY = 0
    NEG = enum.auto()
    RSQRT = enum.auto()
    SILU = enum.auto()
    SIGMOID = enum.auto()
    TANH = enum.auto()
    RELU = enum.auto()
    GELU = enum.auto()
    GELU_TANH = enum.auto()
    COS = enum.auto()
    SIN = enum.auto()
    SQUARE = enum.auto()
    CUBE = enum.auto()
    FROM_INT64 = enum.auto()
    ADD = enum.auto()
    SUB = enum.auto()
    MUL = enum.auto()
    DIV = enum.auto()
    MEAN = enum.auto()
    LAYER_NORM = enum.auto()
    MATRIX_PRODUCT = enum.auto()
    PRODUCT = enum.auto()
    ATTEND = enum.auto()


@dataclass(frozen=True)
class Operand:
    """An operand in memory: the address is in bytes, the four strides are in elements."""

    address: int = 0
    strides: tuple[int, ...] = (0,) * MAX_DIMENSIONS


NOTHING = Operand()


@dataclass(frozen=True)
class Instruction:
    """An instruction like ``Instruction`` in program.cpp; ``operands`` are out, a, b and c."""

    kind: Opcode
    sizes: tuple[int, ...]
    operands: tuple[Operand, Operand, Operand, Operand]
    scalar: float = 0.0
    number: int = 0
    other: int = 0

    def words(self) -> list[int]:
        """Return the instruction as 64-bit integers."""
        words = [int(self.kind), *self.sizes]
        for operand in self.operands:
            words += (operand.address, *operand.strides)
        return [*words, *struct.unpack("q", struct.pack("d", self.scalar)), self.number, self.other]


class Program:
    """A list of instructions that can run repeatedly on the memory that they name."""

    def __init__(self, instructions: Sequence[Instruction], group: int = 0) -> None:
        """Keep the instructions; ``group``: the address of the group whose weights they multiply with, or 0."""
        function = _function()
        assert function is not None, "is_available() has not been asked"
        self._function, self._group = function, group
        self._words = np.array([instruction.words() for instruction in instructions], dtype=np.int64)
        self._address, self._count = self._words.ctypes.data, len(instructions)

    @staticmethod
    def is_available() -> bool:
        """Return whether the kernel was built here."""
        return _function() is not None

    def run(self, places: np.ndarray) -> bool:
        """Run the instructions; return whether all of them ran. If not, their output is undefined.

        places: [blocks, 4] int64: the addresses of the parts and firsts of ``PagedRows``, and of the numbers of key
        and value channels.
        """
        compiled, attention = kernel(), attention_kernel()
        assert compiled is not None and attention is not None
        done: int = self._function(
            self._address,
            self._count,
            places.ctypes.data,
            compiled.isa,
            attention.isa,
            torch.get_num_threads(),
            self._group,
        )
        return done == -1


@functools.cache
def _function() -> ctypes._NamedFuncPointer | None:
    library = with_functions(_SIGNATURES)
    if library is None or attention_kernel() is None:
        return None
    function: ctypes._NamedFuncPointer = library.swarm_run_program
    return function if library.swarm_num_opcodes() == len(Opcode) else None
