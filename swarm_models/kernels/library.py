"""Loader of the compiled kernel, which also selects one of the instruction sets that this processor has."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int, c_long, c_void_p
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

import torch

ENV_ISA = "SWARM_KERNEL"  # a name of `Kernel.names`, or "off"; for tests and comparisons

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "swarm_isa_name": (c_char_p, [c_int]),
    "swarm_isa_runs_here": (c_int, [c_int]),
    "swarm_use_openmp": (None, [c_void_p]),
    "swarm_pack": (None, [c_void_p, c_long, c_long, c_void_p, c_int]),
    "swarm_unpack": (None, [c_void_p, c_long, c_long, c_long, c_void_p]),
    "swarm_matmul": (c_int, [c_void_p, c_long, c_long, c_int, *[c_void_p] * 4, c_int, c_int]),
    "swarm_pack4": (None, [c_void_p, c_void_p, c_long, c_long, c_void_p, c_int]),
    "swarm_unpack4": (None, [c_void_p, c_long, c_long, c_long, c_void_p, c_int]),
    "swarm_matmul4": (c_int, [c_void_p, c_long, c_long, c_int, *[c_void_p] * 3, c_int, c_int]),
    "swarm_matmul_transposed": (c_int, [c_void_p, c_long, c_long, c_long, *[c_void_p] * 3, c_int, c_int]),
}


class Address(NamedTuple):
    """The location of a weight in memory."""

    packed: int
    scale: int


def declare(library: ctypes.CDLL, signatures: Mapping[str, tuple[type | None, list[type]]]) -> None:
    """Declare the results and arguments of functions; raise AttributeError if the library lacks one of them."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class CompiledFunctions:
    """Compiled functions, and the instruction set to use.

    Attributes:
        names: instruction sets that run here, best first.
        name, isa: the instruction set in use, and its number.
    """

    def __init__(self, name_of: Callable[[int], bytes | None], runs_here: Callable[[int], int]) -> None:
        """Choose the best instruction set of those that the library names."""
        names = takewhile(lambda name: name is not None, map(name_of, count()))
        self._numbers = {name.decode(): number for number, name in enumerate(names) if name and runs_here(number)}
        self.names = list(self._numbers)
        self.choose(self.names[0])

    def choose(self, name: str) -> None:
        """Select an instruction set; raise ValueError if it does not run here."""
        if name not in self._numbers:
            raise ValueError(f"the kernel {name!r} does not run here: choose one of {', '.join(self.names)}")
        self.name, self.isa = name, self._numbers[name]


class Kernel(CompiledFunctions):
    """The products of quantised weights.

    Attributes:
        library: the loaded library with all compiled functions.
    """

    def __init__(self, path: Path) -> None:
        """Load the library; raise OSError or AttributeError if it is no library, or of another version."""
        library = ctypes.CDLL(str(path))
        declare(library, _SIGNATURES)
        super().__init__(library.swarm_isa_name, library.swarm_isa_runs_here)
        self._library = self.library = library
        gomp_parallel = _gomp_parallel()
        if gomp_parallel is not None:
            library.swarm_use_openmp(gomp_parallel)

    def pack(self, q: torch.Tensor, packed: torch.Tensor) -> None:
        """Pack q: [out, in] int8 -> packed: uint8, of ``KernelWeight.packed_bytes``."""
        self._library.swarm_pack(q.data_ptr(), *q.shape, packed.data_ptr(), torch.get_num_threads())

    def unpack(self, packed: int, first: int, q: torch.Tensor) -> None:
        """Unpack output channels from ``first`` on, from the weight at this address -> q: [channels, in] int8."""
        self._library.swarm_unpack(packed, q.shape[1], first, first + len(q), q.data_ptr())

    def pack4(self, q: torch.Tensor, groups: torch.Tensor, packed: torch.Tensor) -> None:
        """Pack q: [out, in] uint8 from 0 to 15, groups: [out, groups] int16 -> packed: uint8.

        ``packed`` has the length that ``KernelInt4Weight.packed_bytes`` returns.
        """
        self._library.swarm_pack4(q.data_ptr(), groups.data_ptr(), *q.shape, packed.data_ptr(), torch.get_num_threads())

    def unpack4(self, packed: int, first: int, weight: torch.Tensor) -> None:
        """Unpack output channels from ``first`` on, from the int4 weight at this address -> [channels, in] fp32."""
        channels, width = weight.shape
        self._library.swarm_unpack4(packed, width, first, first + channels, weight.data_ptr(), torch.get_num_threads())

    def matmul(self, x: torch.Tensor, weights: Sequence[Address], ys: Sequence[torch.Tensor]) -> None:
        """Multiply x: [rows, in] fp32, contiguous, by each weight -> ys: [rows, out] each."""
        addresses = [weight.packed for weight in weights], [weight.scale for weight in weights]
        self._multiply(self._library.swarm_matmul, x, addresses, ys)

    def matmul4(self, x: torch.Tensor, packed: Sequence[int], ys: Sequence[torch.Tensor]) -> None:
        """Multiply x: [rows, in] fp32, contiguous, by each int4 weight at these addresses -> ys: [rows, out] each."""
        self._multiply(self._library.swarm_matmul4, x, [packed], ys)

    def _multiply(
        self,
        multiply: Callable[..., int],
        x: torch.Tensor,
        addresses: Sequence[Sequence[int]],
        ys: Sequence[torch.Tensor],
    ) -> None:
        """Call a function of the library with the ``addresses`` of each weight: one list for each of its tensors."""
        count = len(ys)
        failed = multiply(
            x.data_ptr(),
            *x.shape,
            count,
            *[(c_void_p * count)(*each) for each in addresses],
            (c_void_p * count)(*[y.data_ptr() for y in ys]),
            (c_long * count)(*[y.shape[1] for y in ys]),
            self.isa,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product with {len(x)} rows of {x.shape[1]} inputs")

    def matmul_transposed(self, grad: torch.Tensor, weight: Address, y: torch.Tensor) -> None:
        """Multiply grad: [rows, out] fp32, contiguous, by scales and weight -> y: [rows, in]."""
        failed = self._library.swarm_matmul_transposed(
            grad.data_ptr(),
            *grad.shape,
            y.shape[1],
            weight.packed,
            weight.scale,
            y.data_ptr(),
            self.isa,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product with {len(grad)} rows of {grad.shape[1]} gradients")


@functools.cache
def kernel() -> Kernel | None:
    """Return the kernel, or None if it was not built here or ``SWARM_KERNEL`` is "off".

    Raises:
        ValueError: ``SWARM_KERNEL`` names an instruction set that does not run here.
    """
    wanted = os.environ.get(ENV_ISA, "")
    if wanted == "off":
        return None
    for path in _compiled():
        try:
            loaded = Kernel(path)
        except (OSError, AttributeError):  # the library is for another machine, or older than this file
            continue
        if wanted:
            loaded.choose(wanted)
        return loaded
    return None


def with_functions(signatures: Mapping[str, tuple[type | None, list[type]]]) -> ctypes.CDLL | None:
    """Return the library of the kernel with these functions declared; None if there is none, or it is an older one."""
    compiled = kernel()
    if compiled is None:
        return None
    try:
        declare(compiled.library, signatures)
    except AttributeError:  # the library is older than the caller, or for Windows
        return None
    return compiled.library


def why_none() -> str:
    """Return why there is no ``kernel()``."""
    if os.environ.get(ENV_ISA) == "off":
        return f"{ENV_ISA} is off"
    for path in _compiled():
        return f"{path} is for another machine, or of another version"
    return "it was not compiled when this was installed"


def _compiled() -> list[Path]:
    paths = [Path(__file__).with_name(f"_kernel{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return [path for path in paths if path.exists()]


def _gomp_parallel() -> int | None:
    """Return the address of OpenMP's entry point in the library that torch uses, so that both share threads."""
    directory = Path(torch.__file__).parent / "lib"
    libraries = sorted(path for name in ("libgomp*", "libiomp*", "libomp*") for path in directory.glob(name))
    for path in [*map(str, libraries), None]:  # None: whatever this process has loaded
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, c_void_p).value
    return None
