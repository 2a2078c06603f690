"""Sets of small numbers as bytes: chunks that a member holds, micro-batches whose gradients a peer has added up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

MAX_MICRO_BATCHES = 4096  # of a batch; 512 bytes of every record


def to_bits(numbers: Collection[int], size: int) -> bytes:
    """One bit for each of ``size`` numbers, the lowest of a byte first."""
    data = bytearray(-(-size // 8))
    for number in numbers:
        data[number // 8] |= 1 << number % 8
    return bytes(data)


def from_bits(data: bytes, size: int) -> frozenset[int]:
    """Raises ValueError if there are more or fewer bytes than ``size`` bits take."""
    if len(data) != -(-size // 8):
        raise ValueError(f"a set of {size} numbers takes {-(-size // 8)} bytes, and not {len(data)}")
    return frozenset(number for number in range(size) if data[number // 8] >> number % 8 & 1)


def contains(bits: bytes, number: int) -> bool:
    return number // 8 < len(bits) and bool(bits[number // 8] >> number % 8 & 1)


def size_of(bits: bytes) -> int:
    """How many numbers are in the set."""
    return _whole(bits).bit_count()


def are_disjoint(sets: Iterable[bytes]) -> bool:
    """Whether no number is in two of the sets."""
    seen = 0
    for bits in map(_whole, sets):
        if seen & bits:
            return False
        seen |= bits
    return True


def is_partition(sets: Iterable[bytes], size: int) -> bool:
    """Whether each of the numbers 0 to ``size`` - 1 is in exactly one of the sets."""
    sets = list(sets)
    return are_disjoint(sets) and sum(map(_whole, sets)) == (1 << size) - 1


def fits(bits: bytes, size: int) -> bool:
    """Whether it is a set of numbers below ``size``, and as long as one is."""
    return len(bits) == -(-size // 8) and _whole(bits) >> size == 0


def _whole(bits: bytes) -> int:
    return int.from_bytes(bits, "little")
